"""Real runs of `algos/grpo.py` with the tiny model, each in its own process: what they train, how they die.

A run takes most of a minute, nearly all of it start-up, so each test asserts all that its run can show.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from algos.grpo import mark_late
from common import cluster
from common.metrics import rollout_metrics
from common.models import make_tiny, resolve_model
from common.sample import Rollout, Segment

ROOT = Path(__file__).parents[1]
PROMPTS = 16  # of a step, by default
TOLD_WITHIN_S, GONE_WITHIN_S, RUN_WITHIN_S = 30, 10, 600
BY_TICKET = ("--order", "ticket", "--max-staleness", "2", "--samples-per-step", "1000")


class Driver:
    """A run's first process, its output, and every process below it that was ever seen."""

    def __init__(self, output_dir: Path, *command: str):
        self.output_dir, self.output_file = output_dir, output_dir.with_suffix(".out")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with open(self.output_file, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                # a shell's background job ignores Ctrl-C, and so would what it starts
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )  # fmt: skip
        self.seen: set[psutil.Process] = set()

    def watch(self) -> None:
        """Adds the processes that are below the driver now. Those whose parent has died stay known."""
        known = {self.process.pid, *(process.pid for process in self.seen)}
        for process in psutil.process_iter():  # by pid, so mostly parents first; the next call gets the rest
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid == self.process.pid or process.ppid() in known:
                    known.add(process.pid)
                    self.seen.add(process)

    def left(self) -> list[tuple[str, psutil.Process]]:
        """The processes of the run that still run, with their titles."""
        running = []
        for process in self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append((" ".join(process.cmdline())[:120], process))
        return running

    def wait_until(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.output()[-4000:]}"
            self.watch()
            time.sleep(0.5)

    def wait_for_rows(self, count: int) -> None:
        def enough() -> bool:
            assert self.process.poll() is None, self.output()[-4000:]
            return len(self.read("metrics.jsonl")) >= count

        self.wait_until(enough, RUN_WITHIN_S, f"{count} rows of metrics")

    def wait_for_end(self, seconds: float = RUN_WITHIN_S) -> int:
        """The exit code, when every process of the run is gone."""
        self.wait_until(lambda: self.process.poll() is not None, seconds, "the end of the run")
        self.wait_until(lambda: not self.left(), GONE_WITHIN_S, f"end of {self.left()}")
        return self.process.returncode

    def kill_one(self, title: str) -> None:
        """SIGKILL to the process of the run whose title has `title`."""
        self.watch()
        victims = [process for name, process in self.left() if title in name]
        assert len(victims) == 1, self.left()
        victims[0].kill()

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def read(self, name: str) -> list[dict]:
        """The whole lines of a file of the run; all of them must parse."""
        path = self.output_dir / name
        lines = path.read_text().splitlines(True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> None:
        self.watch()
        for process in self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)


@pytest.fixture
def drive(tmp_path):
    """Starts runs: drive("algos.grpo", flags...). Whatever is left of them at the test's end is killed."""
    drivers = []

    def start(module: str, *arguments: str) -> Driver:
        output_dir = tmp_path / f"run{len(drivers)}"
        where = ("--output-dir", str(output_dir)) if module.startswith("algos.") else (str(output_dir),)
        drivers.append(Driver(output_dir, module, *arguments, *where))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def prompts_by_step(run: Driver) -> list[list[tuple[int, str]]]:
    """For each step the (ticket, prompt) of its groups, in order."""
    steps: list[list] = [[] for _ in run.read("metrics.jsonl")]
    for sample in run.read("samples.jsonl"):
        if sample["step"] < len(steps):
            steps[sample["step"]].append((sample["ticket"], sample["prompt"]))
    return steps


def test_a_synchronous_run_on_two_engines_and_two_ranks_is_on_policy_and_writes_all_its_files(drive):
    run = drive(
        "algos.grpo", "--model", "tiny", "--env", "reverse", "--max-staleness", "0", "--max-steps", "6",
        "--eval-every", "3", "--save-every", "3", "--num-engines", "2", "--num-trainers", "2",
    )  # fmt: skip
    assert run.wait_for_end() == 0, run.output()[-4000:]
    rows = run.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert row["mismatch/abs_mean"] <= 1e-5  # fp32 on both sides: what is left is the order of sums
        assert row["staleness/max"] == 0 and row["staleness/late_token_frac"] == 0
        assert row["rollout/overlap_frac"] == 0
        assert row["ratio/clip_low_frac"] == row["ratio/clip_high_frac"] == 0  # one update: pi is old
        assert row["grad_norm"] > 0
    assert [row["step"] for row in rows if "eval/reverse/mean" in row] == [0, 3]
    assert [row["step"] for row in rows if "eval_end/reverse/mean" in row] == [5]
    assert len(run.read("samples.jsonl")) == 6 * 4
    assert json.loads((run.output_dir / "config.json").read_text())["flags"]["max_staleness"] == 0
    summary = json.loads((run.output_dir / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["checkpoint"] == f"{run.output_dir}/checkpoints/step_6"
    assert (run.output_dir / "curve.png").stat().st_size > 1000

    checkpoints = ["step_3", "step_6"]
    assert sorted(path.name for path in (run.output_dir / "checkpoints").iterdir()) == checkpoints
    paths = [resolve_model("tiny"), *(run.output_dir / "checkpoints" / name for name in checkpoints)]
    start, middle, end = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in paths)
    assert start.keys() == end.keys() and all(tensor.isfinite().all() for tensor in end.values())
    moved = [name for name in start if not torch.equal(start[name], end[name])]
    assert moved == list(start)  # every tensor trains, through two FSDP ranks
    assert any(not torch.equal(middle[name], end[name]) for name in start)


OTHERS = {
    "flash_reinforce": ("--failure-tokens 0.5", "gate/rejected_frac"),
    "ppo": ("--critic-warmup-steps 2", "value/grad_norm"),
    "score_centering": ("--group-size 4 --refit-mode abort", "is/top_k_mass"),
    "dapo": ("--group-size 2", "advantage/abs_mean"),
    "distill": ("--group-size 1 --teacher RANDOM --correction seq-mask", "loss/teacher_kl"),
    "distill_topk": ("--group-size 1 --teacher RANDOM --teacher-top-k 5 --zero 3", "teacher/outside_frac"),
}


@pytest.mark.parametrize("pair", [list(OTHERS)[first : first + 2] for first in (0, 2, 4)], ids="+".join)
def test_the_other_algorithms_take_their_steps_on_two_ranks(drive, tmp_path, pair):
    teacher = make_tiny(tmp_path / "teacher", seed=5)  # random weights
    same = "--model tiny --env reverse --max-steps 4 --save-every 2 --prompts-per-step 32 --num-trainers 2"
    flags = {name: f"{same} {OTHERS[name][0]}".replace("RANDOM", teacher).split() for name in pair}
    runs = {name: drive(f"algos.{name}", *flags[name]) for name in pair}  # two at the same time
    for name, run in runs.items():
        assert run.wait_for_end() == 0, run.output()[-4000:]
        rows, warmup = run.read("metrics.jsonl"), 2 if name == "ppo" else 0
        assert [row["step"] for row in rows] == list(range(4))
        assert all("grad_norm" not in row for row in rows[:warmup])
        assert all(row["grad_norm"] > 0 for row in rows[warmup:])
        assert rows[0]["mismatch/abs_mean"] <= 1e-5
        for row in rows:
            value = row[OTHERS[name][1]]
            assert (value >= 0 if name == "flash_reinforce" else value > 0) and row["reward/mean"] > 0
        start, end = (
            AutoModelForCausalLM.from_pretrained(path).state_dict()
            for path in (resolve_model("tiny"), run.output_dir / "checkpoints/step_4")
        )
        assert [key for key in start if not torch.equal(start[key], end[key])] == list(start)
        # the schedule counts the optimizer steps: 5 of warm-up, and none for the groups that were dropped, or
        # while the critic is trained alone
        rates = [1e-3 * (s + 1) / 6 * (1 - s / 4) for s in [0] * warmup + list(range(4 - warmup))]
        assert [row["lr"] for row in rows] == pytest.approx(rates)
        if name == "dapo":
            assert sum(row.get("rollout/dropped/equal_rewards", 0) for row in rows) > 0
            assert all(row["reward/zero_std_group_frac"] == 0 for row in rows)
        if "distill" in name:
            assert 0 < rows[-1]["loss/teacher_kl"] < rows[0]["loss/teacher_kl"]


def test_an_asynchronous_run_in_ticket_order_overlaps_and_trains_the_same_again_until_ctrl_c(drive):
    run = drive("algos.grpo", "--model", "tiny", "--env", "reverse", "--max-steps", "8", *BY_TICKET)
    assert run.wait_for_end() == 0, run.output()[-4000:]
    rows, steps = run.read("metrics.jsonl"), prompts_by_step(run)
    assert len(rows) == 8
    assert all(row["staleness/max"] <= 2 for row in rows) and any(row["staleness/max"] for row in rows)
    assert all(row["rollout/overlap_frac"] > 0 for row in rows[2:])
    for step, prompts in enumerate(steps):
        assert [ticket for ticket, _ in prompts] == list(range(step * PROMPTS, (step + 1) * PROMPTS))

    again = drive("algos.grpo", "--model", "tiny", "--env", "reverse", "--max-steps", "1000", *BY_TICKET)
    again.wait_for_rows(5)
    again.process.send_signal(signal.SIGINT)
    assert again.wait_for_end(TOLD_WITHIN_S) == 130, again.output()[-4000:]
    after = again.output().partition("run ended: Stopped: SIGINT")[2]
    assert "Traceback" not in after and len(after.splitlines()) <= 4, after
    rows = again.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert (again.output_dir / "metrics.jsonl").read_text().endswith("\n")
    assert prompts_by_step(again)[:5] == steps[:5]


def test_a_killed_process_ends_the_run_at_once_and_its_last_line_names_it(drive):
    killed = {"VLLM::EngineCore": "engine", "ray::RolloutWorker": "engine", "ray::Trainer": "trainer"}
    runs = {
        title: drive("algos.grpo", *"--model tiny --env reverse --max-steps 100000".split())
        for title in killed
    }
    for title, name in killed.items():  # the three of them start at the same time
        runs[title].wait_for_rows(3)
        runs[title].kill_one(title)
        assert runs[title].wait_for_end(TOLD_WITHIN_S) == 1
        print(runs[title].output())
        told = runs[title].output().splitlines()[-1]
        # a call that waits for the engine may be the first to see it: "the probe: EngineDeadError"
        assert told.startswith("run ended: RunError: ") and name in told.lower()


def test_an_error_about_memory_says_which_flag_to_lower(tmp_path):
    class Trainer:
        def train_step(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with cluster.Run(60) as run:
        cluster.start(1, str(tmp_path))
        (trainer,) = run.spawn("trainer", Trainer, [()], [{}])
        with pytest.raises(cluster.RunError, match="step 3.*out of memory.*lower --micro-batch-tokens"):
            run.get(trainer.train_step.remote(), "training step 3")


def test_a_dead_process_is_named_though_the_error_of_its_peer_comes_first(tmp_path):
    class Engine:
        def die(self):
            time.sleep(1)
            os._exit(1)

    class Trainer:
        def send(self):
            raise RuntimeError("connection reset by peer")

    with cluster.Run(60) as run:
        cluster.start(2, str(tmp_path))
        (engine,), (trainer,) = (
            run.spawn("engine", Engine, [()], [{}]),
            run.spawn("trainer", Trainer, [()], [{}]),
        )
        run.get(run.ask([engine, trainer], "__ray_ready__"), "start")
        run.tasks[engine.die.remote()] = "engine"
        with pytest.raises(cluster.RunError, match="^engine died"):
            run.get(trainer.send.remote(), "refit to version 1")


def test_a_refit_that_did_not_happen_ends_the_run(drive):
    cases = {
        "skip_refits": (2, "step 2 at version 1: a refit is missing"),
        "send_stale_weights": (0, "step 0 moved the weights, and its refit sent the same as the last"),
    }
    runs = {case: drive("tests.run_cases", case) for case in cases}  # at the same time
    for case, (rows, message) in cases.items():
        assert runs[case].wait_for_end() == 1
        print(runs[case].output())
        assert message in runs[case].output().splitlines()[-1]
        assert len(runs[case].read("metrics.jsonl")) == rows


@pytest.mark.parametrize(
    "late, trained, invalid",
    [("keep", [0, 1, 1, 1], None), ("mask", [0, 0, 1, 1], None), ("drop", [0, 1, 1, 1], "late")],
)
def test_late_tokens_are_counted_and_then_kept_masked_or_dropped(late, trained, invalid):
    # a prompt token, then tokens of versions 1, 2, 4; at version 4 they lag 3, 2, 0, and the bound is 2
    segment = Segment(
        token_ids=np.arange(4, dtype=np.int32), action_mask=np.array([False, True, True, True]),
        logprobs=np.zeros(4, np.float32), versions=np.array([-1, 1, 2, 4], np.int32), turn_ends=[4],
        finish_reason="stop",
    )  # fmt: skip
    rollout = Rollout("0.0", "g0", 0, "0", [segment], [1.0])
    lags, num_late = mark_late([rollout], 4, 2, late)
    assert (sorted(lags), num_late) == ([0, 2, 3], 1)
    assert segment.action_mask.tolist() == [bool(value) for value in trained]
    assert rollout.invalid == invalid
    row = rollout_metrics([rollout], lags, num_late, {}, {})
    assert row["staleness/max"] == 3 and row["staleness/late_token_frac"] == 1 / 3
    assert row["staleness/hist"] == [1, 0, 1, 1] and row["rollout/len_mean"] == 3
    assert row.get("rollout/dropped/late", 0) == (late == "drop")


@pytest.mark.parametrize(
    "gpus, split, share, engines, trainers",
    [
        (0, (2, 1, 1), 0.0, [{"num_gpus": 0.0}] * 2, [{"num_gpus": 0.0}]),
        (1, (1, 1, 1), 0.5, [{"num_gpus": 0.5}], [{"num_gpus": 0.5}]),
        (8, (2, 2, 4), 1.0, [{"num_gpus": 2.0}] * 2, [{"num_gpus": 1.0}] * 4),
        (2, (2, 1, 2), 0.5, ["0", "1"], ["0", "1"]),
        (2, (1, 2, 2), 0.5, ["0,1"], ["0", "1"]),
    ],
)
def test_processes_get_gpus_of_their_own_or_share_each_one_in_pairs(
    monkeypatch, gpus, split, share, engines, trainers
):
    def visible(names: list) -> list:
        of = [n if isinstance(n, dict) else {"env_vars": {"CUDA_VISIBLE_DEVICES": n}} for n in names]
        return [each if "num_gpus" in each else {"runtime_env": each} for each in of]

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cluster.split_gpus(*split) == (share, visible(engines), visible(trainers))
