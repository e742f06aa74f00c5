"""Questions with known answers out of a JSONL file, one JSON object a line:

    {"prompt": "6 x 7?", "answer": "42"}

`prompt` is a string or a list of chat messages, `answer` a string or a number. Optional: `split` ("train" or
"eval", on every line or on none), `source` (a string that stays with the transcripts), and `images`, a list
of paths (relative ones start at the file) or data URLs (data:image/png;base64,...). Images go before a prompt
that is a string; in messages they take the places of the parts {"type": "image"}, in order. Other keys stay
in the task. The answer is graded as text ("exact") or as mathematics ("math", by math-verify).
"""

import copy
import json
import logging
import random
import re
import signal
import threading
from pathlib import Path

from common.env import Env, Step
from common.envs import image_part

GRADERS = ("exact", "math")
SPLITS = ("train", "eval")
NOT_YET = ("tools",)  # keys of the format that would be ignored in silence
MATH_SECONDS = 5  # for reading an answer, and again for comparing it; after that it is wrong


def read_tasks(path: Path, prompt_key: str, answer_key: str) -> list[dict]:
    """The records of a file, with the answer as text; blank lines are skipped.

    Raises ValueError naming file, line number and fix for the first line that is no task.
    """
    if not path.is_file():
        raise ValueError(f"jsonl:{path}: there is no such file; give the path of a JSONL file")
    tasks = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                task = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); write one JSON object a line") from error
            check_record(task, where, prompt_key, answer_key)
            if tasks and ("split" in task) != ("split" in tasks[0]):
                has, had = ("a", "none") if "split" in task else ("no", "one")
                raise ValueError(
                    f"{where}: {has} `split`, but the lines before have {had}; "
                    "give it on every line or on none"
                )
            tasks.append({**task, answer_key: str(task[answer_key])})
    if not tasks:
        raise ValueError(f"{path}: no task in the file; write one JSON object a line")
    return tasks


def check_record(task, where: str, prompt_key: str, answer_key: str) -> None:
    """Raises ValueError, beginning with `where`, for a line's value that is no task."""
    if not isinstance(task, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"{prompt_key}": ..., "{answer_key}": ...}}')
    for name, key in (("prompt", prompt_key), ("answer", answer_key)):
        if key not in task:
            raise ValueError(
                f"{where}: no key {key!r} among {sorted(task)}; add it or rename one, "
                f"or name one of these with --{name}-key"
            )
    if not is_prompt(task[prompt_key]):
        raise ValueError(
            f'{where}: `{prompt_key}` must be a string or a list of {{"role": ..., "content": ...}}'
        )
    if not isinstance(task[answer_key], (str, int, float)):
        raise ValueError(f"{where}: `{answer_key}` must be a string or a number, not {task[answer_key]!r}")
    if "split" in task and task["split"] not in SPLITS:
        raise ValueError(f'{where}: `split` must be "train" or "eval", not {task["split"]!r}')
    if not isinstance(task.get("source", ""), str):
        raise ValueError(f"{where}: `source` must be a string, not {task['source']!r}")
    images = task.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError(f"{where}: `images` must be a list of paths or data URLs, not {images!r:.80}")
    places = image_places(task[prompt_key])
    if isinstance(task[prompt_key], list) and len(places) != len(images):
        parts = f'{len(places)} parts {{"type": "image"}} in `{prompt_key}`'
        raise ValueError(f"{where}: {len(images)} `images` for {parts}; give as many")
    for key in NOT_YET:
        if task.get(key):
            raise ValueError(f"{where}: `{key}` is not supported yet; remove it or leave it empty")


def is_prompt(value) -> bool:
    """Whether `value` is a prompt: a string, or a non-empty list of chat messages."""
    if isinstance(value, list):
        return bool(value) and all(
            isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in value
        )
    return isinstance(value, str)


def image_places(prompt) -> list[dict]:
    """The parts of chat messages that wait for an image out of `images`."""
    contents = [turn["content"] for turn in prompt if isinstance(prompt, list)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [
        part
        for part in parts
        if isinstance(part, dict) and part.get("type") == "image" and "image" not in part
    ]


def equal_as_text(action: str, answer: str) -> bool:
    """Whether the texts are equal up to case and surrounding whitespace."""
    return action.strip().casefold() == answer.strip().casefold()


def equal_as_mathematics(action: str, answer: str) -> bool:
    """Whether the final answer of `action` is the same number, expression, set ... as `answer`.

    The final answer is the last \\boxed{...}, else what is in the last <answer> tags, else the whole action
    if it has no words, else what math-verify finds last. Raises ValueError where `answer` cannot be read.
    """
    import math_verify  # takes a second: only for whom it is needed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every time limit, and of none
    seconds = seconds_for_math()
    wanted = math_verify.parse(as_formula(last_boxed(answer) or answer), parsing_timeout=seconds)
    if not wanted:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics; use --grader exact")
    final = last_boxed(action)
    if final is None and (tagged := re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)):
        final = tagged[-1]
    if final is None and not re.search(r"(?<![\\a-zA-Z])(?!sqrt|pi)[a-zA-Z]{2}", action):
        final = action
    given = math_verify.parse(action if final is None else as_formula(final), parsing_timeout=seconds)
    if math_verify.verify(wanted, given, timeout_seconds=seconds):
        return True
    return equal_as_text(action if final is None else final, answer)  # words, such as "east"


def as_formula(text: str) -> str:
    """`text` in a box. Outside of one math-verify looks for a number, and "x^2 + 1" would be 1."""
    inner = text.replace("\\$", "").strip().rstrip(".").strip("*").rstrip(".")  # of \$5, **5**. and so on
    inner = re.sub(r"^(\$+|\\\(|\\\[)|(\$+|\\\)|\\\])$", "", inner)
    return text if "$" in inner else f"\\boxed{{{inner}}}"


def last_boxed(text: str) -> str | None:
    """What is inside the last \\boxed{...} with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, start = 1, start + len("\\boxed{")
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def seconds_for_math() -> int | None:
    """The limit for math-verify's own alarm; None where there must be none.

    Off the main thread its alarm raises, which it answers with "wrong" in places. And it would replace an
    alarm that is already set, which then limits the time instead.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    return MATH_SECONDS if on_main_thread and signal.getitimer(signal.ITIMER_REAL)[0] == 0 else None


class Jsonl(Env):
    """One question, one answer, which is right or wrong.

    Raises ValueError for a grader that is not "exact" or "math".
    """

    def __init__(
        self,
        path: str | Path,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        grader: str = "exact",
        eval_size: int = 128,
    ):
        if grader not in GRADERS:
            raise ValueError(f"grader {grader!r}: use one of {', '.join(GRADERS)}")
        self.path = Path(path)  # read by `tasks` alone: every rollout makes an instance of its own
        self.prompt_key, self.answer_key = prompt_key, answer_key
        self.is_right = {"exact": equal_as_text, "math": equal_as_mathematics}[grader]
        self.eval_size = eval_size

    def tasks(self, split: str) -> list[dict]:
        """What the `split` of the lines says. Without it, a tenth of the file (at least one task, at most
        `eval_size`, of a fixed shuffle) is "eval", the rest "train"; of one line, both.

        Raises ValueError where the file is not as it should be, or has no task of this split.
        """
        tasks = read_tasks(self.path, self.prompt_key, self.answer_key)
        if "split" in tasks[0]:
            chosen = [task for task in tasks if task["split"] == split]
            if not chosen:
                raise ValueError(f'{self.path}: no line has "split": "{split}"; add some or drop the key')
            return chosen
        if len(tasks) == 1:
            return tasks
        random.Random(0).shuffle(tasks)
        held_out = max(1, min(self.eval_size, len(tasks) // 10))
        return {"train": tasks[:-held_out], "eval": tasks[-held_out:]}[split]

    def reset(self, task: dict) -> str | list[dict]:
        self.answer = task[self.answer_key]
        self.info = {"source": task["source"]} if "source" in task else {}
        images = [self.read_image(image) for image in task.get("images") or []]
        prompt = copy.deepcopy(task[self.prompt_key])
        if images and isinstance(prompt, str):
            return [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
        for part, image in zip(image_places(prompt), images, strict=True):
            part |= image
        return prompt

    def read_image(self, image: str) -> dict:
        """A path or a data URL as a part of a message's content."""
        if image.startswith("data:"):
            return {"type": "image", "image": image}
        return image_part((self.path.parent / image).read_bytes())

    def step(self, action: str) -> Step:
        """1 for the right answer, else 0; the score is the same."""
        right = float(self.is_right(action, self.answer))
        return Step(reward=right, score=right, info=self.info)
