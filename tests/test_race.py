"""The race's pieces: all contenders get the same tasks, rewards, numbers; its page is what was measured.

TRL itself is in another environment: its file is read with stand-ins for what it imports from there.
"""

import asyncio
import importlib.util
import json
import shlex
import statistics
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest

from algos import grpo
from common.envs import load_env
from common.models import char_tokenizer

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "scripts" / "bench"
TASKS = "scripts/bench/race/tasks.py"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"race_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def race():
    return load(BENCH / "race.py")


@pytest.fixture(scope="module")
def trl_file():
    """trl_grpo.py, with empty modules for trl and datasets where this environment has none."""
    lent = {"trl": ("GRPOConfig", "GRPOTrainer"), "datasets": ("Dataset",)}
    missing = {name: names for name, names in lent.items() if importlib.util.find_spec(name) is None}
    for name, names in missing.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(dict.fromkeys(names))
    yield load(BENCH / "race" / "trl_grpo.py")
    for name in missing:
        del sys.modules[name]


def test_trl_gets_the_prompts_in_the_order_of_instar(trl_file):
    epochs = [grpo.epoch_order(7, epoch, 10, shuffle=True).tolist() for epoch in range(3)]
    assert trl_file.prompt_order(7, 10, 25) == (epochs[0] + epochs[1] + epochs[2])[:25]


def test_trls_reward_is_that_of_the_environment(trl_file, monkeypatch):
    tokenizer, make_env = char_tokenizer(), load_env(f"{ROOT}/{TASKS}:Uneven")
    task = {"prompt": "12345", "answer": "54321", "judged": False}
    ended = tokenizer.encode("54321") + [tokenizer.eos_token_id]
    rewards = [
        asyncio.run(trl_file.grade(make_env, task, tokenizer, ids)) for ids in (ended, ended[:5], ended[:3])
    ]
    # right: 6 of 6 positions and exact; without the end the text is the same; 3 of 6 positions, not exact
    assert [outcome.reward for outcome in rewards] == [1.0, 1.0, 0.25]
    assert [outcome.score for outcome in rewards] == [1.0, 1.0, 0.0]
    assert asyncio.run(trl_file.grade(make_env, task, tokenizer, [])).reward == 0.0


def test_training_answers_wait_for_the_judge_as_long_as_said_and_evaluation_does_not():
    tasks, make_env = load(ROOT / TASKS), load_env(f"{ROOT}/{TASKS}:Uneven")
    assert all(task["judged"] for task in make_env().tasks("train"))
    assert not any(task["judged"] for task in make_env().tasks("eval"))
    draws = [tasks.judge_s() for _ in range(4000)]
    assert 0.45 < statistics.mean(draws) < 0.55 and 0.4 < statistics.stdev(draws) < 0.65


def test_the_uneven_tasks_are_uneven_distinct_and_held_out():
    env = load_env(f"{ROOT}/{TASKS}:Uneven")()
    train, held_out = ({task["prompt"] for task in env.tasks(split)} for split in ("train", "eval"))
    assert (len(train), len(held_out), train & held_out) == (1600, 128, set())
    lengths = [len(prompt) for prompt in train]
    assert min(lengths) == 3 and max(lengths) == 12 and statistics.stdev(lengths) > 2
    assert all(task["answer"] == task["prompt"][::-1] for task in env.tasks("train"))


@pytest.mark.parametrize("job", ["tiny even", "tiny uneven", "smollm2 uneven"])
def test_all_contenders_are_told_the_same_numbers(race, job, monkeypatch):
    monkeypatch.setattr(race, "model_path", lambda job: "MODEL")
    args = Namespace(steps=None, instar_flags=None, trl_threads=2, device="cpu", trl_python="python")
    told = {}
    for name in race.SETTINGS[job]:
        words = race.command(job, name, 3, Path("runs/x"), args)
        told[name] = {flag: value for flag, value in zip(words, words[1:]) if flag.startswith("--")}
    ours = [told.pop(name) for name in list(told) if name.startswith("instar")][0]
    ours |= {"--prompts": ours["--prompts-per-step"], "--steps": ours["--max-steps"]}
    same = "env model seed lr lr-warmup-steps group-size max-new-tokens temperature clip-low clip-high"
    for name, theirs in told.items():
        for flag in (*same.split(), "max-grad-norm", "eval-every", "prompts", "steps"):
            assert theirs[f"--{flag}"] == ours[f"--{flag}"], (name, flag)


def test_instar_accepts_the_flags_of_every_job(race):
    import tyro

    for settings in race.SETTINGS.values():
        for name in settings:
            if name.startswith("instar"):
                tyro.cli(grpo.Args, args=shlex.split(settings[name]))


def test_rates_and_times_are_those_of_the_rows(race):
    """A step a second from second 10 on, the score at step 30 over the bar."""
    told = {"prompts": 2, "group_size": 4, "threshold": 0.9}
    rows = [(10.0 + step, {"step": step, "reward/mean": 0.5, "rollout/len_mean": 5}) for step in range(60)]
    for step, score in ((0, 0.2), (30, 0.95)):
        rows[step][1]["eval/reverse/mean"] = score
    rows[59][1]["eval_end/reverse/mean"] = 0.97
    found = race.measure(8.0, rows, told)
    assert found["samples_per_s"] == 8.0  # 8 a step
    assert found["samples_per_s_with_start"] == pytest.approx(8 * 60 / 69)
    assert (found["threshold_s"], found["threshold_s_with_start"]) == (32.0, 40.0)
    assert (found["score_start"], found["score"], found["reward"]) == (0.2, 0.97, 0.5)


def test_a_threshold_that_was_not_reached_counts_as_later_than_any(race):
    assert race.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert race.spread([3.0, None, 20.0]) == "20.0 (3.0 to 20.0; 2 of 3 did)"
    assert race.spread([3.0, None, None]) == "not reached (3.00 to 3.00; 1 of 3 did)"
    assert race.spread([None]) == "not reached"


def test_the_page_has_the_tables_of_the_record(race):
    record = json.loads((ROOT / "docs" / "race.json").read_text())
    assert race.tables(record) in (ROOT / "docs" / "race.md").read_text()
