"""Score centering: its terms by hand, the property it is made for, and the trainer's step by a formula."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import algos.score_centering
from algos import grpo
from algos.score_centering import (
    Args,
    TopLogprobHead,
    Trainer,
    centered_loss,
    check_flags,
    centre_weights,
    make_minibatches,
    make_rows,
    truncated_ratio,
)
from common.attention import use_packed_attention
from common.checks import FlagError
from common.cluster import RunError
from common.logger import mean_of, merge
from common.models import make_tiny
from common.sample import Rollout, Segment
from tests.fakes import TableLM

F64 = torch.float64
Q, P = (0.5, 0.3, 0.2), (0.6, 0.3, 0.1)  # of three tokens, of which two are recorded: ratios 1.2, 1, and .5


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def oracle_f(ratio: float, correction: str, cap: float) -> float:
    if correction == "icepop":
        return ratio if 1 / cap <= ratio <= cap else 0.0
    return {"tis": min(ratio, cap), "clip": min(max(ratio, 1 / cap), cap), "none": 1.0}[correction]


@pytest.mark.parametrize("correction", ["tis", "icepop", "clip", "none"])
def test_f_is_the_correction_of_grpo(correction):
    log_ratios = tensor([[-1000.0, -30.0, -1.0, -0.1, 0.0, 0.1, 1.0, 30.0, 1000.0]]).requires_grad_()
    got = truncated_ratio(log_ratios, correction, 2.0)
    expected = [
        oracle_f(math.exp(min(max(x, -20), 20)), correction, 2.0) for x in log_ratios.detach()[0].tolist()
    ]
    assert got[0].tolist() == pytest.approx(expected, rel=1e-12) and not got.requires_grad
    assert torch.equal(got, grpo.importance_weights(log_ratios, correction, 2.0))


@pytest.mark.parametrize(
    "correction, centre, mean",
    [
        # cap 1.1: f is 1.1, 1, .5; rho = .2 / .1 = 2, alpha = 2 x .5 = 1. q f = .55, .3, .1: .95 in all
        ("tis", [0.55 - 0.6, 0.3 - 0.3], [0.55 - 0.6 * 0.95, 0.3 - 0.3 * 0.95, 0.1 - 0.1 * 0.95]),
        # f is 0, 1, 0; alpha = 0. q f = 0, .3, 0
        ("icepop", [0.0, 0.3], [-0.6 * 0.3, 0.3 - 0.3 * 0.3, -0.1 * 0.3]),
        # f is 1.1, 1, 1 / 1.1; alpha = 2 / 1.1. q f = .55, .3, .181818: 1.031818 in all
        ("clip", [0.55 - 1.2 / 1.1, 0.3 - 0.6 / 1.1],
         [0.55 - 0.6 * 1.0318182, 0.3 - 0.3 * 1.0318182, 0.2 / 1.1 - 0.1 * 1.0318182]),
        # f is 1; alpha = 2: the mean of the score is q - p
        ("none", [0.5 - 1.2, 0.3 - 0.6], [-0.1, 0.0, 0.1]),
    ],
)  # fmt: skip
def test_the_centre_of_three_tokens_by_hand(correction, centre, mean):
    logits = tensor([[P]]).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    got = centre_weights(logprobs[..., :2], tensor([[Q[:2]]]).log(), correction, 1.1)
    assert got[0, 0].tolist() == pytest.approx(centre, abs=1e-12) and not got.requires_grad
    (got * logprobs[..., :2]).sum().backward()  # by the logits: c - p sum(c)
    assert logits.grad[0, 0].tolist() == pytest.approx(mean, abs=1e-6)


def test_on_policy_there_is_nothing_to_take_off():
    top = tensor([[[0.5, 0.3]]]).log()
    for correction in ("tis", "icepop", "clip", "none"):
        assert centre_weights(top, top, correction, 2.0).abs().max() < 1e-12


LOGITS = st.lists(st.floats(-3, 3), min_size=6, max_size=6)


@settings(max_examples=100, deadline=None)
@given(LOGITS, LOGITS, st.integers(1, 6), st.sampled_from(["tis", "icepop", "clip", "none"]),
       st.sampled_from([1.05, 1.5, 2.0]), st.floats(-3, 3))  # fmt: skip
def test_whatever_the_baseline_the_loss_moves_nothing_on_average(pi, mu, k, correction, cap, advantage):
    """For any q and p whose tail has one ratio, the gradient's mean over what q samples is 0 at a constant
    reward; without the second term it is not."""
    p, q = torch.softmax(tensor(pi), 0), torch.softmax(tensor(mu), 0)
    q[k:] = p[k:] * (1 - q[:k].sum()) / p[k:].sum()  # the assumption about the tail; exact for k = 6
    logits = tensor(pi).requires_grad_()
    logprobs = logits.log_softmax(0)
    top, mu_top = logprobs[None, None, :k], q[None, None, :k].log()
    centre = centre_weights(top, mu_top, correction, cap)
    total = torch.zeros((), dtype=F64)
    for token in range(6):
        weight = tensor([[oracle_f((p[token] / q[token]).item(), correction, cap)]])
        loss, _ = centered_loss(
            logprobs[token].view(1, 1), weight, top, centre, tensor([advantage]), torch.tensor([[True]])
        )
        total = total + q[token] * loss
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient.abs().max() < 1e-5  # tails below 1e-6 count as 1e-6


def test_without_the_centre_a_constant_reward_moves_the_policy():
    logits = tensor(P).log().requires_grad_()
    logprobs = logits.log_softmax(0)
    plain = sum(Q[v] * oracle_f(P[v] / Q[v], "tis", 1.1) * logprobs[v] for v in range(3))
    (gradient,) = torch.autograd.grad(plain, logits)
    assert gradient.tolist() == pytest.approx([-0.02, 0.015, 0.005], abs=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_masked_positions_may_hold_anything(garbage):
    logprobs = tensor([[-1.0, garbage], [garbage, garbage]]).requires_grad_()
    top = tensor([[[-1.0, -2.0], [garbage] * 2], [[garbage] * 2] * 2]).requires_grad_()
    centre = tensor([[[0.5, 0.25], [garbage] * 2], [[garbage] * 2] * 2])
    mask = torch.tensor([[True, False], [False, False]])
    loss, sums = centered_loss(
        logprobs, tensor([[2.0, garbage]] * 2), top, centre, tensor([3.0, garbage]), mask
    )
    loss.backward()
    # -3 (2 x -1 - (.5 x -1 + .25 x -2)) = 3
    assert loss.item() == 3.0 and float(sums["loss/policy"][1]) == 1
    assert logprobs.grad.tolist() == [[-6.0, 0.0], [0.0, 0.0]]
    assert top.grad.tolist() == [[[1.5, 0.75], [0.0, 0.0]], [[0.0, 0.0]] * 2]


@pytest.mark.parametrize("correction", ["tis", "icepop", "clip", "none"])
def test_impossible_tokens_and_full_tops_stay_finite_in_single_precision(correction):
    for p, q in (
        ([-1000.0, 0.0], [0.0, -1000.0]),
        ([0.0, -1000.0], [math.log(0.5)] * 2),
        ([1e-6] * 2, [0.0] * 2),
    ):
        assert centre_weights(torch.tensor([[p]]), torch.tensor([[q]]), correction, 2.0).isfinite().all()


def test_the_head_gives_the_logprobs_of_all_that_is_asked_for_in_chunks_and_with_gradient(monkeypatch):
    torch.manual_seed(0)
    model = TableLM(torch.randn(7, 7, dtype=torch.float32))
    ids, top = torch.randint(7, (3, 6)), torch.randint(7, (3, 5, 4))
    expected = (model.lm_head.weight.T[ids[:, :-1]] / 0.7).log_softmax(-1)
    for chunk_bytes in (1, 1 << 20):
        monkeypatch.setattr(algos.score_centering, "CHUNK_BYTES", chunk_bytes)
        model.zero_grad()
        head = TopLogprobHead(copied := copy.deepcopy(model))
        logprobs, entropy, *others = head(copied, ids[:, :-1], ids[:, 1:], 0.7, top_BSK=top)
        torch.testing.assert_close(logprobs, expected.gather(-1, ids[:, 1:, None])[..., 0])
        torch.testing.assert_close(torch.stack(others, -1), expected.gather(-1, top))
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
        sum(others).sum().backward()
        expected.gather(-1, top).sum().backward(retain_graph=True)
        torch.testing.assert_close(copied.lm_head.weight.grad, model.lm_head.weight.grad)
        assert len(head(copied, ids[:, :-1], ids[:, 1:], 0.7)) == 2


def test_packed_rows_have_the_same_logprobs_and_gradients(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "model"), dtype=torch.float32)
    ids, top = torch.randint(5, 90, (3, 10)), torch.randint(5, 90, (3, 9, 4))
    lengths, results = torch.tensor([9, 4, 7]), []
    kept = torch.arange(9) < lengths[:, None]
    for packs in (False, True):
        if packs:
            use_packed_attention(model)
        model.zero_grad()
        head = TopLogprobHead(model)
        values = torch.stack(head(model, ids[:, :-1], ids[:, 1:], 1.0, lengths, top_BSK=top), -1)
        (values * kept[..., None]).sum().backward()
        results.append((values[kept], *(parameter.grad.clone() for parameter in model.parameters())))
        head.head.forward = head.plain_forward
    for plain, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)


# --- The trainer's step on a toy language model

VOCAB, K = 7, 3


def toy_rollouts(rng, count: int) -> list[Rollout]:
    rollouts = []
    for index in range(count):
        length, first = int(rng.integers(4, 10)), int(rng.integers(1, 4))
        mask = np.arange(length) >= first
        q = rng.dirichlet(np.ones(VOCAB), length)
        ids = rng.integers(0, VOCAB, length)
        top = np.argsort(-q, 1)[:, :K]
        top_k = np.stack([top, np.log(np.take_along_axis(q, top, 1))], -1) * mask[:, None, None]
        part = Segment(
            ids, mask, np.where(mask, np.log(q[np.arange(length), ids]), 0), np.where(mask, 0, -1), [length],
            "stop", top_k,
        )  # fmt: skip
        rollouts.append(Rollout(f"{index // 2}.{index % 2}", f"g{index // 2}", 0, "0", [part], [index % 3]))
    return rollouts


def step_oracle(rollouts, advantages, table, correction, cap):
    """Gradient of the logits' table of the bigram model and the loss, written out token by token."""
    gradient, value, count = np.zeros((VOCAB, VOCAB)), 0.0, 0
    for rollout in rollouts:
        (part,) = rollout.segments
        for position in np.flatnonzero(part.action_mask):
            before, token = part.token_ids[position - 1], part.token_ids[position]
            p = np.exp(table[before]) / np.exp(table[before]).sum()
            ids = part.top_k[position, :, 0].astype(int)
            q_top = np.exp(part.top_k[position, :, 1].astype(float))
            rho = (1 - q_top.sum()) / (1 - p[ids].sum())
            alpha = rho * oracle_f(1 / rho, correction, cap)
            coefficient = np.zeros(VOCAB)  # of log p_v in the loss, over -A
            coefficient[token] = oracle_f(p[token] / math.exp(part.logprobs[position]), correction, cap)
            for v, q in zip(ids, q_top):
                coefficient[v] -= q * oracle_f(p[v] / q, correction, cap) - alpha * p[v]
            factor = -advantages[rollout.rollout_id]
            value += factor * (coefficient * np.log(p)).sum()
            gradient[before] += factor * (coefficient - p * coefficient.sum())
            count += 1
    return gradient / count, value / count


@pytest.mark.parametrize("correction", ["tis", "icepop", "clip", "none"])
@pytest.mark.parametrize("ranks, micro_batch_tokens", [(1, 10_000), (2, 25), (3, 1)])
def test_a_step_has_the_gradient_of_the_formula_however_it_is_cut(correction, ranks, micro_batch_tokens):
    rollouts, args = toy_rollouts(np.random.default_rng(0), 8), Args(max_grad_norm=1e9, correction=correction)
    args.correction_cap, args.parallel.num_trainers, args.lr = 1.5, ranks, 0.0
    args.parallel.packing = "off"
    args.parallel.micro_batch_tokens = micro_batch_tokens
    rows, advantages = make_rows(rollouts, args)
    torch.manual_seed(0)
    model, gradients, results = TableLM(torch.randn(VOCAB, VOCAB, dtype=F64)), [], []
    for rank, share in enumerate(make_minibatches(rows, args, step=0)):
        trainer = Trainer(args, "", rank, False)
        trainer.model = copy.deepcopy(model)
        trainer.head = TopLogprobHead(trainer.model)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        results.append(trainer.train_step(share, None))
        gradients.append(trainer.model.lm_head.weight.grad)
    table = model.lm_head.weight.detach().T.numpy()
    expected, value = step_oracle(rollouts, advantages, table, correction, 1.5)
    assert np.abs(torch.stack(gradients).mean(0).T.numpy() - expected).max() < 1e-5  # fp32 in the head
    means = mean_of(merge([result["sums"] for result in results]))
    assert means["loss/policy"] == pytest.approx(value, abs=1e-5)
    masses = [np.exp(r.segments[0].top_k[r.segments[0].action_mask, :, 1]).sum(1) for r in rollouts]
    assert means["is/top_k_mass"] == pytest.approx(np.concatenate(masses).mean(), abs=1e-6)


def test_rollouts_without_the_top_and_a_run_that_would_not_record_it_are_refused(tmp_path):
    rollouts = toy_rollouts(np.random.default_rng(0), 2)
    rollouts[1].segments[0].top_k = None
    with pytest.raises(RunError, match="--record-top-k 20"):
        make_rows(rollouts, Args())
    args = Args()
    args.log.output_dir, args.engine.record_top_k = str(tmp_path / "run"), 0
    with pytest.raises(FlagError, match="--record-top-k 0: .*use --record-top-k 20"):
        check_flags(args)
    args.engine.record_top_k, args.parallel.num_trainers, args.parallel.trainer_tp = 20, 2, 2
    with pytest.raises(FlagError, match="--trainer-tp 2: .*use 1"):
        check_flags(args)


def test_an_engine_keeps_a_top_of_every_sampled_token():
    from common.rollout import read_completion

    # two positions: the sampled token, then the two likeliest
    flat = SimpleNamespace(token_ids=[5, 9, 5, 7, 8, 7], logprobs=[-1.0, -0.5, -1.0, -2.0, -0.25, -2.0])
    output = SimpleNamespace(
        token_ids=(5, 7), logprobs=flat, finish_reason="stop", routed_experts=None,
        weight_versions=[SimpleNamespace(version="3", start=0, end=2)],
    )  # fmt: skip
    completion = read_completion(output, 2)
    assert completion.logprobs == [-1.0, -2.0] and completion.versions.tolist() == [3, 3]
    assert completion.top_k.tolist() == [[[9, -0.5], [5, -1.0]], [[8, -0.25], [7, -2.0]]]
    output.token_ids = (5, 8)  # an id that the log-probs do not belong to
    assert read_completion(output, 2).logprobs == [-1.0, None]
