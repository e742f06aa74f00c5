"""A chat server on real vLLM for tests: an engine in a thread of its own, and a tiny model that knows a few
conversations by heart, so that it calls tools, thinks and counts."""

import asyncio
import contextlib
import threading

import torch

from algos.sft import encode_conversation, sft_loss
from common.chat_server import open_server
from common.models import char_tokenizer, load_tokenizer, random_tiny, save
from common.rollout import Engine, EngineFlags

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
    },
}
CALL = (
    '<tool_call>\n{"name": "calc", "arguments": {"sum":"1+2"}}\n</tool_call>'  # not as the template spaces it
)
COUNT = "one two three four five six seven eight nine ten"
THOUGHT = "<think>so so</think>yes"
KNOWN = [
    [("user", "count"), ("assistant", COUNT)],
    [("user", "count"), ("assistant", COUNT), ("user", "again"), ("assistant", "no more")],
    [("user", "think"), ("assistant", THOUGHT)],
    [
        ("system", "Tools: calc"),
        ("user", "add"),
        ("assistant", CALL),
        ("tool", "3"),
        ("assistant", "it is 3"),
    ],
    [("system", "Tools: calc"), ("user", "twice"), ("assistant", CALL + "\n" + CALL.replace("1", "4"))],
]


def train_by_heart(directory) -> str:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])  # vLLM's parsers of thinking need them as tokens
    model = random_tiny(tokenizer, tied=True, moe=False, seed=2)
    rows = []
    for chat in KNOWN:
        rows.append(encode_conversation(tokenizer, [{"role": r, "content": c} for r, c in chat]))
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([list(ids) + [0] * (length - len(ids)) for ids, _ in rows])
    mask_BS = torch.tensor([list(mask) + [0] * (length - len(mask)) for _, mask in rows])[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.set_num_threads(1)
    for _ in range(2000):
        logprobs_BSV = model(ids_BT).logits[:, :-1].log_softmax(-1)
        logprobs_BS = logprobs_BSV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        if logprobs_BS[mask_BS > 0].min() > -0.02:
            break
        (sft_loss(logprobs_BS, mask_BS) / mask_BS.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise RuntimeError("the model did not learn its texts")
    return save(model, tokenizer, directory)


class Served:
    """An engine and its server in an event loop of their own, so that a test can use synchronous clients."""

    def __init__(self, directory):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.path = train_by_heart(directory)
        self.tokenizer = load_tokenizer(self.path)
        self.call(self.start())

    def call(self, coroutine, timeout_s: float = 120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    async def start(self) -> None:
        self.engine = Engine(self.path, "float32", 0, EngineFlags(max_model_len=1024), gpus=0.0)
        await self.engine.start([self.tokenizer.eos_token_id])
        self.server = await open_server(self.engine, self.tokenizer, {})

    @contextlib.contextmanager
    def session(self, temperature: float = 0.0, max_new_tokens: int = 200, parsers=("hermes", "")):
        async def opened():
            return await self.server.session(parsers, temperature, max_new_tokens).__aenter__()

        session = self.call(opened())
        try:
            yield session
        finally:
            self.loop.call_soon_threadsafe(session.close)

    def close(self) -> None:
        self.call(self.server.stop())
        self.engine.llm.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
