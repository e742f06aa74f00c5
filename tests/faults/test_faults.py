"""Real runs that lose a process, are told to end, or are told so twice: what they save, and how they go on."""

import json
import signal
from pathlib import Path

from tests.test_run import Driver, drive  # noqa: F401

TINY = (
    "algos.grpo",
    "--model",
    "tiny",
    "--env",
    "reverse",
    "--eval-every",
    "1000",
    "--samples-per-step",
    "0",
)
PROMPTS, GROUP = 4, 4
SIZES = ("--prompts-per-step", str(PROMPTS), "--group-size", str(GROUP), "--max-in-flight", "4")
# a process may die in a refit, which the others notice at its deadline at the latest
SIZES += ("--refit-timeout-s", "40")
RESTARTED_WITHIN_S = 120


def trained(folder: Path, steps: int) -> list[list[int]]:
    """The tickets that each step trained, in order."""
    paths = [folder / f"step_{step:06}.jsonl" for step in range(steps)]
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return [list(dict.fromkeys(record["ticket"] for record in step)) for step in records]


def wait_for_restart(run: Driver, count: int) -> None:
    run.wait_until(lambda: run.output().count("starting again") == count, RESTARTED_WITHIN_S, "a restart")
    assert run.process.poll() is None, run.output()[-4000:]


def test_a_run_that_loses_an_engine_and_then_a_trainer_trains_every_ticket_once(drive, tmp_path):  # noqa: F811
    dump = tmp_path / "dump"
    run = drive(
        *TINY, *SIZES, "--max-steps", "60", "--save-every", "10", "--fault-budget", "2",
        "--order", "ticket", "--dump-rollouts", str(dump),
    )  # fmt: skip
    run.wait_for_rows(3)
    run.kill_one("VLLM::EngineCore")
    wait_for_restart(run, 1)
    assert "starting again from the last checkpoint" in run.output()
    saved = run.output().partition("saved ")[2].split()[0]
    first = int(saved.rpartition("_")[2])
    assert first >= 3, "what was trained when the engine died"
    run.wait_until(lambda: len(run.read("metrics.jsonl")) >= first + 12, RESTARTED_WITHIN_S, "12 steps more")
    run.kill_one("ray::Trainer")
    wait_for_restart(run, 2)
    assert "not saved: " in run.output()
    assert run.wait_for_end() == 0, run.output()[-4000:]
    print(run.output())
    assert [row["step"] for row in run.read("metrics.jsonl")] == list(range(60))
    tickets = [ticket for step in trained(dump, 60) for ticket in step]
    assert tickets == list(range(60 * PROMPTS))


def test_a_run_that_is_told_to_end_saves_first_goes_on_with_other_ranks_and_ends_at_once_if_told_twice(
    tmp_path,
):
    dump = tmp_path / "dump"
    flags = (*TINY, *SIZES, "--dump-rollouts", str(dump), "--output-dir", str(tmp_path / "run"))
    run = Driver(tmp_path / "run", *flags, "--max-steps", "1000", "--num-trainers", "2")
    try:
        run.wait_for_rows(5)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait_for_end(60) == 128 + signal.SIGTERM, run.output()[-4000:]
    finally:
        run.end()
    assert "Stopped: SIGTERM" in run.output()
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(folder.name.rpartition("_")[2])
    assert step >= 5

    # without an end of its own: it is told twice to end, once it has trained three steps more
    long = ("--max-steps", "100000", "--resume", "--grace-s", "1000")
    again = Driver(tmp_path / "run", *flags, *long)
    try:
        again.wait_for_rows(step + 3)
        before = sorted((tmp_path / "run" / "checkpoints").iterdir())
        again.process.send_signal(signal.SIGUSR1)
        again.process.send_signal(signal.SIGTERM)
        assert again.wait_for_end(30) in (128 + signal.SIGUSR1, 128 + signal.SIGTERM), again.output()[-4000:]
    finally:
        again.end()
    print(again.output())
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before == [folder]
    assert [row["step"] for row in again.read("metrics.jsonl")][: step + 3] == list(range(step + 3))
    tickets = sorted(ticket for batch in trained(dump, step + 3) for ticket in batch)
    assert len(set(tickets)) == len(tickets) == (step + 3) * PROMPTS
