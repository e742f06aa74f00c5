r"""The environment protocol. An `Env` plays one episode: it gives the prompt, sees the answer, gives the
reward.

    class Parity(Env):
        def tasks(self, split):
            return [{"number": n} for n in range(100)]

        def reset(self, task):
            self.number = task["number"]
            return f"Is {self.number} even or odd?"

        def step(self, action):
            return Step(reward=float(("odd" if self.number % 2 else "even") in action))

`--env path/to/file.py:Parity` trains on it. Environments run in processes of their own (`envs/pool.py`), on
their main thread: one that raises, hangs or crashes costs its own rollout and no other.

Several turns, `async`, and token ids in place of text:

    class Guess(Env):
        max_turns = 5

        def tasks(self, split):
            return [{"number": n} for n in range(100)]

        async def reset(self, task):
            self.number, self.tokenizer = task["number"], AutoTokenizer.from_pretrained(MODEL)
            return self.tokenizer.encode("Guess my number, 0 to 99.\n> ")

        async def step(self, action):
            if action.strip() == str(self.number):
                return Step(reward=1.0, terminated=True)
            hint = "higher" if action.strip().isdigit() and int(action) < self.number else "lower"
            return Step(reward=-0.1, observation=self.tokenizer.encode(f"\n{hint}\n> "))

Ids reach the engine and the trainer as they are. A prompt of ids is the whole context of the first turn, and
an observation of ids is everything between two turns: the chat template plays no part any more, so that from
the first ids on all observations are ids. What the policy sampled, with its end-of-turn token if it got that
far, is in `action_ids`.

Images, for a model that takes them, are parts of a message's content (`common.envs.image_part`), also in
mid-episode:

        def reset(self, task):
            content = [image_part(draw(task)), {"type": "text", "text": "How many circles?"}]
            return [{"role": "user", "content": content}]

        def step(self, action):
            return Step(reward=0.0, observation=[image_part(self.zoomed), {"type": "text", "text": "Now?"}])
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass
class EnvFlags:
    prompt_key: str = "prompt"
    """jsonl: the key of the prompt, a string or a list of chat messages."""
    answer_key: str = "answer"
    """jsonl: the key of the right answer."""
    grader: Literal["exact", "math"] = "exact"
    """jsonl: how an answer is compared: as text up to case, or by math-verify as mathematics."""
    eval_size: Annotated[int, Ge(1)] = 128
    """Most tasks that are held out for evaluation (at most a tenth of a JSONL file)."""
    shuffle: bool = True
    """Every epoch goes through the training tasks in an order of its own. --no-shuffle keeps the file's."""
    data_epochs: Annotated[int, Ge(0)] = 0
    """Passes over the training tasks that end the run before --max-steps does. 0: --max-steps alone."""
    system_prompt: str | None = None
    """A system message before every prompt that has none."""
    chat_template_args: str = "{}"
    """Variables for the chat template as JSON, for example '{"enable_thinking": false}'."""
    env_workers: Annotated[int, Ge(1)] = 4
    """Processes of an engine that grade single-turn answers; an episode of several turns has its own.
    Raise it when grading is slow: time/rollout_wait."""
    env_timeout_s: Annotated[float, Gt(0)] = 60.0
    """Seconds that one reset() or step() may take; then its process is killed and the rollout invalid."""
    unsafe_sandbox: bool = False
    """Run model-written code without a sandbox, with your files and network, where there is no bubblewrap."""


@dataclass
class Step:
    """What an action brought. An `observation` is the next user turn, as text or as parts of text and images,
    or the ids up to the next turn.

    `terminated` and `truncated` are gymnasium's: either ends the episode, and so does an observation of None.
    A closing observation gets no turn and is not trained on. `max_turns` is a limit that truncates, and so is
    --max-new-tokens or --max-model-len in the last turn.
    """

    reward: float
    observation: str | list[dict] | list[int] | None = None
    score: float | None = None  # in [0, 1], for evaluation; None: the episode's reward
    terminated: bool = False  # the episode is over for its own reasons: nothing was to come
    truncated: bool = False  # it ended for a limit: more might have come
    # numbers are averaged into env/NAME, tool_NAME into tool/NAME; strings stay in the transcript
    info: dict = field(default_factory=dict)


class Env(ABC):
    """Subclass and give the three methods. An episode has at most `max_turns` actions.

    What goes in and out must be plain values (JSON). With `max_turns` 1, `reset` must depend on the task
    alone: the process that grades an answer resets an environment of its own first. `reset` and `step` may be
    `async`: an episode has one event loop, which runs while one of them does.
    """

    max_turns = 1
    action_ids: Sequence[int] = ()  # the action of this step as it was sampled

    @abstractmethod
    def tasks(self, split: str) -> Sequence[dict]:
        """The tasks of `split` ("train" or "eval"); the two should be disjoint. Called once per process."""

    @abstractmethod
    def reset(self, task: dict) -> str | list[dict] | list[int]:
        """The prompt of a new episode: a string (one user turn), chat messages, or token ids."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """The policy's answer as text, without the token that ended the turn."""
