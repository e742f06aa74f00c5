"""What a step's rollouts were like and where its time went. Averages are made once, from sums."""

import time
from collections import Counter, defaultdict

import numpy as np
import torch

from common.logger import mean_of, merge
from common.sample import Rollout


class Stopwatch:
    """Laps of one step in seconds, by metric name."""

    def __init__(self):
        self.times: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.times[name], self.last = self.times.get(name, 0.0) + now - self.last, now


class BusyClock:
    """Seconds during which at least one of its `with` blocks was open."""

    def __init__(self):
        self.open, self.total, self.since = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if self.open == 0:
            self.since = time.monotonic()
        self.open += 1

    def __exit__(self, *error) -> None:
        self.open -= 1
        if self.open == 0:
            self.total += time.monotonic() - self.since

    def seconds(self) -> float:
        return self.total + (time.monotonic() - self.since if self.open else 0.0)


def timing_metrics(times: dict, ticks: list[list[dict]], rollouts: list[Rollout], sent: dict) -> dict:
    """`time/*`, `perf/*` and the overlap of a step from its laps `times` and the report `sent` of its refit.

    `ticks` are the engines' counters (`busy_s`, `sampled_tokens`, `at`) at the start of the step, before and
    after training, and at its end: [4][engines].
    """
    busy, clock = (np.array([[engine[key] for engine in tick] for tick in ticks]) for key in ("busy_s", "at"))
    sampled = np.array([sum(engine["sampled_tokens"] for engine in tick) for tick in ticks])
    step_s = sum(times.values()) - times["time/eval"]
    training, whole = clock[2] - clock[1], clock[3] - clock[0]
    return times | {
        "time/step": step_s,
        "time/rollout_wait": float(np.mean(whole - (busy[3] - busy[0]))),
        "rollout/overlap_frac": float(np.mean((busy[2] - busy[1]) / training)),
        "time/refit_pause": sent["pause_s"],
        "perf/refit_gb_per_s": sent["bytes"] / 1e9 / sent["pause_s"],
        "perf/samples_per_s": len(rollouts) / step_s,
        "perf/train_tokens_per_s": sum(rollout.num_actions for rollout in rollouts) / times["time/train"],
        "perf/rollout_tokens_per_s": float((sampled[3] - sampled[0]) / np.mean(whole)),
        **{name: value for name, value in sent.items() if name == "rollout/accepted_frac"},
    }


def reprefilled_tokens(rollout: Rollout) -> int:
    """Tokens whose KV the engine computed again, as a refit came between two sampled tokens; at the start of
    a turn with what the environment added."""
    total = 0
    for segment in rollout.segments:
        at = np.flatnonzero(segment.versions >= 0)
        total += int(at[1:][np.diff(segment.versions[at]) > 0].sum())  # all that stands before such a token
    return total


def rollout_metrics(
    rollouts: list[Rollout], lags: list[int], num_late: int, drops: dict, advantages: dict[str, float]
) -> dict:
    """What the rollouts of a step were like. Rewards are averaged over valid rollouts, lengths over all, the
    numbers in `info` over the valid rollouts that have them. `drops` has the dropped groups by reason: how
    many, and a detail."""
    valid = [rollout for rollout in rollouts if not rollout.invalid]
    reasons = Counter(rollout.invalid for rollout in rollouts if rollout.invalid)
    reasons += Counter({reason: count for reason, (count, _) in drops.items()})
    row = {f"rollout/dropped/{reason}": count for reason, count in reasons.items()}
    rewards = defaultdict(list)
    for rollout in valid:
        rewards[rollout.group_id].append(rollout.reward)
    if rewards:
        flat = np.concatenate(list(rewards.values()))
        row["reward/mean"], row["reward/std"] = float(flat.mean()), float(flat.std())
        constant = [max(group) == min(group) for group in rewards.values() if len(group) > 1]
        row |= {"reward/zero_std_group_frac": float(np.mean(constant))} if constant else {}
    if advantages:
        row["advantage/abs_mean"] = float(np.mean(np.abs(list(advantages.values()))))
    if lags:
        row["staleness/mean"], row["staleness/max"] = float(np.mean(lags)), max(lags)
        row["staleness/hist"] = np.bincount(lags).tolist()
        row["staleness/late_token_frac"] = num_late / len(lags)
    numbers = [(k, v) for rollout in valid for k, v in rollout.info.items() if isinstance(v, (int, float))]
    row |= mean_of(merge([{f"tool/{k[5:]}" if k[:5] == "tool_" else f"env/{k}": (v, 1)} for k, v in numbers]))
    return row | {
        "reward/invalid_frac": 1 - len(valid) / len(rollouts),
        "rollout/len_mean": float(np.mean([rollout.num_sampled for rollout in rollouts])),
        "rollout/truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
        "rollout/turns_mean": float(np.mean([len(rollout.turn_tokens) for rollout in rollouts])),
        "rollout/reprefilled_tokens": sum(map(reprefilled_tokens, rollouts)),
        "rollout/forks_mean": float(np.mean([max(len(rollout.segments) - 1, 0) for rollout in rollouts])),
    }


def mismatch_metrics(log_ratio_BS: torch.Tensor, mask_BS: torch.Tensor, crossed_B) -> tuple[dict, dict]:
    """`mismatch/*` from log(trainer / engine) of the masked tokens (0 elsewhere): sums, and peaks.
    `crossed_B` are the rows in which a refit came between two sampled tokens."""
    difference, count, held = log_ratio_BS.abs(), mask_BS.sum(), log_ratio_BS.clamp(-20, 20)
    return {
        "mismatch/crossed_abs_mean": (difference[crossed_B].sum(), mask_BS[crossed_B].sum()),
        "mismatch/abs_mean": (difference.sum(), count),
        "mismatch/k3": ((held.expm1() - held).sum(), count),
        "mismatch/exact_frac": ((mask_BS & (difference == 0)).sum(), count),
    }, {"mismatch/abs_max": difference.max()}


def rank_metrics(sums: list[dict], peaks: list[dict]) -> dict:
    """What a rank returns from a step: {"sums": {metric: (sum, count)}, "peaks": {metric: max}} of floats."""
    numbers = [{name: (float(s), float(c)) for name, (s, c) in each.items()} for each in sums]
    names = {name for peak in peaks for name in peak}
    highest = {name: max(float(peak[name]) for peak in peaks if name in peak) for name in names}
    return {"sums": merge(numbers), "peaks": highest}


def update_metrics(grad_norm: float, critic: bool = False, alone: bool = False) -> dict:
    """The norm of an update's gradient, or that the update was skipped since it was not finite. `alone`: the
    critic is all that trains, so its skips are the step's."""
    norm, skipped = ("value/grad_norm", "value/skipped_frac") if critic else ("grad_norm", "skipped_frac")
    finite = bool(np.isfinite(grad_norm))
    names = {skipped, "skipped_frac"} if alone else {skipped}
    return dict.fromkeys(names, (not finite, 1)) | ({norm: (grad_norm, 1)} if finite else {})


def training_metrics(ranks: list[dict]) -> dict:
    """The metrics of a step from what each rank returned: sums are added over ranks and divided once.

    `is_weight` and `is_weight_squared` become `is/ess`: (sum w)^2 / (N sum w^2), 1 where all weights are
    equal, and `is/max_share`: the largest weight over the sum of all.
    """
    totals = merge([rank["sums"] for rank in ranks])
    means, (total, _) = mean_of(totals), totals.get("is_weight", (0, 0))
    peaks = {key: max(rank["peaks"][key] for rank in ranks) for key in ranks[0]["peaks"]}
    weight, squared = means.pop("is_weight", None), means.pop("is_weight_squared", None)
    if squared:
        means |= {"is/ess": weight**2 / squared, "is/max_share": peaks["is/max_weight"] / total}
    return means | peaks


def advice(row: dict, rollouts: list[Rollout], drops: dict, group_size: int, max_new_tokens: int) -> dict:
    """What a step shows to be wrong with the run, by kind. Each kind is worth saying once."""
    found = {}
    errors = {r.invalid: r.info["error"] for r in rollouts if r.invalid and "error" in r.info}
    for reason, error in (errors | {reason: detail for reason, (_, detail) in drops.items()}).items():
        last_line = (str(error).strip().splitlines() or ["it says no more"])[-1]
        what = "groups were left out" if reason in drops else "rollouts are invalid"
        found[reason] = f"some {what} ({reason}): {last_line}"
    equal = row.get("reward/zero_std_group_frac") == 1 or row.get("reward/std") == 0
    if equal and "loss/teacher_kl" not in row:  # a teacher teaches whatever the rewards
        what = f"no two rewards of a baseline differ (mean {row['reward/mean']:.3g}): nothing is learned"
        fix = "Change it, give partial credit, warm up by algos/sft.py"
        fix += f", or raise --group-size (now {group_size}) or --temperature"
        found["equal rewards"] = f"{what}, the task is too hard or too easy. {fix}"
    # of weights around 1, an effective size below a tenth takes one above 10; else most were dropped
    if row.get("is/max_weight", 0) > 10 and (row["is/ess"] < 0.1 or row["is/max_share"] > 0.05):
        what = f"few tokens weigh most (largest {row['is/max_weight']:.3g}, {row['is/max_share']:.1%} of all"
        what += f"; effective size {row['is/ess']:.2g})"
        found["few tokens weigh"] = f"{what}: bound them by --max-weight, or by --correction tis"
    if (rejected := max(row.get("is/dropped_frac", 0), row.get("gate/rejected_frac", 0))) > 0.5:
        what = f"{rejected:.0%} of a step was rejected as too far from the policy that sampled it"
        fix = "raise --correction-cap (or --delta), or lower --max-staleness or --lr"
        found["all rejected" if rejected == 1 else "rejected"] = f"{what}: {fix}"
    if (cut := row["rollout/truncated_frac"]) > 0.5:
        fix = f"raise --max-new-tokens (now {max_new_tokens}) or ask for shorter answers"
        found["truncated"] = f"{cut:.0%} of the rollouts were cut off: {fix}"
    return found
