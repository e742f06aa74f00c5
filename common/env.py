"""The environment protocol. An `Env` plays one episode: it gives the prompt, sees the answer, gives the
reward.

    class Parity(Env):
        def tasks(self, split):
            return [{"number": n} for n in range(100)]

        def reset(self, task):
            self.number = task["number"]
            return f"Is {self.number} even or odd?"

        def step(self, action):
            return Step(reward=float(("odd" if self.number % 2 else "even") in action))

`--env path/to/file.py:Parity` trains on it. Environments run in processes of their own (`env_pool.py`), on
their main thread: one that raises, hangs or crashes costs its own rollout and no other.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass
class EnvFlags:
    prompt_key: str = "prompt"
    """jsonl: the key of the prompt, a string or a list of chat messages."""
    answer_key: str = "answer"
    """jsonl: the key of the right answer."""
    grader: Literal["exact", "math"] = "exact"
    """jsonl: how an answer is compared: as text up to case, or by math-verify as mathematics."""
    eval_size: int = 128
    """Most tasks that are held out for evaluation (at most a tenth of a JSONL file)."""
    shuffle: bool = True
    """Every epoch goes through the training tasks in an order of its own. --no-shuffle keeps the file's."""
    system_prompt: str | None = None
    """A system message before every prompt that has none."""
    chat_template_args: str = "{}"
    """Variables for the chat template as JSON, for example '{"enable_thinking": false}'."""
    env_workers: int = 4
    """Processes of an engine that grade single-turn answers; an episode of several turns has its own."""
    env_timeout_s: float = 60.0
    """Seconds that one reset() or step() may take; then its process is killed and the rollout invalid."""


@dataclass
class Step:
    """What an action brought. An `observation` is the next user turn; None ends the episode."""

    reward: float
    observation: str | None = None
    score: float | None = None  # in [0, 1], for evaluation; None: the episode's reward
    truncated: bool = False  # the episode ended for a limit, not for its own reasons
    info: dict = field(
        default_factory=dict
    )  # floats are averaged into metrics, strings stay in the transcript


class Env:
    """Subclass and give the three methods. An episode has at most `max_turns` actions.

    What goes in and out must be plain values (JSON). With `max_turns` 1, `reset` must depend on the task
    alone: the process that grades an answer resets an environment of its own first.
    """

    max_turns = 1

    def tasks(self, split: str) -> Sequence[dict]:
        """The tasks of `split` ("train" or "eval"); the two should be disjoint. Called once per process."""
        raise NotImplementedError

    def reset(self, task: dict) -> str | list[dict]:
        """The prompt of a new episode: a string (one user turn) or chat messages."""
        raise NotImplementedError

    def step(self, action: str) -> Step:
        """The policy's answer as text, without the token that ended the turn."""
        raise NotImplementedError


def load_env(spec: str, flags: EnvFlags | None = None) -> Callable[[], Env]:
    """`--env` to a function that makes environments: reverse, gym:DATASET, jsonl:FILE, path/to/file.py:Class.

    Raises ValueError with what is wrong and what would be right.
    """
    flags = flags or EnvFlags()
    name, _, argument = spec.partition(":")
    if name == "reverse":
        from common.envs.reverse import Reverse

        return Reverse
    if name == "gym":
        from common.envs.gym import Gym

        return lambda: Gym(argument, eval_size=flags.eval_size)
    if name == "jsonl":
        from common.envs.jsonl import Jsonl

        return lambda: Jsonl(argument, flags.prompt_key, flags.answer_key, flags.grader, flags.eval_size)
    if not name.endswith(".py") or not argument:
        raise ValueError(f"--env {spec}: use reverse, gym:DATASET, jsonl:FILE or path/to/file.py:Class")
    if not Path(name).is_file():
        raise ValueError(f"--env {spec}: there is no file {name}")
    module_spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not isinstance(getattr(module, argument, None), type):
        raise ValueError(f"--env {spec}: {name} has no class {argument}")
    return getattr(module, argument)
