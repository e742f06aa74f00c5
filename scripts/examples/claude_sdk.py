"""An agent with a tool that uses Anthropic's SDK. `--env scripts/examples/claude_sdk.py:Clock`"""

from anthropic import AsyncAnthropic

from common.agent import ChatAgent

TOOL = {
    "name": "clock",
    "description": "The time in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIMES = {"Rome": "10:15", "Lima": "4:15", "Oslo": "10:16", "Baku": "13:15"}


class Clock(ChatAgent):
    """Say the time in a city, which only the tool knows. At most three replies."""

    def tasks(self, split: str) -> list[dict]:
        return [{"city": city} for city in (list(TIMES)[:3] if split == "train" else list(TIMES)[3:])]

    async def run(self, ctx) -> float:
        messages = [{"role": "user", "content": f"Time in {ctx.task['city']}?"}]
        async with AsyncAnthropic(base_url=ctx.anthropic_url, api_key=ctx.api_key) as client:
            for _ in range(3):
                async with client.messages.stream(
                    model=ctx.model, max_tokens=ctx.max_tokens, messages=messages, tools=[TOOL]
                ) as stream:
                    reply = await stream.get_final_message()
                calls = [block for block in reply.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id,
                     "content": TIMES.get(str(call.input.get("city")), "unknown city")}
                    for call in calls
                ]  # fmt: skip
                messages.append({"role": "assistant", "content": reply.content})
                messages.append({"role": "user", "content": results})
        said = "".join(block.text for block in reply.content if block.type == "text")
        return float(TIMES[ctx.task["city"]] in said)
