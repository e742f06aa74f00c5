"""What a first hour brings: a reward of one's own, a killed run that goes on, and environments that go wrong.

Real runs of `algos/grpo.py` with the tiny model. Every run starts with a policy that reverses four digits.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.logger import Logger
from tests.test_run import TOLD_WITHIN_S, Driver

PROMPTS, GROUP, TASKS, HELD_OUT = 8, 4, 300, 100
SIZES = ("--model", "tiny", "--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP))
ENDED_WITHIN_S = 240  # start-up and all, on cores that others use too; a step may take 1800 s

REWARD = """
import json
from pathlib import Path

from common.env import Env, Step


class Mirror(Env):
    def tasks(self, split):
        lines = [json.loads(line) for line in Path(__file__).with_name("digits.jsonl").open()]
        return [line for line in lines if line["split"] == split]

    def reset(self, task):
        self.mirrored = task["digits"][::-1]
        return task["digits"]

    def step(self, action):
        right = sum(a == b for a, b in zip(action, self.mirrored))
        return Step(reward=right - 4 * (len(action) != 4), score=right / 4)
"""

# Of each training task the first answer that is graded brings what the task's kind is; the others are fine.
UNRULY = """
import ctypes
import os
import signal
import time
from pathlib import Path

from common.env import Env, Step

KINDS = ["fine", "type", "fine", "sleep", "alarm", "segfault", "fine", "raise"]


class Unruly(Env):
    def tasks(self, split):
        numbers = range(400) if split == "train" else range(9000, 9010)
        return [{"digits": f"{n:04}", "kind": KINDS[n % 8] if n < 9000 else "fine"} for n in numbers]

    def reset(self, task):
        self.task = task
        return task["digits"]

    def step(self, action):
        right = sum(a == b for a, b in zip(action, self.task["digits"][::-1])) / 4
        return self.misbehave(right) if self.task["kind"] != "fine" and self.is_first() else Step(right)

    def is_first(self):
        try:
            os.close(os.open(f"{__file__}.{self.task['digits']}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def misbehave(self, right):
        if self.task["kind"] == "type":
            return Step(reward=f"{right}")
        if self.task["kind"] == "sleep":
            time.sleep(600)
        if self.task["kind"] == "segfault":
            ctypes.string_at(0)
        if self.task["kind"] == "raise":
            raise LookupError("no such word")
        signal.signal(signal.SIGALRM, self.too_late)
        signal.alarm(1)
        try:
            time.sleep(600)
        except TimeoutError:
            return Step(reward=-0.125)

    def too_late(self, *_):
        raise TimeoutError
"""
KINDS = ["fine", "type", "fine", "sleep", "alarm", "segfault", "fine", "raise"]
REASONS = {"type": "bad_reward", "sleep": "env_timeout", "segfault": "env_died", "raise": "env_error"}

RAISES = """
from common.env import Env


class Raises(Env):
    def tasks(self, split):
        return [{"digits": f"{n:04}"} for n in range(50)]

    def reset(self, task):
        return task["digits"]

    def step(self, action):
        raise RuntimeError("the grader has no key")
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a run: launch(name of its folder, flags...). What is left at the test's end is killed."""
    drivers = []

    def start(name: str, *flags: str) -> Driver:
        folder = tmp_path / name
        drivers.append(Driver(folder, "algos.grpo", *flags, "--output-dir", str(folder)))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def dumped(folder: Path, steps: int) -> list[list[dict]]:
    """The recorded rollouts of each step, as plain JSON."""
    paths = [folder / f"step_{step:06}.jsonl" for step in range(steps)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def test_a_killed_run_with_an_own_reward_goes_on_and_its_steps_and_score_can_be_made_again(launch, tmp_path):
    assert len(REWARD.strip().splitlines()) <= 20
    (tmp_path / "mirror.py").write_text(REWARD)
    numbers = [7919 * number % 10_000 for number in range(TASKS + HELD_OUT)]  # all different
    tasks = [
        {"digits": f"{number:04}", "split": "train" if place < TASKS else "eval"}
        for place, number in enumerate(numbers)
    ]
    (tmp_path / "digits.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    env = ("--env", f"{tmp_path}/mirror.py:Mirror")
    # a learning rate that does not depend on --max-steps, so that a replay of all steps has the same one
    same = (*SIZES, *env, "--max-staleness", "1", "--lr-warmup-steps", "1", "--lr-end-ratio", "1")
    recorded = (*same, "--order", "ticket", "--save-every", "2", "--dump-rollouts", f"{tmp_path}/dump")

    run = launch("run", *recorded, "--max-steps", "30")
    run.wait_for_rows(4)
    run.process.kill()
    run.process.wait()  # Ray's two agents of the node stay for longer; they hold nothing that counts
    run.wait_until(lambda: all("Agent" in title for title, _ in run.left()), TOLD_WITHIN_S, "the end of all")
    folders = (run.output_dir / "checkpoints").glob("step_*[0-9]/progress.json")
    start = max(json.loads(path.read_text())["step"] for path in folders)
    assert start >= 4 and start % 2 == 0
    end = start + 2

    again = launch("run", *recorded, "--max-steps", str(end), "--samples-per-step", "1", "--resume")
    assert again.wait_for_end() == 0, again.output()[-4000:]
    warned = [line for line in again.output().splitlines() if line.startswith("warning: --")]
    assert warned == [
        f"warning: --max-steps was 30, now it is {end}",
        "warning: --samples-per-step was 4, now it is 1",
    ]
    rows = again.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(end))
    assert rows[start]["staleness/max"] <= 1  # groups that were finished before the kill are trained first
    if rows[start]["staleness/max"] == 0:
        assert rows[start]["mismatch/abs_mean"] <= 1e-5  # fp32 on both sides

    trained = dumped(tmp_path / "dump", end)
    tickets = [rollout["ticket"] for rollouts in trained for rollout in rollouts]
    assert tickets == [ticket for ticket in range(end * PROMPTS) for _ in range(GROUP)]
    ids = [rollout["rollout_id"] for rollouts in trained for rollout in rollouts]
    assert len(set(ids)) == len(ids)
    assert end * PROMPTS <= TASKS  # one epoch: every ticket has a task of its own
    task_of = {rollout["ticket"]: rollout["prompt_id"] for rollouts in trained for rollout in rollouts}
    assert len(set(task_of.values())) == end * PROMPTS

    final = f"{again.output_dir}/checkpoints/step_{end}"
    replayed = launch("replayed", *same, "--replay-rollouts", f"{tmp_path}/dump", "--max-steps", str(end))
    scored = launch("scored", "--model", final, *env, "--eval-only")
    assert replayed.wait_for_end() == 0, replayed.output()[-4000:]
    for row, twin in zip(rows, replayed.read("metrics.jsonl"), strict=True):
        if row == {"step": start - 1}:  # killed after the checkpoint of a step and before its row
            continue
        for key in ("lr", "loss/policy", "grad_norm", "mismatch/abs_mean", "reward/mean"):
            assert row[key] == twin[key], (row["step"], key)
        assert row["grad_norm"] > 0
    weights, twins = (
        load_file(f"{folder}/checkpoints/step_{end}/model.safetensors")
        for folder in (again.output_dir, replayed.output_dir)
    )
    assert weights.keys() == twins.keys() and all(weights[name].equal(twins[name]) for name in weights)

    assert scored.wait_for_end() == 0, scored.output()[-4000:]
    score = json.loads((scored.output_dir / "summary.json").read_text())["eval/Mirror/mean"]
    assert score == rows[-1]["eval_end/Mirror/mean"]
    assert 0 < score < 1


def test_a_run_killed_between_a_checkpoint_and_the_row_of_its_step_can_go_on(tmp_path):
    text = "".join(json.dumps({"step": step, "reward/mean": 0.5, "time/step": 1.0}) + "\n" for step in (0, 1))
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="lacks a row before step 4"):
        Logger(tmp_path, {}, 6, ("reward/mean",), first_step=4)
    assert path.read_text() == text
    with Logger(tmp_path, {}, 5, ("reward/mean",), first_step=3) as log:
        for step in (3, 4):
            log.log_step({"step": step, "reward/mean": 0.75, "time/step": 1.0})
        log.summary({})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("step") for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2] == {} and lines[3]["reward/mean"] == 0.75  # what is not known is not 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train_s"] == 4 and summary["reward/mean"] == {"first": 0.5, "last": 0.75}
    assert (tmp_path / "curve.png").exists()


def test_an_environment_that_misbehaves_costs_exactly_the_rollouts_in_which_it_does(launch, tmp_path):
    (tmp_path / "unruly.py").write_text(UNRULY)
    steps = 4
    run = launch(
        "run", *SIZES, "--env", f"{tmp_path}/unruly.py:Unruly", "--max-steps", str(steps),
        "--no-shuffle", "--env-timeout-s", "4", "--dump-rollouts", f"{tmp_path}/dump", "--eval-every", "100",
    )  # fmt: skip
    assert run.wait_for_end() == 0, run.output()[-4000:]
    rows = run.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps))
    seen = Counter()
    for row, rollouts in zip(rows, dumped(tmp_path / "dump", steps), strict=True):
        assert len(rollouts) == PROMPTS * GROUP
        groups = [rollouts[first : first + GROUP] for first in range(0, len(rollouts), GROUP)]
        expected = Counter()
        for group in groups:
            kind = KINDS[int(group[0]["prompt_id"]) % 8]
            seen[kind] += 1
            assert len({rollout["group_id"] for rollout in group}) == 1
            invalid = [rollout["invalid"] for rollout in group if rollout["invalid"]]
            assert invalid == ([REASONS[kind]] if kind in REASONS else [])
            late = [rollout for rollout in group if rollout["rewards"] == [-0.125]]
            assert len(late) == (kind == "alarm")
            expected.update(invalid)
        dropped = {key: value for key, value in row.items() if key.startswith("rollout/dropped/")}
        assert dropped == {f"rollout/dropped/{reason}": count for reason, count in expected.items()}
        assert row["reward/invalid_frac"] == pytest.approx(expected.total() / len(rollouts), abs=1e-12)
        rewards = [rollout["rewards"][0] for rollout in rollouts if not rollout["invalid"]]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-12)
        assert row["grad_norm"] > 0
    assert set(seen) == set(KINDS)
    for reason, told in [
        ("env_error", "LookupError: no such word"),
        ("env_died", "its process died in grade()"),
    ]:
        assert f"warning: some rollouts are invalid ({reason}): {told}" in run.output()


def test_an_environment_that_always_raises_ends_the_run_with_its_error(launch, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    run = launch("run", *SIZES, "--env", f"{tmp_path}/raises.py:Raises", "--max-steps", "4")
    assert run.wait_for_end(ENDED_WITHIN_S) == 1
    ended = "groups in a row were dropped, the last for env_error: RuntimeError: the grader has no key"
    ended += " (raises.py:13)"
    ended = f"RunError: engine 0: QueueClosed: {3 * PROMPTS} {ended}"
    assert f"run ended: {ended}" in run.output().splitlines()
    assert run.output().splitlines()[-1].endswith(ended)
    assert run.read("metrics.jsonl") == []
