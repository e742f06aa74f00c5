"""The toy task: reverse four digits. A model of 80,000 parameters learns it on two cores in well under a
minute."""

import random

from common.env import Env, Step

DIGITS = 4
NUM_EVAL = 128


class Reverse(Env):
    """The prompt is "1234", the right answer is "4321" and then the end of the turn."""

    def tasks(self, split: str) -> list[dict]:
        """All 10,000 strings in one fixed order: the first 128 are "eval", the rest is "train"."""
        numbers = [f"{number:0{DIGITS}d}" for number in range(10**DIGITS)]
        random.Random(0).shuffle(numbers)
        numbers = {"eval": numbers[:NUM_EVAL], "train": numbers[NUM_EVAL:]}[split]
        return [{"prompt": number, "answer": number[::-1]} for number in numbers]

    def reset(self, task: dict) -> str:
        self.answer = task["answer"]
        return task["prompt"]

    def step(self, action: str) -> Step:
        """Half the reward for the share of right positions, half for the exact answer; the score is the
        latter.

        Nothing is stripped: a fifth character makes the answer wrong, so ending the turn in time is learned
        too.
        """
        right = sum(given == wanted for given, wanted in zip(action, self.answer))
        exact = float(action == self.answer)
        return Step(reward=0.5 * right / DIGITS + 0.5 * exact, score=exact)
