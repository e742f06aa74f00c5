"""GRPO, FlashREINFORCE, PPO and score centering on the same tasks with equal numbers of rollouts, three seeds each.

    .venv/bin/python scripts/bench/algorithms.py            all of it: some 40 minutes a task on two cores
    .venv/bin/python scripts/bench/algorithms.py reverse    one task
    .venv/bin/python scripts/bench/algorithms.py long       6,000 updates of FlashREINFORCE at staleness 4

Resumable: runs that are done are not repeated (runs/algorithms/). Writes docs/algorithms.json, a picture with
the spread over seeds against rollouts and against seconds, and prints the table.
"""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
FOLDER, ROLLOUTS, TARGET, SEEDS = ROOT / "runs" / "algorithms", 128, 0.9, (1, 2, 3)
SORT = "scripts/examples/sort_digits.py:SortDigits"
TASKS = {
    "reverse": ["--env", "reverse", "--max-steps", "120"],
    "sort": ["--env", SORT, "--max-steps", "300"],
}
# the harder task: reverse is learned so soon that most of 6,000 updates would be of equal rewards
LONG = "--max-steps 6000 --prompts-per-step 16 --max-staleness 4 --lr 3e-4 --lr-end-ratio 1".split()
LONG += ["--env", SORT, "--eval-every", "500"]
ALGORITHMS = {
    "grpo": ["--prompts-per-step", "16", "--group-size", "8"],
    "flash_reinforce": ["--prompts-per-step", "128"],
    "ppo": ["--prompts-per-step", "128"],
    "score_centering": ["--prompts-per-step", "16", "--group-size", "8"],
}


def run(algorithm: str, name: str, flags: list[str]) -> list[dict]:
    """The rows of a run, which is made if it has not been made to its end. Raises CalledProcessError."""
    folder = FOLDER / name
    if not (folder / "summary.json").exists():
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        command = [sys.executable, "-m", f"algos.{algorithm}", *flags]
        subprocess.run(
            [*command, "--output-dir", str(folder), "--no-tensorboard"], cwd=ROOT, check=True, timeout=3600
        )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(rows: list[dict]) -> list[tuple[int, float, float]]:
    """(rollouts, seconds of training, greedy score) at each evaluation."""
    seconds, points = 0.0, []
    for row in rows:
        score = [value for key, value in row.items() if key.startswith("eval/") and key.endswith("/mean")]
        points += [(row["step"] * ROLLOUTS, seconds, score[0])] if score else []
        seconds += row["time/step"]
    (end,) = [v for k, v in rows[-1].items() if k.startswith("eval_end/") and k.endswith("/mean")]
    return [*points, (len(rows) * ROLLOUTS, seconds, end)]


def first_at(points: list[tuple[int, float, float]], place: int) -> float | None:
    return next((point[place] for point in points if point[2] >= TARGET), None)


def show(values: list[float | None]) -> str:
    return ", ".join("never" if value is None else f"{value:.0f}" for value in values)


def main(tasks: list[str]) -> None:
    results = {}
    figure, axes = plt.subplots(len(tasks), 2, figsize=(9, 3.4 * len(tasks)), squeeze=False, dpi=130)
    print("| task | algorithm | score at the start | at the end | rollouts to 0.9 | seconds to 0.9 |")
    print("|---|---|---|---|---|---|")
    for task, (left, right) in zip(tasks, axes):
        for color, algorithm in zip(("C0", "C1", "C2", "C3"), ALGORITHMS):
            flags = [*TASKS[task], *ALGORITHMS[algorithm], "--eval-every", "10"]
            curves = [
                curve(run(algorithm, f"{task}-{algorithm}-{seed}", [*flags, "--seed", str(seed)]))
                for seed in SEEDS
            ]
            results[f"{task} {algorithm}"] = curves
            starts, ends = ([round(points[place][2], 3) for points in curves] for place in (0, -1))
            rollouts, seconds = ([first_at(points, place) for points in curves] for place in (0, 1))
            cells = (task, algorithm, starts, ends, show(rollouts), show(seconds))
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            scores = np.array([[point[2] for point in points] for points in curves])
            for axis, place in ((left, 0), (right, 1)):
                at = np.mean([[point[place] for point in points] for points in curves], axis=0)
                axis.plot(at, scores.mean(0), color=color, label=algorithm)
                axis.fill_between(at, scores.min(0), scores.max(0), color=color, alpha=0.2)
        flags = [*TASKS[task], *ALGORITHMS["grpo"], "--eval-every", "10", "--lr", "0"]
        control = curve(run("grpo", f"{task}-control-1", [*flags, "--seed", "1"]))
        results[f"{task} grpo --lr 0"] = [control]
        print(
            f"| {task} | grpo --lr 0 | {control[0][2]:.3f} | {control[-1][2]:.3f} | never | never |",
            flush=True,
        )
        left.plot(*np.array(control)[:, [0, 2]].T, color="black", linestyle=":", label="grpo --lr 0")
        left.set(title=task, xlabel="rollouts", ylabel="greedy exact match", ylim=(-0.03, 1.03))
        right.set(xlabel="seconds of training", ylim=(-0.03, 1.03))
        left.legend(frameon=False)
    (ROOT / "docs" / "algorithms.json").write_text(json.dumps(results, indent=1) + "\n")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "algorithms.png")


def long_run() -> None:
    """6,000 updates of FlashREINFORCE at staleness 4, without a restart: docs/flash_long.{json,png}."""
    columns = ["reward/mean", "eval/SortDigits/mean", "gate/rejected_frac", "is/max_weight", "is/ess"]
    columns += ["staleness/mean", "mismatch/abs_mean", "grad_norm"]
    frame = pandas.DataFrame(run("flash_reinforce", "flash-long", LONG)).set_index("step")[columns]
    frame.interpolate(limit_area="inside").plot(
        subplots=True, layout=(4, 2), figsize=(10, 9), lw=0.6, grid=True
    )
    plt.tight_layout()
    plt.savefig(ROOT / "docs" / "flash_long.png", dpi=110)
    blocks = frame.groupby(frame.index // 1000)
    table = blocks.mean().join(blocks["is/max_weight"].max().rename("largest weight"))
    (ROOT / "docs" / "flash_long.json").write_text(table.to_json(orient="index", indent=1) + "\n")
    print(table.round(4).to_string())


if __name__ == "__main__":
    if sys.argv[1:] == ["long"]:
        long_run()
    else:
        main(sys.argv[1:] or list(TASKS))
