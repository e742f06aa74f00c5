"""Stand-ins for what a CPU test should not start: a scripted engine, toy tokenizers, a toy LM."""

import asyncio
import contextlib
import json
import traceback
from types import SimpleNamespace

import jinja2
import torch
from transformers import PreTrainedConfig

from common.env import Env, Step
from common.envs.pool import EnvError, Server, plain
from common.rollout import Engine, EngineFlags

# Greedy longest match: "hello" is one token, though a policy may well sample "he" + "llo".
PIECES = ["", "h", "e", "l", "o", "he", "llo", "hello", " ", "w", "<eot>", "\n", "U:", "A:"]
PLAIN_TEMPLATE = (
    "{% for m in msgs %}{% if m.role == 'user' %}U:{{ m.content }}\n"
    "{% else %}A:{{ m.content }}<eot>\n{% endif %}{% endfor %}{% if gen %}A:{% endif %}"
)

MARKS = ["<T>", "</T>", "<k>", "</k>", "<r>", "</r>"]
CHARACTERS = ["", *MARKS, "\n", *map(chr, range(32, 127))]
# Drops the thinking of all turns before the last user message.
THINKING_TEMPLATE = (
    "{% set ns=namespace(last=-1) %}"
    "{% for m in msgs %}{% if m.role=='user' %}{% set ns.last=loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in msgs %}<T>{{m.role}}:{% if m.role=='assistant' and loop.index0<ns.last %}"
    "{{ m.content.split('</k>')[-1] }}{% else %}{{m.content}}{% endif %}</T>\n{% endfor %}"
    "{% if gen %}<T>assistant:{% endif %}"
)
# Puts neighbouring tool results into one turn.
TOOL_TEMPLATE = (
    "{% for m in msgs %}{% if m.role=='tool' %}"
    "{% if loop.first or msgs[loop.index0-1].role!='tool' %}<T>U:{% endif %}<r>{{m.content}}</r>"
    "{% if loop.last or msgs[loop.index0+1].role!='tool' %}</T>\n{% endif %}"
    "{% else %}<T>{{'A' if m.role=='assistant' else 'U'}}:{{m.content}}</T>\n{% endif %}{% endfor %}"
    "{% if gen %}<T>A:{% endif %}"
)


class ToyTokenizer:
    """Token i is pieces[i]; encoding takes the longest that fits, decoding can skip those in `special`."""

    def __init__(self, pieces: list[str], special: set[str], template: str):
        self.pieces = pieces
        self.special = {pieces.index(text) for text in special}
        self.template = jinja2.Environment(keep_trailing_newline=True).from_string(template)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((piece for piece in self.pieces if piece and text.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            text = text.removeprefix(piece)
        return ids

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        skipped = self.special if skip_special_tokens else set()
        return "".join(self.pieces[i] for i in ids if i not in skipped)

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **variables) -> str:
        assert not tokenize, "the ids of a conversation are never those of its text"
        return self.template.render(msgs=messages, gen=add_generation_prompt, **variables)


def plain_tokenizer() -> ToyTokenizer:
    return ToyTokenizer(PIECES, {"<eot>"}, PLAIN_TEMPLATE)


def mark_tokenizer(template: str) -> ToyTokenizer:
    return ToyTokenizer(CHARACTERS, {"<T>", "</T>"}, template)


def span(version: int, start: int, end: int):
    return SimpleNamespace(version=str(version), start=start, end=end)


def reply(ids, logprobs=None, finish="stop", spans=None, logprob_ids=None, routes=None):
    """One completion as vLLM's output object has it. `logprob_ids`: the ids that the log-probs belong to."""
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    logprob_ids = list(ids)[: len(logprobs)] if logprob_ids is None else logprob_ids
    return SimpleNamespace(
        token_ids=tuple(ids),
        logprobs=SimpleNamespace(token_ids=logprob_ids, logprobs=logprobs),
        weight_versions=[span(0, 0, len(ids))] if spans is None else spans,
        finish_reason=finish,
        routed_experts=routes,
        spec_decode_metrics=None,
    )


class ScriptedEngine(Engine):
    """The engine with a script in place of vLLM: each completion is the next reply.

    An exception among them is raised, and "hang" never comes. `requests_seen` has every request: its prompt
    ids, and its sampling fields by name.
    """

    def __init__(self, replies, max_model_len: int = 100):
        self.replies, self.max_model_len, self.flags = list(replies), max_model_len, EngineFlags()
        self.requests_seen: list[dict] = []
        self.adapter: dict = {}
        self.requests = self.sampled_tokens = 0
        self.stop_token_ids, self.final_only = [PIECES.index("<eot>")], "final"
        self.make_sampling, self.llm = self.check_sampling, SimpleNamespace(generate=self.llm_generate)

    @staticmethod
    def check_sampling(**fields) -> dict:
        if fields["max_tokens"] < 1:
            raise ValueError(f"max_tokens must be at least 1, got {fields['max_tokens']}.")  # as vLLM does
        return fields

    async def llm_generate(self, prompt, sampling, request_id):
        self.requests_seen.append(sampling | {"prompt_ids": list(prompt["prompt_token_ids"])})
        outputs = [self.replies.pop(0) for _ in range(sampling.get("n", 1))]
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
            if output == "hang":
                await asyncio.Event().wait()
        yield SimpleNamespace(outputs=outputs)


class ScriptedEnv(Env):
    """Gives its prompt, then one step after the other; `actions` has the texts that it saw, `sampled` the
    ids."""

    def __init__(self, prompt, steps):
        self.prompt, self.steps, self.max_turns = prompt, list(steps), max(1, len(steps))
        self.actions: list[str] = []
        self.sampled: list[list[int]] = []

    def tasks(self, split):
        return [{}]

    def reset(self, task):
        return self.prompt

    def step(self, action):
        self.actions.append(action)
        self.sampled.append(self.action_ids)
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step


class InlineEnvs:
    """`EnvPool` without processes: the same calls, the same way through JSON, the same error for what an
    environment raises. Every episode has an environment of its own."""

    def __init__(self, make_env, num_tasks: int = 8):
        self.make_env, self.max_turns = make_env, make_env().max_turns
        self.num_tasks = {"train": num_tasks, "eval": num_tasks}

    def server(self) -> Server:
        return Server(self.make_env, {split: [{}] * count for split, count in self.num_tasks.items()})

    def call(self, method, *args) -> dict:
        try:
            return json.loads(json.dumps(method(*args), default=plain))
        except Exception:  # whatever a scripted environment raises, as the worker process takes it
            raise EnvError("env_error", traceback.format_exc()) from None

    async def reset(self, split: str, index: int):
        return self.call(self.server().reset, split, index)["prompt"]

    def grader(self, split: str, index: int):
        async def step(action: str, ids) -> Step:
            return Step(**self.call(self.server().grade, split, index, action, ids))

        return step

    @contextlib.asynccontextmanager
    async def episode(self, split: str, index: int):
        server = self.server()

        async def step(action: str, ids) -> Step:
            return Step(**self.call(server.step, action, ids))

        yield self.call(server.reset, split, index)["prompt"], step


def observe(observation: str | list[int] | None, reward: float = 0.0, **ends) -> Step:
    return Step(reward=reward, observation=observation, **ends)


class TableLM(torch.nn.Module):
    """A bigram LM: the logits after token i are row i of `table` [V, V], its only parameter."""

    config = PreTrainedConfig(attn_implementation="sdpa")
    mesh = SimpleNamespace(device_mesh=None, moe_mesh=None)

    def __init__(self, table_VV: torch.Tensor, extra_positions: int = 0):
        super().__init__()
        self.extra_positions = extra_positions
        self.lm_head = torch.nn.Linear(*table_VV.shape, bias=True, dtype=table_VV.dtype)
        self.lm_head.weight.data.copy_(table_VV.T)
        self.lm_head.bias.data.zero_()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache):
        hidden = torch.nn.functional.one_hot(input_ids, self.lm_head.in_features)
        hidden = torch.nn.functional.pad(hidden.to(self.lm_head.weight), (0, 0, 0, self.extra_positions))
        return SimpleNamespace(logits=self.lm_head(hidden))


def step_table() -> torch.Tensor:
    """log P of the bigram LM over 5 ids with P(next = cur + 1 mod 5) = 0.8 and 0.05 for each other id."""
    table = torch.full((5, 5), 0.05, dtype=torch.float64)
    table[torch.arange(5), (torch.arange(5) + 1) % 5] = 0.8
    return table.log()
