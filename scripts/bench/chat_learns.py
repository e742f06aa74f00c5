"""One task of two turns with a tool, learned as an `Env` and as a `ChatAgent` through OpenAI's SDK.

    .venv/bin/python scripts/bench/chat_learns.py                           both algorithms, three seeds each
    .venv/bin/python scripts/bench/chat_learns.py grpo 1 2                  one algorithm, two seeds

The same tokens reach the policy either way, so the curves should differ by no more than seeds do. Resumable:
runs that are done are not repeated (runs/chat_learns/). Writes docs/chat_learns.json and a picture.
"""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
FOLDER, KINDS, ROLLOUTS = ROOT / "runs" / "chat_learns", ("LookupEnv", "LookupAgent"), 64
FLAGS = "--model tiny --max-steps 100 --eval-every 20 --eval-size 64 --lr-end-ratio 0.3 --max-new-tokens 8"
ALGORITHMS = {
    "grpo": ["--prompts-per-step", "8", "--group-size", "8"],
    "flash_reinforce": ["--prompts-per-step", "64"],
}


def curve(algorithm: str, kind: str, seed: int) -> list[tuple[int, float, float, float]]:
    """(rollouts, mean reward since the last evaluation, greedy score, seconds of training) of a run."""
    folder = FOLDER / f"{algorithm}-{kind}-{seed}"
    if not (folder / "summary.json").exists():
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        flags = [*FLAGS.split(), *ALGORITHMS[algorithm], "--env", f"scripts/examples/lookup.py:{kind}"]
        flags += ["--seed", str(seed), "--output-dir", str(folder), "--no-tensorboard"]
        subprocess.run(
            [sys.executable, "-m", f"algos.{algorithm}", *flags], cwd=ROOT, check=True, timeout=3600
        )
    points, rewards, seconds = [], [], 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rewards.append(row["reward/mean"])
        if (score := row.get(f"eval/{kind}/mean")) is not None:
            points.append((row["step"] * ROLLOUTS, float(np.mean(rewards)), score, seconds))
            rewards = []
        seconds += row["time/step"]
    return [
        *points,
        ((row["step"] + 1) * ROLLOUTS, float(np.mean(rewards)), row[f"eval_end/{kind}/mean"], seconds),
    ]


def main(algorithms: list[str], seeds: list[int]) -> None:
    results = {}
    figure, axes = plt.subplots(
        2, len(algorithms), figsize=(4.5 * len(algorithms), 6), squeeze=False, dpi=130
    )
    for column, algorithm in zip(axes.T, algorithms):
        for color, kind in zip(("C0", "C1"), KINDS):
            curves = np.array([curve(algorithm, kind, seed) for seed in seeds])
            results[f"{algorithm} {kind}"] = curves.round(4).tolist()
            for axis, place, name in zip(column, (1, 2), ("mean reward", "greedy: both turns exact")):
                axis.plot(curves[0, :, 0], curves[:, :, place].mean(0), color=color, label=kind)
                low, high = curves[:, :, place].min(0), curves[:, :, place].max(0)
                axis.fill_between(curves[0, :, 0], low, high, color=color, alpha=0.2)
                axis.set(title=algorithm, xlabel="rollouts", ylabel=name, ylim=(-0.03, 1.03))
            ends = curves[:, -1].round(3).tolist()
            print(f"{algorithm} {kind}: (rollouts, reward, score, seconds) at the end: {ends}", flush=True)
        column[0].legend(frameon=False)
    (ROOT / "docs" / "chat_learns.json").write_text(json.dumps(results, indent=1) + "\n")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "chat_learns.png")


if __name__ == "__main__":
    main(
        [name for name in sys.argv[1:] if name in ALGORITHMS] or list(ALGORITHMS),
        [int(seed) for seed in sys.argv[1:] if seed.isdigit()] or [1, 2, 3],
    )
