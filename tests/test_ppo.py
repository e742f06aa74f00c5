"""PPO: GAE over actions alone, losses by a formula, a value head that trains, whole steps by an oracle.

The ranks of the whole steps are processes with a gloo group.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig

from algos.ppo import (
    Args,
    Trainer,
    check_flags,
    explained_variance,
    gae,
    make_minibatches,
    make_rows,
    policy_loss,
    turn_rewards,
    value_loss,
    whiten,
)
from common.checks import FlagError
from common.critic import build_critic, put_value_head, values
from common.logger import LogFlags, mean_of, merge
from common.models import make_tiny
from common.parallel import ParallelFlags, build_model, clip_gradients, join_world
from common.refit import open_store
from common.sample import RecordError, Rollout, Segment
from tests.ranks import on_two_ranks

F64, NAN = torch.float64, math.nan


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


# --- GAE: values by hand

MASK = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
REWARDS = [0.0, 0, 0, 0, 0, 1]


def episode(between=(9.0, -9.0), last=0.0, rewards=REWARDS):
    """Four actions with values .5 .4 .3 .2 and two tokens between, whose values are `between`."""
    values = tensor([[0.5, 0.4, *between, 0.3, 0.2]])
    return gae(tensor([rewards]), values, MASK, tensor([last]), 1.0, 0.9)


def test_time_runs_over_actions_alone():
    # delta -.1 -.1 -.1 .8; from the end .8, -.1 + .9 x .8 = .62, -.1 + .9 x .62 = .458, .3122
    advantages, returns = episode()
    message = ".2465 .3850 steps through tool output, .1655 .2950 through zeros in its place"
    assert advantages[0].tolist() == pytest.approx([0.3122, 0.458, 0, 0, 0.62, 0.8], abs=1e-12), message
    assert returns[0].tolist() == pytest.approx([0.8122, 0.858, 0, 0, 0.92, 1.0], abs=1e-12)
    for wrong in ([0.2465, 0.3850], [0.1655, 0.2950]):
        assert np.abs(advantages[0, :2].numpy() - wrong).min() > 0.05, message


@pytest.mark.parametrize("between", [(0.0, 0.0), (NAN, NAN), (math.inf, -math.inf), (1e30, 7.0)])
def test_what_stands_between_actions_changes_nothing(between):
    for one, two in zip(episode(), episode(between)):
        assert torch.equal(one, two)
    for one, two in zip(episode(), episode(between, rewards=[0, 0, *between, 0, 1])):
        assert torch.equal(one, two)


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_more_tokens_between_actions_change_nothing(place):
    def insert(row, filling):
        return torch.cat([row[:, :place], torch.full((1, 5), filling, dtype=row.dtype), row[:, place:]], 1)

    values = tensor([[0.5, 0.4, 9, -9, 0.3, 0.2]])
    mask, rewards, values = insert(MASK, False), insert(tensor([REWARDS]), NAN), insert(values, NAN)
    advantages, returns = gae(rewards, values, mask, tensor([0.0]), 1.0, 0.9)
    assert advantages[mask].tolist() == pytest.approx([0.3122, 0.458, 0.62, 0.8], abs=1e-12)
    assert returns[mask].tolist() == pytest.approx([0.8122, 0.858, 0.92, 1.0], abs=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


@pytest.mark.parametrize(
    "last, expected", [(0.25, [-0.23455, -0.1495, -0.055, 0.05]), (0.0, [-0.4168, -0.352, -0.28, -0.2])]
)
def test_a_cut_episode_ends_with_the_value_it_is_given(last, expected):
    # reward 0; with V = .25 after the end the last delta is .25 - .2, without it -.2
    advantages, _ = episode(last=last, rewards=[0.0] * 6)
    assert advantages[MASK].tolist() == pytest.approx(expected, abs=1e-12)


# --- GAE: against a loop


def oracle_gae(steps: list[tuple[float, float]], last: float, gamma: float, lam: float) -> list[float]:
    """Advantages of one rollout from its (reward, value) pairs, one an action, in Python's float64."""
    advantages, following, value_after = [], 0.0, last
    for reward, value in reversed(steps):
        following = reward + gamma * value_after - value + gamma * lam * following
        advantages.append(following)
        value_after = value
    return advantages[::-1]


DECAYS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5), (0.5, 1.0)]


@pytest.mark.parametrize("gamma, lam", DECAYS)
@pytest.mark.parametrize("seed", [0, 1])
def test_gae_equals_a_loop_on_any_ragged_batch(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    counts = [0, 1, 31, 32, 33, 64, 300, int(rng.integers(2, 40))]
    length = 420
    mask = np.zeros((len(counts), length), bool)
    for row, count in zip(mask, counts):
        row[rng.choice(length, count, replace=False)] = True
    rewards, states = rng.normal(size=mask.shape), rng.normal(size=mask.shape)
    last = rng.normal(size=len(counts))
    last[::2] = 0.0
    expected = [oracle_gae(list(zip(r[m], v[m])), end, gamma, lam)
                for r, v, m, end in zip(rewards, states, mask, last)]  # fmt: skip
    rewards[~mask] = states[~mask] = NAN
    for dtype, tolerance in ((F64, 1e-12), (torch.float32, 1e-5)):
        parts = [torch.tensor(x).to(dtype) for x in (rewards, states, last)]
        advantages, returns = gae(*parts[:2], torch.tensor(mask), parts[2], gamma, lam)
        assert advantages.dtype == returns.dtype == dtype
        assert not advantages[~torch.tensor(mask)].any()
        for row, row_returns, m, v, wanted in zip(advantages, returns, mask, states, expected):
            scale = max(map(abs, wanted), default=1.0)
            np.testing.assert_allclose(row[m], wanted, rtol=0, atol=tolerance * scale)
            np.testing.assert_allclose(row_returns[m], wanted + v[m], rtol=0, atol=tolerance * (scale + 4))


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.999), (0.99, 0.95)])
def test_a_long_rollout_is_exact_in_single_precision(gamma, lam):
    rng = np.random.default_rng(3)
    rewards, states = np.where(rng.random(16_384) < 0.001, 1.0, 0.0), rng.normal(0.5, 0.3, 16_384)
    states = states.astype(np.float32).astype(float)
    expected = np.array(oracle_gae(list(zip(rewards, states)), 0.0, gamma, lam))
    rows = [torch.tensor(x, dtype=torch.float32)[None] for x in (rewards, states)]
    advantages, _ = gae(*rows, torch.ones(1, 16_384, dtype=torch.bool), torch.zeros(1), gamma, lam)
    assert np.abs(advantages[0].numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_rollouts_without_a_single_action_are_all_zero():
    nothing, garbage = torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), NAN)
    advantages, returns = gae(garbage, garbage, nothing, torch.ones(2), 1.0, 0.9)
    assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2


def test_discounted_sums_by_hand():
    # without values: 1 + .5 x 2 + .25 x 4 = 3; 2 + .5 x 4 = 4
    def sums(terms, decay):
        row = tensor([terms])
        return gae(row, torch.zeros_like(row), torch.ones_like(row).bool(), tensor([0.0]), 1.0, decay)[0][0]

    assert sums([1, 2, 4], 0.5).tolist() == [3, 4, 4]
    assert sums([1, 2, 4], 0.0).tolist() == [1, 2, 4]
    for length in (1, 2, 3, 64, 101):
        assert sums([1] * length, 1.0).tolist() == list(range(length, 0, -1))


# --- From rollouts to advantages


def segment(sampled: str, ends: list[int], finish="stop", trained: str | None = None) -> Segment:
    """One character a token: x sampled, . context."""
    mask, versions = np.array([c == "x" for c in sampled]), np.array([0 if c == "x" else -1 for c in sampled])
    used = mask if trained is None else np.array([c == "x" for c in trained])
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    return Segment(np.arange(len(sampled), dtype=np.int32), used, logprobs, versions, ends, finish)


def rollout(segments: list[Segment], rewards: list[float], number=0) -> Rollout:
    return Rollout(f"0.{number}", "g0", 0, "0", segments, rewards)


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "0")  # joining overwrites them; this puts them back
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        join_world(0, 1, torch.distributed.HashStore(), torch.device("cpu"), 60.0)
        yield
        torch.distributed.destroy_process_group()


class NumberedCritic(torch.nn.Module):
    """The value after a token is the number that its id has."""

    config = PreTrainedConfig(attn_implementation="sdpa")

    def __init__(self, numbers: torch.Tensor):
        super().__init__()
        self.numbers = numbers

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.numbers[input_ids][..., None])


def look_ahead(batch: list[Rollout], after: list[list[np.ndarray]], args: Args) -> tuple[dict, dict]:
    """What a step's rows get under a critic whose value after token t of segment s of rollout r is
    `after[r][s][t]`: (arrays of all tokens but each segment's first, in order; metrics)."""
    table, count = [NAN], 1  # a token's id is its place in the table; 0 is padding
    for played, states in zip(batch, after):
        for part, numbers in zip(played.segments, states):
            part.token_ids = np.arange(count, count + len(numbers), dtype=np.int32)
            table, count = [*table, *numbers], count + len(numbers)
    trainer, numbers = Trainer(args, "", 0, False), torch.tensor(np.array(table, np.float32))
    trainer.critic = NumberedCritic(numbers)
    ((minibatches, episodes),) = make_minibatches(make_rows(batch, args)[0], args, 0)
    batches = [batch for batches, _ in minibatches for batch in batches]
    metrics = trainer.look_ahead(batches, episodes)
    flat = {name: torch.full((count,), NAN) for name in ("advantages", "returns", "old_values")}
    for rows in batches:
        for index, ids in enumerate(rows["token_ids"].long()):
            used = ids[1:][ids[1:] > 0]
            for name, column in flat.items():
                column[used] = rows[name][index, : len(used)]
    return {name: column[1:].numpy() for name, column in flat.items()}, metrics


def test_a_turns_reward_sits_on_its_last_action():
    forked = rollout([segment("..xx.xxx", [4, 8]), segment("...x.x", [4, 6])], [1, 2, 3, 4])
    assert turn_rewards(forked).tolist() == [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 4]


def test_an_episodes_reward_goes_to_its_last_action():
    assert turn_rewards(rollout([segment(".xx.x", [3, 5])], [7])).tolist() == [0, 0, 0, 0, 7]
    # nothing sampled at the end: one token back
    assert turn_rewards(rollout([segment(".xx.x.", [3, 6])], [7])).tolist() == [0, 0, 0, 0, 7, 0]
    # an empty turn: its reward joins that of the turn before it, and before any action it has no cause
    assert turn_rewards(rollout([segment(".x.", [2, 3])], [1, 2])).tolist() == [0, 3, 0]
    assert turn_rewards(rollout([segment("..x", [1, 3])], [1, 2])).tolist() == [0, 0, 2]


def test_rewards_that_do_not_match_the_turns_are_an_error():
    with pytest.raises(RecordError, match="0.0: 2 rewards for 3 turns"):
        turn_rewards(rollout([segment(".x.x.x", [2, 4, 6])], [1, 2]))


def test_the_token_past_the_last_action_gets_no_share_of_the_reward(world):
    # the four actions of the table by hand, a trailing token, the episode's reward given once
    played = rollout([segment(".xx..xx.", [3, 8])], [1.0])
    after = np.array([0.5, 0.4, NAN, NAN, 0.3, 0.2, NAN, NAN], np.float32)  # V after each token
    got, metrics = look_ahead([played], [[after]], Args(lam=0.9))
    action = np.flatnonzero(played.segments[0].action_mask)
    assert (got["returns"] - got["old_values"])[action] == pytest.approx([0.3122, 0.458, 0.62, 0.8], abs=1e-6)
    # mean .54755, unbiased std .21007
    raw = np.array([0.3122, 0.458, 0.62, 0.8])
    expected = (raw - raw.mean()) / math.sqrt(((raw - raw.mean()) ** 2).sum() / 3)
    assert got["advantages"][action] == pytest.approx(expected, abs=1e-5)
    assert not got["advantages"][[3, 4, 7]].any()
    assert [float(x) for x in metrics["advantage/abs_mean"]] == [pytest.approx(raw.sum()), 4]
    returns, values = raw + [0.5, 0.4, 0.3, 0.2], np.array([0.5, 0.4, 0.3, 0.2])
    assert metrics["value/explained_var"] == (pytest.approx(1 - raw.var() / returns.var(), abs=1e-5), 1), (
        values
    )


@pytest.mark.parametrize("gamma, lam", DECAYS)
@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("white", [False, True])
def test_segments_turns_and_cut_episodes_of_any_batch(world, gamma, lam, bootstrap, white):
    rng = np.random.default_rng([7, int(bootstrap)])
    batch, after, raw = [], [], []
    for number in range(9):
        segments, rewards, states, steps = [], [], [], []
        for _ in range(int(rng.integers(1, 4))):
            sampled, ends = "", []
            for _ in range(int(rng.integers(1, 4))):
                sampled += "." * int(rng.integers(1, 6)) + "x" * int(rng.integers(1, 40))
                ends.append(len(sampled))
            trained = "".join("." if rng.random() < 0.1 else token for token in sampled)
            finish = "length" if number % 2 else "stop"
            segments.append(segment(sampled, ends, finish, trained))
            states.append(rng.normal(size=len(sampled)).astype(np.float32))
            for position, token in enumerate(sampled):
                if token == "x":  # sampled in the state after the token before it
                    steps.append([0.0, float(states[-1][position - 1])])
                if position + 1 in ends:
                    rewards.append(float(rng.integers(-3, 4)))
                    steps[-1][0] = rewards[-1]
        last = float(states[-1][-1]) if bootstrap and number % 2 else 0.0
        batch.append(rollout(segments, rewards, number))
        after.append(states)
        raw.append(oracle_gae(steps, last, gamma, lam))
    args = Args(gamma=gamma, lam=lam, bootstrap_truncated=bootstrap, whiten=white)
    args.parallel.micro_batch_tokens = 200
    got, metrics = look_ahead(batch, after, args)
    parts = [part for played in batch for part in played.segments]
    trained, action = (np.concatenate(x) for x in zip(*((p.action_mask, p.versions >= 0) for p in parts)))
    wide = np.zeros(len(action))
    wide[action] = np.concatenate(raw)
    used = wide[trained]
    expected = (wide - used.mean()) / used.std(ddof=1) if white else wide
    np.testing.assert_allclose(got["advantages"][trained], expected[trained], rtol=0, atol=1e-4)
    before = np.concatenate([np.r_[0, states[:-1]] for row in after for states in row])
    np.testing.assert_array_equal(got["old_values"][action], before[action])
    np.testing.assert_allclose(got["returns"][action], (wide + before)[action], rtol=0, atol=1e-4)
    assert float(metrics["advantage/abs_mean"][1]) == trained.sum()
    explained = 1 - used.var() / (wide + before)[trained].var()
    assert metrics["value/explained_var"] == (pytest.approx(explained, abs=1e-4), 1)


# --- Whitening


def test_whitening_by_hand():
    # 1 3 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4
    advantages, mask = tensor([[1, NAN, 3], [5, math.inf, NAN]]), torch.tensor([[1, 0, 1], [1, 0, 0]]).bool()
    assert whiten(advantages, mask).tolist() == [[-1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("value", [0.7, 0.0, -3.3])
def test_equal_advantages_are_exactly_zero(value):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for dtype in (torch.float32, F64):
        assert not whiten(torch.full((2, 3), value, dtype=dtype), mask).any()
    assert not whiten(torch.full((2, 3), value), torch.zeros(2, 3).bool()).any()
    assert not whiten(torch.full((1, 1), value), torch.ones(1, 1).bool()).any(), "one alone has no std"


def test_whitening_does_not_depend_on_how_the_batch_is_laid_out():
    rng = np.random.default_rng(0)
    rows = [rng.normal(2, 3, int(n)) for n in rng.integers(1, 30, 10)]
    flat = np.concatenate(rows)
    expected = (flat - flat.mean()) / flat.std(ddof=1)
    for order in (range(10), rng.permutation(10)):
        for width in (30, 77):
            padded = torch.full((10, width), NAN, dtype=F64)
            for place, index in enumerate(order):
                padded[place, : len(rows[index])] = torch.tensor(rows[index])
            white = whiten(padded, ~padded.isnan())
            assert white.sum().abs() < 1e-9
            got = {index: white[place, : len(rows[index])] for place, index in enumerate(order)}
            np.testing.assert_allclose(np.concatenate([got[i] for i in range(10)]), expected, atol=1e-12)


# --- Losses against the formula


def policy_oracle(log_ratio, weight, advantage, low, high) -> tuple[float, float]:
    """Loss of one token and its derivative by log pi. A log-ratio past +-20 is constant."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = -weight * min(ratio * advantage, clipped * advantage)
    flat = clipped * advantage < ratio * advantage or abs(log_ratio) > 20
    return value, 0.0 if flat else -weight * ratio * advantage


def value_oracle(value, old, target, clip) -> tuple[float, float, bool]:
    """Loss of one token, its derivative by the value, and whether the clip holds it."""
    clipped = min(max(value, old - clip), old + clip)
    if (clipped - target) ** 2 > (value - target) ** 2:
        return (clipped - target) ** 2 / 2, 0.0, True
    return (value - target) ** 2 / 2, value - target, False


LOG_RATIOS = st.one_of(st.floats(-1.5, 1.5), st.sampled_from([0.0, 1000.0, -1000.0, 30.0, -30.0]))
NUMBERS = st.integers(-400, 400).map(lambda n: n / 128 + 1 / 1024)


@st.composite
def batches(draw, *kinds):
    """(grids of the given kinds, masks, a micro-batch number for each row)."""
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 5))

    def grid(kind):
        row = st.lists(kind, min_size=tokens, max_size=tokens)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    empty = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    masks = [[False] * tokens if none else mask for none, mask in zip(empty, grid(st.booleans()))]
    split = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    return [grid(kind) for kind in kinds], masks, split


def in_micro_batches(loss_of, grids, masks, split, garbage):
    """The loss, its metrics and its gradient by the first grid: micro-batch by micro-batch, garbage outside
    the mask."""
    mask = torch.tensor(masks)
    first, *others = [torch.where(mask, tensor(grid), garbage) for grid in grids]
    first.requires_grad_()
    total, parts = 0.0, []
    for number in range(3):
        rows = [index for index, place in enumerate(split) if place == number]
        if rows:
            loss, sums = loss_of(first[rows], *(grid[rows] for grid in others), mask[rows])
            loss.backward()
            total += loss.item()
            parts.append({name: (float(s), float(c)) for name, (s, c) in sums.items()})
    return total, merge(parts), first.grad


GARBAGE = st.sampled_from([NAN, math.inf, -math.inf, 1000.0])


@settings(max_examples=60, deadline=None)
@given(batches(LOG_RATIOS, st.floats(0, 2), NUMBERS), GARBAGE)
def test_the_policy_loss_and_its_gradient_equal_the_formula_however_they_are_cut(batch, garbage):
    grids, masks, split = batch

    def loss_of(logprobs, weights, advantages, mask):
        return policy_loss(logprobs, torch.zeros_like(logprobs), weights, advantages, mask, 0.2, 0.28)

    total, sums, gradient = in_micro_batches(loss_of, grids, masks, split, garbage)
    value, expected, low, high = 0.0, torch.zeros_like(gradient), 0, 0
    for b, t in zip(*np.nonzero(masks)):
        log_ratio, weight, advantage = (grid[b][t] for grid in grids)
        token, expected[b, t] = policy_oracle(log_ratio, weight, advantage, 0.2, 0.28)
        value, ratio = value + token, math.exp(min(log_ratio, 20))
        low, high = low + (advantage < 0 and ratio < 0.8), high + (advantage > 0 and ratio > 1.28)
    count = int(np.sum(masks))
    assert total == pytest.approx(value, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)
    assert sums["loss/policy"] == (pytest.approx(value, rel=1e-9, abs=1e-9), count)
    assert sums["ratio/clip_low_frac"] == (low, count) and sums["ratio/clip_high_frac"] == (high, count)


@settings(max_examples=60, deadline=None)
@given(batches(NUMBERS, NUMBERS, NUMBERS), GARBAGE, st.sampled_from([0.2, 1.0, math.inf]))
def test_the_value_loss_and_its_gradient_equal_the_formula_however_they_are_cut(batch, garbage, clip):
    grids, masks, split = batch
    total, sums, gradient = in_micro_batches(
        lambda *grids: value_loss(*grids, clip), grids, masks, split, garbage
    )
    value, expected, held = 0.0, torch.zeros_like(gradient), 0
    used = [[grid[b][t] for grid in grids] for b, t in zip(*np.nonzero(masks))]
    for (b, t), (now, old, target) in zip(zip(*np.nonzero(masks)), used):
        token, expected[b, t], clipped = value_oracle(now, old, target, clip)
        value, held = value + token, held + clipped
    assert total == pytest.approx(value, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)
    assert sums["loss/value"] == (pytest.approx(value, rel=1e-9, abs=1e-9), len(used))
    assert sums["value/clip_frac"] == (held, len(used))


def test_the_value_clip_by_hand():
    # V_old 0, return 1, clip .2: .1 is inside; .5 got there too fast; -.5 went the wrong way
    now = tensor([[0.1, 0.5, -0.5]]).requires_grad_()
    zeros = torch.zeros(1, 3, dtype=F64)
    loss, sums = value_loss(now, zeros, zeros + 1, torch.ones(1, 3).bool(), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 2)
    assert now.grad[0].tolist() == pytest.approx([-0.9, 0, -1.5])
    assert [float(x) for x in sums["value/clip_frac"]] == [1, 3]


@settings(max_examples=30, deadline=None)
@given(batches(LOG_RATIOS, NUMBERS), GARBAGE)
def test_single_precision_stays_finite(batch, garbage):
    (log_ratios, advantages), masks, _ = batch
    mask = torch.tensor(masks)
    logprobs = torch.where(mask, torch.tensor(log_ratios), garbage).float().requires_grad_()
    now = torch.where(mask, torch.tensor(log_ratios), garbage).float().requires_grad_()
    others = torch.where(mask, torch.tensor(advantages), garbage).float()
    old = torch.zeros_like(others)
    policy = policy_loss(logprobs, old, others.abs(), others, mask, 0.2, 0.28)
    for (loss, sums), leaf in ((policy, logprobs), (value_loss(now, old, others, mask, 0.2), now)):
        loss.backward()
        assert loss.dtype == torch.float32 and torch.isfinite(loss) and torch.isfinite(leaf.grad).all()
        assert all(math.isfinite(mean) for mean in mean_of(merge([sums])).values())


def test_a_batch_without_a_token_has_loss_zero_and_gradient_zero():
    leaf, mask = torch.full((2, 3), NAN, requires_grad=True), torch.zeros(2, 3).bool()
    garbage = leaf.detach()
    policy = policy_loss(leaf, garbage, garbage, garbage, mask, 0.2, 0.28)
    for loss, sums in (policy, value_loss(leaf, garbage, garbage, mask, 0.2)):
        loss.backward()
        assert loss.item() == 0 and not leaf.grad.any() and mean_of(merge([sums])) == {}


# --- Explained variance


@pytest.mark.parametrize(
    "old, expected",
    [([1, 2, 3, 3], 0.85), ([1, 2, 3, 4], 1), ([0, 0, 0, 0], 0), ([8, 9, 10, 11], 1), ([4, 3, 2, 1], -3)],
)
@pytest.mark.parametrize("offset", [0.0, 30_000.0])  # squares of which fp32 keeps too little
def test_explained_variance_by_hand(old, expected, offset):
    # returns 1 2 3 4, variance 1.25. First row: errors 0 0 0 1, variance 1/4 - 1/16 = .1875; 1 - .15
    returns, old = torch.tensor([1.0, 2, 3, 4]) + offset, torch.tensor(old, dtype=torch.float32) + offset
    assert explained_variance(returns, old) == (pytest.approx(expected, abs=1e-6), 1)


@pytest.mark.parametrize("value", [0.7, 0.0, -3.3])
def test_returns_that_do_not_vary_have_nothing_to_explain(value):
    noise = torch.tensor([0.1, -0.5, 0.3, 0.9])
    assert explained_variance(torch.full((4,), value), noise)[1] == 0
    assert explained_variance((torch.full((4,), value) - noise) + noise, noise)[1] == 0, "but for rounding"


# --- The critic


@pytest.fixture(scope="module")
def tiny(world, tmp_path_factory) -> str:
    """The path of a tiny model with a tied head."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tied")


CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])


def hidden_states(path: str) -> torch.Tensor:
    """What the backbone gives to its head, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=F64, attn_implementation="eager")
    return model.model(input_ids=IDS).last_hidden_state.detach()


def test_a_new_critic_has_a_head_of_its_own_and_values_of_zero(tiny):
    policy, critic = build_model(tiny, CPU), build_critic(tiny, CPU)
    shared = policy.get_input_embeddings().weight
    assert shared is policy.get_output_embeddings().weight, "the policy of this test has a tied head"
    head, embedding = critic.get_output_embeddings(), critic.get_input_embeddings().weight
    assert head.weight.shape == (1, 64) and head.weight.dtype == head.bias.dtype == torch.float32
    assert torch.equal(embedding, shared) and embedding is not head.weight
    assert not critic.config.tie_word_embeddings and policy.config.tie_word_embeddings
    names = [name for name, _ in critic.named_parameters()]
    assert names[-2:] == ["lm_head.weight", "lm_head.bias"]
    assert names[:-2] == [name for name, _ in policy.named_parameters()]
    got = values(critic, IDS)
    assert got.shape == IDS.shape and got.dtype == torch.float32 and not got.any()


def test_the_head_gets_the_gradient_of_a_linear_layer_and_the_backbone_follows(tiny):
    critic, hidden = build_critic(tiny, CPU), hidden_states(tiny)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    head, embedding = critic.get_output_embeddings(), critic.get_input_embeddings().weight
    before = embedding.detach().clone()
    scale = torch.randn(IDS.shape, generator=torch.Generator().manual_seed(0))
    (values(critic, IDS) * scale).sum().backward()
    expected = torch.einsum("bt,bth->h", scale.double(), hidden)
    torch.testing.assert_close(head.weight.grad[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert head.bias.grad.item() == pytest.approx(scale.sum().item(), abs=1e-4)
    assert not embedding.grad.any(), "a head of zeros passes nothing on"
    optimizer.step()
    assert torch.equal(embedding, before)
    torch.testing.assert_close(head.weight[0].double(), -0.01 * expected, rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()
    got = values(critic, IDS)
    wanted = hidden @ head.weight[0].double().detach() + head.bias.double().detach()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    assert embedding.grad.any() and all(parameter.grad is not None for parameter in critic.parameters())


def test_the_value_of_a_state_does_not_look_at_what_follows(tiny):
    critic = build_critic(tiny, CPU)
    torch.nn.init.ones_(critic.get_output_embeddings().weight)
    alone, padded = values(critic, IDS[1:, :3]), values(critic, IDS)
    torch.testing.assert_close(padded[1:, :3], alone, rtol=1e-5, atol=1e-5)
    assert padded.std() > 0.1


def test_beside_a_sharded_backbone_in_bf16_the_head_is_sharded_and_computes_in_fp32(tiny):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    critic = build_model(tiny, CPU)  # a single rank on a CPU leaves it whole, so it is sharded here
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in critic.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=half)
    put_value_head(fully_shard(critic, mesh=mesh, mp_policy=half), CPU)
    head, hidden = critic.get_output_embeddings(), hidden_states(tiny)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    assert all(isinstance(parameter, DTensor) for parameter in critic.parameters())
    fine = 1 + 2.0**-12  # bf16 would make it 1
    with torch.no_grad():
        head.bias.to_local().fill_(fine)
    got = values(critic, IDS)
    assert got.dtype == torch.float32 and got.tolist() == [[fine] * 5] * 2
    got.sum().backward()
    norm = clip_gradients(critic, 1e9, ParallelFlags())
    expected = torch.cat([hidden.sum((0, 1)), tensor([10.0])]).norm().item()  # of weight and bias
    assert norm == pytest.approx(expected, rel=0.02)  # the backbone is in bf16
    assert head.weight.grad.dtype == torch.float32
    optimizer.step()
    assert head.bias.full_tensor().item() == pytest.approx(fine - 10, rel=1e-6)


# --- Whole steps, on one rank and on two

TOKENS = [10_000, 60, 1]  # of a micro-batch: all rows at once, a few, one
GAMMA, LAM, TEMPERATURE, VALUE_CLIP = 0.99, 0.9, 0.9, 0.2
STEP_ARGS = {"gamma": GAMMA, "lam": LAM, "temperature": TEMPERATURE, "value_clip": VALUE_CLIP,
             "bootstrap_truncated": True, "kl_coef": 0.1, "lr": 0.0, "critic_lr": 0.0, "max_grad_norm": 1e9,
             "lr_warmup_steps": 0, "lr_end_ratio": 1.0, "correction_cap": 2.0}  # fmt: skip
GATED = {"seq-mask": 1.4, "kl-gate": 4.6e-3}  # caps that some of the rollouts below pass


def step_rollouts() -> list[Rollout]:
    """Ten random rollouts in 13 rows: two forked, one too late to train, one cut, one invalid besides."""
    rng, batch = np.random.default_rng(0), []
    for number in range(11):
        segments, rewards = [], []
        for _ in range({4: 3, 5: 2}.get(number, 1)):
            sampled = "." * int(rng.integers(1, 5)) + "x" * int(rng.integers(2, 12))
            ends = [len(sampled)]
            if number % 3 == 0:
                sampled += "." * int(rng.integers(1, 4)) + "x" * int(rng.integers(2, 9))
                ends.append(len(sampled))
            late = "." * len(sampled) if number == 7 else None
            part = segment(sampled, ends, "length" if number == 6 else "stop", late)
            part.token_ids = rng.integers(0, 100, len(sampled)).astype(np.int32)
            drawn = rng.uniform(-5.5, -3.5, len(sampled))
            part.logprobs = np.where(part.versions >= 0, drawn, NAN).astype(np.float32)
            segments.append(part)
            rewards += rng.normal(size=len(ends)).tolist()
        batch.append(rollout(segments, rewards, number))
    batch[-1].fail("env_error", "it counts nowhere")
    return batch


def put(parameter: torch.Tensor, full: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(full)


def head_weight(width: int) -> torch.Tensor:
    return torch.randn(1, width, generator=torch.Generator().manual_seed(5)) / width**0.5


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def moments_of(model, optimizer) -> dict[str, torch.Tensor]:
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {f"{name}.{key}": whole(x) for name, state in states.items() for key, x in state.items()}


def state_of(trainer: Trainer) -> dict[str, dict]:
    parts = trainer.parts.items()
    return {name: weights_of(model) | moments_of(model, optimizer) for name, (model, optimizer) in parts}


def rank_process(rank: int, path: str, out: str, alone, together) -> None:
    """A rank of two; before that, rank 0 trains alone. The queues carry the rendezvous port of each run."""
    if rank == 0:
        take_steps(0, 1, alone, path, out)
    take_steps(rank, 2, together, path, out)


def take_steps(rank: int, num_ranks: int, port, path: str, out: str) -> None:
    """One rank: gradients of the step in every size, then steps that move weights; all left in a file."""
    args = Args(**STEP_ARGS, parallel=ParallelFlags(num_trainers=num_ranks))
    args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
    trainer, results = Trainer(args, path, rank, False), {}
    if rank == 0:
        store = open_store("127.0.0.1", 60)  # lives until the last step
        port.put(store.port)
    trainer.setup("127.0.0.1", store.port if rank == 0 else port.get(timeout=120), "float32", num_workers=0)
    head = trainer.critic.get_output_embeddings()
    put(head.weight, head_weight(head.weight.shape[1]))
    start = {name: weights_of(model) for name, (model, _) in trainer.parts.items()}

    def step(number: int, lr: float) -> dict:
        shares = make_minibatches(make_rows(step_rollouts(), args)[0], args, number)
        results["fillers", args.parallel.micro_batch_tokens] = [
            not batch["action_mask"].any() for batches, _ in shares[rank][0] for batch in batches
        ]
        args.lr = lr
        return trainer.train_step(shares[rank], None)

    for tokens in TOKENS:
        for minibatches in (1, 2):
            args.parallel.micro_batch_tokens, args.minibatches = tokens, minibatches
            report = step(5, 0.0)
            gradients = {name: {key: whole(parameter.grad) for key, parameter in model.named_parameters()}
                         for name, (model, _) in trainer.parts.items()}  # fmt: skip
            results[tokens, minibatches] = report, gradients
    for args.correction, args.correction_cap in GATED.items():
        for args.parallel.micro_batch_tokens in TOKENS:
            for args.minibatches in (1, 2):
                report = step(5, 0.0)
                gradient = {
                    name: whole(parameter.grad) for name, parameter in trainer.model.named_parameters()
                }
                results[args.correction, args.parallel.micro_batch_tokens, args.minibatches] = (
                    report,
                    gradient,
                )
    args.correction, args.correction_cap = "tis", 2.0
    args.critic_lr, args.critic_warmup_steps = 1e-2, trainer.trained + 1
    args.minibatches, args.max_grad_norm = 1, 1.0
    results["warm-up"] = step(6, 1e-2), start, {n: weights_of(m) for n, (m, _) in trainer.parts.items()}
    results["after it"] = step(7, 1e-2), {n: weights_of(m) for n, (m, _) in trainer.parts.items()}
    saved, folder = state_of(trainer), f"{out}/{num_ranks}/checkpoints/step_8"
    trainer.save(folder, {"step": 8})
    step(8, 1e-2)
    uninterrupted = state_of(trainer)
    trainer.load(folder, None)
    loaded = state_of(trainer)
    step(8, 1e-2)
    results["checkpoint"] = saved, loaded, uninterrupted, state_of(trainer)
    moved = weights_of(trainer.critic)
    trainer.load(None, folder)
    results["init"] = moved, {n: weights_of(m) for n, (m, _) in trainer.parts.items()}
    torch.save(results, f"{out}/{num_ranks}.{rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_tiny(tmp_path_factory.mktemp("models") / "steps")


@pytest.fixture(scope="module")
def results(model, tmp_path_factory) -> dict:
    """(ranks, rank) -> what `take_steps` saved."""
    out = str(tmp_path_factory.mktemp("out"))
    on_two_ranks(rank_process, model, out, num_ports=2)
    return {
        who: torch.load(f"{out}/{who[0]}.{who[1]}", weights_only=False) for who in [(1, 0), (2, 0), (2, 1)]
    }


def verdicts(pairs: list[tuple[float, float]]) -> set[str]:
    """The gates that a rollout passes whose tokens have these (log mu, log pi)."""
    if not pairs:
        return set(GATED)
    mean = math.exp(sum(pi - mu for mu, pi in pairs) / len(pairs))
    probs = [(math.exp(mu), math.exp(pi)) for mu, pi in pairs]
    kl = sum(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for p, q in probs) / len(probs)
    cap = GATED["seq-mask"]
    passed = {"seq-mask": 1 / cap <= mean <= cap, "kl-gate": kl <= GATED["kl-gate"]}
    return {gated for gated in GATED if passed[gated]}


@pytest.fixture(scope="module")
def oracle(model) -> dict:
    """Gradients of the whole step in float64, row by row, from the formulas alone; and what was measured.

    On the first update old = pi and V_old = V: a token's gradients are those of -w A log pi with the constant
    w = min(pi / mu, 2), and of (V - R)^2 / 2 with a constant R. Under a gate w is pi / mu, and 0 in rollouts
    that do not pass. The KL to the starting policy, which is pi itself here, is 0 with gradient 0.
    """
    from transformers import AutoModelForCausalLM

    kind = {"dtype": torch.float64, "attn_implementation": "eager"}
    policy, trunk = (AutoModelForCausalLM.from_pretrained(model, **kind) for _ in range(2))
    weight = head_weight(trunk.config.hidden_size).double().requires_grad_()
    bias = torch.zeros(1, dtype=F64, requires_grad=True)
    batch, tokens = [played for played in step_rollouts() if not played.invalid], []
    for played in batch:
        steps, states, at, last_turn = [], [], [], len(played.rewards) == 1
        rewards = iter(played.rewards)
        for part in played.segments:
            ids = torch.as_tensor(part.token_ids, dtype=torch.int64)
            hidden = trunk.model(input_ids=ids[None]).last_hidden_state[0]
            after = hidden @ weight[0] + bias
            logprobs = (policy(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            for place in range(1, len(ids)):
                if part.versions[place] >= 0:
                    steps.append([0.0, after[place - 1].item()])
                    states.append(after[place - 1])
                    at.append(
                        (logprobs[place - 1, ids[place]], part.logprobs[place], part.action_mask[place])
                    )
                if place + 1 in part.turn_ends and (not last_turn or part is played.segments[-1]):
                    steps[-1][0] = next(rewards)
        last = after[-1].item() if played.segments[-1].finish_reason == "length" else 0.0
        advantages = oracle_gae(steps, last, GAMMA, LAM)
        passed = verdicts([(float(mu), logprob.item()) for logprob, mu, used in at if used])
        tokens += [
            (advantage, state, passed, *what) for advantage, state, what in zip(advantages, states, at)
        ]
    used = [token for token in tokens if token[-1]]
    raw = np.array([token[0] for token in used])
    policy_sum, value_sum, gated_sum = 0.0, 0.0, dict.fromkeys(GATED, 0.0)
    for (advantage, state, passed, logprob, mu, _), white in zip(used, (raw - raw.mean()) / raw.std(ddof=1)):
        ratio = math.exp(logprob.item() - float(mu))
        policy_sum = policy_sum - min(ratio, 2.0) * white * logprob
        value_sum = value_sum + 0.5 * (state - (advantage + state.item())) ** 2
        for gated in passed:
            gated_sum[gated] = gated_sum[gated] - ratio * white * logprob
    gradients = {}
    for gated, loss in gated_sum.items():
        (loss / len(used)).backward(retain_graph=True)
        gradients[gated] = {name: x.grad.clone() for name, x in policy.named_parameters()}
        policy.zero_grad()
    (policy_sum / len(used)).backward()
    (value_sum / len(used)).backward()
    critic = {name: x.grad for name, x in trunk.named_parameters() if not name.startswith("lm_head")}
    gradients |= {
        "policy": {name: x.grad for name, x in policy.named_parameters()},
        "critic": critic | {"lm_head.weight": weight.grad, "lm_head.bias": bias.grad},
    }
    returns = raw + [token[1].item() for token in used]
    explained = 1 - raw.var() / returns.var()
    measured = {"loss/value": value_sum.item() / len(used), "value/explained_var": explained,
                "advantage/abs_mean": np.abs(raw).mean(), "value/clip_frac": 0.0, "loss/kl": 0.0}  # fmt: skip
    dropped = {gated: sum(gated not in token[2] for token in used) for gated in GATED}
    return gradients | {"metrics": measured, "tokens": len(used), "dropped": dropped}


def flat(gradients: dict) -> torch.Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()])


def test_the_step_has_what_makes_it_hard(results, oracle):
    batch = step_rollouts()
    rows = make_rows(batch, Args())[0]
    assert len(rows) == 10 and sum(map(len, rows)) == 13
    late = batch[7]
    assert late.num_sampled and not late.num_actions, "sampled, in GAE, and not in the loss"
    assert results[2, 1]["fillers", 1].count(True) + results[2, 0]["fillers", 1].count(True) == 2, (
        "one is late"
    )
    episodes = make_minibatches(rows, Args(parallel=ParallelFlags(num_trainers=2, micro_batch_tokens=1)), 0)[
        0
    ][1]
    assert episodes["action_mask"].sum() == oracle["tokens"] and len(episodes["cut_at"]) == 10


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_the_gradients_are_those_of_the_formulas_on_any_number_of_ranks(results, oracle, part):
    reference = flat(oracle[part])
    assert reference.norm() > 0.01
    for who, result in results.items():
        for tokens in TOKENS:
            gradients = result[tokens, 1][1][part]
            assert list(gradients) == list(oracle[part])
            assert (flat(gradients) - reference).norm() <= 1e-5 * reference.norm(), (who, tokens)


@pytest.mark.parametrize("gated", GATED)
def test_a_gate_has_the_gradient_of_the_formula_on_any_number_of_ranks(results, oracle, gated):
    reference, halves = flat(oracle[gated]), flat(results[1, 0][gated, 10_000, 2][1])
    assert reference.norm() > 0.01 and 0 < oracle["dropped"][gated] < oracle["tokens"]
    for num_ranks in (1, 2):
        for tokens in TOKENS:
            parts = [results[num_ranks, rank] for rank in range(num_ranks)]
            for part in parts:
                difference = flat(part[gated, tokens, 1][1]) - reference
                assert difference.norm() <= 1e-5 * reference.norm(), (num_ranks, tokens)
                assert (flat(part[gated, tokens, 2][1]) - halves).norm() <= 1e-5 * halves.norm()
            sums = merge([part[gated, tokens, 1][0]["sums"] for part in parts])
            assert sums["is/dropped_frac"] == (oracle["dropped"][gated], oracle["tokens"])
            assert sums["loss/policy"][1] == oracle["tokens"], "rejected tokens count in the denominator"


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_the_gradient_of_a_minibatch_does_not_depend_on_ranks_and_micro_batches(results, part):
    reference = flat(results[1, 0][10_000, 2][1][part])
    assert (reference - flat(results[1, 0][10_000, 1][1][part])).norm() > 0.1 * reference.norm()
    for who, result in results.items():
        for tokens in TOKENS:
            difference = flat(result[tokens, 2][1][part]) - reference
            assert difference.norm() <= 1e-5 * reference.norm(), (who, tokens)


def test_the_metrics_are_those_of_the_formulas_on_any_number_of_ranks(results, oracle):
    for num_ranks in (1, 2):
        for tokens in TOKENS:
            parts = [results[num_ranks, rank][tokens, 1][0]["sums"] for rank in range(num_ranks)]
            sums = merge(parts)
            means = mean_of(sums)
            measured = {name: means[name] for name in oracle["metrics"]}
            assert measured == pytest.approx(oracle["metrics"], rel=1e-4, abs=1e-6), (num_ranks, tokens)
            for name in ("loss/policy", "loss/value", "advantage/abs_mean", "mismatch/abs_mean"):
                assert sums[name][1] == oracle["tokens"], (name, num_ranks, tokens)
            for name, part in (("grad_norm", "policy"), ("value/grad_norm", "critic")):
                assert means[name] == pytest.approx(flat(oracle[part]).norm().item(), rel=1e-4)


def differing(one: dict, two: dict) -> list[str]:
    assert one.keys() == two.keys() and one
    return [name for name in one if not torch.equal(one[name], two[name])]


def test_a_warm_up_step_trains_the_critic_alone(results):
    for result in results.values():
        report, before, after = result["warm-up"]
        assert differing(before["policy"], after["policy"]) == []
        assert differing(before["critic"], after["critic"]) == list(before["critic"])
        assert "grad_norm" not in report["sums"] and report["sums"]["value/grad_norm"][0] > 0
        assert report["sums"]["mismatch/abs_mean"][1] > 0
        report, later = result["after it"]
        assert differing(after["policy"], later["policy"]) == list(before["policy"])
        assert report["sums"]["grad_norm"][0] > 0


def test_a_checkpoint_has_policy_and_critic_with_their_optimizers(results):
    for result in results.values():
        saved, loaded, uninterrupted, resumed = result["checkpoint"]
        for part in ("policy", "critic"):
            assert differing(saved[part], loaded[part]) == []
            assert differing(uninterrupted[part], resumed[part]) == []
            assert differing(saved[part], resumed[part])


def test_a_run_that_starts_from_another_takes_its_policy_alone(results):
    for result in results.values():
        critic, start = result["init"]
        policy = result["checkpoint"][0]["policy"]
        assert differing({name: policy[name] for name in start["policy"]}, start["policy"]) == []
        assert differing(critic, start["critic"]) == []


# --- Flags


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"gamma": 1.01}, "--gamma 1.01: must be less than or equal to 1"),
        ({"gamma": -0.1}, "--gamma -0.1: must be greater than or equal to 0"),
        ({"gamma": NAN}, "--gamma nan: must be"),
        ({"lam": 1.5}, "--lam 1.5: must be less than or equal to 1"),
        ({"lam": -1.0}, "--lam -1.0: must be greater than or equal to 0"),
        ({"critic_warmup_steps": -1}, "--critic-warmup-steps -1: must be greater than or equal to 0"),
        ({"critic_lr": -1e-3}, "--critic-lr -0.001: must be greater than or equal to 0"),
        ({"value_clip": 0.0}, "--value-clip 0.0: must be greater than 0"),
        ({"group_size": 0}, "--group-size 0: must be greater than or equal to 1"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message):
    with pytest.raises(FlagError, match=message):
        check_flags(Args(**flags))


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_any_group_size_will_do_and_the_critics_learning_rate_follows_the_model(tmp_path, group_size):
    log = LogFlags(output_dir=str(tmp_path / "run"))
    for asked, expected in ((None, 1e-3), (0.0, 0.0), (2e-4, 2e-4)):
        args = Args(group_size=group_size, critic_lr=asked, log=log)
        assert check_flags(args) > 0 and args.critic_lr == expected
