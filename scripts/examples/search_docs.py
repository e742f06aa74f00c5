"""Search over documents: which metric is meant? `--env scripts/examples/search_docs.py:SearchDocs`

The documents are the glossary of algos/README.md. The policy gets a meaning and asks a search tool, as often as
it likes within four replies; naming the metric earns 1.
"""

import math
import re
from collections import Counter
from pathlib import Path

from openai import OpenAI

from common.agent import ChatAgent
from common.env import Step

CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")  # takes 25 ms: one for all episodes
GLOSSARY = (Path(__file__).parents[2] / "algos" / "README.md").read_text().partition("## Metrics")[2]
ROWS = re.findall(r"^\| `([a-z_/]+)`[^|]* \| (.+) \|$", GLOSSARY, re.MULTILINE)  # (metric, meaning)
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": QUERY}}


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


SEEN_IN = Counter(word for name, meaning in ROWS for word in words(f"{name} {meaning}"))


def search(query: str) -> str:
    """The three rows that share most with the query; a word counts the more, the fewer rows have it."""
    shared = [words(query) & words(f"{name} {meaning}") for name, meaning in ROWS]
    points = [sum(math.log(1 + len(ROWS) / SEEN_IN[word]) for word in found) for found in shared]
    best = sorted(range(len(ROWS)), key=lambda row: -points[row])[:3]
    return "\n".join(f"{ROWS[row][0]}: {ROWS[row][1]}" for row in best if points[row]) or "nothing found"


class SearchDocs(ChatAgent):
    def tasks(self, split: str) -> list[dict]:
        return [{"row": row} for row in range(len(ROWS)) if (row % 5 == 0) == (split == "eval")]

    def run(self, ctx) -> Step:
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        name, meaning = ROWS[ctx.task["row"]]
        messages, calls = [{"role": "user", "content": f"Which metric is this? {meaning}"}], 0
        for _ in range(4):
            reply = client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
            messages.append(message := reply.choices[0].message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                found, calls = search(call.function.arguments), calls + 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        right = float(name in (message.content or ""))
        return Step(right, info={"tool_used": float(calls > 0), "tool_calls": calls})
