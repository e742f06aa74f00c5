"""What asynchrony would buy: the queue between rollout and training as events, without a model and a GPU.

    .venv/bin/python scripts/bench/queue_simulation.py
    .venv/bin/python scripts/bench/queue_simulation.py --durations straggler --in-flight 512 --group-size 8

Prints, for bounds 0 to 8 and both orders, how long the trainer waits and how stale tokens are. Groups of
G rollouts take as long as their longest one; a rollout takes `mean-s` seconds on average. The rules are those
of common/sample_queue.py, written again here: group k (dropped ones do not occur) may start once
k // P <= version + bound; "arrival" trains the P oldest finished groups, "ticket" the next P in order. All
tokens of a group are sampled where it starts, which is the worst case: real rollouts go on under new weights.
"""

import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tyro

Durations = Literal["even", "lognormal", "straggler"]
BOUNDS, ORDERS = (0, 1, 2, 4, 8), ("arrival", "ticket")


@dataclass
class Args:
    durations: Durations = "lognormal"
    """even: all the same. lognormal: standard deviation as large as the mean. straggler: lognormal, and 2% of
    the rollouts five times as long."""
    mean_s: float = 1.0
    """Seconds that a rollout takes on average (of lognormal, where it has stragglers)."""
    prompts_per_step: int = 128
    """Groups that a step trains (P)."""
    group_size: int = 1
    """Rollouts of a group (G)."""
    in_flight: int = 128
    """Groups that run at a time."""
    train_s: float | None = None
    """Seconds of a training step with its refit. Default: as long as the rollout of a step takes."""
    steps: int = 300
    """Steps of a simulation; the first tenth is not counted."""


def draw(kind: Durations, mean_s: float, rng: np.random.Generator, size) -> np.ndarray:
    """Seconds that rollouts take."""
    if kind == "even":
        return np.full(size, mean_s)
    sigma2 = np.log(2.0)  # the standard deviation is the mean
    seconds = rng.lognormal(np.log(mean_s) - sigma2 / 2, np.sqrt(sigma2), size)
    return seconds * np.where(rng.random(size) < 0.02, 5.0, 1.0) if kind == "straggler" else seconds


def group_mean(kind: Durations, mean_s: float, group_size: int) -> float:
    """Mean seconds of the longest rollout of a group, from 100,000 of them."""
    return float(draw(kind, mean_s, np.random.default_rng(0), (100_000, group_size)).max(1).mean())


def simulate(
    group_s: Callable[[int], float], step_s: Callable[[int], float], *, prompts_per_step: int, in_flight: int,
    bound: int, order: str, steps: int,
) -> list[dict]:  # fmt: skip
    """`group_s(k)` is the time that group k takes, `step_s(s)` that of training step s with its refit. For
    each step: the tickets that it trained, their lags, how long the trainer waited, and when it was done."""
    now, version, next_ticket, idle_slots, training_until = 0.0, 0, 0, in_flight, None
    events: list[tuple[float, int, int]] = []  # (time, order of equal times, ticket; -1: a step is done)
    started: dict[int, int] = {}  # ticket -> version that sampled it, while it is not trained
    finished: set[int] = set()
    log: list[dict] = []
    waiting_since = 0.0
    while len(log) < steps or training_until is not None:
        while idle_slots and next_ticket // prompts_per_step <= version + bound:
            heapq.heappush(events, (now + group_s(next_ticket), 1 + next_ticket, next_ticket))
            started[next_ticket], next_ticket, idle_slots = version, next_ticket + 1, idle_slots - 1
        known = sorted(finished if order == "arrival" else started)[:prompts_per_step]
        if training_until is None and len(known) == prompts_per_step and finished.issuperset(known):
            lags = [version - started.pop(ticket) for ticket in known]
            finished -= set(known)
            training_until = now + step_s(version)
            log.append({"tickets": known, "lags": lags, "wait_s": now - waiting_since, "end": training_until})
            heapq.heappush(events, (training_until, 0, -1))
            continue
        now, _, ticket = heapq.heappop(events)
        if ticket == -1:
            version, training_until, waiting_since = version + 1, None, now
        else:
            finished.add(ticket)
            idle_slots += 1
    return log


def measures(log: list[dict], bound: int, rollouts_per_group: int) -> dict:
    """What a run measures too: shares of the time, lags of the groups' tokens, rollouts a second."""
    skipped = len(log) // 10
    counted = log[skipped:]
    seconds = log[-1]["end"] - (log[skipped - 1]["end"] if skipped else 0.0)
    lags = np.concatenate([step["lags"] for step in counted])
    return {
        "idle": sum(step["wait_s"] for step in counted) / seconds,
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "late": float((lags > bound).mean()),
        "rollouts_per_s": len(lags) * rollouts_per_group / seconds,
    }


def main(args: Args) -> None:
    P, G = args.prompts_per_step, args.group_size
    mean_group_s = group_mean(args.durations, args.mean_s, G)
    train_s = args.train_s or mean_group_s * P / args.in_flight
    print(f"{args.durations}: a group takes {mean_group_s:.2f} s on average, a training step {train_s:.2f} s")
    print("| bound | order | trainer waits | lag, mean | max | late | rollouts/s |")
    print("|---|---|---|---|---|---|---|")
    for bound in BOUNDS:
        for order in ORDERS:
            rng = np.random.default_rng(1)  # the same rollouts for all
            longest = draw(args.durations, args.mean_s, rng, (P * (args.steps + 20) + args.in_flight, G)).max(
                1
            )
            sizes = {"prompts_per_step": P, "in_flight": args.in_flight, "steps": args.steps}
            group_s = lambda k: longest[k % len(longest)]  # noqa: E731
            log = simulate(group_s, lambda s: train_s, bound=bound, order=order, **sizes)
            m = measures(log, bound, G)
            cells = (
                bound,
                order,
                f"{m['idle']:.0%}",
                f"{m['lag_mean']:.2f}",
                m["lag_max"],
                f"{m['late']:.1%}",
            )
            print("| " + " | ".join(map(str, (*cells, f"{m['rollouts_per_s']:.3g}"))) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
