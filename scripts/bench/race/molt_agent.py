"""The environment of scripts/bench/race.py as Molt wants it, its `--train.agent_path`.

The rewards are those of the environment's own `step`, as for the other contenders.
"""

import inspect
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from molt.agents.base import Env, Result, StepEnvRunner

from common.envs import load_env

MAKE_ENV, END = load_env(os.environ["RACE_ENV"]), os.environ["RACE_END_OF_TURN"]


class Task(Env):
    async def step(self, state: dict, **_) -> Result:
        env = MAKE_ENV()
        env.reset(json.loads(state["label"]))
        outcome = env.step(state["action_text"].removesuffix(END))
        outcome = await outcome if inspect.isawaitable(outcome) else outcome
        return Result(reward=outcome.reward, score=outcome.score)


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Task)
