"""An environment on an OpenEnv server, whatever it plays: `pip install openenv`, start the server, then

    OPENENV_URL=http://127.0.0.1:8000 ... --env scripts/examples/openenv_client.py:OpenEnv

The keys of its action and observation are the server's own: edit ACTION and OBSERVATION.
"""

import os

from openenv.core.generic_client import GenericEnvClient

from common.env import Env, Step

ACTION, OBSERVATION = "message", "echoed_message"  # of OpenEnv's echo environment


class OpenEnv(Env):
    max_turns = 8

    def tasks(self, split: str) -> list[dict]:
        return [{"seed": seed} for seed in (range(10_000) if split == "train" else range(10_000, 10_064))]

    async def reset(self, task: dict) -> str:
        self.client = GenericEnvClient(base_url=os.environ["OPENENV_URL"])
        await self.client.connect()
        return str((await self.client.reset(seed=task["seed"])).observation[OBSERVATION])

    async def step(self, action: str) -> Step:
        result = await self.client.step({ACTION: action})
        if result.done:
            await self.client.close()
        return Step(result.reward or 0.0, str(result.observation[OBSERVATION]), terminated=result.done)
