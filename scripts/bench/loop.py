"""How close is a step of the asynchronous loop to the slower of its two halves?

    python scripts/bench/loop.py                                                   two cores: tiny, reverse
    python scripts/bench/loop.py "--flags=--model PATH --env jsonl:data.jsonl ..."     GPUs

Runs of `algos/grpo.py` in turns: synchronous (--max-staleness 0), where rollout and training are timed alone,
each while the other one waits; and asynchronous, where they overlap. Medians over the steps of each run:

    ideal = max(rollout alone, training alone) + the refit's pause
    idle  = how long a step waits for rollouts beyond (rollout alone - training alone), as a share of it
"""

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]


@dataclass
class Args:
    flags: str = "--model tiny --env reverse"
    """Flags of both kinds of run."""
    staleness: int = 4
    """--max-staleness of the asynchronous runs."""
    steps: int = 40
    """Steps of a run."""
    skip: int = 10
    """First steps that do not count: they start from an empty queue, and compile."""
    repeats: int = 2
    """Runs of each kind, in turns."""
    out: str = ""
    """File for the figures as JSON."""


def run(args: Args, staleness: int) -> dict:
    """One run: medians of its steps' seconds. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "algos.grpo", *shlex.split(args.flags)]
        command += ["--max-steps", str(args.steps), "--eval-every", str(args.steps)]
        command += ["--max-staleness", str(staleness), "--output-dir", f"{folder}/run"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.DEVNULL)
        text = Path(folder, "run", "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()][args.skip : -1]  # the last one also evaluates
    names = ("step", "trainer_wait", "train", "refit", "refit_pause", "rollout_wait")
    found = {name: statistics.median(row[f"time/{name}"] for row in rows) for name in names}
    found["overlap"] = statistics.mean(row["rollout/overlap_frac"] for row in rows)
    found["lag"] = statistics.mean(row["staleness/mean"] for row in rows)
    found["max_lag"] = max(row["staleness/max"] for row in rows)
    print(f"max staleness {staleness}:", {name: round(value, 4) for name, value in found.items()}, flush=True)
    return {"max_staleness": staleness} | found


def main(args: Args) -> None:
    pairs = []
    for _ in range(args.repeats):
        alone, both = run(args, 0), run(args, args.staleness)
        rollout, train = alone["trainer_wait"], alone["train"]
        ideal = max(rollout, train) + both["refit_pause"]
        waits = max(0.0, both["trainer_wait"] - max(0.0, rollout - train))
        pair = {"rollout alone": rollout, "training alone": train, "rollout / training": rollout / train}
        pair |= {"synchronous step": alone["step"], "asynchronous step": both["step"]}
        pair |= {"step / ideal": both["step"] / ideal, "excess idle": waits / both["step"]}
        pair |= {
            "speed-up": alone["step"] / both["step"],
            "mean lag": both["lag"],
            "max lag": both["max_lag"],
        }
        pairs.append(pair | {"runs": [alone, both]})
        print("  ".join(f"{name} {value:.3f}" for name, value in pair.items()), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(pairs, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
