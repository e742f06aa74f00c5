"""Does the quickstart learn, and what does asynchrony buy? Several runs of `algos/grpo.py` on `tiny`, one
after the other.

    .venv/bin/python scripts/bench/first_light.py learn      3 seeds, and lr 0 as the control
    .venv/bin/python scripts/bench/first_light.py overlap    --max-staleness 0 and 2 in turn, twice

Writes docs/first_light_<what>.json and a picture, and prints the table of the README.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RUNS = {
    "learn": [["--seed", "1"], ["--seed", "2"], ["--seed", "3"], ["--seed", "1", "--lr", "0"]],
    "overlap": [
        ["--max-staleness", bound, "--max-in-flight", flying, "--max-steps", "60", "--eval-every", "60"]
        for bound, flying in [("0", "16"), ("2", "16"), ("2", "32")] * 2
    ],
}


def run(flags: list[str], folder: str) -> dict:
    """One run; its flags, rows and summary. Raises CalledProcessError if it fails."""
    command = [
        sys.executable,
        "-m",
        "algos.grpo",
        "--model",
        "tiny",
        "--env",
        "reverse",
        "--output-dir",
        folder,
    ]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, timeout=900)
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return {
        "flags": " ".join(flags),
        "rows": rows,
        "summary": json.loads(Path(folder, "summary.json").read_text()),
    }


def learning(result: dict) -> dict:
    """Scores against seconds of training (evaluation not counted), and when 0.95 was first seen."""
    seconds, points = 0.0, []
    for row in result["rows"]:
        if "eval/reverse/mean" in row:
            points.append((round(seconds, 1), row["step"], row["eval/reverse/mean"]))
        seconds += row["time/step"]
    points.append((round(seconds, 1), len(result["rows"]), result["rows"][-1]["eval_end/reverse/mean"]))
    hit = next((point for point in points if point[2] >= 0.95), None)
    return {
        "flags": result["flags"],
        "points": points,
        "score at step 0": points[0][2],
        "score at the end": points[-1][2],
        "seconds to 0.95": hit and hit[0],
        "steps to 0.95": hit and hit[1],
        "seconds in all": points[-1][0],
    }


def overlap(result: dict) -> dict:
    rows = result["rows"][10:]  # the first steps start from an empty queue
    seconds = sum(row["time/step"] for row in rows)
    return {
        "flags": result["flags"],
        "samples/s": 128 * len(rows) / seconds,
        "trainer waits": sum(row["time/trainer_wait"] for row in rows) / seconds,
        "overlap": sum(row["rollout/overlap_frac"] for row in rows) / len(rows),
        "mean lag": sum(row["staleness/mean"] for row in rows) / len(rows),
        "worst mismatch": max(row["mismatch/abs_mean"] for row in result["rows"]),
    }


def main(what: str) -> None:
    results = []
    for index, flags in enumerate(RUNS[what]):
        with tempfile.TemporaryDirectory() as folder:
            results.append({"learn": learning, "overlap": overlap}[what](run(flags, f"{folder}/run{index}")))
    Path(ROOT, "docs", f"first_light_{what}.json").write_text(json.dumps(results, indent=1) + "\n")
    keys = [key for key in results[0] if key != "points"]
    print("| " + " | ".join(keys) + " |")
    print("|---" * len(keys) + "|")
    for result in results:
        cells = [result[key] for key in keys]
        print(
            "| "
            + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
            + " |"
        )
    if what == "learn":
        figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=130, layout="constrained")
        for result in results:
            axes.plot(
                [point[0] for point in result["points"]],
                [point[2] for point in result["points"]],
                marker="o",
                markersize=4,
                label=result["flags"],
            )
        axes.set(xlabel="seconds of training on two cores", ylabel="greedy exact match", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(ROOT / "docs" / "first_light_learn.png")


if __name__ == "__main__":
    main(sys.argv[1])
