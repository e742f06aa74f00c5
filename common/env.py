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

`--env path/to/file.py:Parity` trains on it. Every rollout gets an instance of its own.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


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
    """Subclass and give the three methods. An episode has at most `max_turns` actions."""

    max_turns = 1

    def tasks(self, split: str) -> Sequence[dict]:
        """The tasks of `split` ("train" or "eval"); the two should be disjoint. One task is a dict of plain
        values."""
        raise NotImplementedError

    def reset(self, task: dict) -> str | list[dict]:
        """The prompt of a new episode: a string (one user turn) or chat messages."""
        raise NotImplementedError

    def step(self, action: str) -> Step:
        """The policy's answer as text, without the token that ended the turn."""
        raise NotImplementedError


def load_env(spec: str) -> Callable[[], Env]:
    """`--env` to a function that makes environments: reverse, jsonl:FILE, or path/to/file.py:Class.

    Raises ValueError with what is wrong and what would be right.
    """
    name, _, argument = spec.partition(":")
    if name == "reverse":
        from common.envs.reverse import Reverse

        return Reverse
    if name == "jsonl":
        from common.envs.jsonl import Jsonl

        return lambda: Jsonl(argument)
    if not name.endswith(".py") or not argument:
        raise ValueError(f"--env {spec}: use reverse, jsonl:FILE or path/to/file.py:Class")
    if not Path(name).is_file():
        raise ValueError(f"--env {spec}: there is no file {name}")
    module_spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not isinstance(getattr(module, argument, None), type):
        raise ValueError(f"--env {spec}: {name} has no class {argument}")
    return getattr(module, argument)
