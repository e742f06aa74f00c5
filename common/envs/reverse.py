"""The toy task: reverse four digits. The `tiny` model learns it on two cores in well under a minute."""

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
        """Half the reward for the share of right positions, half for the exact answer, which is the score.

        The end of the turn is a fifth position, right if exactly four characters come before it. Without it,
        ending early costs reward and ending in time brings none until an answer is exact, so a policy that is
        seldom exact learns never to end, and then no answer is.
        """
        right = sum(given == wanted for given, wanted in zip(action, self.answer)) + (len(action) == DIGITS)
        exact = float(action == self.answer)
        return Step(reward=0.5 * right / (DIGITS + 1) + 0.5 * exact, score=exact)
