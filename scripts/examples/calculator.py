"""An agent with a tool, over several turns, with OpenAI's SDK. `--env scripts/examples/calculator.py:Calculator`"""

import json

from openai import AsyncOpenAI

from common.agent import ChatAgent
from common.env import Step

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "The value of a sum such as 12+30.",
        "parameters": {
            "type": "object",
            "properties": {"sum": {"type": "string"}},
            "required": ["sum"],
        },
    },
}


def calc(arguments: str) -> str:
    try:
        return str(sum(int(part) for part in json.loads(arguments)["sum"].split("+")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


class Calculator(ChatAgent):
    """Add two numbers. At most four replies, tool calls among them; the reward counts right characters."""

    def tasks(self, split: str) -> list[dict]:
        numbers = range(10, 60) if split == "train" else range(60, 70)
        return [{"question": f"{n}+{n + 7}=", "answer": str(2 * n + 7)} for n in numbers]

    async def run(self, ctx) -> Step:
        messages = [{"role": "user", "content": ctx.task["question"]}]
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            for _ in range(4):
                reply = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL], tool_choice="auto"
                )
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = calc(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        said, right = (message.content or "").strip(), ctx.task["answer"]
        same = sum(a == b for a, b in zip(said, right)) - abs(len(said) - len(right)) / 10
        return Step(
            reward=same / len(right), score=float(said == right), info={"replies": len(messages) // 2}
        )
