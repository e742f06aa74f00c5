"""Runs with one thing broken on purpose: python -m tests.run_cases NAME OUTPUT_DIR. See test_run.py."""

import asyncio
import sys
import threading

import psutil

from algos import grpo
from common import checks
from common.cluster import DeadlineFlags
from common.logger import LogFlags
from common.parallel import build_model


def skip_refits() -> None:
    """From version 2 on a refit does nothing, and says that it did."""
    refit = grpo.refit
    grpo.refit = lambda run, version, *rest: (
        refit(run, version, *rest) if version < 2 else run.last_refit | {"version": version, "changed": True}
    )


class StaleSender(grpo.Trainer):
    """Trains one model and sends another one, which stays as it started."""

    def setup(self, *where) -> str:
        description = super().setup(*where)
        self.sender.model = build_model(self.model_path, self.device)
        return description


def send_stale_weights() -> None:
    start_run = grpo.start_run
    grpo.start_run = lambda args, log, worker, trainer, *rest: start_run(
        args, log, worker, StaleSender, *rest
    )


def die_in_refit() -> None:
    """At the refit to version 3 the engine's process is stopped, and two seconds later killed."""
    refit = grpo.refit

    def fatal(run, version, *rest):
        if version == 3:
            below = psutil.Process().children(recursive=True)
            (engine,) = [process for process in below if "VLLM::EngineCore" in " ".join(process.cmdline())]
            engine.suspend()
            threading.Timer(2, engine.kill).start()
        return refit(run, version, *rest)

    grpo.refit = fatal


class DeafWorker(grpo.RolloutWorker):
    """Does not hear of the refit to version 2."""

    async def refit(self, version, queue):
        await asyncio.sleep(0 if version < 2 else 3600)
        return await super().refit(version, queue)


def lose_control_call() -> None:
    start_run = grpo.start_run
    grpo.start_run = lambda args, log, worker, *rest: start_run(args, log, DeafWorker, *rest)


CASES = {
    "skip_refits": (skip_refits, {}),
    "send_stale_weights": (send_stale_weights, {}),
    # nothing is in flight while a refit waits, so no request tells of the death
    "die_in_refit": (die_in_refit, {"max_staleness": 0, "deadline": DeadlineFlags(refit_timeout_s=1000)}),
    "lose_control_call": (lose_control_call, {"deadline": DeadlineFlags(refit_timeout_s=15)}),
}


if __name__ == "__main__":
    break_it, flags = CASES[sys.argv[1]]
    break_it()
    checks.run(grpo.main, grpo.Args(max_steps=6, log=LogFlags(output_dir=sys.argv[2]), **flags))
