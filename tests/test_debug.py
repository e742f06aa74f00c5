"""Recorded rollouts, the plan of a run, advice, evaluation scores, and where metrics go besides files."""

import json
import math
import sys
import tempfile
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.debug import batch_plan, dump_rollouts, read_rollouts, traced
from common.evaluate import pass_at_k, score_metrics
from common.logger import Logger, LogFlags
from common.metrics import advice
from common.sample import Rollout, Segment
from common.trackers import open_trackers

# --- Recorded rollouts

TEXT = st.text(st.characters(), max_size=8)  # surrogates, line separators and NUL among them
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ARRAYS = {"token_ids": np.int32, "action_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


@st.composite
def segments(draw):
    mask = draw(st.lists(st.booleans(), max_size=6))
    logprob, version = st.floats(-(2.0**100), 0, width=32), st.integers(0, 2**31 - 1)
    ends = [position + 1 for position, sampled in enumerate(mask) if sampled]
    top_k = np.array([[[draw(logprob)] * 2] * 3 for _ in mask], np.float32).reshape(len(mask), 3, 2)
    return Segment(
        token_ids=np.array([draw(st.integers(0, 2**31 - 1)) for _ in mask], np.int32),
        action_mask=np.array(mask, bool),
        logprobs=np.array([draw(logprob) if sampled else 0.0 for sampled in mask], np.float32),
        versions=np.array([draw(version) if sampled else -1 for sampled in mask], np.int32),
        turn_ends=ends[-1:],
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        top_k=draw(st.sampled_from([top_k, None])),
    )


ROLLOUTS = st.lists(
    st.builds(
        Rollout,
        rollout_id=TEXT, group_id=TEXT, ticket=st.integers(-1, 2**40), prompt_id=TEXT,
        segments=st.lists(segments(), max_size=3), rewards=st.lists(NUMBERS.filter(lambda reward: abs(reward) < 1e300), max_size=3),
        info=st.dictionaries(TEXT, st.one_of(NUMBERS, TEXT, st.integers(), st.none(), st.lists(TEXT))),
        invalid=st.none() | TEXT,
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS, st.integers(0, 10**7))
def test_recorded_rollouts_come_back_to_the_last_bit(rollouts, step):
    with tempfile.TemporaryDirectory() as folder:
        dump_rollouts(f"{folder}/new/dump", step, rollouts)
        again = read_rollouts(f"{folder}/new/dump", step)
    assert len(again) == len(rollouts)
    for before, after in zip(rollouts, again):
        assert len(before.segments) == len(after.segments)
        for one, two in zip(before.segments, after.segments):
            for name, dtype in ARRAYS.items():
                assert getattr(two, name).dtype == dtype
                assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
            assert (one.turn_ends, one.finish_reason) == (two.turn_ends, two.finish_reason)
            assert (one.top_k is None) == (two.top_k is None)
            if one.top_k is not None:
                assert two.top_k.dtype == np.float32 and one.top_k.tobytes() == two.top_k.tobytes()
        assert {**vars(before), "segments": []} == {**vars(after), "segments": []}
        assert math.copysign(1, before.reward) == math.copysign(1, after.reward)


def test_steps_are_files_of_their_own_and_one_that_was_not_recorded_is_an_error(tmp_path):
    rollouts = [Rollout(f"{step}.0", f"g{step}", step, "0", [], [0.1 * step]) for step in range(3)]
    for step, rollout in enumerate(rollouts):
        dump_rollouts(str(tmp_path), step, [rollout])
    assert [read_rollouts(str(tmp_path), step)[0].rewards for step in range(3)] == [[0.0], [0.1], [0.2]]
    with pytest.raises(FileNotFoundError):
        read_rollouts(str(tmp_path), 3)


# --- The plan and the trace


def test_the_plan_of_a_run_is_its_arithmetic():
    # 16 x 8 = 128 rollouts, in 4 minibatches of 32, twice: 8 updates, 960 in 120 steps; 1,920 prompts of 256
    lines = batch_plan(16, 8, 4, 2, 120, 256).splitlines()
    assert lines == [
        "a step: 16 prompts x 8 = 128 rollouts",
        "updates: 2 epochs x 4 minibatches of 32 rollouts = 8 a step, 960 in 120 steps",
        "data: 1920 prompts, 7.5 passes over 256 training tasks",
    ]


def test_a_trace_is_json_with_what_ran_in_its_block_alone(tmp_path):
    path = tmp_path / "profile" / "step_1" / "rank0.json"
    torch.ones(3).cos()
    with traced(str(path)):
        torch.ones(3).sin()
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::sin" in names and "aten::cos" not in names
    with traced(None):
        pass
    assert [file.name for file in tmp_path.rglob("*.json")] == ["rank0.json"]


# --- Advice


def rollout(invalid=None, **info) -> Rollout:
    return Rollout("0.0", "g0", 0, "0", [], [], info, invalid)


FINE = {"reward/zero_std_group_frac": 0.5, "reward/mean": 0.25, "reward/std": 0.4}
FINE |= {"rollout/truncated_frac": 0.5}
CASES = {
    "nothing": ({}, [rollout()], {}, {}),
    "an error": (
        {}, [rollout(), rollout("env_error", error="Traceback\n  line 3\nKeyError: 'x'\n")], {},
        {"env_error": ["some rollouts are invalid (env_error): KeyError: 'x'"]},
    ),
    "a dropped group": ({}, [rollout()], {"timeout": (4, "not over after 600 s")},
                        {"timeout": ["some groups were left out (timeout): not over after 600 s"]}),
    "both": ({}, [rollout("bad_reward", error="reward is nan")], {"env_died": (1, "died in step()")},
             {"bad_reward": ["reward is nan"], "env_died": ["died in step()"]}),
    "late": ({}, [rollout("late")], {}, {}),
    "no detail": ({}, [rollout()], {"constant": (1, "")}, {"constant": ["constant"]}),
    "a word of the user's": ({}, [rollout("late", error="")], {}, {"late": ["late"]}),
    "equal rewards": ({"reward/zero_std_group_frac": 1.0}, [rollout()], {},
                      {"equal rewards": ["mean 0.25", "--group-size", "now 8", "--temperature"]}),
    "equal rewards, and a teacher": ({"reward/zero_std_group_frac": 1.0, "reward/std": 0.0, "loss/teacher_kl": 0.1},
                                     [rollout()], {}, {}),
    "a weight of 1e5 among 1e4 of 1": (
        # (1e4 + 1e5)^2 / (1e4 (1e4 + 1e10)) = .000121; 1e5 / 1.1e5 = .909
        {"is/ess": 0.000121, "is/max_weight": 1e5, "is/max_share": 0.909}, [rollout()], {},
        {"few tokens weigh": ["1e+05", "90.9%", "0.00012", "--max-weight", "--correction tis"]},
    ),
    "a weight of 100 among 1e4 of 1": (
        {"is/ess": 0.51, "is/max_weight": 100.0, "is/max_share": 0.0099}, [rollout()], {}, {},
    ),
    "a weight of 100 among 900 of 1": (
        # (900 + 100)^2 / (901 (900 + 1e4)) = .102, so that the size alone would not tell
        {"is/ess": 0.102, "is/max_weight": 100.0, "is/max_share": 0.1}, [rollout()], {},
        {"few tokens weigh": ["largest 100", "10.0%", "0.1"]},
    ),
    "ten tokens in all": ({"is/ess": 1.0, "is/max_weight": 1.0, "is/max_share": 0.1}, [rollout()], {}, {}),
    "most tokens dropped, the others at 1": (
        {"is/ess": 0.05, "is/max_weight": 1.9, "is/max_share": 0.01}, [rollout()], {}, {},
    ),
    "everything dropped": ({"is/dropped_frac": 1.0, "is/max_weight": 0.0}, [rollout()], {},
                           {"all rejected": ["100%", "--correction-cap"]}),
    "most rollouts rejected": ({"gate/rejected_frac": 0.6}, [rollout()], {},
                               {"rejected": ["60%", "--correction-cap", "--delta", "--max-staleness"]}),
    "a few tokens dropped": ({"is/dropped_frac": 0.4}, [rollout()], {}, {}),
    "cut off": ({"rollout/truncated_frac": 0.75}, [rollout()], {},
                {"truncated": ["75%", "--max-new-tokens", "now 16"]}),
}  # fmt: skip


@pytest.mark.parametrize("change, rollouts, drops, expected", CASES.values(), ids=CASES)
def test_advice(change, rollouts, drops, expected):
    found = advice(FINE | change, rollouts, drops, 8, 16)
    assert found.keys() == expected.keys()
    for kind, parts in expected.items():
        assert all(part in found[kind] for part in parts), found[kind]
        assert "\n" not in found[kind]


def test_a_step_without_a_valid_rollout_gets_no_advice_about_its_rewards():
    assert advice({"rollout/truncated_frac": 0.0}, [rollout()], {}, 8, 16) == {}


# --- Scores


@pytest.mark.parametrize(
    "n, c, k, expected",
    [
        (4, 1, 2, 1 - 3 / 6),  # of six pairs three miss the right one
        (4, 2, 2, 1 - 1 / 6),
        (4, 0, 2, 0.0),
        (4, 4, 2, 1.0),
        (4, 3, 2, 1.0),  # no two wrong ones
        (5, 1, 1, 0.2),
        (8, 1, 8, 1.0),
        (8, 3, 4, 1 - 5 / 70),
        (10, 2, 3, 1 - 56 / 120),
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_the_choices_with_a_right_one(right, data):
    from itertools import combinations

    k = data.draw(st.integers(1, len(right)))
    choices = [any(choice) for choice in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(choices) / len(choices))


def test_the_score_is_the_mean_over_the_tasks_of_all_engines_with_its_interval():
    # 1, 0, 1 and 0.5: mean .625, squared deviations .140625 + .390625 + .140625 + .015625 = .6875 over 3
    metrics = score_metrics("eval/toy", [[[1.0], [0.0], [1.0]], [[0.5]], []])
    expected = 1.96 * math.sqrt(0.6875 / 3) / 2
    assert metrics == {"eval/toy/mean": 0.625, "eval/toy/ci95": pytest.approx(expected, abs=1e-12)}
    assert score_metrics("e", [[[1.0]] * 5])["e/ci95"] == 0
    assert score_metrics("e", [[[0.5]]]) == {"e/mean": 0.5, "e/ci95": 1.0}, "one task says nothing"


def test_sampled_scores_give_avg_and_pass_at_powers_of_two():
    # right ones of four: 1, 0, 4; the 0.9 is not right. pass@2: 1/2, 0, 1; pass@4: 1, 0, 1
    shares = [[[0.0, 1, 0, 0, 0], [1.0, 0.9, 0, 0, 0]], [[1.0, 1, 1, 1, 1]]]
    metrics = score_metrics("eval/toy", shares)
    expected = {"mean": 2 / 3, "avg@4": 5.9 / 12, "pass@2": 0.5, "pass@4": 2 / 3}
    expected["ci95"] = 1.96 * math.sqrt(1 / 3) / math.sqrt(3)
    assert metrics == pytest.approx({f"eval/toy/{name}": value for name, value in expected.items()})
    three = score_metrics("e", [[[0.0, 1.0, 0.0, 0.0]]])
    assert three["e/pass@2"] == pytest.approx(2 / 3) and "e/pass@4" not in three and "e/avg@3" in three
    assert set(score_metrics("e", [[[0.0, 1.0]]])) == {"e/mean", "e/ci95", "e/avg@1"}


# --- Trackers


def logged(flags: LogFlags, steps: int, samples: int = 2) -> None:
    """A run of `steps` steps with `samples` samples each."""
    trackers = open_trackers(flags, {"lr": 0.1})
    with Logger(flags.output_dir, {"lr": 0.1}, steps, ("reward/mean",), 0, trackers) as log:
        for step in range(steps):
            log.log_step({"step": step, "reward/mean": step / 4, "loss/policy": math.nan, "hist": [1, 2]})
            sample = {"prompt": "q", "transcript": f"line one\n# of step {step}", "reward": 1.0}
            log.log_samples(step, [sample | {"advantage": None}] * samples)


def test_tensorboard_files_have_every_metric_of_every_step(tmp_path):
    logged(LogFlags(output_dir=str(tmp_path)), 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step", "reward/mean"}, "no list, and nothing that is not finite"
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(0, 0.0), (1, 0.25), (2, 0.5)]
    texts = events.Tensors("samples/1/text_summary")
    assert [event.step for event in texts] == [0, 1, 2]
    assert texts[2].tensor_proto.string_val == [b"    line one\n    # of step 2"]


def test_no_tracker_leaves_no_file(tmp_path):
    logged(LogFlags(output_dir=str(tmp_path), tensorboard=False), 2)
    assert open_trackers(LogFlags(output_dir=str(tmp_path), tensorboard=False), {}) == []
    assert not (tmp_path / "tensorboard").exists()


class FakeHost(ModuleType):
    """wandb's or trackio's calls, counted."""

    def __init__(self, name: str):
        super().__init__(name)
        self.started, self.calls, self.rows, self.finished = [], [], [], 0

    def init(self, **how) -> None:
        self.started.append(how)

    def log(self, values: dict, step: int) -> None:
        self.calls.append((step, values))

    def Table(self, columns: list[str], data: list[list[str]]) -> list:
        assert all(len(row) == len(columns) for row in data)
        self.rows.append(len(data))
        return data

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_hosted_tracker_gets_each_step_and_each_sample_once(tmp_path, monkeypatch, package):
    host = FakeHost(package)
    monkeypatch.setitem(sys.modules, package, host)
    flags = LogFlags(output_dir=str(tmp_path / "run7"), tensorboard=False, **{f"{package}_project": "toys"})
    logged(flags, 20, samples=3)
    assert host.started == [{"project": "toys", "name": "run7", "config": {"lr": 0.1}}]
    scalars = [(step, values) for step, values in host.calls if "samples" not in values]
    assert scalars == [(step, {"step": step, "reward/mean": step / 4}) for step in range(20)]
    tables = [(step, values["samples"]) for step, values in host.calls if "samples" in values]
    assert [step for step, _ in tables] == (list(range(20)) if package == "wandb" else [])
    assert sum(host.rows) == (60 if package == "wandb" else 0), "630 rows would repeat all steps before"
    for step, table in tables:
        assert table == [["q", f"line one\n# of step {step}", "1.0", "None"]] * 3
    assert host.finished == 1


def test_a_run_that_fails_closes_its_trackers(tmp_path, monkeypatch):
    host = FakeHost("wandb")
    monkeypatch.setitem(sys.modules, "wandb", host)
    trackers = open_trackers(LogFlags(output_dir=str(tmp_path), wandb_project="toys"), {})
    assert len(trackers) == 2
    with pytest.raises(RuntimeError, match="engine 0 died"):
        with Logger(str(tmp_path), {}, 3, ("reward/mean",), 0, trackers) as log:
            log.log_step({"step": 0, "reward/mean": 0.5})
            raise RuntimeError("engine 0 died")
    assert host.finished == 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("reward/mean")] == [0.5]
