"""FlashREINFORCE's maths: advantages, gate, filter and loss count rollouts, however their rows are cut."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algos.flash_reinforce import (
    batch_advantages,
    bernoulli_kl,
    entropy_floors,
    gate,
    gate_metrics,
    kl_sums,
    policy_loss,
    without_confident_failures,
)
from common.logger import mean_of, merge

F64, VOCAB, INF = torch.float64, 5, math.inf


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


# --- Advantages


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.2, 0.3, 0.7, 1 / 3, -3.7])
def test_a_step_of_equal_rewards_has_advantages_of_exactly_zero(reward):
    for size in range(130):
        assert batch_advantages([reward] * size) == [0.0] * size
        assert batch_advantages([np.float32(reward)] * size) == [0.0] * size


def test_the_baseline_is_the_mean_over_the_step():
    # (1 + 0 + 0 + 1 + .5) / 5 = .5, and no division by a std
    assert batch_advantages([1, 0, 0, 1, 0.5]) == [0.5, -0.5, -0.5, 0.5, 0.0]
    assert batch_advantages([2.0]) == [0.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9), st.randoms(), st.integers())
def test_advantages_sum_to_zero_and_follow_their_rewards(rewards, shuffler, shift):
    advantages, shift = batch_advantages(rewards), shift % 100
    assert sum(advantages) == pytest.approx(0, abs=1e-12)
    assert batch_advantages([reward + shift for reward in rewards]) == pytest.approx(advantages, abs=1e-12)
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    expected = [advantages[i] for i in order]
    assert batch_advantages([rewards[i] for i in order]) == pytest.approx(expected, abs=1e-12)


# --- The KL of one token


def oracle_kl(mu_logprob: float, logprob: float) -> float:
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (mu_logprob, logprob))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    "p, q, expected",
    [
        (0.5, 0.25, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),  # .143841; the other direction is .130812
        (0.25, 0.5, 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        (0.9, 0.9, 0.0),
    ],
)
def test_the_kl_goes_from_the_engine_to_the_trainer(p, q, expected):
    assert bernoulli_kl(tensor([[p]]).log(), tensor([[q]]).log()).item() == pytest.approx(expected, abs=1e-7)


LOGPROBS = st.one_of(
    st.floats(-20, 0), st.floats(-1e-3, 0), st.sampled_from([0.0, -1e-9, -1e-6, -1e-4, -1000.0, -INF, 1e-5])
)


@settings(max_examples=200, deadline=None)
@given(LOGPROBS, LOGPROBS)
def test_the_kl_of_a_token_equals_the_formula_and_is_never_negative(mu, pi):
    mu, pi = float(np.float32(mu)), float(np.float32(pi))
    kl = bernoulli_kl(torch.tensor([[mu]]), torch.tensor([[pi]]))
    assert kl.dtype == torch.float32 and kl.item() >= 0
    assert kl.item() == pytest.approx(oracle_kl(mu, pi), rel=2e-5, abs=2e-6)
    assert bernoulli_kl(torch.tensor([[mu]]), torch.tensor([[mu]])).item() == 0


def test_rounding_makes_no_kl_negative():
    # the two terms, each about 1e-5, cancel down to 1e-10: far below what single precision resolves
    mu = torch.linspace(0.05, 0.95, 1000).log()[None]
    kl = bernoulli_kl(mu, mu + 1e-5)
    assert kl.min() >= 0 and kl.max() < 1e-6


def test_nearly_certain_tokens_keep_their_kl_in_single_precision():
    # p = 1 - 1e-5, q = 1 - 4e-5: 1e-5 ln(1/4) + (1 - 1e-5) ln(p/q) = -1.38629e-5 + 3.00072e-5
    mu, pi = torch.tensor([[math.log1p(-1e-5)]]), torch.tensor([[math.log1p(-4e-5)]])
    assert bernoulli_kl(mu, pi).item() == pytest.approx(1.6144e-5, rel=1e-3)


# --- The gate


def probabilities(rows) -> torch.Tensor:
    """Log-probs of rows of probabilities, padded with NaN."""
    width = max(map(len, rows))
    return tensor([list(row) + [math.nan] * (width - len(row)) for row in rows]).log()


def kept_alone_and_together(mu_rows, pi_rows, delta):
    """What the gate says of each row as a rollout of its own, and of the rows as one rollout."""
    mu, pi = probabilities(mu_rows), probabilities(pi_rows)
    mask, count = ~mu.isnan(), len(mu_rows)
    alone = gate(*kl_sums(pi, mu, mask, torch.arange(count), count), delta)
    together = gate(*kl_sums(pi, mu, mask, torch.zeros(count, dtype=torch.long), 1), delta)
    return alone.tolist(), together.tolist()


def test_the_gate_looks_at_the_whole_rollout():
    # KL(.5, .25) = .143841 in one token: over 10 tokens .0143841, over its own row .143841; the mean of the
    # two rows' means is .0719
    mu, pi = [[0.5], [0.5] * 9], [[0.25], [0.5] * 9]
    assert kept_alone_and_together(mu, pi, 0.015) == ([False, True], [True])
    assert kept_alone_and_together(mu, pi, 0.014) == ([False, True], [False])
    # two such tokens of which one is masked count once, and their row counts one token
    logprobs, behaviour = probabilities([[0.25, 0.25]]), probabilities([[0.5, 0.5]])
    sums, counts = kl_sums(logprobs, behaviour, torch.tensor([[True, False]]), torch.tensor([2]), 4)
    assert sums.tolist() == [0, 0, pytest.approx(0.143841, abs=1e-6), 0] and counts.tolist() == [0, 0, 1, 0]


def test_a_mean_equal_to_delta_is_kept_and_delta_infinity_keeps_all():
    sums, counts = tensor([0.5, 0.5, 0.0, 0.0, 13.8]), tensor([2, 1, 3, 0, 1])
    assert gate(sums, counts, 0.25).tolist() == [True, False, True, True, False]
    assert gate(sums, counts, 0.0).tolist() == [False, False, True, True, False]
    assert gate(sums, counts, INF).tolist() == [True] * 5
    assert gate(tensor([math.nan]), tensor([1]), 0.01).item(), "a broken log-prob must reach the loss"


# --- The whole step: rows over ranks and micro-batches, as a trainer runs it


def random_rollout(rng, num_rows: int, drift: float, reward: float) -> dict:
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(2, 7))
        logits, tokens = rng.normal(size=(length, VOCAB)), rng.integers(0, VOCAB, length)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        mu = np.minimum(logp[np.arange(length), tokens] + drift * rng.normal(size=length), -1e-3)
        rows.append({"logits": logits, "tokens": tokens, "mu": mu, "mask": rng.random(length) < 0.8})
    return {"rows": rows, "reward": reward}


def random_step(seed: int) -> list[dict]:
    """Ten rollouts: most near mu, some far; two have a row without action tokens, one has nothing else."""
    rng = np.random.default_rng(seed)
    rollouts = [
        random_rollout(rng, int(rng.integers(1, 5)), [0.05, 0.2, 1.0][index % 3], float(rng.integers(0, 3)))
        for index in range(10)
    ]
    for index in (0, 4):
        rollouts[index]["rows"][0]["mask"][:] = False
    for row in rollouts[7]["rows"]:
        row["mask"][:] = False
    return rollouts


def deal(rollouts, num_ranks: int, rows_at_once: int, seed: int = 0) -> list[list[list[tuple[int, int]]]]:
    """(rollout, row) for each rank and micro-batch, shuffled, so that a rollout's rows are torn apart."""
    keys = [(i, s) for i, rollout in enumerate(rollouts) for s in range(len(rollout["rows"]))]
    random.Random(seed).shuffle(keys)
    groups = [keys[start : start + rows_at_once] for start in range(0, len(keys), rows_at_once)]
    most = -(-len(groups) // num_ranks)
    ranks = [groups[rank::num_ranks] for rank in range(num_ranks)]
    return [rank + [[]] * (most - len(rank)) for rank in ranks]


def padded(arrays, fill) -> torch.Tensor:
    width = max(map(len, arrays)) + 1
    return torch.stack([torch.cat([a, torch.full((width - len(a),), fill, dtype=a.dtype)]) for a in arrays])


def micro_batch(rollouts, keys, leaves, advantages) -> dict:
    """The keys' rows, padded; outside the mask NaN. Without keys: a copy of some row, all of it masked."""
    num_actions = [sum(int(row["mask"].sum()) for row in rollout["rows"]) for rollout in rollouts]
    rows = [rollouts[i]["rows"][s] for i, s in keys or [(1, 0)]]
    picked = [leaves[key] for key in keys or [(1, 0)]]
    mask = padded([torch.as_tensor(row["mask"]) for row in rows], False) & bool(keys)
    logp = [leaf.log_softmax(-1) for leaf in picked]
    chosen = [lp[torch.arange(len(lp)), torch.as_tensor(row["tokens"])] for lp, row in zip(logp, rows)]
    index = torch.tensor([i for i, _ in keys or [(1, 0)]])
    entropies = [-(lp.exp() * lp).sum(-1).detach() for lp in logp]
    return {
        "index": index, "mask": mask, "num_actions": torch.tensor(num_actions)[index],
        "advantages": tensor(advantages)[index], "entropy": padded(entropies, math.nan),
        "logprobs": torch.where(mask, padded(chosen, 0.0), math.nan),
        "mu": torch.where(mask, padded([torch.as_tensor(row["mu"]) for row in rows], 0.0), math.nan),
    }  # fmt: skip


def leaves_of(rollouts) -> dict[tuple[int, int], torch.Tensor]:
    rows = {(i, s): row for i, rollout in enumerate(rollouts) for s, row in enumerate(rollout["rows"])}
    return {key: tensor(row["logits"]).requires_grad_() for key, row in rows.items()}


def train(rollouts, ranks, delta, max_weight=INF, q=None):
    """Gradient by every row's logits averaged over ranks, metrics, largest weight, kept rollouts."""
    leaves = leaves_of(rollouts)
    advantages = batch_advantages([rollout["reward"] for rollout in rollouts])
    num_rollouts = len(rollouts)
    build = lambda keys: micro_batch(rollouts, keys, leaves, advantages)  # noqa: E731
    sums, counts, entropies, owners = 0, 0, [], []
    with torch.no_grad():
        for batch in [build(keys) for rank in ranks for keys in rank]:
            parts = kl_sums(batch["logprobs"], batch["mu"], batch["mask"], batch["index"], num_rollouts)
            sums, counts = sums + parts[0], counts + parts[1]
            entropies.append(batch["entropy"][batch["mask"]])
            owners.append(batch["index"][:, None].expand(batch["mask"].shape)[batch["mask"]])
    kept = gate(sums, counts, delta)
    metrics, peaks = [gate_metrics(kept)], []
    if q is not None:
        floors_R = entropy_floors(torch.cat(entropies), torch.cat(owners), num_rollouts, q)
    for batch in [build(keys) for rank in ranks for keys in rank]:
        mask = batch["mask"]
        if q is not None:
            floors = floors_R[batch["index"]]
            mask = without_confident_failures(mask, batch["entropy"], floors, batch["advantages"])
        loss, step_metrics, step_peaks = policy_loss(
            batch["logprobs"], batch["mu"], batch["advantages"], batch["num_actions"],
            kept[batch["index"]], mask, max_weight,
        )  # fmt: skip
        (loss * len(ranks) / num_rollouts).backward()
        metrics.append(step_metrics)
        peaks.append(float(step_peaks["is/max_weight"]))
    gradients = {key: leaf.grad / len(ranks) if leaf.grad is not None else torch.zeros_like(leaf)
                 for key, leaf in leaves.items()}  # fmt: skip
    means = mean_of(merge([{n: (float(s), float(c)) for n, (s, c) in d.items()} for d in metrics]))
    return gradients, means, max(peaks), kept.tolist()


def mean_kls(rollouts) -> list[float]:
    means = []
    for rollout in rollouts:
        kls = [oracle_kl(row["mu"][t], logp_of(row)[t][row["tokens"][t]])
               for row in rollout["rows"] for t in np.flatnonzero(row["mask"])]  # fmt: skip
        means.append(sum(kls) / max(len(kls), 1))
    return means


def logp_of(row) -> np.ndarray:
    return row["logits"] - np.log(np.exp(row["logits"]).sum(-1, keepdims=True))


def oracle(rollouts, delta, max_weight=INF, q=1.0):
    """Loss, gradient by every row's logits and used weights, token by token from the formula, in float64."""
    size = len(rollouts)
    baseline = sum(rollout["reward"] for rollout in rollouts) / size
    loss, gradients, weights = 0.0, {}, []
    for i, (rollout, mean_kl) in enumerate(zip(rollouts, mean_kls(rollouts))):
        advantage = rollout["reward"] - baseline
        places = [(s, t) for s, row in enumerate(rollout["rows"]) for t in np.flatnonzero(row["mask"])]
        num_actions = len(places)
        for s, row in enumerate(rollout["rows"]):
            gradients[i, s] = np.zeros_like(row["logits"])
        if mean_kl > delta:
            continue
        if advantage < 0:
            logp = {(s, t): logp_of(rollout["rows"][s])[t] for s, t in places}
            entropy = {place: -(np.exp(lp) * lp).sum() for place, lp in logp.items()}
            places = sorted(places, key=lambda place: -entropy[place])[: math.ceil(q * num_actions)]
        for s, t in places:
            row = rollout["rows"][s]
            logp, token = logp_of(row)[t], row["tokens"][t]
            weights.append(min(math.exp(logp[token] - row["mu"][t]), max_weight))
            slope = -weights[-1] * advantage / (size * num_actions)  # dL / d(log pi)
            gradients[i, s][t] += slope * (np.eye(VOCAB)[token] - np.exp(logp))
            loss += slope * logp[token]
    return loss, gradients, weights


def threshold(rollouts, rank: int) -> float:
    """A delta halfway between two neighbouring mean KLs, so that rounding decides nothing: keeps `rank`."""
    means = sorted(mean_kls(rollouts))
    return (means[rank - 1] + means[rank]) / 2


def assert_equals_the_formula(rollouts, ranks, delta, max_weight=INF, q=None):
    gradients, means, peak, kept = train(rollouts, ranks, delta, max_weight, q)
    loss, expected, weights = oracle(rollouts, delta, max_weight, 1.0 if q is None else q)
    assert kept == [mean <= delta for mean in mean_kls(rollouts)]
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient.numpy(), expected[key], rtol=1e-9, atol=1e-12)
    assert means["loss/policy"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert means["gate/rejected_frac"] == kept.count(False) / len(kept)
    assert peak == pytest.approx(max(weights, default=0.0), rel=1e-9)
    if weights:
        ess = means["is_weight"] ** 2 / means["is_weight_squared"]
        expected_ess = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
        assert ess == pytest.approx(expected_ess, rel=1e-9)
    if q is None:
        lengths = [sum(int(row["mask"].sum()) for row in rollout["rows"]) for rollout in rollouts]
        lost = sum(length for length, used in zip(lengths, kept) if not used)
        assert means["is/dropped_frac"] == pytest.approx(lost / sum(lengths))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("num_kept", [1, 6])
def test_a_step_has_the_gradient_of_the_formula_however_it_is_cut(num_ranks, rows_at_once, num_kept):
    rollouts = random_step(num_ranks)
    ranks = deal(rollouts, num_ranks, rows_at_once)
    assert_equals_the_formula(rollouts, ranks, threshold(rollouts, num_kept))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9),
       st.sampled_from([INF, 0.5, 1.0, 1.2]), st.sampled_from([None, 0.0, 0.2, 0.75, 0.9, 1.0]))  # fmt: skip
def test_any_step_equals_the_formula(seed, num_ranks, rows_at_once, num_kept, max_weight, q):
    rollouts = random_step(seed)
    ranks = deal(rollouts, num_ranks, rows_at_once, seed)
    assert_equals_the_formula(rollouts, ranks, threshold(rollouts, num_kept), max_weight, q)


def test_an_infinite_delta_is_plain_importance_weighted_reinforce():
    # the estimator written the usual way: pi/mu keeps its gradient, and nothing is detached
    rollouts = random_step(5)
    gradients, means, _, kept = train(rollouts, deal(rollouts, 2, 3), INF)
    assert all(kept) and means["gate/rejected_frac"] == 0 and means["is/dropped_frac"] == 0
    leaves = leaves_of(rollouts)
    baseline, surrogate = sum(rollout["reward"] for rollout in rollouts) / 10, 0
    for i, rollout in enumerate(rollouts):
        num_actions = sum(row["mask"].sum() for row in rollout["rows"])
        for s, row in enumerate(rollout["rows"]):
            logp = leaves[i, s].log_softmax(-1)
            ratio = (logp[torch.arange(len(logp)), row["tokens"]] - tensor(row["mu"])).exp()
            total = ratio[torch.as_tensor(row["mask"])].sum()
            surrogate = surrogate - (rollout["reward"] - baseline) * total / max(num_actions, 1) / 10
    surrogate.backward()
    for key, leaf in leaves.items():
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(gradients[key], expected, rtol=1e-9, atol=1e-12)


def test_a_step_of_equal_rewards_has_a_gradient_of_exactly_zero():
    rollouts = random_step(6)
    for rollout in rollouts:
        rollout["reward"] = 0.7
    gradients, means, _, _ = train(rollouts, deal(rollouts, 2, 3), INF)
    assert all(not gradient.any() for gradient in gradients.values()) and means["loss/policy"] == 0


# --- Rollouts, not rows


def mass(rows_of, rewards, kept=None):
    """On-policy (weight 1): the summed |dL / d(log pi)| of each rollout, given its rows' lengths."""
    index = torch.tensor([i for i, lengths in enumerate(rows_of) for _ in lengths])
    lengths = torch.tensor([length for row in rows_of for length in row])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    logprobs = torch.full(mask.shape, -0.7, dtype=F64, requires_grad=True)
    num_actions = torch.tensor([sum(row) for row in rows_of])
    kept = torch.tensor(kept or [True] * len(rows_of))
    loss, _, _ = policy_loss(logprobs, logprobs.detach(), tensor(batch_advantages(rewards))[index],
                             num_actions[index], kept[index], mask)  # fmt: skip
    (loss / len(rows_of)).backward()
    return [logprobs.grad[index == i].abs().sum().item() for i in range(len(rows_of))]


def test_nine_rows_weigh_as_much_as_one():
    # baseline 1/2, so each |A| is 1/2 and a quarter of it is 1/8; per row it would be 9/24 against 1/24
    rows = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2], [40]]
    assert mass(rows, [0, 0, 1, 1]) == pytest.approx([0.125] * 4, abs=1e-12)


def test_a_rejected_rollout_stays_in_the_baseline_and_in_the_denominator():
    rows, rewards = [[3, 1], [7], [2], [4]], [0, 0, 1, 1]
    masses = mass(rows, rewards, kept=[True, False, True, True])
    assert masses == pytest.approx([0.125, 0, 0.125, 0.125], abs=1e-12), "1/6: divided by the three kept ones"


# --- Weights


def one_row(logprobs, mu, advantage=1.0, mask=None, max_weight=INF, dtype=F64):
    logprobs = torch.tensor([logprobs], dtype=dtype, requires_grad=True)
    mask = torch.tensor([mask or [True] * logprobs.shape[1]])
    return logprobs, policy_loss(logprobs, torch.tensor([mu], dtype=dtype), tensor([advantage]),
                                 torch.tensor([2]), torch.tensor([True]), mask, max_weight)  # fmt: skip


def test_the_loss_of_two_tokens_by_hand():
    # weights .5/.25 = 2 and .2/.4 = 1/2, T = 2, A = 3: -3/2 (2 ln .5 + ln .2 / 2) = 3.286520
    mu = [math.log(0.25), math.log(0.4)]
    logprobs, (loss, sums, peaks) = one_row([math.log(0.5), math.log(0.2)], mu, 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(3.286520, abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx([-3.0, -0.75], abs=1e-9)
    assert peaks["is/max_weight"].item() == pytest.approx(2)
    weight, squared = mean_of(sums)["is_weight"], mean_of(sums)["is_weight_squared"]
    assert weight**2 / squared == pytest.approx(2.5**2 / 2 / 4.25)


def test_max_weight_caps_the_weight_and_nothing_else():
    # weights 2 and 1/2 become 1.5 and 1/2; a capped token keeps its gradient
    mu = [math.log(0.25), math.log(0.4)]
    logprobs, (loss, _, peaks) = one_row([math.log(0.5), math.log(0.2)], mu, 3.0, max_weight=1.5)
    loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-2.25, -0.75], abs=1e-9)
    assert peaks["is/max_weight"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("pi, mu, weight", [(-1e-9, -1000, math.exp(20)), (-1000, -1e-9, math.exp(-20))])
def test_a_log_ratio_of_a_thousand_stays_finite(dtype, pi, mu, weight):
    for advantage in (1.0, -1.0):
        logprobs, (loss, sums, peaks) = one_row([pi, pi], [mu, mu], advantage, dtype=dtype)
        loss.backward()
        assert math.isfinite(loss.item()) and loss.dtype == dtype
        assert logprobs.grad[0].tolist() == pytest.approx([-advantage * weight / 2] * 2, rel=1e-5)
        assert all(math.isfinite(value) for value in (*mean_of(merge([sums])).values(), *peaks.values()))
    mask, mu_logprobs = torch.tensor([[True] * 2]), torch.full_like(logprobs, mu)
    sums, counts = kl_sums(logprobs, mu_logprobs, mask, torch.tensor([0]), 1)
    expected = (1 - 1e-6) * math.log(1e6 - 1) - 1e-6 * math.log(1e6 - 1)  # both probabilities at their bounds
    assert (sums / counts).item() == pytest.approx(expected, rel=1e-5)
    assert not sums.requires_grad and not gate(sums, counts, 5e-3).item()


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 1000.0])
def test_masked_positions_may_hold_anything(garbage):
    clean, (loss, _, _) = one_row([-0.5, -1.0], [-0.7, -0.9])
    loss.backward()
    values = [-0.5, -1.0, garbage], [-0.7, -0.9, garbage]
    dirty, (same, sums, peaks) = one_row(*values, mask=[True, True, False])
    same.backward()
    assert same.item() == loss.item() and dirty.grad[0].tolist() == [*clean.grad[0].tolist(), 0.0]
    masked, (nothing, empty, empty_peaks) = one_row([garbage] * 3, [garbage] * 3, garbage, mask=[False] * 3)
    nothing.backward()
    assert nothing.item() == 0 and not masked.grad.any()
    metrics = mean_of(merge([sums, empty])) | {"a": peaks["is/max_weight"], "b": empty_peaks["is/max_weight"]}
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_of_masked_rows_alone_measures_nothing():
    _, (loss, sums, peaks) = one_row([math.nan], [math.nan], mask=[False])
    assert loss.item() == 0 and peaks["is/max_weight"] == 0
    nothing = tensor([[math.nan]])
    kept = gate(*kl_sums(nothing, nothing, torch.tensor([[False]]), torch.tensor([0]), 1), 1e-3)
    assert mean_of(merge([sums, gate_metrics(kept)])) == {"loss/policy": 0, "gate/rejected_frac": 0}


# --- The entropy filter of failures


SHARES = [(0, 0), (0.01, 1), (0.07, 7), (0.5, 50), (0.555, 56), (0.9, 90), (1, 100)]


@pytest.mark.parametrize("q, num_kept", SHARES)
def test_the_floor_keeps_a_share_of_the_rollout_rounded_up(q, num_kept):
    # .07 * 100 is 7.000000000000001 in floating point, and must not become 8
    entropy = torch.randperm(100, generator=torch.Generator().manual_seed(0)).double()
    owners = torch.zeros(101, dtype=torch.long)
    owners[100] = 2  # rollout 2 has one token, rollout 1 none
    floors = entropy_floors(torch.cat([entropy, tensor([0.25])]), owners, 3, q)
    assert int((entropy >= floors[0]).sum()) == num_kept
    assert floors.tolist() == [100 - num_kept if num_kept else INF, INF, 0.25 if q else INF]


def test_only_failures_lose_tokens_and_the_lowest_entropies_go():
    mask = torch.tensor([[True, True, True, False]] * 4)
    entropy = tensor([[0.3, 0.1, 0.2, math.nan]] * 4)
    floors, advantages = tensor([0.2, 0.2, 0.2, INF]), tensor([-1.0, 1.0, 0.0, -1.0])
    filtered = without_confident_failures(mask, entropy, floors, advantages)
    assert filtered.tolist() == [[True, False, True, False], *mask[1:3].tolist(), [False] * 4]


def test_filtered_tokens_stay_in_the_denominators():
    # q = 1/2 of a failure's tokens leaves its gradient per token as it was, and the other tokens have none
    rollouts = random_step(8)
    ranks = deal(rollouts, 2, 3)
    full, _, _, _ = train(rollouts, ranks, INF)
    half, _, _, _ = train(rollouts, ranks, INF, q=0.5)
    tokens = [(a[t], b[t]) for key in full for a, b in [(full[key], half[key])] for t in range(len(a))]
    assert all(not b.any() or torch.equal(a, b) for a, b in tokens)
    assert any(a.any() and not b.any() for a, b in tokens)
