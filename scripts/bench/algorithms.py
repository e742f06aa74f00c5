"""Every algorithm on the same tasks with equal numbers of rollouts, three seeds each.

    .venv/bin/python scripts/bench/algorithms.py                    all of it: a minute or two for each run
    .venv/bin/python scripts/bench/algorithms.py reverse dapo ppo   these algorithms on this task
    .venv/bin/python scripts/bench/algorithms.py table              what there is, without a run
    .venv/bin/python scripts/bench/algorithms.py long               FlashREINFORCE, 6,000 updates at lag 4

Resumable: a run that stands in docs/algorithms.json, or in runs/algorithms/, is not repeated. Each run goes
into the JSON when it ends; then come the picture (against rollouts, with the spread over seeds) and the table.
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
GROUPS, SINGLE = ["--prompts-per-step", "16", "--group-size", "8"], ["--prompts-per-step", "128"]
ALGORITHMS = {
    "grpo": GROUPS, "flash_reinforce": SINGLE, "ppo": SINGLE, "score_centering": GROUPS, "dr_grpo": GROUPS,
    "rloo": GROUPS, "reinforce_pp": GROUPS, "reinforce_pp_baseline": GROUPS, "gspo": GROUPS, "cispo": GROUPS,
    "dapo": GROUPS, "distill": GROUPS, "distill_topk": GROUPS,
}  # fmt: skip
LEARN_FROM_A_TEACHER = ("distill", "distill_topk")  # the checkpoint of `teacher`, a GRPO run of the same task
PANELS = (
    ("flash_reinforce", "ppo", "score_centering"),
    ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    ("gspo", "cispo", "dapo"),
    LEARN_FROM_A_TEACHER,
)


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


def teacher(task: str, results: dict) -> str:
    """The last checkpoint of GRPO with seed 1 on the task, a run of its own in `results`."""
    name, flags = f"{task}-teacher", [*TASKS[task], *GROUPS, "--eval-every", "10", "--seed", "1"]
    rows = run("grpo", name, flags)
    results[f"{task} teacher"] = {"1": curve(rows)}
    return str(FOLDER / name / "checkpoints" / f"step_{len(rows)}")


def curve(rows: list[dict]) -> list[tuple[int, float, float]]:
    """(rollouts, seconds of training, greedy score) at each evaluation. Groups that DAPO sampled and did not
    train count."""
    rollouts, seconds, points = 0, 0.0, []
    for row in rows:
        score = [value for key, value in row.items() if key.startswith("eval/") and key.endswith("/mean")]
        points += [(rollouts, seconds, score[0])] if score else []
        rollouts += ROLLOUTS + 8 * row.get("rollout/dropped/equal_rewards", 0)
        seconds += row["time/step"]
    (end,) = [v for k, v in rows[-1].items() if k.startswith("eval_end/") and k.endswith("/mean")]
    return [*points, (rollouts, seconds, end)]


def measure(results: dict, tasks: list[str], algorithms: list[str]) -> None:
    """Makes the runs that are missing in `results`, {"task algorithm": {seed: curve}}, and writes each
    down."""
    wanted = [(task, algorithm, seed) for task in tasks for algorithm in algorithms for seed in SEEDS]
    wanted += [(task, "grpo --lr 0", 1) for task in tasks if "grpo" in algorithms]
    for task, what, seed in wanted:
        algorithm, *more = what.split()
        of_seeds = results.setdefault(f"{task} {what}", {})
        if str(seed) in of_seeds:
            continue
        flags = [*TASKS[task], *ALGORITHMS[algorithm], "--eval-every", "10", *more, "--seed", str(seed)]
        if algorithm in LEARN_FROM_A_TEACHER:
            flags += ["--teacher", teacher(task, results)]
        name = f"{task}-{'control' if more else algorithm}-{seed}"
        of_seeds[str(seed)] = curve(run(algorithm, name, flags))
        (ROOT / "docs" / "algorithms.json").write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict) -> None:
    """For each task the scores at the end and the rollouts until TARGET, seed by seed; empty where no run
    stands."""
    print(
        "| algorithm | " + " | ".join(f"{task}: at the end | rollouts to {TARGET}" for task in TASKS) + " |"
    )
    print("|---" * (1 + 2 * len(TASKS)) + "|")
    for what in [*ALGORITHMS, "teacher", "grpo --lr 0"]:
        cells = [f"`{what}`"]
        for task in TASKS:
            curves = list(results.get(f"{task} {what}", {}).values())
            ends = ", ".join(f"{points[-1][2]:.3f}" for points in curves)
            firsts = [next((at for at, _, score in points if score >= TARGET), None) for points in curves]
            cells += [ends, ", ".join("never" if at is None else f"{at:,}" for at in firsts)]
        print("| " + " | ".join(cells) + " |")


def draw(results: dict) -> None:
    """A row of panels for each task, GRPO in each panel; the band is the spread over seeds."""
    size = {"figsize": (3.4 * len(PANELS), 3.2 * len(TASKS)), "squeeze": False, "sharey": True, "dpi": 110}
    figure, axes = plt.subplots(len(TASKS), len(PANELS), **size)
    for task, row in zip(TASKS, axes):
        for names, axis in zip(PANELS, row):
            for color, name in zip(("black", "C0", "C1", "C2", "C3"), ("grpo", *names)):
                curves = list(results.get(f"{task} {name}", {}).values())
                if not curves:
                    continue
                scores = np.array([[point[2] for point in points] for points in curves])
                at = np.mean([[point[0] for point in points] for points in curves], axis=0)
                label = name if len(curves) == len(SEEDS) else f"{name} ({len(curves)} seeds)"
                axis.plot(at, scores.mean(0), color=color, label=label, lw=1.2)
                axis.fill_between(at, scores.min(0), scores.max(0), color=color, alpha=0.15, lw=0)
            axis.set(title=task, xlabel="rollouts", ylim=(-0.03, 1.03))
            axis.legend(frameon=False, fontsize=7, loc="lower right")
        row[0].set_ylabel("greedy exact match")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "algorithms.png")


def main(words: list[str]) -> None:
    if unknown := set(words) - {*TASKS, *ALGORITHMS, "table"}:
        sys.exit(f"{', '.join(sorted(unknown))}: use {', '.join([*TASKS, *ALGORITHMS])}, table or long")
    path = ROOT / "docs" / "algorithms.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if words != ["table"]:
        tasks, algorithms = ([w for w in known if w in words] or list(known) for known in (TASKS, ALGORITHMS))
        measure(results, tasks, algorithms)
    table(results)
    draw(results)


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
        main(sys.argv[1:])
