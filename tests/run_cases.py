"""Runs with one thing broken on purpose: python -m tests.run_cases NAME OUTPUT_DIR. See test_run.py."""

import sys

from algos import grpo
from common import checks
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


if __name__ == "__main__":
    {"skip_refits": skip_refits, "send_stale_weights": send_stale_weights}[sys.argv[1]]()
    checks.run(grpo.main, grpo.Args(max_steps=6, log=LogFlags(output_dir=sys.argv[2])))
