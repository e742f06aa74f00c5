"""tiny-vlm learns to count squares: three seeds, beside what the same policies score on other tasks' images.

    .venv/bin/python scripts/bench/images.py              all seeds, one after the other, on two slow cores
    .venv/bin/python scripts/bench/images.py 1 2          some of them

Resumable: runs that are done are not repeated (runs/images/). Writes docs/images.json.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from common.envs.shapes import MOST, Shapes  # noqa: E402

FOLDER = ROOT / "runs" / "images"
FLAGS = "--model tiny-vlm --max-new-tokens 3 --lr 5e-4 --max-steps 200 --eval-every 40"


class Shuffled(Shapes):
    """The same tasks, each with the image of another one."""

    def tasks(self, split: str) -> list[dict]:
        tasks = super().tasks(split)
        shown = np.random.default_rng(0).permutation([task["number"] for task in tasks]).tolist()
        return [task | {"shown": number} for task, number in zip(tasks, shown)]

    def reset(self, task: dict) -> list[dict]:
        prompt = super().reset(task | {"number": task["shown"]})
        self.number = task["number"]
        return prompt


def run(name: str, *flags: str) -> Path:
    folder = FOLDER / name
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "algos.grpo", *FLAGS.split(), *flags]
        subprocess.run([*command, "--output-dir", str(folder)], cwd=ROOT, check=True, timeout=900)
    return folder


def results(seed: str) -> dict:
    """Greedy exact answers on 128 held-out tasks, by step, and those of the last policy on shuffled images."""
    trained = run(f"seed_{seed}", "--env", "shapes", "--seed", seed)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    scores = [(row["step"], row["eval/shapes/mean"]) for row in rows if "eval/shapes/mean" in row]
    scores.append((len(rows), rows[-1]["eval_end/shapes/mean"]))
    weights = f"{trained}/checkpoints/step_{len(rows)}"
    blind = run(f"shuffled_{seed}", "--env", f"{__file__}:Shuffled", "--init-from", weights, "--eval-only")
    return {
        "step, exact": scores,
        "on shuffled images": json.loads((blind / "summary.json").read_text())["eval/Shuffled/mean"],
        "seconds of training": round(sum(row["time/step"] for row in rows), 1),
        "mismatch/abs_mean of step 0": rows[0]["mismatch/abs_mean"],
    }


def main(seeds: list[str]) -> None:
    numbers = [task["number"] for task in Shapes().tasks("eval")]
    majority = max(numbers.count(number) for number in range(1, MOST + 1)) / len(numbers)
    found = {"flags": FLAGS, "most frequent answer": majority}
    for seed in seeds:
        found[f"seed {seed}"] = results(seed)
        print(seed, found[f"seed {seed}"], flush=True)
        (ROOT / "docs" / "images.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ["1", "2", "3"])
