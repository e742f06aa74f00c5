"""Two turns with images: a tool that answers with a picture.

    python -m algos.grpo --model tiny-vlm --env scripts/examples/look.py:Look --lr 5e-4 --max-new-tokens 3

The first reply should say how many squares there are. With it the tool is asked, which draws a picture of its
own; the second reply should count that one's. Both count; only both right are a score.
"""

import zlib

from common.env import Env, Step
from common.envs import image_part
from common.envs.shapes import MOST, Shapes, draw


class Look(Env):
    max_turns = 2

    def tasks(self, split: str) -> list[dict]:
        return Shapes().tasks(split)

    def reset(self, task: dict) -> list[dict]:
        self.index, self.rewards = task["index"], []
        return [{"role": "user", "content": self.show(task["number"])}]

    def show(self, number: int) -> list[dict]:
        self.number, self.index = number, self.index + 1
        return [image_part(draw(number, self.index)), {"type": "text", "text": "?"}]

    def step(self, action: str) -> Step:
        self.rewards.append(float(action.strip() == str(self.number)) / 2)
        if len(self.rewards) == self.max_turns:
            return Step(self.rewards[-1], score=float(sum(self.rewards) == 1.0))
        return Step(self.rewards[-1], self.show(1 + zlib.crc32(action.encode()) % MOST), score=0.0)
