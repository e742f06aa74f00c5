"""The records: a sampled token has an id, a log-prob and a version, or it is an error."""

import math

import numpy as np
import pytest

from common.sample import RecordError, Rollout, Segment, check_reward, extend_segment

IDS = [5, 6, 10]


def one_turn(logprobs, versions=(0, 0, 0), ids=IDS, context=(12, 7, 11, 13)):
    return extend_segment(None, list(context), ids, logprobs, np.asarray(versions, np.int32), "stop")


def rollout_of(*segments) -> Rollout:
    return Rollout("7.0", "g7", 7, "3", list(segments), [0.0])


@pytest.mark.parametrize("logprobs", [[-0.5, -1.0, -0.1], [-0.5, 0.0, -0.1], [-0.5, 3e-5, -0.1]])
def test_logprobs_up_to_rounding_above_zero_are_accepted(logprobs):
    segment = one_turn(logprobs)
    assert segment.action_mask.tolist() == [False] * 4 + [True] * 3
    assert segment.logprobs[4:].tolist() == np.float32(logprobs).tolist()


REJECTED = {
    "too short": [-0.5, -1.0],
    "too long": [-0.5, -1.0, -0.1, -0.1],
    "empty": [],
    "None": [-0.5, None, -0.1],
    "NaN": [-0.5, math.nan, -0.1],
    "-inf": [-0.5, -math.inf, -0.1],
    "positive": [-0.5, 0.3, -0.1],
}


@pytest.mark.parametrize("logprobs", REJECTED.values(), ids=REJECTED)
def test_a_missing_or_impossible_logprob_is_an_error_and_never_filled(logprobs):
    with pytest.raises(RecordError, match=r"position \d"):
        one_turn(logprobs)


def test_the_error_points_at_the_token():
    # row: 4 context tokens, then 3 sampled; the middle one is position 1 of the turn, 5 of the row
    with pytest.raises(RecordError, match="position (1 of the turn|5)"):
        one_turn([-0.5, None, -0.1])
    with pytest.raises(RecordError, match="position (1 of the turn|5)"):
        one_turn([-0.5, math.nan, -0.1])


def test_a_sampled_token_without_a_version_is_an_error():
    with pytest.raises(RecordError, match="position 6.*version"):
        one_turn([-0.5, -1.0, -0.1], versions=(0, 0, -1))
    with pytest.raises(RecordError):
        one_turn([-0.5, -1.0, -0.1], versions=(0, 0))


def test_an_empty_completion_is_legal_and_trains_nothing():
    segment = extend_segment(None, [12, 7], [], [], np.zeros(0, np.int32), "stop")
    assert segment.token_ids.tolist() == [12, 7]
    assert segment.num_actions == 0 and segment.finish_reason == "stop"
    assert segment.turn_ends == [2]


def test_a_second_turn_extends_the_row_and_leaves_the_first_record_alone():
    first = one_turn([-0.5, -1.0, -0.1], versions=(0, 0, 1))
    second = extend_segment(first, [11, 12], [2, 10], [-0.7, -0.2], np.array([1, 2]), "length")
    assert second.token_ids.tolist() == [12, 7, 11, 13, 5, 6, 10, 11, 12, 2, 10]
    assert second.action_mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert second.versions[second.action_mask].tolist() == [0, 0, 1, 1, 2]
    assert second.logprobs[second.action_mask].tolist() == np.float32([-0.5, -1, -0.1, -0.7, -0.2]).tolist()
    assert second.turn_ends == [7, 11] and second.finish_reason == "length"
    assert first.token_ids.tolist() == [12, 7, 11, 13, 5, 6, 10] and first.turn_ends == [7]


def test_arrays_of_unequal_length_make_no_segment():
    good = dict(
        token_ids=np.arange(3, dtype=np.int32), action_mask=np.zeros(3, bool),
        logprobs=np.zeros(3, np.float32), versions=np.full(3, -1, np.int32), turn_ends=[3],
        finish_reason="stop",
    )  # fmt: skip
    assert Segment(**good).num_actions == 0
    for name in ("action_mask", "logprobs", "versions"):
        with pytest.raises(RecordError, match=name):
            Segment(**good | {name: good[name][:2]})
    with pytest.raises(RecordError, match="turn ends at 4"):
        Segment(**good | {"turn_ends": [4]})


def test_the_length_of_a_rollout_counts_actions_over_all_segments():
    # masks 3 and 2 long, with context around them: 5 actions, not the span of 9 or the 18 tokens
    first = one_turn([-0.5, -1.0, -0.1])
    both = extend_segment(first, [11, 12, 4, 11], [2, 10], [-0.7, -0.2], [0, 0], "stop")
    assert rollout_of(both).num_actions == 5
    fork = one_turn([-0.1, -0.1, -0.1], context=(1, 2, 3))
    assert rollout_of(both, fork).num_actions == 8
    assert rollout_of().num_actions == 0 and not rollout_of().truncated


def test_the_reward_of_an_episode_is_the_exact_sum_over_its_turns():
    # in floating point 0.1 + 0.2 + 0.3 depends on the order (0.6000000000000001 or 0.6); equal ones must tie
    rollouts = [Rollout("0.0", "g0", 0, "0", [], rewards) for rewards in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert rollouts[0].reward == rollouts[1].reward


def test_lags_are_per_sampled_token_and_a_version_from_the_future_is_an_error():
    segment = one_turn([-0.5, -1.0, -0.1], versions=(3, 3, 4))
    assert rollout_of(segment, segment).lags(5).tolist() == [2, 2, 1, 2, 2, 1]
    assert rollout_of().lags(5).tolist() == []
    with pytest.raises(RecordError, match="7.0.*version 4.*newest is 3"):
        rollout_of(segment).lags(3)


@pytest.mark.parametrize("value, expected", [(0.0, 0.0), (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5),
                                             (np.bool_(False), 0.0), (np.int64(-2), -2.0)])  # fmt: skip
def test_finite_numbers_and_truth_values_are_rewards(value, expected):
    reward = check_reward(value)
    assert reward == expected and type(reward) is float


@pytest.mark.parametrize("value", [None, "1.0", math.nan, math.inf, -math.inf, [1.0], np.float32("nan")])
def test_everything_else_is_no_reward(value):
    with pytest.raises(RecordError, match="reward is"):
        check_reward(value)
