"""Distillation, from a sampled token and from the teacher's likeliest ones: gradients derived by hand, C18's
two actions, a step against a formula written out token by token, and what is refused.

The committed batch is that of tests/test_family.py: seven tokens (two 0, three 1, two 2) of a uniform policy
over three, so that a token y has the gradient onehot(y) - 1/3 by the logits.
"""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import algos.distill_topk
from algos import distill, distill_topk
from algos.distill_topk import TopLogprobHead
from common.checks import FlagError, teacher_path
from common.logger import mean_of, merge
from common.logprobs import LogprobHead
from common.models import make_tiny, resolve_model
from common.parallel import ParallelFlags
from common.sample import Rollout, Segment
from tests.fakes import TableLM
from tests.test_family import GRPO, committed_batch, gradient_of, segment, token_gradient, trained

F64 = torch.float64
TEACHER = torch.tensor([[0.5, 0.25, 0.25]] * 3, dtype=F64).log()
UP, DOWN = math.log(1.5), math.log(0.75)  # log(teacher / uniform) of token 0, and of 1 and 2
VERDICTS = [[UP, DOWN, DOWN], [DOWN], [UP], [DOWN, DOWN]]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """The sum over ranks is that of this process."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op=None: None)


# --- The committed batch


def test_the_advantage_of_a_token_is_the_teachers_verdict():
    gradient = gradient_of("distill", reference=TEACHER)
    assert gradient == pytest.approx(token_gradient(VERDICTS), abs=1e-6)
    # sum of the verdicts: 2 ln 1.5 + 5 ln .75 = -.6274802; token 0: -(2 ln 1.5 + .6274802 / 3) / 7
    assert gradient == pytest.approx([-0.1457272, 0.0934123, 0.0523149], abs=1e-6)
    assert gradient - GRPO == pytest.approx([-0.1120554, 0.2280993, -0.1160439], abs=1e-6)


def test_a_stale_token_weighs_old_over_mu_and_is_judged_by_old():
    # the engine gave token 2 of rollout 1 a half (old/mu = 2/3), or a twelfth (4, cut to 2). With mu in the
    # advantage it would be log(1/4 / (1/2)), or log(1/4 / (1/12))
    for mu, weight in ((1 / 2, 2 / 3), (1 / 12, 2.0)):
        rollouts = committed_batch()
        rollouts[1].segments = [segment([2], [math.log(mu)])]
        verdicts = [VERDICTS[0], [weight * DOWN], *VERDICTS[2:]]
        got = gradient_of("distill", rollouts, reference=TEACHER)
        assert got == pytest.approx(token_gradient(verdicts), abs=1e-6)
        _, metrics, _ = trained("distill", rollouts, reference=TEACHER)
        flat = [verdict for own in verdicts for verdict in own]
        assert metrics["loss/teacher_kl"] == pytest.approx(-sum(flat) / 7, abs=1e-6)
        assert metrics["advantage/abs_mean"] == pytest.approx((2 * UP - 5 * DOWN) / 7, abs=1e-6)


def test_over_the_teachers_likeliest_token_the_policy_weighs_and_elsewhere_the_sample():
    # K = 1, token 0: 1/3 ln(2/3) at each of 7 positions; ln(4/3) at the five where 1 or 2 was sampled
    gradient = gradient_of("distill_topk", reference=TEACHER, teacher_top_k=1)
    exact = -UP / 3 * (np.eye(3)[0] - 1 / 3)
    sampled = -DOWN * (np.array([0, 3, 2]) - 5 / 3) / 7
    assert gradient == pytest.approx(exact + sampled, abs=1e-6)
    assert gradient == pytest.approx([-0.1585991, 0.0998483, 0.0587508], abs=1e-6)
    assert gradient - GRPO == pytest.approx([-0.1249273, 0.2345353, -0.1096080], abs=1e-6)
    _, metrics, _ = trained("distill_topk", committed_batch(), reference=TEACHER, teacher_top_k=1)
    assert metrics["loss/teacher_kl"] == pytest.approx(-UP / 3 - 5 / 7 * DOWN, abs=1e-6)
    assert metrics["teacher/outside_frac"] == pytest.approx(5 / 7, abs=1e-6)


def test_over_all_tokens_it_is_the_gradient_of_the_kl_whatever_was_sampled():
    # KL = 1/3 (ln(2/3) + 2 ln(4/3)) = .0566330; by a logit 1/3 (log(pi/teacher) - KL)
    expected = [-0.1540327, 0.0770163, 0.0770163]
    assert gradient_of("distill_topk", reference=TEACHER, teacher_top_k=3) == pytest.approx(
        expected, abs=1e-6
    )
    rollouts = committed_batch()
    rollouts[1].segments = [segment([2], [-math.log(12)])]  # nor does its staleness matter
    gradient, metrics, _ = trained("distill_topk", rollouts, reference=TEACHER, teacher_top_k=3)
    assert gradient == pytest.approx(expected, abs=1e-6)
    assert metrics["loss/teacher_kl"] == pytest.approx(0.0566330, abs=1e-6)
    assert metrics["teacher/outside_frac"] == 0


def test_a_sampled_token_outside_of_the_top_has_its_own_cap():
    rollouts = committed_batch()
    rollouts[1].segments = [segment([2], [-math.log(24)])]  # pi/mu = 8
    plain = gradient_of("distill_topk", reference=TEACHER, teacher_top_k=1)
    more = -DOWN * (np.eye(3)[2] - 1 / 3) / 7
    for cap, weight in ((5.0, 5.0), (3.0, 3.0), (10.0, 8.0)):
        flags = {"reference": TEACHER, "teacher_top_k": 1, "max_weight": cap}
        got = gradient_of("distill_topk", rollouts, **flags)
        assert got == pytest.approx(plain + (weight - 1) * more, abs=1e-6)
        _, metrics, _ = trained("distill_topk", rollouts, **flags)
        assert metrics["ratio/clip_high_frac"] == pytest.approx((cap < 8) / 7, abs=1e-6)


@pytest.mark.parametrize("name", ["distill", "distill_topk"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name):
    gradient, metrics, _ = trained(name, committed_batch(), reference=torch.zeros(3, 3, dtype=F64))
    assert np.abs(gradient).max() < 1e-7 and abs(metrics["loss/teacher_kl"]) < 1e-7


# --- Two actions, pi (.6, .4), teacher (.5, .5): the KL's derivative is .6 x .4 (ln 1.2 - ln .8) = .0973116


def two_actions(mu, gradient_of_action) -> list[float]:
    """The mean over actions of mu, by the two logits of pi."""
    logits = tensor([math.log(1.5), 0.0]).requires_grad_()
    logprobs = logits.log_softmax(0)
    total = sum(mu[action] * gradient_of_action(logprobs, action) for action in range(2))
    return torch.autograd.grad(total, logits)[0].tolist()


@pytest.mark.parametrize("mu", [(0.6, 0.4), (0.3, 0.7), (0.9, 0.1)])
def test_the_sampled_verdict_has_the_gradient_of_the_kl_on_and_off_policy(mu):
    def loss(logprobs, action):
        mask, logprobs_BS = torch.tensor([[True]]), logprobs[action].view(1, 1)
        old_BS, teacher_BS = logprobs_BS.detach(), tensor([[math.log(0.5)]])
        weights_BS = distill.importance_weights(old_BS - math.log(mu[action]), "tis", 1e9)
        advantages_BS = distill.teacher_advantages(logprobs_BS, teacher_BS, mask)
        assert not advantages_BS.requires_grad  # k1 itself in the loss would have a gradient of 0
        return distill.policy_loss(logprobs_BS, old_BS, weights_BS, advantages_BS, mask, 0.2, 0.28)[0]

    assert two_actions(mu, loss) == pytest.approx([0.0973116, -0.0973116], abs=1e-6)


@pytest.mark.parametrize("mu", [(0.6, 0.4), (0.3, 0.7), (0.9, 0.1)])
@pytest.mark.parametrize("top", [(), (0,), (1,), (0, 1)])
def test_with_any_top_it_has_the_gradient_of_the_kl_on_and_off_policy(mu, top):
    def loss(logprobs, action):
        tokens = [action, *top]
        logprobs_BSM, teacher_BSM = logprobs[tokens].view(1, 1, -1), tensor([[[math.log(0.5)] * len(tokens)]])
        mu_BS, outside = tensor([[math.log(mu[action])]]), torch.tensor([[action not in top]])
        mask = torch.tensor([[True]])
        return distill_topk.teacher_loss(logprobs_BSM, teacher_BSM, mu_BS, outside, mask, 1e9)[0]

    assert two_actions(mu, loss) == pytest.approx([0.0973116, -0.0973116], abs=1e-6)


@pytest.mark.parametrize("name", ["distill", "distill_topk"])
def test_a_step_comes_closer_to_the_teacher(name):
    def kl(trainer) -> float:
        table = trainer.model.lm_head.weight.detach().T + trainer.model.lm_head.bias.detach()
        p = table.log_softmax(-1)
        return float((p.exp() * (p - TEACHER)).sum(-1).mean())

    _, _, trainer = trained(name, committed_batch(), reference=TEACHER, lr=0.1)
    assert kl(trainer) < 0.0566 and kl(trainer) > 0


# --- Single functions


def test_every_token_has_a_clip_of_its_own():
    """Ratios 1.5, .5, 1.5, .5 at A = 1, -1, -2, 2: the first two are held at 1.28 and .8."""
    ratios, advantages = tensor([[1.5, 0.5, 1.5, 0.5]]), tensor([[1.0, -1.0, -2.0, 2.0]])
    logprobs, mask = ratios.log().requires_grad_(), torch.tensor([[True] * 4])
    weights = tensor([[1.0, 1.0, 2.0, 1.0]])
    loss, sums = distill.policy_loss(logprobs, torch.zeros_like(ratios), weights, advantages, mask, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.28 - 0.8 - 2 * 3.0 + 1.0), abs=1e-9)
    assert logprobs.grad[0].tolist() == pytest.approx([0, 0, 6.0, -1.0], abs=1e-9)
    assert [float(sums[f"ratio/clip_{side}_frac"][0]) for side in ("low", "high")] == [1, 1]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_masked_positions_may_hold_anything(garbage):
    mask = torch.tensor([[True, False], [False, False]])
    logprobs = tensor([[-1.0, garbage], [garbage] * 2]).requires_grad_()
    odd = tensor([[-1.0, garbage], [garbage] * 2])
    advantages = distill.teacher_advantages(logprobs.detach(), odd - 2.0, mask)
    loss, sums = distill.policy_loss(logprobs, odd, torch.ones_like(odd), advantages, mask, 0.2, 0.28)
    loss.backward()
    assert loss.item() == 2.0 and float(sums["loss/policy"][1]) == 1
    assert logprobs.grad.tolist() == [[2.0, 0.0], [0.0, 0.0]]

    logprobs = tensor([[[-1.0, -2.0], [garbage] * 2], [[garbage] * 2] * 2]).requires_grad_()
    teacher = tensor([[[-3.0, -2.5], [garbage] * 2], [[garbage] * 2] * 2])
    outside = torch.tensor([[True, True], [False, True]])
    loss, sums = distill_topk.teacher_loss(logprobs, teacher, odd, outside, mask, 5.0)
    loss.backward()
    kl = [2.0, 0.5 * math.exp(-2.0)]  # weights 1 and e^-2
    assert loss.item() == pytest.approx(-kl[0] - 2 * kl[1], abs=1e-9)
    assert logprobs.grad[0, 0].tolist() == pytest.approx(kl, abs=1e-9)
    assert logprobs.grad[0, 1].tolist() == [0, 0] and not logprobs.grad[1].any()
    assert {name: float(s) for name, (s, _) in sums.items()} == {
        "loss/teacher_kl": pytest.approx(sum(kl)), "ratio/clip_high_frac": 0, "teacher/outside_frac": 1,
    }  # fmt: skip
    nothing = torch.zeros_like(mask)
    loss, sums = distill_topk.teacher_loss(logprobs, teacher, odd, outside, nothing, 5.0)
    assert loss.item() == 0.0 and all(float(count) == 0 for _, count in sums.values())


def test_the_head_finds_the_likeliest_and_gives_what_is_asked_for_in_chunks_and_with_gradient(monkeypatch):
    torch.manual_seed(0)
    model = TableLM(torch.randn(7, 7, dtype=torch.float32))
    ids, top = torch.randint(7, (3, 6)), torch.randint(7, (3, 5, 4))
    sampled = ids[:, 1:, None]
    expected = (model.lm_head.weight.T[ids[:, :-1]] / 0.7).log_softmax(-1)
    for chunk_bytes in (1, 1 << 20):
        monkeypatch.setattr(algos.distill_topk, "CHUNK_BYTES", {"cpu": chunk_bytes})
        model.zero_grad()
        head = TopLogprobHead(copied := copy.deepcopy(model))
        logprobs, entropy, *others = head(copied, ids[:, :-1], torch.cat([sampled, top], -1), 0.7)
        torch.testing.assert_close(logprobs, expected.gather(-1, sampled)[..., 0])
        torch.testing.assert_close(torch.stack(others, -1), expected.gather(-1, top))
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
        (logprobs + 2 * sum(others)).sum().backward()
        (expected.gather(-1, sampled).sum() + 2 * expected.gather(-1, top).sum()).backward(retain_graph=True)
        torch.testing.assert_close(copied.lm_head.weight.grad, model.lm_head.weight.grad)
        assert len(head(copied, ids[:, :-1], ids[:, 1:], 0.7)) == 2  # as any head, where that is asked for
        head.likeliest = (3, 5)  # of the first five tokens: the others are a larger teacher's padding
        with torch.no_grad():
            _, _, *found = head(copied, ids[:, :-1], sampled, 0.7)
        values, indices = torch.stack(found, -1).chunk(2, -1)
        torch.testing.assert_close(values, expected[..., :5].topk(3).values)
        torch.testing.assert_close(expected.gather(-1, indices.long()), values)
        assert indices.max() < 5


def test_packed_rows_have_the_same_numbers_and_gradients(tmp_path):
    from common.attention import use_packed_attention

    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "model"), dtype=torch.float32)
    ids, top = torch.randint(5, 90, (3, 10)), torch.randint(5, 90, (3, 9, 4))
    targets, lengths, results = torch.cat([ids[:, 1:, None], top], -1), torch.tensor([9, 4, 7]), []
    kept = torch.arange(9) < lengths[:, None]
    for packs in (False, True):
        if packs:
            use_packed_attention(model)
        model.zero_grad()
        head = TopLogprobHead(model)
        values = torch.stack(head(model, ids[:, :-1], targets, 1.0, lengths), -1)
        (values * kept[..., None]).sum().backward()
        results.append((values[kept], *(parameter.grad.clone() for parameter in model.parameters())))
        head.head.forward = head.plain_forward
    for plain, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)


# --- A step on a toy language model, token by token

VOCAB = 7


def toy_rollouts(rng, count: int) -> list[Rollout]:
    rollouts = []
    for index in range(count):
        length, first = int(rng.integers(4, 10)), int(rng.integers(1, 4))
        mask, q = np.arange(length) >= first, rng.dirichlet(np.ones(VOCAB), length)
        ids = rng.integers(0, VOCAB, length)
        mu, versions = np.where(mask, np.log(q[np.arange(length), ids]), 0), np.where(mask, 0, -1)
        part = Segment(ids, mask, mu, versions, [length], "stop")
        rollouts.append(Rollout(f"{index // 2}.{index % 2}", f"g{index // 2}", 0, "0", [part], [index % 3]))
    return rollouts


def step_oracle(rollouts, table, teacher, top_k: int | None, cap: float) -> tuple[np.ndarray, float]:
    """The gradient of the bigram table and the KL's estimate. `top_k` None: only the sampled token counts."""
    gradient, total, count = np.zeros((VOCAB, VOCAB)), 0.0, 0
    for rollout in rollouts:
        (part,) = rollout.segments
        for position in np.flatnonzero(part.action_mask):
            before, token = part.token_ids[position - 1], part.token_ids[position]
            p, t = (np.exp(x[before]) / np.exp(x[before]).sum() for x in (table, teacher))
            top = np.argsort(-t)[:top_k] if top_k else []
            counts = {v: p[v] for v in top}
            if token not in counts:
                counts[token] = min(p[token] / math.exp(part.logprobs[position]), cap)
            for v, c in counts.items():
                verdict = c * math.log(p[v] / t[v])
                gradient[before] += verdict * (np.eye(VOCAB)[v] - p)
                total += verdict
            count += 1
    return gradient / count, total / count


@pytest.mark.parametrize("name, top_k", [("distill", None), ("distill_topk", 1), ("distill_topk", 3)])
@pytest.mark.parametrize("ranks, micro_batch_tokens", [(1, 10_000), (2, 25), (3, 1)])
def test_a_step_has_the_gradient_of_the_formula_however_it_is_cut(name, top_k, ranks, micro_batch_tokens):
    module = {"distill": distill, "distill_topk": distill_topk}[name]
    rollouts, args = toy_rollouts(np.random.default_rng(0), 8), module.Args(lr=0.0, max_grad_norm=1e9)
    cap = {"distill": "correction_cap", "distill_topk": "max_weight"}[name]
    setattr(args, cap, 1.5)
    args.parallel.num_trainers, args.parallel.packing = ranks, "off"
    args.parallel.micro_batch_tokens = micro_batch_tokens
    rows, _ = module.make_rows(rollouts, args)
    torch.manual_seed(0)
    model, teacher = (TableLM(torch.randn(VOCAB, VOCAB, dtype=F64)) for _ in range(2))
    gradients, results, head = [], [], TopLogprobHead if top_k else LogprobHead
    for rank, share in enumerate(module.make_minibatches(rows, args, step=0)):
        trainer = module.Trainer(args, "", rank, False)
        trainer.model, trainer.teacher = copy.deepcopy(model), copy.deepcopy(teacher)
        trainer.head, trainer.teacher_head = head(trainer.model), head(trainer.teacher)
        trainer.teacher_head.likeliest = (top_k, VOCAB)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
        results.append(trainer.train_step(share, None))
        gradients.append(trainer.model.lm_head.weight.grad)
        assert trainer.teacher.lm_head.weight.grad is None
    tables = (each.lm_head.weight.detach().T.numpy() for each in (model, teacher))
    expected, kl = step_oracle(rollouts, *tables, top_k, 1.5)
    assert np.abs(torch.stack(gradients).mean(0).T.numpy() - expected).max() < 1e-5  # fp32 in the head
    means = mean_of(merge([result["sums"] for result in results]))
    assert means["loss/teacher_kl"] == pytest.approx(kl, abs=1e-5)


# --- What is refused, and what is not


@pytest.mark.parametrize("module", [distill, distill_topk])
def test_one_rollout_a_prompt_will_do_and_the_teachers_folder_is_filled_in(tmp_path, module):
    args = module.Args(group_size=1, teacher="tiny")
    args.log.output_dir = str(tmp_path / "run")
    assert module.check_flags(args) > 0 and args.teacher == resolve_model("tiny")


def test_a_head_over_whole_rows_of_logits_refuses_tensor_parallelism(tmp_path):
    args = distill_topk.Args(teacher="tiny")
    args.log.output_dir, args.parallel.num_trainers, args.parallel.trainer_tp = str(tmp_path / "run"), 2, 2
    with pytest.raises(FlagError, match="--trainer-tp 2: .*use 1"):
        distill_topk.check_flags(args)


def test_a_teacher_with_padded_logits_will_do_and_one_with_fewer_will_not(tmp_path):
    """As Qwen2.5-7B has 128 more than Qwen2.5-1.5B, with the same tokenizer."""
    small = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "small"))
    large = make_tiny(tmp_path / "large")
    model = AutoModelForCausalLM.from_pretrained(large)
    model.resize_token_embeddings(small.config.vocab_size + 128)
    model.save_pretrained(large)
    assert teacher_path(large, str(tmp_path / "small"), ParallelFlags()) == large
    with pytest.raises(FlagError, match="--teacher .*small: .*use a teacher with the same tokenizer"):
        teacher_path(str(tmp_path / "small"), large, ParallelFlags())
