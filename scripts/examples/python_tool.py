"""Products that take a tool: Python in a sandbox. `--env scripts/examples/python_tool.py:PythonEnv`

A ```python block is run, anything else is the answer. At most three turns: the right number earns 1, code that
fails costs 0.1, each in its own turn. python_agent.py has the same as a program.
"""

import re

from common.env import Env, Step
from common.sandbox import Sandbox

SANDBOX = Sandbox()


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
