"""The toy task behind a slow tool: `--env scripts/examples/slow_tool.py:SlowReverse --env-workers 64`.

How slow, a file says whose path is in INSTAR_SLOW_TOOL: {"kind": "lognormal", "mean_s": 0.1}. It is read at
each step, so that scripts/bench/staleness.py can change it while a run goes on. Without it nothing is slow.
"""

import json
import math
import os
import random
import time
from pathlib import Path

from common.env import Step
from common.envs.reverse import Reverse


class SlowReverse(Reverse):
    """Reverse four digits. An answer of the training split is graded after a while."""

    def tasks(self, split: str) -> list[dict]:
        return [task | {"slow": split == "train"} for task in super().tasks(split)]

    def reset(self, task: dict) -> str:
        self.slow = task["slow"]
        return super().reset(task)

    def step(self, action: str) -> Step:
        seconds = 0.0
        if self.slow and "INSTAR_SLOW_TOOL" in os.environ:
            how = json.loads(Path(os.environ["INSTAR_SLOW_TOOL"]).read_text())
            seconds = how["mean_s"]
            if how["kind"] != "even":  # a standard deviation as large as the mean
                dice = random.SystemRandom()  # workers are forks: they would all draw the same
                seconds *= dice.lognormvariate(-math.log(2) / 2, math.sqrt(math.log(2)))
                if how["kind"] == "straggler" and dice.random() < 0.02:
                    seconds *= 5
        time.sleep(seconds)
        outcome = super().step(action)
        outcome.info["slept"] = seconds
        return outcome
