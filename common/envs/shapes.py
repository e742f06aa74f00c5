"""Toy visual tasks, drawn on the fly: how many squares a picture shows."""

import numpy as np

from common.env import Env, Step
from common.envs import image_part

SIZES = ((24, 24), (48, 24))  # width, height; pictures of different size have different numbers of tokens
CELL, MOST = 8, 4


def draw(number: int, index: int):
    """A picture of `number` squares in random cells, of one colour on another. `index` decides the rest."""
    from PIL import Image

    dice = np.random.default_rng([index, 5])
    width, height = SIZES[dice.integers(len(SIZES))]
    background, colour = dice.integers(0, 60, 3), dice.integers(160, 256, 3)
    pixels = np.broadcast_to(background, (height, width, 3)).astype(np.uint8)
    cells = [(row, column) for row in range(0, height, CELL) for column in range(0, width, CELL)]
    for row, column in dice.permutation(cells)[:number]:
        pixels[row + 1 : row + CELL - 1, column + 1 : column + CELL - 1] = colour
    return Image.fromarray(pixels)


class Shapes(Env):
    """One picture, one question. Each number is the answer to a quarter of the tasks."""

    def tasks(self, split: str) -> list[dict]:
        first, count = (0, 10_000) if split == "train" else (1_000_000, 128)
        return [{"index": i, "number": 1 + i % MOST} for i in range(first, first + count)]

    def reset(self, task: dict) -> list[dict]:
        self.number = task["number"]
        content = [image_part(draw(task["number"], task["index"])), {"type": "text", "text": "?"}]
        return [{"role": "user", "content": content}]

    def step(self, action: str) -> Step:
        """1 for the right number, else 0; the score is the same."""
        right = float(action.strip() == str(self.number))
        return Step(reward=right, score=right)
