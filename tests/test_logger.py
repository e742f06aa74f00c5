"""The logger's files, its order, and what it prints where there is no terminal."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from common.logger import Logger, mean_of, merge

HEADLINE = ("reward/mean", "staleness/mean", "time/step")
COUNTS = st.integers(0, 1000).map(float)
PAIRS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.tuples(COUNTS, COUNTS))


def row(step, **more):
    base = {"reward/mean": step / 10, "staleness/mean": 1.0, "mismatch/abs_mean": 1e-3 * step}
    base |= {"time/step": 2.0, "time/trainer_wait": 0.5, "time/train": 1.0, "time/refit": 0.25}
    base["perf/samples_per_s"] = 64.0
    return {"step": step} | base | more


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_hold_what_was_logged(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "algos.grpo", "--system-prompt", "Be brief."])
    folder = tmp_path / "new" / "run"
    sample = {"ticket": 7, "transcript": "a\nb\u2028\U0001f600", "reward": 1.0, "invalid": None}
    with Logger(folder, {"lr": 0.1, "folder": Path("x")}, 3, HEADLINE) as log:
        log.log_step(row(0, **{"eval/toy/mean": 0.25, "staleness/hist": np.array([3, 1])}))
        log.log_step(row(1, **{"grad_norm": np.float32(0.5)}))
        assert len(read_lines(folder / "metrics.jsonl")) == 2  # on disk at once, not at the end
        log.log_samples(1, [sample])
        log.log_step(row(2, **{"eval/toy/mean": 0.75, "eval_end/toy/mean": 0.5}))
        log.summary({"best_checkpoint": "none"})
    rows = read_lines(folder / "metrics.jsonl")
    assert [list(each)[0] for each in rows] == ["step"] * 3 and [each["step"] for each in rows] == [0, 1, 2]
    assert rows[0]["staleness/hist"] == [3, 1] and rows[1]["grad_norm"] == 0.5
    assert read_lines(folder / "samples.jsonl") == [{"step": 1} | sample]
    config = json.loads((folder / "config.json").read_text())
    assert config["flags"] == {"folder": "x", "lr": 0.1}
    assert {"python", "torch", "ray"} <= set(config["versions"])
    assert config["command"] == "python -m algos.grpo --system-prompt 'Be brief.'"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval/toy/mean"] == {"first": 0.25, "best": 0.75, "best_version": 2, "end": 0.5}
    assert summary["reward/mean"] == {"first": 0.0, "last": 0.2} and summary["best_checkpoint"] == "none"
    assert summary["steps"] == 3 and summary["train_s"] == 6.0 and summary["samples_per_s"] == 64.0
    assert summary["trainer_wait_frac"] == 0.25 and summary["refit_frac"] == 0.125
    assert summary["mismatch_worst"] == 2e-3


@pytest.mark.parametrize("step", [None, 0, 2, -1])
def test_steps_out_of_order_are_refused(tmp_path, step):
    with Logger(tmp_path, {}, 5, HEADLINE) as log:
        log.log_step(row(0))
        with pytest.raises(ValueError, match="due is step 1"):
            log.log_step(row(1) | {"step": step})
        assert len(read_lines(tmp_path / "metrics.jsonl")) == 1


def test_a_row_too_many_is_refused(tmp_path):
    with Logger(tmp_path, {}, 1, HEADLINE) as log:
        log.log_step(row(0))
        with pytest.raises(ValueError, match="of 1"):
            log.log_step(row(1))


def test_resume_removes_what_is_measured_again(tmp_path):
    with Logger(tmp_path, {}, 4, HEADLINE) as log:
        for step in range(3):
            log.log_step(row(step))
            log.log_samples(step, [{"ticket": step}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rewa')  # a run killed on a full disk
    with Logger(tmp_path, {}, 4, HEADLINE, first_step=2) as log:
        for step in (2, 3):
            log.log_step(row(step, **{"reward/mean": -1.0}))
        log.summary({})
    assert [each["step"] for each in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [each["reward/mean"] for each in read_lines(tmp_path / "metrics.jsonl")] == [0.0, 0.1, -1.0, -1.0]
    assert [each["ticket"] for each in read_lines(tmp_path / "samples.jsonl")] == [0, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 4
    with pytest.raises(ValueError, match="before step 9"):
        Logger(tmp_path, {}, 12, HEADLINE, first_step=9)


def test_what_is_not_finite_becomes_null_and_is_named_once(tmp_path, capsys):
    with Logger(tmp_path, {}, 2, HEADLINE) as log:
        log.log_step(row(0, **{"loss/policy": math.nan, "staleness/hist": [1.0, math.inf]}))
        log.log_step(row(1, **{"loss/policy": np.float32("nan")}))
        log.log_samples(1, [{"reward": -math.inf}])
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert rows[0]["loss/policy"] is None and rows[0]["staleness/hist"] == [1.0, None]
    assert rows[1]["loss/policy"] is None
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": 1, "reward": None}]
    printed = capsys.readouterr().out
    assert printed.count("warning: loss/policy is not finite: null in metrics.jsonl\n") == 1
    assert "staleness/hist" in printed and "reward is not finite: null in samples.jsonl" in printed


def test_plain_output(tmp_path, capsys):
    with Logger(tmp_path, {}, 2, HEADLINE) as log:
        log.phase("engines: [loading]")
        log.warn("watch out")
        log.warn("watch out")
        log.log_step(row(0, **{"eval/toy/mean": 0.125}))
        log.log_step(row(1))
        log.summary({})
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "\x1b" not in printed
    assert re.fullmatch(r"\[ *\d+\.\d s\] engines: \[loading\]", lines[0])
    assert lines[1] == "warning: watch out"
    step = "step 0/2  reward/mean 0  staleness/mean 1  time/step 2  eval/toy/mean 0.125  eta 0:00:02"
    assert lines[2] == step
    assert lines[3] == "step 1/2  reward/mean 0.1  staleness/mean 1  time/step 2  eta 0:00:00"
    assert str(tmp_path) in lines[4] and "first 0  last 0.1" in printed


def test_each_step_has_one_line_however_fast_it_is(tmp_path, capsys):
    with Logger(tmp_path, {}, 100, HEADLINE) as log:
        for step in range(100):
            log.log_step(row(step, **({"eval/toy/mean": 0.5} if step == 50 else {})))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/100" for step in range(100)]
    assert [line.split()[1] for line in lines if "eval/toy/mean 0.5" in line] == ["50/100"]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 100


def test_flags_that_differ_from_those_of_the_run_that_goes_on_are_named(tmp_path, capsys):
    flags = {"lr": 0.1, "seed": 1, "data": {"eval_size": 128, "shuffle": True}, "save": {"resume": False}}
    with Logger(tmp_path, flags, 2, HEADLINE) as log:
        log.log_step(row(0))
    assert "warning" not in capsys.readouterr().out
    flags |= {"lr": 0.2, "data": {"eval_size": 64, "shuffle": True}, "save": {"resume": True}}
    with Logger(tmp_path, flags, 2, HEADLINE, first_step=1) as log:
        log.log_step(row(1))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    expected = {"warning: --lr was 0.1, now it is 0.2", "warning: --eval-size was 128, now it is 64"}
    assert set(warnings) == expected and len(warnings) == 2
    assert json.loads((tmp_path / "config.json").read_text())["flags"]["lr"] == 0.2


def test_a_kind_of_warning_is_printed_once_and_the_preview_shows_what_is_trained(tmp_path, capsys):
    sample = {"rollout_id": "0.1", "reward": 0.5, "invalid": None, "prompt": "Say [b]x", "transcript": "y\nz"}
    with Logger(tmp_path, {}, 2, HEADLINE) as log:
        log.warn("half of them are cut off", "truncated")
        log.warn("two thirds of them are cut off", "truncated")
        log.warn("nothing is learned", "equal rewards")
        log.preview([sample, sample | {"rollout_id": "0.2", "invalid": "env_died"}])
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 2 and "two thirds" not in printed
    assert "rollout 0.1: reward 0.5 " in printed and "rollout 0.2: reward 0.5 (invalid: env_died)" in printed
    assert "Say [b]x" in printed and "y\nz\n" in printed


def test_an_error_is_named_and_not_hidden(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="engine 1 died"):
        with Logger(tmp_path, {}, 9, HEADLINE) as log:
            log.log_step(row(0))
            log.log_step(row(1))
            raise RuntimeError("a long story\n  engine 1 died\n") from ValueError("in [1]\n  worse")
    told = capsys.readouterr().out.splitlines()
    assert told[-3:] == ["in [1]", "  worse", "run ended: RuntimeError:   engine 1 died"]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    assert (tmp_path / "curve.png").stat().st_size > 0 and not (tmp_path / "summary.json").exists()


def test_an_error_before_the_first_step_draws_nothing(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        with Logger(tmp_path, {}, 9, HEADLINE):
            raise KeyboardInterrupt
    assert "run ended: KeyboardInterrupt: (no message)" in capsys.readouterr().out
    assert not (tmp_path / "curve.png").exists()


def test_curve_shows_several_lines(tmp_path):
    with Logger(tmp_path, {}, 20, HEADLINE) as log:
        for step in range(20):
            log.log_step(row(step, **({"eval/toy/mean": step / 20} if step % 5 == 0 else {})))
        log.summary({})
    colors = Image.open(tmp_path / "curve.png").convert("RGB").getcolors(maxcolors=1 << 20)
    saturated = [color for count, color in colors if count > 100 and max(color) - min(color) > 100]
    assert len(saturated) >= 3  # blue, orange and green lines


def test_a_terminal_gets_a_live_line(tmp_path):
    script = (
        "from common.logger import Logger\n"
        f"with Logger({str(tmp_path)!r}, {{}}, 1, ('reward/mean',)) as log:\n"
        "    log.phase('engines')\n"
        "    log.log_step({'step': 0, 'reward/mean': 0.5})\n"
    )
    env = os.environ | {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "\x1b[" in done.stdout and "step 0/1" in done.stdout and "engines" in done.stdout
    assert re.search(r"^\[ *\d+\.\d s\] engines$", done.stdout, re.MULTILINE), "phases stay on the screen"


@given(st.lists(PAIRS, max_size=6), st.integers(0, 6))
def test_merging_does_not_depend_on_the_split(parts, cut):
    assert merge([merge(parts[:cut]), merge(parts[cut:])]) == merge(parts)
    assert merge(parts) == merge(parts[::-1])
    assert set(merge(parts)) == {key for pairs in parts for key in pairs}


@given(st.lists(PAIRS, max_size=6))
def test_a_mean_divides_the_whole_sum_once(parts):
    means = mean_of(merge(parts))
    for key in "abc":
        pairs = [pairs[key] for pairs in parts if key in pairs]
        count = sum(count for _, count in pairs)
        assert (key in means) == (count > 0)
        if count:
            assert means[key] == sum(value for value, _ in pairs) / count


def test_the_mean_of_unequal_parts_is_not_the_mean_of_means():
    assert mean_of(merge([{"a": (10.0, 1)}, {"a": (0.0, 9), "b": (0.0, 0)}])) == {"a": 1.0}
