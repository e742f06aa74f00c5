"""A `ChatAgent` trained by each algorithm, from the command line to the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BATCH = {"grpo": ["--prompts-per-step", "4", "--group-size", "4"]}


@pytest.mark.parametrize("algorithm", ["grpo", "flash_reinforce", "ppo"])
def test_an_agent_is_trained_like_an_environment(tmp_path, algorithm):
    agent = "scripts/examples/lookup.py:LookupAgent"
    flags = [
        "--model",
        "tiny",
        "--env",
        agent,
        "--max-steps",
        "2",
        "--max-staleness",
        "0",
        "--no-tensorboard",
    ]
    flags += ["--output-dir", str(tmp_path / "run"), *BATCH.get(algorithm, ["--prompts-per-step", "16"])]
    command = [sys.executable, "-m", f"algos.{algorithm}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["mismatch/abs_mean"] < 1e-5, (
            "the trainer's log-probs of the recorded tokens are the engine's"
        )
        assert row["grad_norm"] > 0 and row["reward/invalid_frac"] == 0
        assert row["rollout/turns_mean"] == 2 and row["rollout/forks_mean"] == 0
    assert "eval/LookupAgent/mean" in rows[0] and "eval_end/LookupAgent/mean" in rows[-1]
