"""What scripts/bench/race.py trains on besides `reverse`, and the model that knows a little of it.

All contenders take tasks, prompts, rewards and the judge's waits from here. As an environment of Instar:
`--env scripts/bench/race/tasks.py:Uneven`, on a GPU `:Sums`.
"""

import asyncio
import math
import random
from pathlib import Path

from common.env import Env, Step
from common.envs.gym import Gym

SHORTEST, TYPICAL, LONGEST, SPREAD = 3, 4, 12, 0.6  # digits: median, bounds, deviation of the logarithm
NUM_TRAIN, NUM_EVAL = 1_600, 128
JUDGE_S = 0.0  # seconds that the judge takes: lognormal, of this mean and as large a standard deviation


def judge_s() -> float:
    """How long the judge takes over one answer. Workers are forks: they must not draw the same."""
    return JUDGE_S * random.SystemRandom().lognormvariate(-math.log(2) / 2, math.sqrt(math.log(2)))


class Uneven(Env):
    """Reverse a number of 3 to 12 digits. Each answer of the training split waits for a judge."""

    def tasks(self, split: str) -> list[dict]:
        dice, numbers = random.Random(0), {}
        while len(numbers) < NUM_EVAL + NUM_TRAIN:  # a dict keeps their order, and each once
            length = round(dice.lognormvariate(math.log(TYPICAL), SPREAD))
            numbers["".join(dice.choices("0123456789", k=min(LONGEST, max(SHORTEST, length))))] = None
        part = slice(NUM_EVAL) if split == "eval" else slice(NUM_EVAL, None)
        return [{"prompt": n, "answer": n[::-1], "judged": split == "train"} for n in [*numbers][part]]

    def reset(self, task: dict) -> str:
        self.task = task
        return task["prompt"]

    async def step(self, action: str) -> Step:
        """As `Reverse` grades: half for the share of right positions, the end being one, half for exact."""
        if self.task["judged"]:
            await asyncio.sleep(judge_s())
        answer = self.task["answer"]
        right = sum(given == wanted for given, wanted in zip(action, answer)) + (len(action) == len(answer))
        exact = float(action == answer)
        return Step(reward=0.5 * right / (len(answer) + 1) + 0.5 * exact, score=exact)


class Sums(Gym):
    """Two-number sums out of reasoning-gym behind the same judge, for a real instruct model."""

    def __init__(self):
        super().__init__("chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2", eval_size=NUM_EVAL)

    def tasks(self, split: str) -> list[dict]:
        size = NUM_EVAL if split == "eval" else NUM_TRAIN
        return [task | {"judged": split == "train"} for task in super().tasks(split)[:size]]

    def reset(self, task: dict) -> str:
        self.judged = task["judged"]
        return super().reset(task)

    async def step(self, action: str) -> Step:
        if self.judged:
            await asyncio.sleep(judge_s())
        return super().step(action)


def make_model(directory: Path) -> None:
    """`tiny` of the uneven task: random, then a little SFT, until 0.3 of its greedy answers are right."""
    import torch

    from algos.sft import encode_conversation, sft_loss
    from common import models

    torch.set_num_threads(1)
    tokenizer, dice = models.char_tokenizer(), random.Random(0)
    model = models.random_tiny(tokenizer, tied=True, moe=False, seed=models.WARM_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.WARM_LR, weight_decay=0.0)
    tasks, shares = Uneven().tasks("train"), [0.0]
    while sum(shares[-4:]) / 4 < models.WARM_SCORE:
        rows = [
            encode_conversation(
                tokenizer,
                [{"role": "user", "content": t["prompt"]}, {"role": "assistant", "content": t["answer"]}],
            )
            for t in dice.choices(tasks, k=models.WARM_BATCH)
        ]
        longest = max(len(ids) for ids, _ in rows)
        padded = [[part + [0] * (longest - len(part)) for part in row] for row in rows]
        ids_BT, mask_BT = (torch.tensor(column) for column in zip(*padded))
        targets_BS, mask_BS = ids_BT[:, 1:], mask_BT[:, 1:]
        logits_BSV = model(ids_BT).logits[:, :-1]
        right_BS = (logits_BSV.argmax(-1) == targets_BS) | (mask_BS == 0)
        shares.append(float(right_BS.all(-1).float().mean()))
        logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, targets_BS[..., None]).squeeze(-1)
        (sft_loss(logprobs_BS, mask_BS) / mask_BS.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    models.save(model, tokenizer, directory)
