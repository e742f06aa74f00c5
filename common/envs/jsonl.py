"""Questions with known answers out of a JSONL file: one JSON object a line, with `prompt` and `answer`."""

import json
import random
from pathlib import Path

from common.env import Env, Step

MAX_EVAL = 128


def read_tasks(path: Path) -> list[dict]:
    """The records of a file, with `answer` as text; blank lines are skipped.

    Raises ValueError naming file, line number and fix for the first line that is no task.
    """
    if not path.is_file():
        raise ValueError(f"jsonl:{path}: there is no such file; give the path of a JSONL file")
    tasks = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                task = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); write one JSON object a line") from error
            if not isinstance(task, dict):
                raise ValueError(f'{where}: not a JSON object; write {{"prompt": ..., "answer": ...}}')
            for key in ("prompt", "answer"):
                if key not in task:
                    raise ValueError(f"{where}: no key {key!r} among {sorted(task)}; add it or rename one")
            if not is_prompt(task["prompt"]):
                raise ValueError(
                    f'{where}: `prompt` must be a string or a list of {{"role": ..., "content": ...}}'
                )
            if not isinstance(task["answer"], (str, int, float)):
                raise ValueError(f"{where}: `answer` must be a string or a number, not {task['answer']!r}")
            tasks.append({**task, "answer": str(task["answer"])})
    if not tasks:
        raise ValueError(f"{path}: no task in the file; write one JSON object a line")
    return tasks


def is_prompt(value) -> bool:
    """Whether `value` is a prompt: a string, or a non-empty list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(
            isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value
        )
    return isinstance(value, str)


class Jsonl(Env):
    """One question, one answer; right if the texts are equal up to case and surrounding whitespace."""

    def __init__(self, path: str):
        self.path = Path(path)  # read by `tasks` alone: every rollout makes an instance of its own

    def tasks(self, split: str) -> list[dict]:
        """A tenth of the file (1 to 128 tasks of a fixed shuffle) is "eval", the rest "train"; of one line,
        both.

        Raises ValueError where the file is not as it should be.
        """
        tasks = read_tasks(self.path)
        if len(tasks) == 1:
            return tasks
        random.Random(0).shuffle(tasks)
        held_out = max(1, min(MAX_EVAL, len(tasks) // 10))
        return {"train": tasks[:-held_out], "eval": tasks[-held_out:]}[split]

    def reset(self, task: dict) -> str | list[dict]:
        self.answer = task["answer"]
        return task["prompt"]

    def step(self, action: str) -> Step:
        """1 for the right answer, else 0; the score is the same."""
        right = float(action.strip().casefold() == self.answer.strip().casefold())
        return Step(reward=right, score=right)
