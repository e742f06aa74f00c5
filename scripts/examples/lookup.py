"""One task of two turns with a tool, as an `Env` and as a program with OpenAI's SDK.

    --env scripts/examples/lookup.py:LookupEnv      --env scripts/examples/lookup.py:LookupAgent

The first reply should be the question backwards: with it the tool is asked. The second should be the tool's
answer backwards. Both count; only both right are a score.
"""

import zlib

from openai import OpenAI

from common.agent import ChatAgent
from common.env import Env, Step
from common.envs.reverse import Reverse

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # takes 25 ms: one for all episodes


def tool(said: str) -> str:
    return f"{zlib.crc32(said.encode()) % 10_000:04d}"


def grade(said: str, digits: str) -> float:
    """Half of what `Reverse` gives."""
    reverse = Reverse()
    reverse.reset({"prompt": digits, "answer": digits[::-1]})
    return reverse.step(said).reward / 2


class LookupEnv(Env):
    max_turns = 2

    def tasks(self, split: str) -> list[dict]:
        return Reverse().tasks(split)

    def reset(self, task: dict) -> str:
        self.asked, self.rewards = task["prompt"], []
        return self.asked

    def step(self, action: str) -> Step:
        self.rewards.append(grade(action, self.asked))
        self.asked = tool(action)
        over = len(self.rewards) == self.max_turns
        return Step(self.rewards[-1], None if over else self.asked, score=float(sum(self.rewards) == 1.0))


class LookupAgent(ChatAgent):
    tasks = LookupEnv.tasks

    def run(self, ctx) -> Step:
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        asked, messages, rewards = ctx.task["prompt"], [], []
        for _ in range(LookupEnv.max_turns):
            messages.append({"role": "user", "content": asked})
            reply = client.chat.completions.create(model=ctx.model, messages=messages).choices[0].message
            messages.append(reply)
            rewards.append(grade(reply.content or "", asked))
            asked = tool(reply.content or "")
        return Step(rewards, score=float(sum(rewards) == 1.0))
