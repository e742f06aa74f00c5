"""A task of your own in a few lines: sort four digits. `--env scripts/examples/sort_digits.py:SortDigits`"""

from common.envs.reverse import Reverse


class SortDigits(Reverse):
    """The prompt is "4213", the right answer is "1234" and then the end of the turn."""

    def tasks(self, split: str) -> list[dict]:
        tasks = super().tasks(split)
        return [{"prompt": task["prompt"], "answer": "".join(sorted(task["prompt"]))} for task in tasks]
