"""Products that take a tool: Python in a sandbox. As an `Env`, where a block of code is run, and as a program.

    --env scripts/examples/python_tool.py:PythonEnv      --env scripts/examples/python_tool.py:PythonAgent

At most three replies. The right number earns 1 and ends it; code that fails costs 0.1, in its own turn.
"""

import re

from openai import OpenAI

from common.agent import ChatAgent
from common.env import Env, Step
from common.sandbox import Sandbox

SANDBOX = Sandbox()
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # takes 25 ms: one for all episodes
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs code.", "parameters": CODE}}


class PythonEnv(Env):
    max_turns = 3

    def tasks(self, split: str) -> list[dict]:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        return [{"pair": pair} for pair in pairs if (sum(pair) % 60 == 0) == (split == "eval")]

    def reset(self, task: dict) -> str:
        a, b = task["pair"]
        self.question, self.answer = f"{a}*{b}=?", str(a * b)
        self.stats = {"tool_used": 0, "tool_calls": 0, "tool_errors": 0}
        return f"{self.question} (a ```python block is run)"

    def call(self, code: str) -> Step:
        result = SANDBOX.run(code)
        failed = result.exit_code != 0
        self.stats |= {"tool_used": 1, "tool_calls": self.stats["tool_calls"] + 1}
        self.stats["tool_errors"] += failed
        return Step(-0.1 * failed, result.text or "(no output)", score=0.0, info=self.stats)

    def step(self, action: str) -> Step:
        if block := re.search(r"```python\n(.*?)```", action, re.DOTALL):
            return self.call(block[1])
        right = float(action.strip() == self.answer)
        return Step(right, score=right, info=self.stats, terminated=True)


class PythonAgent(ChatAgent):
    tasks = PythonEnv.tasks

    def run(self, ctx) -> Step:
        client, env = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key), PythonEnv()
        env.reset(ctx.task)
        messages, rewards = [{"role": "user", "content": env.question}], []
        while len(rewards) < env.max_turns:
            reply = client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
            messages.append(message := reply.choices[0].message)
            if not message.tool_calls:
                last = env.step(message.content or "")
                return Step([*rewards, last.reward], score=last.score, info=env.stats)
            rewards.append(0.0)
            for (
                call
            ) in message.tool_calls:  # in the sandbox, what is no JSON, or has no code, fails as code does
                step = env.call(f"import json; exec(json.loads({call.function.arguments!r})['code'])")
                rewards[-1] += step.reward
                messages.append({"role": "tool", "tool_call_id": call.id, "content": step.observation})
        return Step(rewards, score=0.0, info=env.stats, truncated=True)
