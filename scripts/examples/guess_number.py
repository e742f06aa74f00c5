"""A game of several turns with a reward for each. `--env scripts/examples/guess_number.py:GuessNumber`"""

from common.env import Env, Step


class GuessNumber(Env):
    """Find a number from 0 to 99 in seven guesses. Finding it earns 1; a guess earns up to 0.05 by how many of
    the numbers that were still possible it rules out, so that each turn has a credit of its own (PPO)."""

    max_turns = 7

    def tasks(self, split: str) -> list[dict]:
        return [{"number": n} for n in range(100) if (n % 10 == 3) == (split == "eval")]

    def reset(self, task: dict) -> str:
        self.number, self.low, self.high = task["number"], 0, 99
        return "Guess my number, 0 to 99. Say the number alone."

    def step(self, action: str) -> Step:
        said = action.strip()
        if not (said.isascii() and said.isdigit()):
            return Step(0.0, "a number, please", score=0.0)
        guess, left = int(said[:9]), self.high - self.low + 1
        if guess == self.number:
            return Step(1.0, score=1.0, terminated=True)
        if guess < self.number:
            self.low, hint = max(self.low, guess + 1), "higher"
        else:
            self.high, hint = min(self.high, guess - 1), "lower"
        ruled_out = 1 - (self.high - self.low + 1) / left
        return Step(0.1 * min(ruled_out, 0.5), hint, score=0.0)
