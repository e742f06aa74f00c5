"""Two agents that argue side by side. `--env scripts/examples/sub_agents.py:SubAgents`

Each has a conversation of its own, so each is a segment of the rollout; both are trained on the common reward.
"""

import asyncio

from openai import AsyncOpenAI

from common.agent import ChatAgent


class SubAgents(ChatAgent):
    """One agent counts up, one down; each turn they hear what the other said. Digits earn."""

    turns = 4

    def tasks(self, split: str) -> list[dict]:
        return [{"start": n} for n in (range(100) if split == "train" else range(100, 110))]

    async def run(self, ctx) -> float:
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            histories = [
                [{"role": "system", "content": way}, {"role": "user", "content": str(ctx.task["start"])}]
                for way in ("up", "down")
            ]
            said: list[str] = []
            for _ in range(self.turns):
                replies = await asyncio.gather(
                    *(
                        client.chat.completions.create(model=ctx.model, messages=history)
                        for history in histories
                    )
                )
                texts = [reply.choices[0].message.content or "" for reply in replies]
                for history, own, other in zip(histories, texts, reversed(texts)):
                    history += [{"role": "assistant", "content": own}, {"role": "user", "content": other}]
                said += texts
        return sum(text.strip().isdigit() for text in said) / len(said)
