"""A task in a shell: move files by what they say. `--env scripts/examples/file_task.py:FileTask`

A box of the sandbox is for one call. What stays from turn to turn is the files: each call does again, quietly,
what was done before.
"""

import random
import shlex

from common.env import Env, Step
from common.sandbox import Sandbox

SANDBOX = Sandbox()
WORDS = ("fig", "kiwi", "plum")


class FileTask(Env):
    """A reply is a shell command; "done" ends it. The score is 1 if every file is where it should be."""

    max_turns = 6

    def tasks(self, split: str) -> list[dict]:
        return [{"seed": seed} for seed in (range(1000) if split == "train" else range(1000, 1064))]

    def reset(self, task: dict) -> str:
        dice = random.Random(task["seed"])
        self.files = {f"{letter}.txt": dice.choice(WORDS) for letter in "abcdef"}
        self.word, self.done = dice.choice(WORDS), []
        self.setup = "\n".join(f"echo {word} > {name}" for name, word in self.files.items())
        self.stats = {"tool_used": 0, "tool_calls": 0, "tool_errors": 0}
        return (
            f'Move the files that say "{self.word}" to a folder kept. A shell command each turn, then: done'
        )

    def shell(self, command: str):
        before = "\n".join(f"sh -c {shlex.quote(past)} >/dev/null 2>&1" for past in self.done)
        return SANDBOX.run(f"{self.setup}\n{before}\nexec sh -c {shlex.quote(command)}", "sh")

    def step(self, action: str) -> Step:
        if action.strip() != "done":
            result = self.shell(action)
            self.done.append(action)
            self.stats |= {"tool_used": 1, "tool_calls": len(self.done)}
            self.stats["tool_errors"] += result.exit_code != 0
            return Step(0.0, result.text or "(no output)", score=0.0, info=self.stats)
        found = self.shell("grep . *.txt kept/*").output.split()
        wanted = [f"{'kept/' * (word == self.word)}{name}:{word}" for name, word in self.files.items()]
        right = float(sorted(found) == sorted(wanted))
        return Step(right, score=right, info=self.stats, terminated=True)
