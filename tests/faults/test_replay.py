"""A run that trains from recorded rollouts, killed and gone on with, has the parameters of one that was not."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    "module, rates, one_that_counts_all",
    # a third, two thirds and all of 0.003 times 1 - updates / 6; with a critic that is trained alone in step 0
    [
        ("algos.grpo", [1e-3, None, 2e-3 * 5 / 6, 3e-3 * 4 / 6, 3e-3 * 4 / 6, 3e-3 * 3 / 6], 3e-3 * 2 / 6),
        ("algos.ppo", [1e-3, None, 1e-3, 2e-3 * 5 / 6, 2e-3 * 5 / 6, 3e-3 * 4 / 6], 3e-3 * 3 / 6),
    ],
)
def test_a_schedule_counts_steps_that_made_an_update_and_goes_on_from_there(
    tmp_path, module, rates, one_that_counts_all
):
    """Of six steps the second has no valid rollout, and the fourth no finite gradient."""
    record(tmp_path / "dump")
    for step, field, value in ((1, "invalid", "lost"), (3, "rewards", [math.nan])):
        path = tmp_path / "dump" / f"step_{step:06}.jsonl"
        rollouts = [json.loads(line) | {field: value} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    flags = ["--max-steps", "6", "--lr", "0.003", "--lr-warmup-steps", "2"]
    flags += ["--critic-warmup-steps", "1"] if module == "algos.ppo" else []

    def rates_of(*more: str) -> list[float | None]:
        process = start(module, tmp_path / "dump", tmp_path / "run", *flags, *more)
        assert process.wait(300) == 0, (tmp_path / "run.out").read_text()[-4000:]
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [row.get("skipped_frac") for row in rows[1:4]] == [None, 0, 1]
        return [row.get("lr") for row in rows]

    assert rates_of() == pytest.approx(rates)
    shutil.rmtree(tmp_path / "run/checkpoints/step_6")
    progress = tmp_path / "run/checkpoints/step_4/progress.json"
    assert json.loads(progress.read_text())["trained"] == 2
    assert rates_of("--resume") == pytest.approx(rates)
    shutil.rmtree(tmp_path / "run/checkpoints/step_6")
    older = json.loads(progress.read_text())
    del older["trained"]
    progress.write_text(json.dumps(older))
    assert rates_of("--resume")[4] == pytest.approx(one_that_counts_all)
