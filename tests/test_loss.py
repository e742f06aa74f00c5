"""The loss: values by hand, gradients by a formula, one mask, and one denominator however a step is cut."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from algos import grpo, ppo
from algos.grpo import (
    Args,
    Trainer,
    importance_weights,
    kl_loss,
    make_minibatches,
    make_rows,
    mark_kept,
    mark_late,
    policy_loss,
)
from common.batching import collate, micro_batches
from common.parallel import ParallelFlags
from common.logger import mean_of, merge
from common.logprobs import LogprobHead
from common.metrics import rollout_metrics
from common.sample import Rollout, Segment
from tests.fakes import TableLM

F64 = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def loss_of(ratios, advantages):
    """policy_loss of one row a list of ratios; old is 0, so log pi is the log of the ratio."""
    logprobs = tensor(ratios).log().requires_grad_()
    old, mask = torch.zeros_like(logprobs), torch.ones_like(logprobs, dtype=torch.bool)
    loss, sums = policy_loss(logprobs, old, torch.ones_like(old), tensor(advantages), mask, 0.2, 0.28)
    return loss, sums, logprobs


# --- Clip


@pytest.mark.parametrize(
    "advantage, losses, low, high",
    [(1.0, [-1.1, -0.9, -1.28, -0.6], 0, 1), (-1.0, [1.1, 0.9, 1.5, 0.8], 1, 0)],
)
def test_the_clip_table(advantage, losses, low, high):
    ratios = [1.1, 0.9, 1.5, 0.6]
    for ratio, expected in zip(ratios, losses):
        assert loss_of([[ratio]], [advantage])[0].item() == pytest.approx(expected, abs=1e-6)
    loss, sums, _ = loss_of([ratios], [advantage])
    assert loss.item() == pytest.approx(sum(losses), abs=1e-6)
    assert [float(x) for x in sums["ratio/clip_low_frac"]] == [low, 4]
    assert [float(x) for x in sums["ratio/clip_high_frac"]] == [high, 4]
    assert [float(x) for x in sums["loss/policy"]] == [pytest.approx(sum(losses), abs=1e-6), 4]


def test_a_clipped_token_has_no_gradient_and_every_other_one_has():
    # d(-r A)/d log pi = -r A where not clipped: A = 1 clips 1.5 alone, A = -1 clips 0.6 alone
    for advantage, expected in ((1.0, [-1.1, -0.9, 0, -0.6]), (-1.0, [1.1, 0.9, 1.5, 0])):
        loss, _, logprobs = loss_of([[1.1, 0.9, 1.5, 0.6]], [advantage])
        loss.backward()
        assert logprobs.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


# --- Importance weights

TABLE = [  # ratio old / mu; tis, icepop, clip at cap 2
    (0.1, 0.1, 0.0, 0.5),
    (0.5, 0.5, 0.5, 0.5),
    (1.0, 1.0, 1.0, 1.0),
    (1.9, 1.9, 1.9, 1.9),
    (3.0, 2.0, 0.0, 2.0),
]


@pytest.mark.parametrize("ratio, tis, icepop, clip", TABLE)
def test_the_table_of_corrections(ratio, tis, icepop, clip):
    for name, expected in {"tis": tis, "icepop": icepop, "clip": clip, "none": 1.0}.items():
        weight = importance_weights(tensor([[math.log2(ratio) * math.log(2)]]), name, 2.0)
        assert weight.item() == pytest.approx(expected, abs=1e-6), name


def test_a_correction_carries_no_gradient():
    log_ratio = tensor([[0.1, -3.0, 3.0]]).requires_grad_()
    for name in ("tis", "icepop", "clip", "none"):
        assert not importance_weights(log_ratio, name, 2.0).requires_grad


def test_a_missing_logprob_filled_with_zero_would_have_shown():
    # the engine said -1, zero was filled in: old - mu = -1 weighs the token by e^-1 instead of 1
    assert importance_weights(tensor([[-1.0]]), "tis", 2.0).item() == pytest.approx(0.367879, abs=1e-6)


# --- The formula, written again

LOG_RATIOS = st.one_of(st.floats(-1.5, 1.5), st.sampled_from([0.0, 1000.0, -1000.0, 30.0, -30.0]))


def oracle(log_ratio, weight, advantage, low, high) -> tuple[float, float]:
    """Loss of one token and its derivative by log pi, in float64. A log-ratio past +-20 is constant."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = min(max(ratio, 1 - low), 1 + high)
    if clipped * advantage < ratio * advantage or abs(log_ratio) > 20:
        return -weight * min(ratio * advantage, clipped * advantage), 0.0
    return -weight * ratio * advantage, -weight * ratio * advantage


def oracle_weight(log_ratio, correction, cap) -> float:
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    if correction == "icepop":
        return ratio if 1 / cap <= ratio <= cap else 0.0
    floor = {"tis": 0.0, "clip": 1 / cap}
    return min(max(ratio, floor[correction]), cap) if correction in floor else 1.0


@st.composite
def batches(draw):
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    grid = lambda values: draw(  # noqa: E731
        st.lists(st.lists(values, min_size=tokens, max_size=tokens), min_size=rows, max_size=rows)
    )
    empty = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    masks = [[False] * tokens if none else mask for none, mask in zip(empty, grid(st.booleans()))]
    nonzero = st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3)
    advantages = draw(st.lists(nonzero, min_size=rows, max_size=rows))
    return grid(LOG_RATIOS), grid(LOG_RATIOS), masks, advantages


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from(["tis", "icepop", "clip", "none"]), st.sampled_from([1.5, 2, 5]))
def test_loss_and_gradient_equal_the_formula_on_any_batch(batch, correction, cap):
    log_ratios, log_weights, masks, advantages = batch
    logprobs = tensor(log_ratios).requires_grad_()
    weights = importance_weights(tensor(log_weights), correction, cap)
    old, mask = torch.zeros_like(logprobs), torch.tensor(masks)
    loss, sums = policy_loss(logprobs, old, weights, tensor(advantages), mask, 0.2, 0.28)
    loss.backward()
    total, gradient, count = 0.0, torch.zeros_like(logprobs), 0
    for b, row in enumerate(masks):
        for t, used in enumerate(row):
            expected = oracle_weight(log_weights[b][t], correction, cap)
            assert weights[b, t].item() == pytest.approx(expected, rel=1e-9)
            if used:
                value, gradient[b, t] = oracle(log_ratios[b][t], expected, advantages[b], 0.2, 0.28)
                total, count = total + value, count + 1
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-9, atol=1e-9)
    assert float(sums["loss/policy"][1]) == count


@settings(max_examples=50, deadline=None)
@given(batch=batches())
def test_single_precision_stays_finite(batch):
    log_ratios, log_weights, masks, advantages = batch
    logprobs = torch.tensor(log_ratios, requires_grad=True)
    weights = importance_weights(torch.tensor(log_weights), "tis", 2.0)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), weights, tensor(advantages),
                          torch.tensor(masks), 0.2, 0.28)  # fmt: skip
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


# --- Corrections that keep or reject a whole rollout

LOG_2 = math.log(2)


@pytest.fixture(scope="module")
def one_rank():
    """The sum over ranks is that of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
        yield


def gated_batch(log_ratios, owners, masks=None, mu=-1.0) -> dict:
    """A micro-batch whose rows belong to the rollouts `owners`; old is mu + log ratio."""
    log_ratio = tensor(log_ratios)
    mask = torch.ones_like(log_ratio).bool() if masks is None else torch.tensor(masks)
    logprobs = torch.nn.functional.pad(torch.full_like(log_ratio, mu), (1, 0), value=math.nan)
    return {"logprobs": logprobs, "old_logprobs": log_ratio + mu, "mask": mask,
            "rollout_index": torch.tensor(owners)}  # fmt: skip


def test_the_geometric_mean_of_a_whole_rollout_decides(one_rank):
    # rollout 0: ratios 4, 1/2 in one row and 1/2 in another: 4 / 4 = 1. 1: 2, 2. 2: 1/2. 3: 4, 1: mean 2
    first = gated_batch([[2 * LOG_2, -LOG_2], [LOG_2, LOG_2]], [0, 1])
    second = gated_batch([[-LOG_2, math.nan], [-LOG_2, math.nan], [2 * LOG_2, 0.0]], [0, 2, 3],
                         [[True, False], [True, False], [True, True]])  # fmt: skip
    for cap, kept in ((1.01, {0}), (1.99, {0}), (2.01, {0, 1, 2, 3}), (math.inf, {0, 1, 2, 3})):
        mark_kept([first, second], 4, "seq-mask", cap)
        assert first["kept"].tolist() == [index in kept for index in (0, 1)], cap
        assert second["kept"].tolist() == [index in kept for index in (0, 2, 3)], cap
    mark_kept([first, second], 4, "seq-mask", 1.5)
    weights = importance_weights(
        tensor([[2 * LOG_2, -LOG_2], [LOG_2, LOG_2]]), "seq-mask", 1.5, first["kept"]
    )
    torch.testing.assert_close(weights, tensor([[4.0, 0.5], [0.0, 0.0]]))  # the kept have their raw ratios


def test_the_mean_kl_of_a_whole_rollout_decides(one_rank):
    # p 1/2, q 1/4: (ln 2 + ln(2/3)) / 2 = .143841. Rollout 0 has it once in three tokens, rollout 1 always
    halves = gated_batch([[-LOG_2, 0.0], [-LOG_2, -LOG_2]], [0, 1], mu=-LOG_2)
    rest = gated_batch([[0.0, -1000.0]], [0], [[True, False]], mu=-LOG_2)
    for cap, kept in ((0.047, [False, False]), (0.048, [True, False]), (0.1438, [True, False]),
                      (0.1439, [True, True])):  # fmt: skip
        mark_kept([halves, rest], 2, "kl-gate", cap)
        assert halves["kept"].tolist() == kept and rest["kept"].tolist() == kept[:1], cap


@pytest.mark.parametrize("gated", ["seq-mask", "kl-gate"])
def test_a_rollout_with_a_nan_is_kept_so_that_it_stops_the_run(one_rank, gated):
    batch = gated_batch(
        [[math.nan, 9.0], [9.0, 9.0], [9.0, 9.0]], [0, 1, 2], [[True] * 2, [True] * 2, [False] * 2]
    )
    mark_kept([batch], 3, gated, 1.0 if gated == "seq-mask" else 1e-3)
    assert batch["kept"].tolist() == [True, False, True]
    log_ratio = torch.where(batch["mask"], batch["old_logprobs"] + 1.0, 0.0)
    weights = importance_weights(log_ratio, gated, 1.0, batch["kept"])
    assert weights[0].isnan().any() and weights[1].tolist() == [0.0, 0.0]


def oracle_kl(mu_logprob: float, logprob: float) -> float:
    p, q = (min(max(math.exp(min(x, 0.0)), 1e-6), 1 - 1e-6) for x in (mu_logprob, logprob))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@st.composite
def gated_rows(draw):
    """Rows [(rollout, [(log mu, log old, log pi - log old, used)], A)] and two ways to cut them."""
    num_rows, tokens, num_rollouts = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    old = st.one_of(st.floats(-3, -0.1), st.sampled_from([-1000.0, -1e-9]))
    token = st.tuples(st.floats(-3, -0.1), old, LOG_RATIOS, st.booleans())
    row = st.tuples(st.integers(0, num_rollouts - 1), st.lists(token, min_size=tokens, max_size=tokens),
                    st.floats(-3, 3), st.booleans())  # fmt: skip
    rows = [(owner, [(*t[:3], t[3] and not empty) for t in row_tokens], advantage)
            for owner, row_tokens, advantage, empty in draw(st.lists(row, min_size=num_rows, max_size=num_rows))]  # fmt: skip
    cuts = draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    return rows, num_rollouts, (cuts, [0] * num_rows)


@settings(max_examples=100, deadline=None)
@given(
    gated_rows(),
    st.sampled_from([("seq-mask", 1.05), ("seq-mask", 2.0), ("kl-gate", 5e-3), ("kl-gate", 0.1)]),
)
def test_a_gated_loss_and_its_gradient_equal_the_formula_however_they_are_cut(one_rank, batch, gated):
    (rows, num_rollouts, splits), (correction, cap) = batch, gated
    means = []
    for index in range(num_rollouts):
        used = [t for owner, row, _ in rows if owner == index for t in row if t[3]]
        scores = [old - mu if correction == "seq-mask" else oracle_kl(mu, old) for mu, old, _, _ in used]
        means.append(sum(scores) / max(len(scores), 1))
    bound = math.log(cap) if correction == "seq-mask" else cap
    assume(all(abs(abs(mean) - bound) > 1e-5 for mean in means))  # the KL is in fp32
    value, dropped, expected = 0.0, 0, torch.zeros(len(rows), len(rows[0][1]), dtype=F64)
    for b, (owner, row, advantage) in enumerate(rows):
        for t, (mu, old, log_ratio, used) in enumerate(row):
            weight = math.exp(min(max(old - mu, -20.0), 20.0)) if abs(means[owner]) <= bound else 0.0
            if used:
                token, expected[b, t] = oracle(log_ratio, weight, advantage, 0.2, 0.28)
                value, dropped = value + token, dropped + (weight == 0)
    mask = torch.tensor([[t[3] for t in row] for _, row, _ in rows])
    mu, old, log_ratio = (torch.where(mask, tensor([[t[i] for t in row] for _, row, _ in rows]), math.nan)
                          for i in range(3))  # fmt: skip
    for split in splits:
        logprobs = (old + log_ratio).requires_grad_()
        parts = [[b for b, number in enumerate(split) if number == part] for part in sorted(set(split))]
        batches = [{"logprobs": torch.nn.functional.pad(mu[part], (1, 0)), "old_logprobs": old[part],
                    "mask": mask[part], "rollout_index": torch.tensor([rows[b][0] for b in part])}
                   for part in parts]  # fmt: skip
        mark_kept(batches, num_rollouts, correction, cap)
        total, zeros = 0.0, 0
        for part, cut in zip(parts, batches):
            log_weight = torch.where(mask[part], old[part] - mu[part], 0.0)
            weights = importance_weights(log_weight, correction, cap, cut["kept"])
            advantages = tensor([rows[b][2] for b in part])
            loss, _ = policy_loss(logprobs[part], old[part], weights, advantages, mask[part], 0.2, 0.28)
            loss.backward()
            total, zeros = total + loss.item(), zeros + int((weights[mask[part]] == 0).sum())
        assert total == pytest.approx(value, rel=1e-9, abs=1e-9) and zeros == dropped
        torch.testing.assert_close(logprobs.grad, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("correction, cap", [("tis", 2.0), ("icepop", 2.0), ("clip", 2.0), ("none", 2.0),
                                             ("seq-mask", 1.05), ("kl-gate", 5e-3)])  # fmt: skip
def test_each_correction_has_a_cap_of_its_own(tmp_path, correction, cap):
    for module in (grpo, ppo):
        for asked, expected in ((None, cap), (1.5, 1.5)):
            args = module.Args(correction=correction, correction_cap=asked)
            args.log.output_dir = str(tmp_path / "run")
            module.check_flags(args)
            assert args.correction_cap == expected


E20 = math.exp(20)  # log-ratios are held within +-20
LN_1E6 = math.log(1e6)


@pytest.mark.parametrize(
    "correction, cap, weights",
    [
        # a row with +1000, -1000 and 0, one with +1000 alone, one with -1000 alone
        ("tis", 2.0, [[2, 1 / E20, 1], [2], [1 / E20]]),
        ("icepop", 2.0, [[0, 0, 1], [0], [0]]),
        ("clip", 2.0, [[2, 0.5, 1], [2], [0.5]]),
        ("none", 2.0, [[1, 1, 1], [1], [1]]),
        # the geometric mean of the first is 1, of the others e^1000 and e^-1000
        ("seq-mask", 1.05, [[E20, 1 / E20, 1], [0], [0]]),
        # p 1e-6 and q 1 - 1e-6, or the reverse: a KL of (1 - 2e-6) ln 1e6 each; two thirds of it in the first
        ("kl-gate", 2 / 3 * LN_1E6 + 0.01, [[E20, 1 / E20, 1], [0], [0]]),
        ("kl-gate", LN_1E6, [[E20, 1 / E20, 1], [E20], [1 / E20]]),
        ("kl-gate", 2 / 3 * LN_1E6 - 0.01, [[0, 0, 0], [0], [0]]),
    ],
)
def test_every_correction_of_ratios_beyond_reason_by_hand(one_rank, correction, cap, weights):
    up, down = (-1000.0, 0.0), (0.0, -1000.0)  # log mu, log old
    tokens = [[up, down, (-1.0, -1.0)], [up], [down]]
    mask = torch.tensor([[True] * len(row) + [False] * (3 - len(row)) for row in tokens])
    mu, old = (tensor([[t[i] for t in row] + [math.nan] * (3 - len(row)) for row in tokens]) for i in (0, 1))
    batch = {"logprobs": torch.nn.functional.pad(mu, (1, 0)), "old_logprobs": old, "mask": mask,
             "rollout_index": torch.arange(3)}  # fmt: skip
    if correction in grpo.GATES:
        mark_kept([batch], 3, correction, cap)
    log_ratio = torch.where(mask, old - mu, 0.0)
    got = importance_weights(log_ratio, correction, cap, batch.get("kept"))
    assert got[mask].tolist() == pytest.approx(sum(weights, []), rel=1e-9)
    # and through the loss: ratio 1 and A = -1 sum the weights up, which are the gradient too
    logprobs = old.clone().requires_grad_()
    loss, _ = policy_loss(logprobs, old, got, tensor([-1.0] * 3), mask, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(sum(map(sum, weights)), rel=1e-9)
    assert logprobs.grad[mask].tolist() == pytest.approx(sum(weights, []), rel=1e-9)
    assert not logprobs.grad[~mask].any()


# --- One effective mask


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_masked_positions_may_hold_anything(garbage):
    # ratio 1 and A = -1 make the weights the token losses: A 1 + 2 + 3 over 3 tokens, B is excluded
    logprobs = tensor([[0, 0, 0, garbage], [garbage] * 4]).requires_grad_()
    weights = tensor([[1, 2, 3, garbage], [9, 9, 9, garbage]])
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    old, advantages = torch.zeros_like(logprobs), tensor([-1, garbage])
    loss, sums = policy_loss(logprobs, old, weights, advantages, mask, 0.2, 0.28)
    loss = loss / mask.sum()
    assert loss.item() == pytest.approx(2.0), ".857143 has the masked tokens in the denominator"
    loss.backward()
    assert logprobs.grad.tolist() == [[pytest.approx(x / 3) for x in (1, 2, 3, 0)], [0.0] * 4]
    assert all(math.isfinite(value) for value in mean_of(merge([sums])).values())


def test_the_gradient_through_a_masked_exponential_is_zero():
    # exp(1000) is infinite, and infinity times the zero of a plain where() is NaN
    logprobs = tensor([[0.0, 1000.0]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    loss, _ = policy_loss(logprobs, torch.zeros(1, 2, dtype=F64), torch.ones(1, 2, dtype=F64), tensor([-1.0]),
                          mask, 0.2, 0.28)  # fmt: skip
    loss.backward()
    assert loss.item() == 1.0 and logprobs.grad.tolist() == [[1.0, 0.0]]


def test_the_kl_term_is_k2_under_the_same_mask():
    # ((ln 1.2)^2 + (ln .8)^2) / 2, the NaN outside
    logprobs = tensor([[math.log(0.6), math.log(0.4), math.nan]]).requires_grad_()
    ref = tensor([[math.log(0.5), math.log(0.5), 0.0]])
    loss = kl_loss(logprobs, ref, torch.tensor([[True, True, False]]))
    loss.backward()
    assert loss.item() == pytest.approx(0.0166206 + 0.0248965, abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([math.log(1.2), math.log(0.8), 0.0], abs=1e-6)


# --- The denominator

TOKEN_LOSSES = {"A": [1, 1, 1], "B": [5], "C": [2, 2], "D": [0, 0, 0, 4]}  # N = 10, sum 16: mean 1.6
SPLITS = [
    [[["A", "B", "C", "D"]]],
    [[["A"], ["B"]], [["C"], ["D"]]],
    [[["D"]], [["A", "B"], ["C"]]],
    [[["A"]], [["B"]], [["C"]], [["D"]]],
    [[["A"], ["B"], ["C"], ["D"]], [[], [], [], []]],
]


def toy_row(losses, masked=False) -> dict:
    return {"token_ids": np.ones(len(losses), np.int32), "action_mask": np.full(len(losses), not masked),
            "weights": np.asarray(losses, float), "advantage": -1.0}  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_token_mean_and_its_gradient_do_not_depend_on_the_split(split):
    num_tokens = sum(map(len, TOKEN_LOSSES.values()))
    value, gradient = 0.0, 0.0
    for micro in split:
        scale = torch.ones((), dtype=F64, requires_grad=True)  # multiplies every token's loss; the ratio is 1
        for names in micro:
            rows = [toy_row(TOKEN_LOSSES[name]) for name in names] or [toy_row([7.0], masked=True)]
            batch = {key: torch.as_tensor(array) for key, array in collate(rows).items()}
            logprobs = scale.log().expand(batch["weights"].shape)
            loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), batch["weights"], batch["advantage"],
                                  batch["action_mask"], 0.2, 0.28)  # fmt: skip
            loss = loss * len(split) / num_tokens  # FSDP takes the mean over ranks
            loss.backward()
            value += loss.item() / len(split)
        gradient += scale.grad.item() / len(split)
    assert value == pytest.approx(1.6, abs=1e-6), "2.25 is a mean of means, 1.6667 the mean of the ranks"
    assert gradient == pytest.approx(1.6, abs=1e-6)


# --- The trainer's step on a toy language model, without processes

VOCAB = 7


def segment(ids, first_action: int, logprobs, masked=False) -> Segment:
    mask = (np.arange(len(ids)) >= first_action) & (not masked)
    padded = np.r_[np.zeros(first_action), logprobs].astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Segment(np.asarray(ids, np.int32), mask, padded, versions, [len(ids)], "stop")


def toy_rows(rng, num_rows: int, masked=()) -> list[list[dict]]:
    """Random rollouts of one segment; the log-probs outside the mask are NaN, as nobody may look at them."""
    rows = []
    for index in range(num_rows):
        length, first = int(rng.integers(4, 12)), int(rng.integers(1, 4))
        logprobs = -rng.uniform(0.5, 3, length - first)
        part = segment(rng.integers(0, VOCAB, length), first, logprobs, index in masked)
        part.logprobs[~part.action_mask] = math.nan
        rollout = Rollout(f"0.{index}", "g0", 0, "0", [part], [0.0])
        ((row,),), _ = make_rows([rollout], Args())
        rows.append([row | {"advantage": float(rng.normal())}])
    return rows


def toy_model() -> TableLM:
    torch.manual_seed(0)
    return TableLM(torch.randn(VOCAB, VOCAB, dtype=F64))


def ranks_after_a_step(rows, num_ranks: int, micro_batch_tokens: int, model=None, **flags):
    """Trains on fake ranks one after the other: gradients averaged as FSDP does, merged sums, peaks."""
    args = Args(lr=0.0, max_grad_norm=1e9, **{"correction_cap": 2.0} | flags)
    args.parallel.num_trainers, args.parallel.micro_batch_tokens = num_ranks, micro_batch_tokens
    trainers, results = [], []
    for rank, share in enumerate(make_minibatches(rows, args, step=0)):
        trainer = Trainer(args, "", rank, False)
        trainer.model = copy.deepcopy(model) if model else toy_model()
        trainer.head = LogprobHead(trainer.model)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        results.append(trainer.train_step(share, None))
        trainers.append(trainer)
    gradients = [torch.stack(shards).mean(0) for shards in
                 zip(*[[p.grad for p in trainer.model.parameters()] for trainer in trainers])]  # fmt: skip
    sums = merge([result["sums"] for result in results])
    peaks = {key: max(result["peaks"][key] for result in results) for key in results[0]["peaks"]}
    return gradients, sums, peaks


def step_oracle(rows, correction_cap=2.0):
    """Gradient of the bigram model's logit table for one on-policy step, and the sums, all written out.

    On-policy (old = pi) a token's loss is -w A pi / sg(pi): value -w A, derivative -w A (onehot - p) by its
    logits.
    """
    table = toy_model().lm_head.weight.detach().T.numpy()  # row i: the logits after token i
    logits_gradient, value, mismatch, count = np.zeros((VOCAB, VOCAB)), 0.0, 0.0, 0
    for (row,) in rows:
        for position in np.flatnonzero(row["action_mask"]):
            before, token = row["token_ids"][position - 1], row["token_ids"][position]
            p = np.exp(table[before]) / np.exp(table[before]).sum()
            log_weight = math.log(p[token]) - float(row["logprobs"][position])
            factor = -min(math.exp(log_weight), correction_cap) * row["advantage"]
            logits_gradient[before] += factor * (np.eye(VOCAB)[token] - p)
            value, mismatch, count = value + factor, mismatch + abs(log_weight), count + 1
    count = max(count, 1)
    return logits_gradient.T / count, logits_gradient.sum(0) / count, value / count, mismatch / count


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_tokens", [1, 25, 10_000])
def test_a_step_has_the_gradient_of_the_formula_however_it_is_cut(num_ranks, micro_batch_tokens):
    rows = toy_rows(np.random.default_rng(0), 7, masked=[2])
    (weight, bias), sums, peaks = ranks_after_a_step(rows, num_ranks, micro_batch_tokens)
    expected_weight, expected_bias, value, mismatch = step_oracle(rows)
    assert np.abs(weight.numpy() - expected_weight).max() < 1e-6  # the head computes in fp32
    assert np.abs(bias.numpy() - expected_bias).max() < 1e-6
    means = mean_of(sums)
    assert means["loss/policy"] == pytest.approx(value, abs=1e-6)
    assert means["mismatch/abs_mean"] == pytest.approx(mismatch, abs=1e-6)
    assert all(math.isfinite(number) for number in (*means.values(), *peaks.values()))


def test_a_rank_whose_rows_are_all_masked_changes_nothing():
    rng = np.random.default_rng(1)
    working = toy_rows(rng, 2)
    alone, _, _ = ranks_after_a_step(working, 1, 10_000)
    # by length: two ranks get two rows each, and any split with masked rows has the same sums
    with_idle, _, _ = ranks_after_a_step(working + toy_rows(rng, 2, masked=[0, 1]), 2, 10_000)
    for one, two in zip(alone, with_idle):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-7)


@pytest.mark.parametrize("flags", [{}, {"minibatches": 2, "epochs": 2}])
def test_a_step_of_masked_rows_alone_has_loss_zero_and_finite_gradients(flags):
    rows = toy_rows(np.random.default_rng(2), 4, masked=range(4))
    gradients, sums, peaks = ranks_after_a_step(rows, 2, 10_000, **flags)
    assert all(not gradient.any() for gradient in gradients)
    assert sums["loss/policy"] == (0.0, 0.0), "no token, and a loss of exactly 0"
    assert sums["grad_norm"][0] == 0.0
    assert all(math.isfinite(peak) for peak in peaks.values())


def test_the_first_update_of_an_on_policy_step_is_on_policy():
    # the engine's log-probs are those of the trainer: ratio 1, nothing clipped, weight 1, no mismatch
    model, rows = toy_model(), toy_rows(np.random.default_rng(3), 6)
    for (row,) in rows:
        ids = torch.as_tensor(row["token_ids"], dtype=torch.int64)
        table = model.lm_head.weight.detach().T.log_softmax(-1)
        row["logprobs"] = np.r_[0.0, table[ids[:-1], ids[1:]].numpy()].astype(np.float32)
    tokens = sum(int(row["action_mask"].sum()) for (row,) in rows)
    for flags in ({}, {"minibatches": 2}):  # with two, the old log-probs come from a pass of their own
        _, sums, peaks = ranks_after_a_step(rows, 1, 30, model=model, **flags)
        means = mean_of(sums)
        assert means["ratio/clip_low_frac"] == 0 and means["ratio/clip_high_frac"] == 0
        assert peaks["mismatch/abs_max"] <= 1e-6 and peaks["is/max_weight"] == pytest.approx(1, abs=1e-6)
        assert means["is/dropped_frac"] == 0
        # at ratio 1 and weight 1 the loss is minus the sum of the advantages over the tokens
        expected = -sum(row["advantage"] * row["action_mask"].sum() for (row,) in rows)
        assert sums["loss/policy"] == (pytest.approx(expected, abs=1e-5), tokens)


# --- Metrics stay raw


def test_a_token_that_is_too_late_to_train_still_counts_in_the_lengths():
    # A has 3 sampled tokens, B 4 of which 2 are late, and B is truncated
    parts = [segment([1, 2, 3, 4], 1, [-0.1] * 3), segment([1, 2, 3, 4, 5], 1, [-0.1] * 4)]
    parts[1].versions[1:] = [0, 0, 4, 4]
    parts[0].versions[1:] = 4
    parts[1].finish_reason = "length"
    rollouts = [Rollout(f"0.{i}", "g0", 0, "0", [part], [float(i)]) for i, part in enumerate(parts)]
    lags, num_late = mark_late(rollouts, 4, 2, "mask")
    assert num_late == 2
    row = rollout_metrics(rollouts, lags, num_late, {}, {})
    assert row["rollout/truncated_frac"] == 0.5
    assert row["staleness/late_token_frac"] == pytest.approx(2 / 7)
    assert row["rollout/len_mean"] == 3.5, "2.5 forgets what was sampled and not trained"


def test_rewards_are_averaged_over_valid_rollouts_alone():
    # rewards 1, 0, died, 0: mean 1/3, a quarter invalid
    part = segment([1, 2], 1, [-0.1])
    rollouts = [Rollout(f"0.{i}", "g0", 0, "0", [part], [reward]) for i, reward in enumerate([1, 0, 0, 0])]
    rollouts[2].invalid = "env_error"
    row = rollout_metrics(rollouts, [], 0, {}, {"0.0": 1.0, "0.1": -0.5, "0.3": -0.5})
    assert row["advantage/abs_mean"] == pytest.approx(2 / 3)
    assert row["reward/mean"] == pytest.approx(1 / 3) and row["reward/invalid_frac"] == 0.25
    assert row["rollout/dropped/env_error"] == 1


def test_every_segment_of_a_rollout_carries_its_advantage():
    # rewards 1, 0, died, 0 in one group, 3 and 1 in another: std sqrt(1/3) and sqrt(2)
    forked = Rollout("0.0", "g0", 0, "0", [segment([1, 2, 3], 1, [-1, -2]), segment([4, 5], 1, [-3])], [1.0])
    others = [Rollout(f"0.{i}", "g0", 0, "0", [segment([6, i], 1, [-1])], [0.0]) for i in (1, 2, 3)]
    others[1].invalid = "env_error"
    far = [Rollout(f"1.{i}", "g1", 1, "5", [segment([7, i], 1, [-1])], [r]) for i, r in enumerate([3, 1])]
    rows, advantages = make_rows([forked, *others, *far], Args())
    half = math.sqrt(0.5)
    expected = {"0.0": 1.1547005, "0.1": -0.5773503, "0.3": -0.5773503, "1.0": half, "1.1": -half}
    assert advantages == pytest.approx(expected, abs=1e-6)
    flat = [[row["advantage"] for row in rollout] for rollout in rows]
    assert flat == [[advantages["0.0"]] * 2, *([advantages[name]] for name in ("0.1", "0.3", "1.0", "1.1"))]
    assert [row["token_ids"].tolist() for row in rows[0]] == [[1, 2, 3], [4, 5]]
    assert [row["token_ids"].tolist() for (row,) in rows[1:]] == [[6, 1], [6, 3], [7, 0], [7, 1]]
    assert sum(int(row["action_mask"].sum()) for row in rows[0]) == 3
    (batches_of_rank,) = micro_batches(rows[0], ParallelFlags(micro_batch_tokens=100))
    assert batches_of_rank[0]["advantage"].tolist() == pytest.approx([1.1547005, 1.1547005])
