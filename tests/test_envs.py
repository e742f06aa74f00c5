"""The built-in environments: rewards worked out by hand, splits, and what a broken file is answered with."""

import json

import pytest

from common.env import load_env
from common.envs.jsonl import Jsonl
from common.envs.reverse import Reverse


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def questions(count):
    return [json.dumps({"prompt": f"question {i}", "answer": f"answer {i}"}) for i in range(count)]


@pytest.mark.parametrize(
    "action, reward, score",
    [
        ("4321", 0.5 * 5 / 5 + 0.5, 1.0),
        ("4320", 0.5 * 4 / 5, 0.0),  # three digits and the end
        ("1234", 0.5 * 1 / 5, 0.0),  # the end alone
        ("43211", 0.5 * 4 / 5, 0.0),  # four digits, but the turn goes on
        ("432", 0.5 * 3 / 5, 0.0),
        ("4321 ", 0.5 * 4 / 5, 0.0),  # nothing is stripped
        (" 4321", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reverse_rewards_four_digits_the_end_and_the_exact_answer(action, reward, score):
    env = Reverse()
    assert env.reset({"prompt": "1234", "answer": "4321"}) == "1234"
    step = env.step(action)
    assert step.reward == pytest.approx(reward)
    assert step.score == score
    assert step.observation is None


def test_reverse_splits_all_numbers_into_disjoint_tasks_in_one_fixed_order():
    train, evaluation = Reverse().tasks("train"), Reverse().tasks("eval")
    assert len(evaluation) == 128
    assert len({task["prompt"] for task in train + evaluation}) == len(train + evaluation) == 10_000
    assert all(task["answer"] == task["prompt"][::-1] and len(task["prompt"]) == 4 for task in train)
    assert train == Reverse().tasks("train")
    assert train != sorted(train, key=lambda task: task["prompt"])


def test_jsonl_grades_up_to_case_and_surrounding_whitespace():
    env = Jsonl("unused.jsonl")
    env.reset({"prompt": "Capital of France?", "answer": "Paris"})
    for action, right in (("Paris", 1.0), ("  paris\n", 1.0), ("Paris.", 0.0), ("", 0.0)):
        step = env.step(action)
        assert (step.reward, step.score) == (right, right), action


def test_jsonl_reads_strings_messages_numbers_and_further_keys_and_skips_blank_lines(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    records = [
        {"prompt": messages, "answer": 42},
        {"prompt": "é?", "answer": "É", "source": "letters"},
    ]
    path = write(tmp_path / "a.jsonl", json.dumps(records[0]), "", "   ", json.dumps(records[1]))
    env = load_env(f"jsonl:{path}")()
    tasks = {task["answer"]: task for task in [*env.tasks("train"), *env.tasks("eval")]}
    assert set(tasks) == {"42", "É"}
    assert tasks["É"]["source"] == "letters"
    assert env.reset(tasks["42"]) == messages
    assert env.step("42").reward == 1.0
    assert env.reset(tasks["É"]) == "é?"
    assert env.step("é").reward == 1.0


@pytest.mark.parametrize("count, held_out", [(2, 1), (9, 1), (50, 5), (2000, 128)])
def test_jsonl_holds_out_a_tenth_at_least_one_and_at_most_128(tmp_path, count, held_out):
    env = Jsonl(write(tmp_path / "a.jsonl", *questions(count)))
    train, evaluation = env.tasks("train"), env.tasks("eval")
    assert len(evaluation) == held_out
    assert len({task["prompt"] for task in train + evaluation}) == len(train + evaluation) == count
    assert (train, evaluation) == (env.tasks("train"), env.tasks("eval"))


def test_a_single_line_is_both_train_and_eval(tmp_path):
    env = Jsonl(write(tmp_path / "a.jsonl", *questions(1)))
    assert env.tasks("train") == env.tasks("eval") == [{"prompt": "question 0", "answer": "answer 0"}]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"answer": "a"}', "no key 'prompt'"),
        ('{"prompt": "p"}', "no key 'answer'"),
        ('{"prompt": [], "answer": "a"}', "`prompt` must be"),
        ('{"prompt": [{"role": "user"}], "answer": "a"}', "`prompt` must be"),
        ('{"prompt": "p", "answer": null}', "`answer` must be"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", *questions(1), "", line)
    with pytest.raises(ValueError) as error:
        Jsonl(path).tasks("train")
    assert f"{path}, line 3: " in str(error.value)
    assert message in str(error.value)


def test_bytes_that_are_no_text_are_named_by_file_and_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": "\xff"}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 1: not JSON"):
        Jsonl(path).tasks("train")


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        Jsonl(tmp_path / "none.jsonl").tasks("train")
    with pytest.raises(ValueError, match="no task in the file"):
        Jsonl(write(tmp_path / "a.jsonl", "")).tasks("train")
