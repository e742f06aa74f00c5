"""LoRA beside full training on Reverse, three seeds each: GRPO with the tiny model, equal numbers of rollouts.

    .venv/bin/python scripts/bench/lora.py          all of it: a minute or two for each run
    .venv/bin/python scripts/bench/lora.py 1        only seed 1
    .venv/bin/python scripts/bench/lora.py table    what there is, without a run

Resumable: a run that stands in docs/lora.json is not repeated.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS, SEEDS, TARGET = ROOT / "docs" / "lora.json", (1, 2, 3), 0.9
COMMAND = "algos.grpo --env reverse --max-steps 120 --eval-every 10 --no-tensorboard".split()
VARIANTS = {
    "rank 8, lr 3e-3": ["--lora-rank", "8", "--lr", "3e-3"],
    "rank 8, lr 1e-2": ["--lora-rank", "8", "--lr", "1e-2"],
    "full, lr 1e-3": [],
    "rank 8, lr 1e-3": ["--lora-rank", "8", "--lr", "1e-3"],
}


def run(name: str, flags: list[str], seed: int) -> dict:
    """What a run gives: (rollouts, greedy score) at each evaluation, and means over its steps."""
    folder = ROOT / "runs" / "lora" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    command = [sys.executable, "-m", *COMMAND, *flags, "--seed", str(seed), "--output-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=3600)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(128 * row["step"], row["eval/reverse/mean"]) for row in rows if "eval/reverse/mean" in row]
    curve.append((128 * len(rows), rows[-1]["eval_end/reverse/mean"]))
    means = ("time/step", "time/refit", "perf/rollout_tokens_per_s", "mismatch/abs_mean")
    return {"curve": curve} | {key: statistics.mean(row[key] for row in rows[5:]) for key in means}


def table(results: dict) -> None:
    print("| variant | greedy score at the end | best | rollouts to 0.9 | s a step | ms a refit | mismatch |")
    print("|---|---|---|---|---|---|---|")
    for name in VARIANTS:
        runs = list(results.get(name, {}).values())
        if not runs:
            continue
        ends = ", ".join(f"{each['curve'][-1][1]:.3f}" for each in runs)
        best = ", ".join(f"{max(score for _, score in each['curve']):.3f}" for each in runs)
        firsts = [next((at for at, score in each["curve"] if score >= TARGET), None) for each in runs]
        first = ", ".join("never" if at is None else f"{at:,}" for at in firsts)
        step, refit, mismatch = (
            statistics.mean(each[key] for each in runs)
            for key in ("time/step", "time/refit", "mismatch/abs_mean")
        )
        print(f"| {name} | {ends} | {best} | {first} | {step:.3f} | {1e3 * refit:.0f} | {mismatch:.1e} |")


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    seeds = [int(seed) for seed in sys.argv[1:] if seed != "table"] if sys.argv[1:] else SEEDS
    for seed in seeds:
        for name, flags in VARIANTS.items():
            if str(seed) not in results.setdefault(name, {}):
                results[name][str(seed)] = run(name, flags, seed)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    table(results)


if __name__ == "__main__":
    main()
