"""SmolLM2 learns two-number sums on a GPU: three seeds, and a control whose learning rate is 0.

    python scripts/bench/first_hour.py                    one after the other on one GPU
    python scripts/bench/first_hour.py 1 control          some of them

Resumable: runs that are done are not repeated (runs/first_hour/). Writes docs/first_hour.json and a picture.
"""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs" / "first_hour"
ENV = "gym:chain_sum,min_terms=2,max_terms=2,min_digits=1,max_digits=2"
FLAGS = f"--model smollm2 --env {ENV} --max-new-tokens 16 --prompts-per-step 32 --max-in-flight 64"
FLAGS += " --eval-samples 4 --eval-every 20 --max-steps 60 --kv-cache-gb 8"
RUNS = {"1": "--lr 1e-5 --seed 1", "2": "--lr 1e-5 --seed 2", "3": "--lr 1e-5 --seed 3"}
RUNS["control"] = "--lr 0 --seed 1"
TIMES = ("step", "train", "trainer_wait", "refit", "refit_pause", "rollout_wait")


def run(name: str) -> dict:
    """The curves of a run (seconds of training, evaluation, reward of each step), and its median times."""
    folder = FOLDER / name
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "algos.grpo", *FLAGS.split(), *RUNS[name].split()]
        subprocess.run([*command, "--output-dir", str(folder)], cwd=ROOT, check=True, timeout=3600)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds, scores = 0.0, []
    for row in rows:
        if (score := row.get("eval/chain_sum/mean")) is not None:
            scores.append((row["step"], round(seconds, 1), score))
        seconds += row["time/step"]
    scores.append((len(rows), round(seconds, 1), rows[-1]["eval_end/chain_sum/mean"]))
    steady = rows[len(rows) // 3 : -1]
    times = {name: round(statistics.median(row[f"time/{name}"] for row in steady), 3) for name in TIMES}
    rewards = [round(row["reward/mean"], 3) for row in rows]
    return {"flags": RUNS[name], "step, seconds, exact": scores, "reward": rewards, "times": times}


def main(names: list[str]) -> None:
    results = {name: run(name) for name in names}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), dpi=130)
    for name, found in results.items():
        look = (
            {"color": "0.6", "label": "learning rate 0"} if name == "control" else {"label": f"seed {name}"}
        )
        steps, seconds, exact = zip(*found["step, seconds, exact"])
        axes[0].plot(steps, exact, marker="o", **look)
        axes[1].plot(found["reward"], **look)
        print(name, found["step, seconds, exact"], found["times"], flush=True)
    axes[0].set(xlabel="step", ylabel="greedy, 128 held-out sums: exact", ylim=(0, 1))
    axes[1].set(xlabel="step", ylabel="mean reward of sampled answers", ylim=(0, 1))
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "first_hour.png")
    (ROOT / "docs" / "first_hour.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUNS))
