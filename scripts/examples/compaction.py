"""A conversation that outgrows its context. `--env scripts/examples/compaction.py:Compaction`

When the history is long, the policy sums it up and goes on from the summary. That rewrites history, so a new
segment starts; both are trained, the summary too, as it was sampled in the first.
"""

from openai import AsyncOpenAI

from common.agent import ChatAgent

LIMIT = 80  # tokens of a prompt


class Compaction(ChatAgent):
    """Numbers come one by one; at the end the policy is asked for the first. Remembering it earns."""

    def tasks(self, split: str) -> list[dict]:
        starts = range(10, 90) if split == "train" else range(90, 100)
        return [{"numbers": [(start * step) % 100 for step in range(1, 7)]} for start in starts]

    async def run(self, ctx) -> float:
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:

            async def say(text: str) -> str:
                messages.append({"role": "user", "content": text})
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                self.used = reply.usage.total_tokens
                return reply.choices[0].message.content or ""

            messages: list[dict] = []
            for number in ctx.task["numbers"]:
                await say(str(number))
                if self.used > LIMIT:
                    summary = await say("sum up")
                    messages[:] = [{"role": "system", "content": summary}]
            answer = await say("first?")
        return float(answer.strip() == str(ctx.task["numbers"][0]))
