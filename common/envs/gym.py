"""The procedural tasks of reasoning-gym: gym:DATASET, with settings of its config after commas, as JSON.

    gym:chain_sum,min_terms=2,max_terms=2,max_digits=1
    gym:basic_arithmetic,operators=["+","-"],size=500

`size` is the number of train tasks (10,000 if not given). Questions are made when they are looked at.
"""

import difflib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from numbers import Number

from common.env import Env, Step

TRAIN_SIZE = 10_000
# The library makes item i from seed + i: seeds that are close together would give the same questions.
TRAIN_SEED, EVAL_SEED = 0, 2**31
HOW_TO_ANSWER = "Give the answer alone. If you reason first, end with the answer in <answer></answer> tags."


def parse_argument(argument: str) -> tuple[str, dict]:
    """ "name,key=value,..." to a dataset's name and its settings; a value that is no JSON is a string.

    Raises ValueError for what is no dataset, no setting of it, or of a wrong type.
    """
    from reasoning_gym.factory import DATASETS  # takes seconds: only for whom it is needed

    name, _, rest = argument.partition(",")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(f"gym:{argument}: reasoning-gym has no dataset {name!r}; use {', '.join(near)}")
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(DATASETS[name][1])
        if field.name != "seed"
    }
    settings = {}
    # A comma inside of a JSON value is not followed by a name and "=".
    for part in re.split(r",(?=\s*\w+\s*=)", rest) if rest else []:
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"gym:{argument}: {part!r} is no setting; write name=value")
        if key not in defaults:
            raise ValueError(f"gym:{argument}: {name} has no setting {key!r}; use {', '.join(defaults)}")
        if key in settings:
            raise ValueError(f"gym:{argument}: {key} is given twice; remove one")
        settings[key] = parse_value(text)
        wanted, given = kind(defaults[key]), kind(settings[key])
        if None not in (wanted, given) and wanted != given:
            raise ValueError(f"gym:{argument}: {key} must be {wanted}, not {given} ({text})")
    size = settings.get("size", TRAIN_SIZE)
    if not isinstance(size, int) or not 0 < size <= EVAL_SEED:
        raise ValueError(f"gym:{argument}: size must be a whole number of tasks, at least 1, not {size}")
    return name, settings


def parse_value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def kind(value) -> str | None:
    """The JSON name of a value's type; None for what has no type to compare: null and no default."""
    if value is None or value is MISSING:
        return None
    names = {bool: "true or false", Number: "a number", str: "a string", (list, tuple): "a list"}
    return next((name for types, name in names.items() if isinstance(value, types)), type(value).__name__)


@lru_cache(maxsize=16)
def open_dataset(name: str, settings: str, seed: int, size: int):
    """A dataset of the library. Kept, because some read a word list and every rollout makes a `Gym`.

    Raises ValueError where the library refuses the settings (a JSON object).
    """
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **{**json.loads(settings), "seed": seed, "size": size})
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"gym:{name} with {settings}: {error or type(error).__name__}") from error


class LazyTasks(Sequence):
    """`length` tasks, each made by `make(index)` when it is looked at."""

    def __init__(self, length: int, make: Callable[[int], dict]):
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index):
        where = range(self.length)[index]  # an int or a slice; raises IndexError beyond the end
        return [self.make(i) for i in where] if isinstance(where, range) else self.make(where)


class Gym(Env):
    """One question, one answer, graded by the dataset's own scorer.

    Raises ValueError for an argument that names no dataset or no setting of it, or values it refuses.
    """

    def __init__(self, argument: str, eval_size: int = 128):
        self.argument = argument
        name, settings = parse_argument(argument)
        sizes = {TRAIN_SEED: settings.pop("size", TRAIN_SIZE), EVAL_SEED: eval_size}
        text = json.dumps(settings, sort_keys=True)
        self.datasets = {seed: open_dataset(name, text, seed, size) for seed, size in sizes.items()}

    def tasks(self, split: str) -> Sequence[dict]:
        """`size` tasks to train on, or `eval_size` to evaluate on, none of which is in "train".

        Raises ValueError where the library cannot make a question of these settings, or none that "eval" does
        not have.
        """
        eval_tasks = [self.make_task(EVAL_SEED, index) for index in range(len(self.datasets[EVAL_SEED]))]
        if split == "eval":
            return eval_tasks
        held_out = {task["question"] for task in eval_tasks}
        size = len(self.datasets[TRAIN_SEED])

        def next_outside_eval(index: int) -> dict:
            """The first task from `index` on, around the end, whose question is not one of "eval"."""
            for offset in range(size):
                task = self.make_task(TRAIN_SEED, (index + offset) % size)
                if task["question"] not in held_out:
                    return task
            raise ValueError(
                f"gym:{self.argument}: all {size} train questions are among the {len(eval_tasks)} of eval; "
                "use settings with more different questions, or a smaller --eval-size"
            )

        tasks = LazyTasks(size, next_outside_eval)
        tasks[0]  # so that settings without train questions fail now
        return tasks

    def make_task(self, seed: int, index: int) -> dict:
        return {"question": self.make_entry(seed, index)["question"], "seed": seed, "index": index}

    def make_entry(self, seed: int, index: int) -> dict:
        """The library's question, answer and metadata; always the same for the same arguments."""
        state = random.getstate()
        random.seed(seed + index)  # list_functions draws from the global generator too
        try:
            return self.datasets[seed][index]
        except Exception as error:  # it checks few settings before it uses them; an IndexError ends a `for`
            raise ValueError(
                f"gym:{self.argument}: reasoning-gym fails to make question {index} ({error!r}); "
                "use other settings"
            ) from error
        finally:
            random.setstate(state)

    def reset(self, task: dict) -> str:
        self.task = task
        return f"{task['question']}\n\n{HOW_TO_ANSWER}"

    def step(self, action: str) -> Step:
        """The dataset's reward for the text in the last <answer> tags, else for the whole answer or for what
        follows its last "=", whichever is better ("1 + 2 = 3"); the score is 1 for a full reward, else 0. An
        answer that the scorer cannot read is wrong.

        Raises ValueError where the question comes out differently from how it was asked.
        """
        from reasoning_gym.utils import extract_answer

        seed, index = self.task["seed"], self.task["index"]
        entry = self.make_entry(seed, index)
        if entry["question"] != self.task["question"]:
            raise ValueError(
                f"gym:{self.argument}: question {index} differs between two processes and cannot be graded; "
                "set PYTHONHASHSEED=0 in the environment"
            )
        tagged = extract_answer(action)
        answers = {action.strip(), action.rpartition("=")[2].strip()} if tagged is None else {tagged}
        score, rewards, info = self.datasets[seed].score_answer, [0.0], {}
        for answer in answers:
            try:
                rewards.append(float(score(answer, entry)))
            except Exception as error:  # some scorers raise on an answer that they cannot read
                score(entry["answer"], entry)  # but one that raises on the true answer is broken
                info = {"unreadable": repr(error)}
        return Step(reward=max(rewards), score=float(max(rewards) == 1.0), info=info)
