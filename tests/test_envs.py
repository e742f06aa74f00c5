"""The built-in environments: rewards worked out by hand, splits, and what a broken file is answered with."""

import json
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.env import EnvFlags
from common.envs import load_env
from common.envs.gym import Gym
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


def test_jsonl_reads_other_key_names_and_says_them_in_its_errors(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "6 x 7?", "target": 42, "prompt": "not this"}')
    env = Jsonl(path, prompt_key="question", answer_key="target")
    (task,) = env.tasks("train")
    assert env.reset(task) == "6 x 7?"
    assert (env.step("42").reward, env.step("not this").reward) == (1.0, 0.0)
    with pytest.raises(ValueError, match="line 1: no key 'answer' among .*target.*with --answer-key"):
        Jsonl(path).tasks("train")
    bad = write(tmp_path / "b.jsonl", '{"question": 1, "target": 42}')
    with pytest.raises(ValueError, match="line 1: `question` must be a string or a list"):
        Jsonl(bad, prompt_key="question", answer_key="target").tasks("train")


@pytest.mark.parametrize(
    "further, message",
    [
        ({"images": "a.png"}, "`images` must be a list of paths or data URLs, not 'a.png'"),
        ({"images": [3]}, "`images` must be a list of paths or data URLs, not [3]"),
        ({"tools": [{"name": "python"}]}, "`tools` is not supported yet; remove it"),
        ({"source": 3}, "`source` must be a string, not 3"),
        ({"split": "test"}, '`split` must be "train" or "eval", not \'test\''),
    ],
)
def test_jsonl_refuses_optional_keys_that_it_could_only_ignore(tmp_path, further, message):
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "p", "answer": "a", **further}))
    with pytest.raises(ValueError) as error:
        Jsonl(path).tasks("train")
    assert f"{path}, line 1: {message}" in str(error.value)


def test_jsonl_keeps_empty_images_and_tools_and_puts_the_source_into_the_info(tmp_path):
    record = {"prompt": "p", "answer": "a", "images": [], "tools": None, "source": "gsm8k"}
    env = Jsonl(write(tmp_path / "a.jsonl", json.dumps(record)))
    assert env.tasks("eval") == [record]
    env.reset(record)
    assert env.step("a").info == {"source": "gsm8k"}
    env.reset({"prompt": "p", "answer": "a"})
    assert env.step("a").info == {}


def split_line(number, split):
    return json.dumps({"prompt": f"question {number}", "answer": "a", **({"split": split} if split else {})})


def test_a_split_key_on_every_line_decides_and_the_order_of_the_file_stays(tmp_path):
    splits = ["eval", "train", "eval", "train", "train"]
    env = Jsonl(write(tmp_path / "a.jsonl", *map(split_line, range(5), splits)), eval_size=1)
    assert [task["prompt"][-1] for task in env.tasks("train")] == ["1", "3", "4"]
    assert [task["prompt"][-1] for task in env.tasks("eval")] == ["0", "2"]


@pytest.mark.parametrize("splits, said", [(["train", None], "no `split`"), ([None, "eval"], "a `split`")])
def test_a_split_key_on_some_lines_is_refused_at_the_first_line_that_differs(tmp_path, splits, said):
    path = write(tmp_path / "a.jsonl", *map(split_line, range(2), splits))
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {said}, .* on every line or on none"):
        Jsonl(path).tasks("train")


def test_a_split_that_no_line_has_is_refused(tmp_path):
    env = Jsonl(write(tmp_path / "a.jsonl", split_line(0, "train")))
    assert len(env.tasks("train")) == 1
    with pytest.raises(ValueError, match='no line has "split": "eval"'):
        env.tasks("eval")


def test_jsonl_holds_out_at_most_the_eval_size(tmp_path):
    path = write(tmp_path / "a.jsonl", *questions(100))
    assert [len(Jsonl(path, eval_size=size).tasks("eval")) for size in (1, 4, 10, 50)] == [1, 4, 10, 10]


def test_an_unknown_grader_is_refused():
    with pytest.raises(ValueError, match="grader 'sympy': use one of exact, math"):
        Jsonl("unused.jsonl", grader="sympy")


def math_reward(answer, action):
    env = Jsonl("unused.jsonl", grader="math")
    env.reset({"prompt": "?", "answer": answer})
    step = env.step(action)
    assert step.reward == step.score
    return step.reward


RIGHT = [
    ("42", "42"),
    ("42", " 42.\n"),
    ("42", "42.0"),
    ("42", "The answer is 42."),
    ("42", "First 10, then 20, so the final answer is $42$."),
    ("42", "6 * 7 = 42"),
    ("42", "I tried \\boxed{41}, but it is \\boxed{42}, and not 43."),
    ("42", "<answer>41</answer> no: <answer>42</answer>"),
    ("42", "\\boxed{x = 42}"),
    ("\\boxed{42}", "42"),
    ("The sum is 40 + 2, so \\boxed{42}", "\\boxed{42}"),
    ("1/2", "0.5"),
    ("0.5", "1/2"),
    ("1/2", "\\boxed{\\frac12}"),
    ("$\\frac{1}{2}$", "It is \\(\\frac{2}{4}\\)."),
    ("\\frac{3}{4}", "\\boxed{\\dfrac{3}{4}}"),
    ("-3", "\\boxed{-3}"),
    ("1,234", "1234"),
    ("1234", "The total is 1,234."),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
    ("x^2 + 2x + 1", "\\boxed{(x+1)^2}"),
    ("x^2 + 1", "1 + x^2"),
    ("2\\pi", "\\boxed{\\pi \\cdot 2}"),
    ("(1, 2)", "\\boxed{(1, 2)}"),
    ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
    ("[0, 1)", "\\boxed{[0, 1)}"),
    ("\\text{east}", "\\boxed{\\text{east}}"),
    ("even", "Even"),
    ("5", "**5**."),
    ("\\$5", "\\boxed{5}"),
]
WRONG = [
    ("42", "41"),
    ("42", "-42"),
    ("42", "I had \\boxed{42}, but it is \\boxed{41}."),
    ("42", "It may be 42. \\boxed{41}"),
    ("42", "<answer>42</answer> no: <answer>41</answer>"),
    ("42", "I do not know."),
    ("42", ""),
    ("42", "\\boxed{}"),
    ("42", "It is 42, no, 41."),
    ("1/2", "1/3"),
    ("1/2", "\\boxed{2}"),
    ("1", "x^2 + 1"),
    ("x^2 + 1", "1"),
    ("x^2 + 1", "\\boxed{x^2 - 1}"),
    ("\\sqrt{8}", "\\boxed{8}"),
    ("(1, 2)", "\\boxed{(2, 1)}"),
    ("[0, 1)", "\\boxed{[0, 1]}"),
    ("east", "\\boxed{\\text{west}}"),
]


@pytest.mark.parametrize("reward, pairs", [(1.0, RIGHT), (0.0, WRONG)], ids=["right", "wrong"])
def test_the_math_grader_compares_final_answers_as_mathematics(reward, pairs):
    assert [(answer, action) for answer, action in pairs if math_reward(answer, action) != reward] == []


def test_the_math_grader_is_as_right_in_a_thread():
    with ThreadPoolExecutor(1) as pool:
        rewards = [pool.submit(math_reward, *pair).result() for pair in (*RIGHT[:14], *WRONG[:10])]
    assert rewards == [1.0] * 14 + [0.0] * 10


def test_the_math_grader_leaves_an_alarm_that_is_set_alone():
    signal.setitimer(signal.ITIMER_REAL, 600)
    try:
        assert math_reward("1/2", "0.5") == 1.0
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_an_answer_that_is_no_mathematics_is_an_error_and_not_a_wrong_action():
    with pytest.raises(ValueError, match="the answer '' cannot be read as mathematics; use --grader exact"):
        math_reward("", "42")


EASY_SUMS = "chain_sum,min_terms=2,max_terms=2,max_digits=1"


def test_gym_asks_the_same_questions_every_time_and_other_ones_in_eval():
    env, again = Gym(EASY_SUMS, eval_size=50), Gym(EASY_SUMS, eval_size=50)
    train, evaluation = env.tasks("train"), env.tasks("eval")
    assert (len(train), len(evaluation)) == (10_000, 50)
    assert train[:100] == again.tasks("train")[:100] == [train[i] for i in range(100)]
    assert train[9_999] == train[-1] and evaluation == again.tasks("eval")
    # Of 200 possible sums many are in eval, so that some train tasks had to give way.
    held_out = {task["question"] for task in evaluation}
    assert held_out.isdisjoint(task["question"] for task in train[:1_000])
    assert any(task["index"] != i for i, task in enumerate(train[:100]))
    with pytest.raises(IndexError):
        train[10_000]


def test_gym_makes_train_tasks_only_when_they_are_looked_at():
    assert len(Gym("chain_sum,size=2000000000", eval_size=2).tasks("train")) == 2_000_000_000


@pytest.mark.parametrize(
    "argument",
    [
        EASY_SUMS,
        'basic_arithmetic,operators=["+","-"],allow_parentheses=false,whitespace=single',
        "letter_counting,min_words=2,max_words=4",
        "spell_backward,max_word_len=4",
        "number_sorting,max_decimals=0,max_numbers=4",
    ],
)
def test_gym_gives_the_true_answer_a_full_reward_and_a_wrong_one_no_score(argument):
    name, env = argument.split(",")[0], Gym(argument, eval_size=20)
    for task in [*env.tasks("eval"), *env.tasks("train")[:20]]:
        assert json.loads(json.dumps(task)) == task
        grader = Gym(argument, eval_size=20)  # as in another process: it knows the task alone
        prompt = grader.reset(json.loads(json.dumps(task)))
        assert prompt.startswith(task["question"] + "\n") and "<answer></answer>" in prompt
        true = answer_by_hand(name, task["question"])
        for action in (true, f" {true}\n", f"Let me see: 7?\n<answer>{true}</answer>", f"x = {true}"):
            step = grader.step(action)
            assert (step.reward, step.score, step.observation) == (1.0, 1.0, None), (task, action)
        for action in ("", "wrong", "-123456", f"<answer>no</answer> {true}", f"{true} or {true}"):
            step = grader.step(action)
            assert 0 <= step.reward < 1 and step.score == 0.0, (task, action)


def answer_by_hand(name, question):
    """The answer worked out of the question's text."""
    if name == "letter_counting":
        letter, text = re.fullmatch(r'.*letter "(.)" appear in the text: "(.*)"\?', question).groups()
        return str(text.lower().count(letter))
    if name == "spell_backward":
        return question.rsplit(" ", 1)[1][::-1]
    if name == "number_sorting":
        direction, numbers = re.match(r"Sort these numbers in (\w+) order: (.*)", question).groups()
        return json.dumps(sorted(numbers.split(", "), key=float, reverse=direction == "descending"))
    terms = re.findall(r"[+-]?\d+", re.sub(r"\s", "", re.search(r"[-+\d][-+\d\s]*\d", question).group()))
    return str(sum(map(int, terms)))


@pytest.mark.parametrize(
    "argument, message",
    [
        ("chain_sums", "no dataset 'chain_sums'; use chain_sum"),
        ("", "no dataset ''"),
        ("chain_sum,terms=2", "chain_sum has no setting 'terms'; use min_terms, max_terms, min_digits"),
        ("chain_sum,seed=2", "chain_sum has no setting 'seed'"),
        ("chain_sum,min_terms", "'min_terms' is no setting; write name=value"),
        ("chain_sum,=2", "chain_sum has no setting ''"),
        ("chain_sum,min_terms=2,min_terms=3", "min_terms is given twice"),
        ("chain_sum,min_terms=two", "min_terms must be a number, not a string (two)"),
        ("chain_sum,allow_negation=False", "allow_negation must be true or false, not a string (False)"),
        ("chain_sum,allow_negation=1", "allow_negation must be true or false, not a number (1)"),
        ("chain_sum,size=0", "size must be a whole number of tasks, at least 1, not 0"),
        ("chain_sum,size=1.5", "size must be a whole number of tasks, at least 1, not 1.5"),
        ("chain_sum,min_terms=5,max_terms=2", "max_terms must be >= min_terms"),
        ('basic_arithmetic,operators="+"', "operators must be a list, not a string"),
    ],
)
def test_gym_refuses_what_is_no_dataset_or_no_setting_of_it(argument, message):
    with pytest.raises(ValueError) as error:
        Gym(argument)
    assert "gym:" in str(error.value) and message in str(error.value)


def test_gym_refuses_settings_without_questions_and_without_train_questions():
    with pytest.raises(ValueError, match="fails to make question 0 .*use other settings"):
        Gym("spell_backward,min_word_len=50,max_word_len=60").tasks("train")
    with pytest.raises(ValueError, match="all 30 train questions are among the 128 of eval"):
        Gym("chain_sum,min_terms=1,max_terms=1,max_digits=1,size=30").tasks("train")


def test_gym_refuses_to_grade_a_question_that_it_would_not_ask():
    env = Gym(EASY_SUMS)
    env.reset({**env.tasks("eval")[0], "question": "another one"})
    with pytest.raises(ValueError, match="question 0 differs between two processes"):
        env.step("3")


def test_an_answer_that_a_gym_scorer_cannot_read_is_wrong_and_a_broken_scorer_is_an_error(monkeypatch):
    env = Gym("prime_factorization", eval_size=1)
    env.reset(env.tasks("eval")[0])
    step = env.step("seven")
    assert (step.reward, step.score) == (0.0, 0.0)
    assert "invalid literal" in step.info["unreadable"]
    monkeypatch.setattr(env.datasets[env.task["seed"]], "score_answer", lambda answer, entry: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        env.step("seven")


def test_gym_neither_hears_nor_disturbs_the_global_random_generator():
    env = Gym("list_functions", eval_size=30)  # it draws from that generator
    random.seed(1)
    tasks = env.tasks("eval")
    assert random.random() == random.Random(1).random()
    assert tasks == env.tasks("eval")


def test_load_env_hands_the_flags_on(tmp_path):
    flags = EnvFlags(prompt_key="q", answer_key="a", grader="math", eval_size=3)
    path = write(tmp_path / "a.jsonl", *(json.dumps({"q": f"half of {i}?", "a": i / 2}) for i in range(50)))
    env = load_env(f"jsonl:{path}", flags)()
    assert len(env.tasks("eval")) == 3
    assert env.reset({"q": "half of 1?", "a": "0.5"}) == "half of 1?"
    assert env.step("1/2").reward == 1.0
    assert len(load_env(f"gym:{EASY_SUMS}", flags)().tasks("eval")) == 3
