"""A run that trains from recorded rollouts, killed and gone on with, has the parameters of one that was not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common.debug import dump_rollouts
from common.models import load_tokenizer, resolve_model
from common.sample import Rollout, Segment

ROOT, STEPS, PROMPTS, GROUP = Path(__file__).parents[2], 16, 2, 4
FLAGS = (
    "--model", "tiny", "--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP), "--minibatches", "2",
    "--max-steps", str(STEPS), "--save-every", "2", "--samples-per-step", "0",
)  # fmt: skip


def record(folder: Path) -> None:
    """Rollouts of random tokens: what they say does not matter, only that every step has its own."""
    dice = np.random.default_rng(5)
    tokenizer = load_tokenizer(resolve_model("tiny"))
    for step in range(STEPS):
        rollouts = []
        for number in range(PROMPTS * GROUP):
            ticket, length, context = step * PROMPTS + number // GROUP, int(dice.integers(8, 20)), 4
            sampled = np.arange(length) >= context
            segment = Segment(
                token_ids=dice.integers(0, tokenizer.vocab_size, length), action_mask=sampled,
                logprobs=np.where(sampled, -dice.random(length) * 4, 0.0), finish_reason="stop",
                versions=np.where(sampled, max(step - 1, 0), -1), turn_ends=[length],
            )  # fmt: skip
            name = f"{ticket}.{number % GROUP}"
            rollouts.append(Rollout(name, f"g{ticket}", ticket, "0", [segment], [float(dice.random())]))
        dump_rollouts(str(folder), step, rollouts)


def start(module: str, dump: Path, output_dir: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *FLAGS, "--replay-rollouts", str(dump)]
    command += ["--output-dir", str(output_dir), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(output_dir.with_suffix(".out"), "ab") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=environment)


def state(output_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint by name: parameters and averages, of policy and critic."""
    path = output_dir.with_suffix(".pt")
    dcp_to_torch_save(output_dir / "checkpoints" / f"step_{STEPS}" / "trainer", path)
    flat, left = {}, [("", torch.load(path, weights_only=False))]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{name}/{key}", each) for key, each in value.items()]
        elif isinstance(value, torch.Tensor):
            flat[name] = value
    return flat


def test_a_killed_replay_that_goes_on_ends_with_the_same_bits(tmp_path):
    record(tmp_path / "dump")
    whole = start("algos.ppo", tmp_path / "dump", tmp_path / "whole")
    killed = start("algos.ppo", tmp_path / "dump", tmp_path / "killed")
    rows, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 300
    while not rows.exists() or rows.read_text().count("\n") < 6:
        assert time.monotonic() < deadline and killed.poll() is None, (tmp_path / "killed.out").read_text()
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    before = rows.read_text().count("\n")
    assert 6 <= before < STEPS
    again = start("algos.ppo", tmp_path / "dump", tmp_path / "killed", "--resume")
    for process, name in ((whole, "whole"), (again, "killed")):
        assert process.wait(300) == 0, (tmp_path / f"{name}.out").read_text()[-4000:]
    one, two = state(tmp_path / "whole"), state(tmp_path / "killed")
    assert one.keys() == two.keys() and len([name for name in one if name.endswith("exp_avg_sq")]) > 20
    assert [name for name in one if not one[name].equal(two[name])] == []
    assert rows.read_text().count("\n") == STEPS
