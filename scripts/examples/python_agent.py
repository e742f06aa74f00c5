"""The Python tool of python_tool.py as a program with OpenAI's SDK, where the policy calls it as models do.

--env scripts/examples/python_agent.py:PythonAgent
"""

from openai import BadRequestError, OpenAI

from common.agent import ChatAgent
from common.env import Step
from scripts.examples.python_tool import PythonEnv

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # takes 25 ms: one for all episodes
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs code.", "parameters": CODE}}


class PythonAgent(ChatAgent):
    tasks = PythonEnv.tasks

    def run(self, ctx) -> Step:
        client, env = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key), PythonEnv()
        env.reset(ctx.task)
        messages, rewards = [{"role": "user", "content": env.question}], []
        while len(rewards) < env.max_turns:
            try:
                reply = client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
            except BadRequestError:  # the context is full
                break
            messages.append(message := reply.choices[0].message)
            if not message.tool_calls:
                last = env.step(message.content or "")
                return Step([*rewards, last.reward], score=last.score, info=env.stats)
            rewards.append(0.0)
            # in the sandbox: arguments that are no JSON, or have no code, fail there as code does
            for call in message.tool_calls:
                step = env.call(f"import json; exec(json.loads({call.function.arguments!r})['code'])")
                rewards[-1] += step.reward
                messages.append({"role": "tool", "tool_call_id": call.id, "content": step.observation})
        return Step(rewards, score=0.0, info=env.stats, truncated=True)
