"""The boundary between messages and tokens: what a conversation is as ids. Sampled ids stay as they are.

`ChatAgent` is an episode that is a program of its own; `chat_server.py` is whom it speaks to.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.env import Env, Step
from common.envs.pool import EnvError, is_ids
from common.images import Picture, expand, pictures_of
from common.sample import RecordError, Rollout, Segment, check_reward, extend_segment

if TYPE_CHECKING:
    from common.chat_server import Reply
    from common.rollout import Completion


def render(tokenizer, messages: list[dict], template_args: dict) -> str:
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **template_args
    )


def encode(tokenizer, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
    return expand(tokenizer, tokenizer.encode(text, add_special_tokens=False), pictures)


def as_messages(prompt: str | list[dict] | list[int], system_prompt: str | None) -> list[dict]:
    """A prompt as chat messages, after the system prompt unless it brings its own; none for a prompt of ids.
    Raises EnvError."""
    if prompt and is_ids(prompt):
        return []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    fits = isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    if not fits or not all({"role", "content"} <= m.keys() for m in messages):
        what = "not a string or chat messages, nor token ids"
        raise EnvError("env_error", f"reset() returned {prompt!r:.80}, {what}")
    if system_prompt and messages[0].get("role") != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def check_ids(tokenizer, ids: list[int]) -> None:
    """Raises EnvError for a token id that the tokenizer does not have."""
    if ids and max(ids) >= len(tokenizer):
        raise EnvError("env_error", f"token id {max(ids)}: the tokenizer has {len(tokenizer)}, from 0 on")


def read_prompt(tokenizer, prompt: str | list, system_prompt: str | None, template_args: dict) -> tuple:
    """A prompt as (chat messages, their text in the template, ids, pictures); of ids, the ids alone, as they
    are. Raises EnvError."""
    messages = as_messages(prompt, system_prompt)
    if not messages:
        check_ids(tokenizer, prompt)
        if system_prompt:
            raise EnvError("bad_prompt", "no --system-prompt can go before a prompt of ids; leave it out")
        return [], "", prompt, []
    pictures = [picture for message in messages for picture in pictures_of(tokenizer, message["content"])]
    try:
        rendered = render(tokenizer, messages, template_args)
    except Exception as error:  # a template raises what it likes
        raise EnvError("bad_prompt", f"chat template: {type(error).__name__}: {error}") from error
    return messages, rendered, encode(tokenizer, rendered, pictures), pictures


def next_context(
    tokenizer, rendered: str, action: str, sampled_end: str, full: str, pictures=(), new=()
) -> tuple[list[int], bool]:
    """The ids between a turn that was sampled and the next one: the template's delta, or everything after a
    fork.

    `rendered` is the conversation up to the turn, `full` the one up to the next turn, both as the template
    has them. `sampled_end` is the end-of-turn token if the policy sampled it: it is not repeated. One that it
    did not sample is context. `pictures` are those up to the turn, `new` the ones after it. Returns (ids,
    forked): forked where the template rewrote history. Raises EnvError where it has left out an image.
    """
    if not full.startswith(rendered + action):
        return encode(tokenizer, full, [*pictures, *new]), True
    delta = full[len(rendered + action) :]
    return encode(tokenizer, delta.removeprefix(sampled_end), new), False


# --- An agent that is a program of its own


@dataclass
class ChatContext:
    """What `ChatAgent.run` gets. The key is this episode's; the server is on this machine."""

    task: dict
    base_url: str  # for OpenAI's SDK, ends in /v1
    api_key: str
    model: str
    max_tokens: int  # a reply is cut there at the latest, whatever a request asks for
    system_prompt: str | None  # of --system-prompt

    @property
    def anthropic_url(self) -> str:
        """For Anthropic's SDK, which adds /v1 itself."""
        return self.base_url.removesuffix("/v1")

    @property
    def judge_url(self) -> str:
        """For OpenAI's SDK. What is said there is sampled as it is asked for, and never trained on."""
        return f"{self.anthropic_url}/judge/v1"


class ChatAgent(Env):
    """An episode that is a program: `run` speaks to the policy with OpenAI's or Anthropic's SDK, as often as
    it likes, and returns the reward.

        class Parity(ChatAgent):
            def tasks(self, split):
                return [{"number": n} for n in range(100)]

            async def run(self, ctx):
                client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
                question = {"role": "user", "content": f"Is {ctx.task['number']} even or odd?"}
                reply = await client.chat.completions.create(model=ctx.model, messages=[question])
                right = "odd" if ctx.task["number"] % 2 else "even"
                return float(right in reply.choices[0].message.content.lower())

    `run` may be a plain method; it runs in a process of its own. It returns a number, a list (the reward of
    each reply in the order in which they were asked for), or a `Step` with a score and infos besides.
    """

    max_turns = 0  # not played turn by turn
    tool_parser = "hermes"  # vLLM's names of how this model writes tool calls and thinking; "" for not at all
    reasoning_parser = ""

    @abstractmethod
    def run(self, ctx: ChatContext) -> float | list[float] | Step:
        """One episode."""

    def reset(self, task: dict) -> str:
        return ""

    def step(self, action: str) -> Step:
        raise TypeError("a ChatAgent is run, not stepped")


@dataclass
class Turn:
    """One reply of the policy in a session's tree of conversations. The ids up to its end are those of its
    `parent`, then `context_ids`, then what was sampled."""

    parent: "Turn | None"
    context_ids: list[int]
    completion: "Completion"
    sampled_end: str  # the end-of-turn token, if the policy sampled it
    closing: str = ""  # what the template puts after a reply
    texts: set[str] = field(default_factory=set)  # how the template may write the conversation up to here
    order: tuple[int, int] = (0, 0)  # number of the request, choice; not below the parent's
    continued: bool = False  # a request has gone on from here
    reply: "Reply | None" = None  # what the client got of it

    @property
    def ids(self) -> list[int]:
        parts, turn = [], self
        while turn:
            parts += [turn.completion.token_ids, turn.context_ids]
            turn = turn.parent
        return [i for part in reversed(parts) for i in part]


class Recorder:
    """What the policy said in one session, and which turn a conversation goes on from."""

    def __init__(self):
        self.turns: list[Turn] = []
        self.order: list[list[int]] = []  # which turns each segment has, once `segments` has made them

    def place(self, full: str) -> tuple[Turn | None, str]:
        """The turn with the longest conversation that `full` begins with, of several the newest from which
        none has gone on yet, and the text after what was sampled: the template's delta. (None, full) where
        history is new, or was rewritten."""
        matches = [
            (len(text), not turn.continued, at)
            for at, turn in enumerate(self.turns)
            for text in turn.texts
            if full.startswith(text)
        ]
        if not matches:
            return None, full
        length, _, at = max(matches)
        turn = self.turns[at]
        return turn, turn.closing.removeprefix(turn.sampled_end) + full[length:]

    def segments(self) -> list[Segment]:
        """A turn goes on with the segment that ends in its parent. Where another turn did so already, it
        starts a new one, in which what came before is context: no token is trained twice. Turns are in the
        order of their requests, segments in that of their last turns. Left out is a reply that its client
        did not wait for, unless another goes on from it: whether it still got on record was chance."""
        parents = {id(turn.parent) for turn in self.turns}
        heard = [t for t in self.turns if id(t) in parents or not (t.reply and t.reply.abandoned)]
        segments: list[Segment] = []
        self.order = []
        ends: dict[int, int] = {}  # id of the last turn of a segment -> the segment's index
        for number, turn in enumerate(sorted(heard, key=lambda turn: turn.order)):
            index = ends.pop(id(turn.parent), len(segments))
            before, context_ids = None, turn.context_ids
            if index < len(segments):
                before = segments[index]
            else:
                segments.append(None)
                self.order.append([])
                context_ids = [*(turn.parent.ids if turn.parent else []), *context_ids]
            segments[index] = extend_segment(before, context_ids, **vars(turn.completion))
            ends[id(turn)] = index
            self.order[index].append(number)
        ranks = sorted(range(len(segments)), key=lambda index: self.order[index][-1])
        self.order = [self.order[index] for index in ranks]
        return [segments[index] for index in ranks]


async def play_agent(
    engine, tokenizer, envs, split: str, index: int, rollout: Rollout, *, temperature: float,
    max_new_tokens: int, system_prompt: str | None, template_args: dict,
) -> None:  # fmt: skip
    """Plays one episode of a `ChatAgent` against this engine's server and fills `rollout`.

    What the agent does wrong is an EnvError; what the engine does is raised as it is.
    """
    from common.chat_server import open_server  # needs vLLM, which an agent's process does without

    server = await open_server(engine, tokenizer, template_args)
    async with server.session(envs.parsers, temperature, max_new_tokens) as session:
        try:
            access = session.access | {"system_prompt": system_prompt}
            outcome = await session.unless_it_failed(envs.run_agent(split, index, access))
        finally:
            session.close()
            try:
                rollout.segments = session.recorder.segments()
            except RecordError as error:
                rollout.fail("bad_record", f"{rollout.rollout_id}: {error}")
            rollout.info |= session.info
    if rollout.invalid:
        return
    if not rollout.segments:
        raise EnvError("no_turns", "run() returned before the policy had said anything")
    rewards, count = outcome.reward, sum(map(len, session.recorder.order))
    if not isinstance(rewards, list):
        rewards = [rewards]
    elif len(rewards) == count:  # a rollout's rewards are in the order of its segments
        rewards = [rewards[number] for numbers in session.recorder.order for number in numbers]
    elif len(rewards) != 1:
        raise EnvError("bad_reward", f"run() returned {len(rewards)} rewards for {count} replies")
    try:
        rollout.rewards = [check_reward(reward) for reward in rewards]
        score = rollout.reward if outcome.score is None else check_reward(outcome.score)
    except RecordError as error:
        raise EnvError("bad_reward", str(error)) from None
    rollout.info |= {**outcome.info, "score": score}
    if outcome.truncated and not outcome.terminated:
        rollout.segments[-1].finish_reason = "length"
