"""The examples with tools and games: what they reward, what they count, and what trains on it."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from algos.ppo import turn_rewards
from common.metrics import rollout_metrics
from common.rollout import transcript
from common.sample import Rollout, extend_segment
from tests.test_chat_agents import EXAMPLES, play
from tests.test_sandbox import made

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def contained():
    """Skips, saying why, where model-written code cannot be contained."""
    made(warm=0)


def index_of(kind, task: dict) -> int:
    return kind().tasks("train").index(task)


# --- Played by an engine whose model knows two conversations with the tool by heart


@pytest.mark.parametrize("file, kind", [("python_tool", "PythonEnv"), ("python_agent", "PythonAgent")])
def test_the_python_tool_is_called_and_its_answer_used(contained, served, file, kind):
    from scripts.examples.python_tool import PythonEnv

    index = index_of(PythonEnv, {"pair": (12, 34)})
    (rollout,) = play(
        served, f"{EXAMPLES}{file}.py:{kind}", 1, temperature=0.0, max_new_tokens=100, index=index
    )
    assert rollout.invalid is None and rollout.rewards == [0.0, 1.0]
    assert rollout.info == {"tool_used": 1, "tool_calls": 1, "tool_errors": 0, "score": 1.0}
    (segment,) = rollout.segments
    text = served.tokenizer.decode(segment.token_ids)
    assert text.count("print(12*34)") == 1 and text.endswith("assistant\n408<|im_end|>")
    sampled = served.tokenizer.decode(segment.token_ids[segment.action_mask])
    assert sampled.startswith({"PythonEnv": "```python", "PythonAgent": "<tool_call>"}[kind])
    assert sampled.endswith("<|im_end|>408<|im_end|>"), "the tool's own 408 is not the policy's"

    # the reward of the second turn is on its last token, and no token of the first has any
    rewards = turn_rewards(rollout)
    assert rewards.nonzero()[0].tolist() == [len(segment.token_ids) - 1] and rewards.sum() == 1
    row = rollout_metrics([rollout], [], 0, {}, {})
    assert (row["tool/used"], row["tool/calls"], row["tool/errors"], row["env/score"]) == (1, 1, 0, 1)
    assert row["rollout/turns_mean"] == 2
    record = transcript(rollout, served.tokenizer, 0.5)
    assert record["rewards"] == [0.0, 1.0] and record["turn_tokens"] == rollout.turn_tokens
    assert rollout.turn_tokens[1] == len("408") + 1 and sum(rollout.turn_tokens) == rollout.num_actions


def test_the_agent_of_the_documentation_runs_what_the_model_writes(contained, served, tmp_path):
    text = (ROOT / "docs/agents.md").read_text()
    (source,) = re.findall(r"```python\n# multiply\.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "multiply.py").write_text(source)
    index = index_of(runpy.run_path(str(tmp_path / "multiply.py"))["Multiply"], {"a": 12, "b": 34})
    (rollout,) = play(
        served, f"{tmp_path}/multiply.py:Multiply", 1, temperature=0.0, max_new_tokens=100, index=index
    )
    assert rollout.invalid is None and rollout.reward == 1.0 and len(rollout.turn_tokens) == 2
    (segment,) = rollout.segments
    text = served.tokenizer.decode(segment.token_ids)
    assert text.count("print(12*34)") == 1 and text.endswith("assistant\n408<|im_end|>")


@pytest.mark.parametrize("spec, turns", [
    ("guess_number.py:GuessNumber", 7), ("search_docs.py:SearchDocs", 4), ("file_task.py:FileTask", 6),
])  # fmt: skip
def test_examples_play(request, served, spec, turns):
    if spec.startswith("file_task"):
        request.getfixturevalue("contained")
    for rollout in play(served, EXAMPLES + spec, 2, max_new_tokens=12):
        assert rollout.invalid is None, rollout.info
        assert 1 <= len(rollout.turn_tokens) <= turns and rollout.num_actions == rollout.num_sampled > 0


# --- What they reward


def test_python_tool_rewards(contained):
    from scripts.examples.python_tool import PythonEnv

    env = PythonEnv()
    assert not {tuple(task["pair"]) for task in env.tasks("train")} & {
        task["pair"] for task in env.tasks("eval")
    }
    assert env.reset({"pair": (12, 34)}).startswith("12*34=?")
    wrong = env.step("```python\nprint(12*\n```")
    assert wrong.reward == -0.1 and "SyntaxError" in wrong.observation and not wrong.terminated
    step = env.step("Let me see.\n```python\nprint(12*34)\n```\nWait for it.")
    assert (step.reward, step.observation) == (0.0, "408")
    assert env.step("```python\npass\n```").observation == "(no output)"
    last = env.step(" 408 ")
    assert last.reward == last.score == 1.0 and last.terminated
    assert last.info == {"tool_used": 1, "tool_calls": 3, "tool_errors": 1}
    env.reset({"pair": (12, 34)})
    last = env.step("409")
    assert last.reward == 0.0 and last.terminated and last.info["tool_used"] == 0


def test_file_task(contained):
    from scripts.examples.file_task import FileTask

    env = FileTask()
    prompt = env.reset({"seed": 3})
    word = re.search(r'"(\w+)"', prompt)[1]
    assert env.step("ls").observation.split() == [f"{letter}.txt" for letter in "abcdef"]
    assert "[exit code" in env.step("if then 'quotes").observation
    assert env.step("mkdir kept; mv $(grep -l " + word + " *.txt) kept").observation == "(no output)"
    assert set(env.step("ls kept").observation.split()) == {n for n, w in env.files.items() if w == word}
    last = env.step("done")
    assert last.score == last.reward == 1.0 and last.terminated
    assert last.info == {"tool_used": 1, "tool_calls": 4, "tool_errors": 1}
    env.reset({"seed": 3})
    env.step("mkdir kept; mv *.txt kept")
    assert env.step("done").score == 0.0
    env.reset({"seed": 3})
    assert env.step("done").score == 0.0


def test_guess_number_pays_each_turn_for_what_it_rules_out():
    from scripts.examples.guess_number import GuessNumber

    env = GuessNumber()
    env.reset({"number": 30})
    assert [vars(env.step(said))["observation"] for said in ("49", "24", "x", "24")] == [
        "lower", "higher", "a number, please", "higher",
    ]  # fmt: skip
    env.reset({"number": 30})
    steps = [env.step(said) for said in ("49", "9", "10", "30")]
    # of 100 numbers 51 go (half is the most that counts), of 49 ten go, of 39 one goes, then it is found
    assert np.allclose([step.reward for step in steps], [0.05, 1 / 49, 0.1 / 39, 1.0])
    assert steps[-1].terminated and steps[-1].score == 1.0
    assert env.step("٣").observation == "a number, please"


def test_search_finds_a_row_by_its_own_meaning():
    from scripts.examples.search_docs import ROWS, search

    assert len(ROWS) > 30
    first = [search(meaning).splitlines()[0].split(": ")[0] for _, meaning in ROWS]
    assert np.mean([found == name for found, (name, _) in zip(first, ROWS)]) > 0.9
    assert search("zzzz") == "nothing found" and search("") == "nothing found"


def test_textarena_games():
    pytest.importorskip("textarena", reason="textarena is not installed (an optional package)")
    from scripts.examples.textarena_game import GuessTheNumber

    env = GuessTheNumber()
    assert "between 1 and 20" in env.reset({"seed": 5})
    low, high, step = 1, 20, None
    while step is None or not step.terminated:
        guess = (low + high) // 2
        step = env.step(f"[{guess}]")
        low, high = (guess + 1, high) if "higher" in (step.observation or "") else (low, guess - 1)
    assert step.score == 1.0


def test_examples_are_named_in_the_documentation():
    readme = (ROOT / "docs" / "agents.md").read_text()
    assert [path.name for path in (ROOT / EXAMPLES).glob("*.py") if path.name not in readme] == []


# --- What is counted


def rollout_of(rewards: list[float], info: dict, turns: list[int]) -> Rollout:
    segment = None
    for tokens in turns:
        segment = extend_segment(segment, [1, 2], [3] * tokens, [-1.0] * tokens, [0] * tokens, "stop")
    return Rollout("0.0", "g0", 0, "0", [segment], rewards, info)


def test_numbers_of_info_are_averaged_over_the_rollouts_that_have_them():
    rollouts = [
        rollout_of([1.0], {"tool_calls": 2, "tool_used": True, "luck": 0.5, "why": "text"}, [3, 1, 2]),
        rollout_of([0.0], {"tool_calls": 5, "tool_used": False, "score": 0.25}, [4]),
        rollout_of([0.0], {"tool_calls": 100, "error": "no"}, [1]),
    ]
    rollouts[2].invalid = "env_error"
    row = rollout_metrics(rollouts, [], 0, {}, {})
    assert {key: value for key, value in row.items() if key.startswith(("tool/", "env/"))} == {
        "tool/calls": 3.5, "tool/used": 0.5, "env/luck": 0.5, "env/score": 0.25,
    }  # fmt: skip
    assert row["rollout/turns_mean"] == (3 + 1 + 1) / 3, "turns, also where one reward stands for all"
    assert [rollout.turn_tokens for rollout in rollouts] == [[3, 1, 2], [4], [1]]


def test_each_turns_reward_goes_to_its_own_last_token():
    """Context of two tokens before each turn; the turns have 3, 1 and 2."""
    rewards = turn_rewards(rollout_of([-0.1, 0.0, 1.0], {}, [3, 1, 2]))
    assert np.allclose(rewards, [0, 0, 0, 0, -0.1, 0, 0, 0, 0, 0, 0, 1])
