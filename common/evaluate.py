"""Evaluation on the current engines: greedy answers, and pass@k from sampled ones."""

import asyncio
import math

import numpy as np

from common.rollout import rollout_group


async def evaluate(
    engine, tokenizer, envs, indices, *, samples: int, temperature: float, **settings
) -> list[list[float]]:
    """For each task the score in [0, 1] of a greedy answer, then those of `samples` sampled ones. `settings`
    are those of `rollout_group`. A crashed or late episode counts as wrong."""

    async def scores(index: int) -> list[float]:
        task = (engine, tokenizer, envs, "eval", index)
        group = await rollout_group(*task, ticket=-1, group_size=1, temperature=0.0, **settings)
        if samples:
            sampled = {"group_size": samples, "temperature": temperature}
            group += await rollout_group(*task, ticket=-1, **sampled, **settings)
        return [0.0 if rollout.invalid else float(rollout.info["score"]) for rollout in group]

    return await asyncio.gather(*map(scores, indices))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that k of the samples have a right one, unbiased: 1 - C(n - c, k) / C(n, k).

    "Evaluating Large Language Models Trained on Code", arXiv 2107.03374.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def score_metrics(prefix: str, shares: list[list[list[float]]]) -> dict[str, float]:
    """`mean` of the greedy answers with half the width of its 95% interval (normal, over tasks); with n > 0
    sampled answers `avg@n`, and `pass@k` for k = 2, 4, 8, ... n, where right is a score of 1.

    `shares` has the scores of each engine's tasks, as `evaluate` returns them.
    """
    tasks = [scores for share in shares for scores in share]
    greedy, sampled = np.array([scores[0] for scores in tasks]), [scores[1:] for scores in tasks]
    ci95 = 1.96 * greedy.std(ddof=1) / math.sqrt(len(tasks)) if len(tasks) > 1 else 1.0
    metrics = {f"{prefix}/mean": float(greedy.mean()), f"{prefix}/ci95": float(ci95)}
    if n := len(sampled[0]):
        metrics[f"{prefix}/avg@{n}"] = float(np.mean(sampled))
        for k in (2**power for power in range(1, n.bit_length())):
            chances = [pass_at_k(n, scores.count(1.0), k) for scores in sampled]
            metrics[f"{prefix}/pass@{k}"] = float(np.mean(chances))
    return metrics
