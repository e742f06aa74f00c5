"""Greedy evaluation on the current engines."""

import asyncio
from pathlib import Path

from common.rollout import rollout_group


def env_name(spec: str) -> str:
    """The name of `--env` in metrics: reverse, the stem of a JSONL file, or the class's name."""
    name, _, argument = spec.partition(":")
    if not argument:
        return name
    return argument if name.endswith(".py") else Path(argument).stem


async def evaluate(
    engine, tokenizer, make_env, tasks, *, max_new_tokens: int, timeout_s: float
) -> list[float]:
    """The score of one greedy answer to each task, [0, 1]. A crashed or late episode counts as wrong."""
    groups = await asyncio.gather(*(
        rollout_group(
            engine, tokenizer, make_env, task, ticket=-1, prompt_id=index, group_size=1, temperature=0.0,
            max_new_tokens=max_new_tokens, timeout_s=timeout_s,
        )
        for index, task in enumerate(tasks)
    ))  # fmt: skip
    return [0.0 if rollout.invalid else float(rollout.info["score"]) for (rollout,) in groups]


def mean_score(shares: list[list[float]]) -> float:
    """The mean over all tasks of what each engine scored of them."""
    scores = [score for share in shares for score in share]
    return sum(scores) / len(scores)
