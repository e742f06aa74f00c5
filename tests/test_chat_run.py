"""A `ChatAgent` trained by each algorithm, from the command line to the end."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = "--model tiny --env scripts/examples/lookup.py:LookupAgent --max-steps 2 --max-staleness 0 --no-tensorboard"
BATCH = {
    "grpo": "--prompts-per-step 4 --group-size 4",
    "flash_reinforce": "--prompts-per-step 16",
    "ppo": "--prompts-per-step 16",
}


def test_an_agent_is_trained_like_an_environment(tmp_path):
    runs = {}
    for name, batch in BATCH.items():  # at the same time
        command = [sys.executable, "-m", f"algos.{name}", *FLAGS.split(), *batch.split()]
        with open(tmp_path / f"{name}.out", "w") as file:
            more = ["--output-dir", str(tmp_path / name)]
            runs[name] = subprocess.Popen([*command, *more], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        for name, run in runs.items():
            assert run.wait(600) == 0, (tmp_path / f"{name}.out").read_text()[-3000:]
            rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows] == [0, 1]
            for row in rows:
                what = "the trainer's log-probs of the recorded tokens are the engine's"
                assert row["mismatch/abs_mean"] < 1e-5, what
                assert row["grad_norm"] > 0 and row["reward/invalid_frac"] == 0
                assert row["rollout/turns_mean"] == 2 and row["rollout/forks_mean"] == 0
            assert "eval/LookupAgent/mean" in rows[0] and "eval_end/LookupAgent/mean" in rows[-1]
    finally:
        for run in runs.values():
            run.kill()  # nothing where it has ended
