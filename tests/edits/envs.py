"""Environments whose rewards are known functions of the task and the answer."""

import zlib

from common.env import Env, Step


class Graded(Env):
    """Rewards of -3 to 3 that the answer's text decides. Every third task has a second turn, and one answer in
    twenty breaks the environment."""

    max_turns = 2

    def tasks(self, split):
        return [{"number": number} for number in range(60 if split == "train" else 8)]

    def reset(self, task):
        self.number, self.turn = task["number"], 0
        return f"{self.number:04d}"

    def step(self, action):
        code = zlib.crc32(action.encode())
        if code % 20 == 0:
            raise ValueError("an answer that breaks it")
        self.turn += 1
        if self.number % 3 == 0 and self.turn == 1:
            return Step(reward=0.0, observation="12")
        return Step(reward=float(code % 7 - 3), terminated=True)


class Letters(Graded):
    """The second environment: other prompts, and rewards that the first one never gives."""

    max_turns = 1

    def reset(self, task):
        self.number, self.turn = task["number"], 0
        return f"{self.number:04d}99"

    def step(self, action):
        return Step(reward=10.0 + zlib.crc32(action.encode()) % 2, terminated=True)


class Halves(Graded):
    """Twelve tasks: the even ones are always solved, the odd ones never."""

    max_turns = 1

    def tasks(self, split):
        return [{"number": number} for number in range(12)]

    def step(self, action):
        return Step(reward=float(self.number % 2 == 0), terminated=True)
