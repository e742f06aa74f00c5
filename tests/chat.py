"""A chat server on real vLLM for tests: an engine in a thread of its own, and a tiny model that knows a few
conversations by heart, so that it calls tools, thinks and counts."""

import asyncio
import contextlib
import functools
import inspect
import itertools
import random
import threading
from types import SimpleNamespace

import httpx
import pydantic
import torch
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

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
PYTHON = '<tool_call>\n{"name": "python", "arguments": {"code": "print(12*34)"}}\n</tool_call>'
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
    [
        ("system", "Tools: python"),
        ("user", "12*34=?"),
        ("assistant", PYTHON),
        ("tool", "408"),
        ("assistant", "408"),
    ],
    [
        ("user", "12*34=? (a ```python block is run)"),
        ("assistant", "```python\nprint(12*34)\n```"),
        ("user", "408"),
        ("assistant", "408"),
    ],
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


class RandomEngine:
    """vLLM's AsyncLLM with another `generate`: texts as `say` gives them, tokenised letter by letter, so that
    "user" is four tokens where the tokenizer would make one. `requests` has (prompt ids, sampled ids)."""

    def __init__(self, llm, tokenizer):
        self.llm, self.tokenizer, self.requests = llm, tokenizer, []

    def __getattr__(self, name):
        return getattr(self.llm, name)

    def say(self, seed: int) -> tuple[list[int], str]:
        chance = random.Random(seed)
        arguments = [
            '{"sum":"1+2"}',
            '{"sum": "3"}',
            '{ "a" : 1,"b":[2] }',
            '{"b":1, "a":2}',
            '{"a": bad}',
            "{}",
        ]
        call = '{"name": "calc", "arguments": ' + chance.choice(arguments) + "}"
        text = chance.choice(["", "<k>so</k>"]) + chance.choice(
            ["", "a", " b ", "user", "\n", "the end", "<k>"]
        )
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            text += (
                f"<tool_call>{chance.choice(['', chr(10)])}{call}{chance.choice(['', chr(10)])}</tool_call>"
            )
        ids = [token for letter in text for token in self.tokenizer.encode(letter, add_special_tokens=False)]
        if chance.random() < 0.1:
            ids.append(
                self.tokenizer.convert_tokens_to_ids("<|im_start|>")
            )  # special, so the client never sees it
        finish = chance.choice(["stop", "stop", "stop", "length"])
        return ids + ([self.tokenizer.eos_token_id] if finish == "stop" else []), finish

    async def generate(self, prompt, sampling, request_id, **_):
        stream = sampling.output_kind == RequestOutputKind.DELTA
        prompt_ids = list(prompt["prompt_token_ids"])
        outputs = []
        for index in range(sampling.n):
            ids, finish = self.say(len(self.requests))
            self.requests.append((prompt_ids, ids))
            cuts = [*range(0, len(ids), 3), len(ids)] if stream else [0, len(ids)]
            if len(cuts) == 1 or len(ids) == 0:
                cuts = [0, 0]
            for start, end in itertools.pairwise(cuts):
                last = end == len(ids)
                flat = FlatLogprobs()
                for token in ids[start:end]:
                    flat.append_fast([token], [-0.25], iter([1]), [self.tokenizer.decode([token])])
                body = ids[start : end - (last and finish == "stop")]
                text = self.tokenizer.decode(body, skip_special_tokens=True)
                spans = [SimpleNamespace(version="4", start=0, end=len(ids))] if last else None
                output = CompletionOutput(
                    index, text, ids[start:end], None, flat, finish_reason=finish if last else None,
                    weight_versions=spans,
                )  # fmt: skip
                if stream:
                    yield RequestOutput(request_id, None, prompt_ids, None, [output], last)
                else:
                    outputs.append(output)
        if not stream:
            yield RequestOutput(request_id, None, prompt_ids, None, outputs, True)


@contextlib.contextmanager
def random_engine(served, template: str | None = None):
    """The server with a RandomEngine in place of its engine, and with another chat template."""
    client, tokenizer = served.server.client, served.engine.llm.renderer.tokenizer
    own, real = tokenizer.chat_template, client.llm
    client.llm = RandomEngine(real, served.tokenizer)
    tokenizer.chat_template = template or own
    try:
        yield client.llm
    finally:
        client.llm, tokenizer.chat_template = real, own


@functools.cache
def loop_of_clients() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def waited(value):
    """What an asynchronous SDK gave, as its synchronous twin gives it."""
    if inspect.isawaitable(value):

        async def wait():
            return await value

        return waited(asyncio.run_coroutine_threadsafe(wait(), loop_of_clients()).result(60))
    plain = (str, int, float, list, dict, tuple, pydantic.BaseModel, httpx.Response, type(None))
    return value if isinstance(value, plain) and not hasattr(value, "__aiter__") else Waiting(value)


class Waiting:
    """An asynchronous client, or what comes from it, used from a synchronous test: its calls are waited for,
    its streams are iterators, its context managers plain ones."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return waited(getattr(self.inner, name))

    def __call__(self, *args, **kwargs):
        return waited(self.inner(*args, **kwargs))

    def __iter__(self):
        return Waiting(aiter(self.inner))

    def __next__(self):
        try:
            return waited(anext(self.inner))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self):
        return waited(self.inner.__aenter__())

    def __exit__(self, *error):
        waited(self.inner.__aexit__(*error))
