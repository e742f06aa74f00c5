"""The same two-turn task with a tool, once as an `Env` and once as a program with OpenAI's SDK.

    --env scripts/examples/lookup.py:LookupEnv      --env scripts/examples/lookup.py:LookupAgent

The user says four digits, and the tool has a secret under them read backwards. The first reply asks the tool,
the second must be the secret, backwards too. A question that the tool does not know ends the episode.
"""

from openai import OpenAI

from common.agent import ChatAgent
from common.env import Env, Step
from common.envs.reverse import Reverse

# Made once, as it takes a while; each episode has its own key and shares the rest.
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")


def secret(digits: str) -> str:
    return f"{(int(digits) * 7919 + 1234) % 10_000:04d}"


def grade(said: str, digits: str) -> float:
    """Half for the share of right positions, the end among them, half for the exact answer."""
    reverse = Reverse()
    reverse.reset({"prompt": digits, "answer": digits[::-1]})
    return reverse.step(said).reward


class LookupEnv(Env):
    max_turns = 2

    def tasks(self, split: str) -> list[dict]:
        return Reverse().tasks(split)

    def reset(self, task: dict) -> str:
        self.digits, self.asked = task["prompt"], False
        return self.digits

    def step(self, action: str) -> Step:
        known = secret(self.digits)
        if not self.asked:
            self.asked, right = True, action == self.digits[::-1]
            return Step(reward=grade(action, self.digits) / 2, observation=known if right else None, score=0.0)
        return Step(reward=grade(action, known) / 2, score=float(action == known[::-1]))


class LookupAgent(ChatAgent):
    tasks = LookupEnv.tasks

    def run(self, ctx) -> Step:
        digits, client = ctx.task["prompt"], CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        messages, rewards, score = [], [], 0.0
        for asked in (digits, secret(digits)):
            messages.append({"role": "user", "content": asked})
            reply = client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append(reply.choices[0].message)
            said = messages[-1].content or ""
            rewards.append(grade(said, asked) / 2)
            score = float(said == asked[::-1] and asked != digits)
            if said != asked[::-1]:
                break
        return Step(reward=rewards, score=score)
