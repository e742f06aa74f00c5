"""Real runs in which a process stops (SIGSTOP) or dies where nothing would tell of it, or a call is lost."""

import signal

import pytest
from tests.test_run import Driver, drive  # noqa: F401

TINY = (
    "algos.grpo --model tiny --env reverse --prompts-per-step 4 --group-size 4 --samples-per-step 0".split()
)
DEADLINE_S = 30
DEADLINES = ("--step-timeout-s", str(DEADLINE_S), "--refit-timeout-s", str(DEADLINE_S))
# a wait, a second one for what the trainers have, and the start and end of everything on two busy cores
TOLD_WITHIN_S = 2 * DEADLINE_S + 150


def stop_one(run: Driver, title: str):
    run.watch()
    (victim,) = [process for name, process in run.left() if title in name]
    victim.send_signal(signal.SIGSTOP)
    return victim


@pytest.mark.parametrize(
    "title, silent",
    [("VLLM::EngineCore", ""), ("ray::RolloutWorker", "engine"), ("ray::Trainer", "trainer")],
)
def test_a_stopped_process_is_missed_at_the_deadline_and_nothing_of_it_is_left(drive, title, silent):  # noqa: F811
    run = drive(*TINY, *DEADLINES, "--max-steps", "100000")
    run.wait_for_rows(3)
    stop_one(run, title)
    assert run.wait_for_end(TOLD_WITHIN_S) == 1
    print(run.output())
    (told,) = [line for line in run.output().splitlines() if line.startswith("run ended: RunError: ")]
    assert f": nothing after {DEADLINE_S} s" in told and "are running" in told
    assert told.partition("; no answer from ")[2].partition(";")[0] == silent
    stacks = (run.output_dir / "stacks.txt").read_text()
    assert str(run.output_dir / "stacks.txt") in told
    assert "The driver:" in stacks and "in get" in stacks and "cluster.py" in stacks
    short = title[:15]  # what the system keeps of it
    (state,) = {line.rpartition(": ")[2] for line in stacks.splitlines() if line.startswith(f"--- {short}")}
    assert state == "stopped"
    others = {"ray::RolloutWorker", "ray::Trainer", "ray::SampleQueue"} - {title}
    for other in others:
        of_it = stacks.partition(f"--- {other[:15]}")[2].partition("---")[0]
        assert "Thread" in of_it and "File " in of_it, f"{other}: {of_it}"


def test_a_run_with_a_stopped_engine_goes_on_with_another_one(drive):  # noqa: F811
    run = drive(*TINY, *DEADLINES, "--max-steps", "20", "--fault-budget", "1")
    run.wait_for_rows(3)
    victim = stop_one(run, "VLLM::EngineCore")
    run.wait_until(lambda: "starting again" in run.output(), TOLD_WITHIN_S, "a restart")
    assert not victim.is_running(), "the stopped engine holds its memory"
    assert run.wait_for_end() == 0, run.output()[-4000:]
    assert [row["step"] for row in run.read("metrics.jsonl")] == list(range(20))


def test_an_engine_that_dies_in_a_refit_is_missed_at_once_and_a_lost_call_at_the_deadline(drive):  # noqa: F811
    died, deaf = drive("tests.run_cases", "die_in_refit"), drive("tests.run_cases", "lose_control_call")
    died.wait_for_rows(2)
    assert died.wait_for_end(60) == 1  # the deadline is at 1000 s
    print(died.output())
    assert "saved " in died.output() and (died.output_dir / "checkpoints" / "step_3").exists()
    assert "run ended: RunError: refit to version 3: EngineDeadError" in died.output()
    assert deaf.wait_for_end() == 1
    print(deaf.output())
    assert "run ended: RunError: refit to version 2: " in deaf.output()
    assert len(deaf.read("metrics.jsonl")) == 1
