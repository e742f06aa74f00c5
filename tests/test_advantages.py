"""Group advantages: exact zeros for constant groups, an unbiased std, nothing but the group's own rewards."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.grpo import group_advantages
from common import checks


@pytest.mark.parametrize("reward, size", [(0.7, 8), (0.95, 7), (0.3, 6), (0.85, 12), (0.0, 4), (-3.7, 2)])
def test_a_constant_group_has_advantages_of_exactly_zero(reward, size):
    # in fp32 the mean of eight 0.7 is 0.69999993, and dividing that rest by an epsilon gives 0.06 to 0.8
    for kind in (float, np.float32):
        advantages = group_advantages([kind(reward)] * size)
        assert advantages == [0.0] * size


def test_the_std_is_the_unbiased_one():
    # mean 3/8; squared deviations 3 * (5/8)^2 + 5 * (3/8)^2 = 120/64; over 7: std sqrt(15/56)
    rewards = [1, 0, 0, 1, 1, 0, 0, 0]
    advantages = group_advantages(rewards)
    expected = [1.2076147 if reward else -0.7245688 for reward in rewards]
    # with the biased std it would be 1.2909918, with an epsilon of 1e-6 1.2076124
    assert advantages == pytest.approx(expected, abs=1e-6)
    assert sum(advantages) == pytest.approx(0, abs=1e-12)


def test_a_group_is_measured_by_its_own_rewards_whatever_the_order():
    # [1, 0]: mean .5, std sqrt(.5); [2, 2] is constant
    assert group_advantages([1.0, 0.0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-6)
    assert group_advantages([2.0, 2.0]) == [0.0, 0.0]


def test_three_valid_rollouts_of_four_are_a_group_of_three():
    # [1, 0, 0]: mean 1/3, squared deviations 6/9 over 2: std .5773503
    assert group_advantages([1.0, 0.0, 0.0]) == pytest.approx([1.1547005, -0.5773503, -0.5773503], abs=1e-6)


def test_a_single_rollout_or_none_has_nothing_to_be_compared_with():
    assert group_advantages([1.0]) == [0.0]
    assert group_advantages([]) == []


@pytest.mark.parametrize("size", [1, 0, -1])
def test_a_group_of_one_is_refused_at_parse_time(size):
    with pytest.raises(checks.FlagError, match="--group-size"):
        checks.check_group_size(size)
    checks.check_group_size(2)


@given(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=9), st.randoms())
def test_advantages_follow_their_rewards_through_any_permutation(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    advantages = group_advantages(rewards)
    permuted = group_advantages([rewards[i] for i in order])
    assert permuted == pytest.approx([advantages[i] for i in order], abs=1e-12)
    # quarters are exact in floating point, so the formula in integers of 1/4 is exact up to the root
    n, quarters = len(rewards), [round(4 * reward) for reward in rewards]
    variance = (n * sum(q * q for q in quarters) - sum(quarters) ** 2) / (n * (n - 1))
    for quarter, advantage in zip(quarters, advantages):
        expected = (quarter - sum(quarters) / n) / math.sqrt(variance) if variance else 0.0
        assert advantage == pytest.approx(expected, abs=1e-12)
