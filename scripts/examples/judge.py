"""A reward from the policy's own judgement. `--env scripts/examples/judge.py:Judged`

What is said through /judge reaches the same engines with any sampling or grammar, and is never trained on.
"""

from openai import OpenAI

from common.agent import ChatAgent

VERDICTS = {"yes": 1.0, "no": 0.0}


class Judged(ChatAgent):
    """Write a short greeting; the judge says whether it is one. A plain method does as well as an async one."""

    def tasks(self, split: str) -> list[dict]:
        names = ["Ann", "Bob", "Cem", "Dia"] if split == "train" else ["Eve"]
        return [{"prompt": f"Greet {name}."} for name in names]

    def run(self, ctx) -> float:
        asked = [{"role": "user", "content": ctx.task["prompt"]}]
        with OpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as policy:
            answer = policy.chat.completions.create(model=ctx.model, messages=asked)
        question = f"{ctx.task['prompt']}\nAnswer: {answer.choices[0].message.content}\nGood? yes or no"
        with OpenAI(base_url=ctx.judge_url, api_key=ctx.api_key) as judge:
            verdict = judge.chat.completions.create(
                model=ctx.model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=4,
                extra_body={"structured_outputs": {"choice": list(VERDICTS)}},
            )  # fmt: skip
        return VERDICTS[verdict.choices[0].message.content]
