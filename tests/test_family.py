"""The copies of GRPO: of one committed batch each, how far its gradient is from GRPO's, derived by hand.

The batch, on a bigram model of three tokens whose next token is always uniform, so that a token y has the
gradient onehot(y) - 1/3 by the logits. Two prompts with two rollouts each:

    g0   reward 3: tokens 0, 1 in one segment and 1 in another     reward 1: token 2
    g1   reward 1: token 0                                        reward 1: tokens 1, 2

The engine sampled with the trainer's policy, unless a test says otherwise, so every ratio is 1. Then a token
of a rollout counts c_i with c_i the file's weight of its log-prob, and the gradient by the logits is
-sum_i c_i (n_i - T_i / 3): n_i how often each token was sampled by rollout i, T_i how many they are.
GRPO: std sqrt(2), A = +-sqrt(1/2) in g0 and 0 in g1, N = 7 tokens: -sqrt(1/2) / 7 x (1, 4, -5) / 3.
"""

import asyncio
import copy
import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.checks import FlagError
from common.logger import mean_of, merge
from common.logprobs import LogprobHead
from common.metrics import BusyClock
from common.sample import Rollout, Segment
from common.sample_queue import QueueClosed, SampleQueue, unpack_group
from tests.fakes import TableLM
from tests.ranks import on_two_ranks
from tests.test_queue_simulation import JumpingLoop

ROOT_HALF, LN_3 = math.sqrt(0.5), math.log(3)
LOSS_OF_GROUPS = ("dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp_baseline", "dapo")
# n_i - T_i / 3 of the four rollouts
SCORES = np.array([[1, 2, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]]) - np.array([[3], [1], [1], [2]]) / 3
GRPO = -(SCORES[0] - SCORES[1]) * ROOT_HALF / 7


def segment(tokens: list[int], mu: list[float] | None = None) -> Segment:
    """A prompt of one token, 0, and then `tokens`, sampled with the log-probs `mu` (default: log 1/3)."""
    mask, mu = np.arange(len(tokens) + 1) > 0, [-LN_3] * len(tokens) if mu is None else mu
    return Segment([0, *tokens], mask, [0, *mu], np.where(mask, 0, -1), [len(tokens) + 1], "stop")


def committed_batch() -> list[Rollout]:
    tokens = [[[0, 1], [1]], [[2]], [[0]], [[1, 2]]]
    rewards, groups = [3.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]
    return [
        Rollout(f"{group}.{i}", f"g{group}", group, "0", [segment(part) for part in parts], [reward])
        for i, (parts, reward, group) in enumerate(zip(tokens, rewards, groups))
    ]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """The sum over ranks is that of this process."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op=None: None)


def trained(name: str, rollouts, *, table=None, micro_batch_tokens=10_000, lr=0.0, reference=None, **flags):
    """One step of `algos/NAME.py` without its engines: (gradient by the logits [3], metrics, trainer)."""
    module = importlib.import_module(f"algos.{name}")
    args = module.Args(lr=lr, lr_warmup_steps=0, lr_end_ratio=1.0, max_grad_norm=1e9, **flags)
    args.parallel.micro_batch_tokens, args.parallel.packing = micro_batch_tokens, False
    if hasattr(args, "correction_cap"):
        args.correction_cap = args.correction_cap or 2.0
    trainer = module.Trainer(args, "", 0, False)
    trainer.model = TableLM(torch.zeros(3, 3, dtype=torch.float64) if table is None else table)
    head = module.TopLogprobHead if name == "distill_topk" else LogprobHead
    trainer.head = head(trainer.model)
    if name.startswith("distill"):
        trainer.teacher = TableLM(reference)
        trainer.teacher_head = head(trainer.teacher)
        trainer.teacher_head.likeliest = (flags.get("teacher_top_k", 3), 3)
    elif reference is not None:
        trainer.ref_model = TableLM(reference)
        trainer.ref_head = LogprobHead(trainer.ref_model)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=lr)
    rows, _ = module.make_rows(copy.deepcopy(rollouts), args)
    (share,) = module.make_minibatches(rows, args, step=0)
    result = trainer.train_step(share, None)
    gradient = trainer.model.lm_head.bias.grad.numpy()  # the bias is added to all logits
    return gradient, mean_of(merge([result["sums"]])), trainer


def gradient_of(name: str, rollouts=None, **flags) -> np.ndarray:
    """The same however the rows are cut into micro-batches."""
    rollouts = committed_batch() if rollouts is None else rollouts
    whole, _, _ = trained(name, rollouts, **flags)
    cut, _, _ = trained(name, rollouts, micro_batch_tokens=1, **flags)
    assert cut == pytest.approx(whole, abs=1e-7)
    return whole


def test_grpo_on_the_committed_batch():
    assert gradient_of("grpo") == pytest.approx(GRPO, abs=1e-6)
    assert GRPO == pytest.approx([-0.0336718, -0.1346870, 0.1683588], abs=1e-6)


# --- Dr. GRPO


def test_dr_grpo_has_no_std_and_a_constant_divisor():
    # A = +-1 instead of +-sqrt(1/2), and 4 rollouts x 5 tokens instead of 7: 7 sqrt(2) / 20 of GRPO's
    gradient = gradient_of("dr_grpo", episode_tokens=5)
    assert gradient == pytest.approx(GRPO * 7 * math.sqrt(2) / 20, abs=1e-6)
    assert gradient - GRPO == pytest.approx([0.0170051, 0.0680203, -0.0850253], abs=1e-6)
    assert gradient_of("dr_grpo", episode_tokens=10) == pytest.approx(gradient / 2, abs=1e-6)


def test_a_token_of_dr_grpo_weighs_the_same_whatever_else_is_in_the_batch():
    # 8 of the rewardless tokens more: GRPO's divisor grows from 7 to 15, that of Dr. GRPO stays
    rollouts = committed_batch()
    rollouts[2].segments.append(segment([0, 1, 2, 0, 1, 2, 0, 1]))
    assert gradient_of("grpo", rollouts) == pytest.approx(GRPO * 7 / 15, abs=1e-6)
    plain = gradient_of("dr_grpo", episode_tokens=5)
    assert gradient_of("dr_grpo", rollouts, episode_tokens=5) == pytest.approx(plain, abs=1e-6)


ENVS = """
from common.agent import ChatAgent
from common.env import Env, Step


class Turns(Env):
    max_turns = 3

    def tasks(self, split):
        return [{}]

    def reset(self, task):
        return "go"

    def step(self, action):
        return Step(reward=1.0)


class Program(ChatAgent):
    def tasks(self, split):
        return [{}]

    async def run(self, task, client):
        return 1.0
"""


@pytest.mark.parametrize("name", ["dr_grpo", "dapo"])
@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, 16),
        ({"max_new_tokens": 100}, 100),
        ({"episode_tokens": 7}, 7),
        ({"env": "Turns"}, 3 * 16),
        ({"env": "Turns", "max_new_tokens": 300}, 512),  # no longer than --max-model-len
        ({"env": "Program"}, 512),
    ],
)
def test_the_longest_episode_by_default(tmp_path, name, flags, expected):
    (tmp_path / "envs.py").write_text(ENVS)
    path = {"env": f"{tmp_path}/envs.py:{flags['env']}"} if "env" in flags else {}
    module = importlib.import_module(f"algos.{name}")
    args = module.Args(**flags | path)
    args.log.output_dir = str(tmp_path / "run")
    module.check_flags(args)
    assert args.episode_tokens == expected


# --- RLOO


def test_rloo_takes_the_mean_of_the_others_and_the_sum_over_a_rollout():
    # A = 3 - 1 and 1 - 3, over 4 rollouts: a token counts +-2/4, in GRPO +-sqrt(1/2)/7: 7/sqrt(2) of it
    gradient = gradient_of("rloo")
    assert gradient == pytest.approx(-(SCORES[0] - SCORES[1]) / 2, abs=1e-6)
    assert gradient - GRPO == pytest.approx(GRPO * (7 * ROOT_HALF - 1), abs=1e-6)


def test_the_baseline_of_rloo_is_that_of_the_others():
    from algos.rloo import group_advantages

    assert group_advantages([1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert group_advantages([0.7] * 8) == [0.0] * 8 and group_advantages([1.0]) == [0.0]


def test_the_only_loser_of_rloo_stays_finite_in_single_precision():
    """Its seven equal siblings have a leave-one-out std of 0 (1e-8 and the like, in fp32): RLOO has no std."""
    from algos.rloo import group_advantages

    rewards = np.array([0.0] + [0.95] * 7, dtype=np.float32).tolist()
    assert group_advantages(rewards) == pytest.approx([-0.95] + [0.95 - 6 * 0.95 / 7] * 7, abs=1e-6)


def test_rloo_does_not_clip():
    from algos.rloo import policy_loss

    logprobs = torch.tensor([[0.1, 1.5, -3.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[True, True, True]])
    loss, sums = policy_loss(logprobs, old, torch.tensor([[1.0, 2.0, 1.0]]), torch.tensor([-2.0]), mask)
    loss.backward()
    expected = [2 * math.exp(0.1), 4 * math.exp(1.5), 2 * math.exp(-3.0)]
    assert logprobs.grad[0].tolist() == pytest.approx(expected, rel=1e-9)
    assert loss.item() == pytest.approx(sum(expected), rel=1e-9) and float(sums["loss/policy"][1]) == 3


# --- GSPO


def test_gspo_averages_over_a_rollout_first():
    # a token of rollout i counts A / (4 T_i): 1/12 and 1/4 of sqrt(1/2) instead of 1/7
    gradient = gradient_of("gspo")
    assert gradient == pytest.approx(-(SCORES[0] / 12 - SCORES[1] / 4) * ROOT_HALF, abs=1e-6)
    # -sqrt(1/2) (1/12 - 1/7) on rollout 0 and sqrt(1/2) (1/4 - 1/7) on rollout 1
    difference = ROOT_HALF * (5 / 84 * SCORES[0] + 9 / 84 * SCORES[1])
    assert gradient - GRPO == pytest.approx(difference, abs=1e-6)


def test_the_ratio_of_gspo_is_the_geometric_mean_over_all_segments():
    """The second epoch, after a step that moved the logits to a table of its own: s_0 of rollout 0 is the
    cube root of pi(0|0) pi(1|0) pi(1|0) 27, whose first two tokens lie in another row than the third."""
    table = torch.zeros(3, 3, dtype=torch.float64)
    rollouts = committed_batch()
    for micro_batch_tokens in (1, 10_000):
        gradient, metrics, trainer = trained(
            "gspo", rollouts, table=table, micro_batch_tokens=micro_batch_tokens, lr=0.05, epochs=2,
            clip_low=0.9, clip_high=9.0,
        )  # fmt: skip
        # by hand: the first step's gradient on the table and the bias, then the ratios, then the second's
        weights, bias = np.zeros((3, 3)), np.zeros(3)  # logits after token i: weights[i] + bias
        samples = [[(0, 0), (0, 1), (0, 1)], [(0, 2)], [(0, 0)], [(0, 1), (1, 2)]]  # (before, token)
        ratios, bias_gradient = [1.0] * 4, None
        for update in range(2):
            logits = weights + bias
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            if update:
                logs = [[math.log(3 * p[before, token]) for before, token in own] for own in samples]
                ratios = [math.exp(sum(own) / len(own)) for own in logs]
            table_gradient = np.zeros((3, 3))
            for own, ratio, advantage in zip(samples, ratios, [ROOT_HALF, -ROOT_HALF, 0, 0]):
                for before, token in own:
                    score = np.eye(3)[token] - p[before]
                    table_gradient[before] -= ratio * advantage / (4 * len(own)) * score
            bias_gradient = table_gradient.sum(0)
            weights, bias = weights - 0.05 * table_gradient, bias - 0.05 * bias_gradient
        assert gradient == pytest.approx(bias_gradient, abs=1e-6)
        assert trainer.model.lm_head.weight.detach().T.numpy() == pytest.approx(weights, abs=1e-6)
        # the two updates' mean over 4 rollouts: s A is sqrt(1/2) (s_0 - s_1), and 0 in the first
        assert metrics["loss/policy"] == pytest.approx(-ROOT_HALF * (ratios[0] - ratios[1]) / 8, abs=1e-6)
        assert ratios[0] > 1.001 and ratios[1] < 0.999  # what was rewarded became likelier


def test_gspo_clips_whole_rollouts():
    """The same second epoch with the paper's clip: s_0 > 1.0004 at A > 0 and s_1 < 0.9997 at A < 0, so that
    nothing of either is left; g1 has no advantage."""
    gradient, metrics, _ = trained("gspo", committed_batch(), lr=0.05, epochs=2)
    assert gradient == pytest.approx(np.zeros(3), abs=1e-9)
    # one rollout of four in one update of two, either way
    assert metrics["ratio/clip_high_frac"] == pytest.approx(1 / 8, abs=1e-6)
    assert metrics["ratio/clip_low_frac"] == pytest.approx(1 / 8, abs=1e-6)
    within, metrics, _ = trained("gspo", committed_batch(), lr=0.05, epochs=2, clip_low=0.5, clip_high=0.5)
    assert np.abs(within).max() > 0.01 and metrics["ratio/clip_high_frac"] == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_masked_positions_of_gspo_may_hold_anything(garbage):
    from algos.gspo import policy_loss

    logprobs = torch.tensor([[-1.0, -2.0, garbage], [garbage] * 3], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[1.0, 2.0, garbage], [garbage] * 3])
    share = torch.tensor([[0.5, 0.5, 0.0], [0.0] * 3])
    row = torch.tensor([0.0, 1.0]), weights, torch.tensor([-1.0, garbage]), share
    loss, sums = policy_loss(logprobs, *row, 0.2, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(1.5) and float(sums["loss/policy"][1]) == 1
    assert logprobs.grad.tolist() == [[0.5, 1.0, 0.0], [0.0] * 3]


# --- CISPO


def test_cispo_on_policy_is_grpo():
    assert gradient_of("cispo") == pytest.approx(GRPO, abs=1e-6)


def test_cispo_keeps_weights_up_to_its_own_cap():
    # the engine gave token 2 of rollout 1 a twelfth: pi/mu = 4, which GRPO's correction cuts to 2
    rollouts = committed_batch()
    rollouts[1].segments = [segment([2], [-math.log(12)])]
    grpo, cispo = gradient_of("grpo", rollouts), gradient_of("cispo", rollouts)
    assert grpo == pytest.approx(-(SCORES[0] - 2 * SCORES[1]) * ROOT_HALF / 7, abs=1e-6)
    assert cispo - grpo == pytest.approx(2 * SCORES[1] * ROOT_HALF / 7, abs=1e-6)
    assert cispo - grpo == pytest.approx([-0.0673435, -0.0673435, 0.1346870], abs=1e-6)
    capped = gradient_of("cispo", rollouts, max_weight=3.0)
    assert capped == pytest.approx(-(SCORES[0] - 3 * SCORES[1]) * ROOT_HALF / 7, abs=1e-6)


def test_no_ratio_takes_the_gradient_of_cispo_away():
    """Ratios .1, 1.5 and 8 at A = 2: GRPO has nothing left at 1.5 and 8, CISPO min(ratio, 5) A."""
    from algos.cispo import policy_loss

    ratios = torch.tensor([[0.1, 1.5, 8.0]], dtype=torch.float64)
    logprobs, mask = ratios.log().requires_grad_(), torch.tensor([[True] * 3])
    for advantage in (2.0, -2.0):
        advantages = torch.tensor([advantage], dtype=torch.float64)
        loss, weights, sums = policy_loss(logprobs, torch.zeros_like(ratios), advantages, mask, 5.0)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert weights[0].tolist() == pytest.approx([0.1, 1.5, 5.0], rel=1e-9) and not weights.requires_grad
        assert gradient[0].tolist() == pytest.approx([-w * advantage for w in (0.1, 1.5, 5.0)], rel=1e-9)
        expected = sum(-w * advantage * math.log(r) for w, r in ((0.1, 0.1), (1.5, 1.5), (5.0, 8.0)))
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        assert [float(x) for x in sums["ratio/clip_high_frac"]] == [1, 3]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
def test_masked_positions_of_cispo_may_hold_anything(garbage):
    from algos.cispo import policy_loss

    logprobs = torch.tensor([[-1.0, garbage], [garbage] * 2], dtype=torch.float64, requires_grad=True)
    mu, mask = torch.tensor([[-1.0, garbage], [garbage] * 2]), torch.tensor([[True, False], [False, False]])
    loss, _, sums = policy_loss(logprobs, mu, torch.tensor([-3.0, garbage]), mask, 5.0)
    loss.backward()
    assert loss.item() == -3.0 and float(sums["loss/policy"][1]) == 1
    assert logprobs.grad.tolist() == [[3.0, 0.0], [0.0, 0.0]]


# --- REINFORCE++


def token_gradient(advantages: list[list[float]]) -> np.ndarray:
    """By the logits, where the tokens of the committed batch have these advantages: the token mean."""
    tokens = [[0, 1, 1], [2], [0], [1, 2]]
    flat = [
        (a, t) for own, ids in zip(advantages, tokens, strict=True) for a, t in zip(own, ids, strict=True)
    ]
    return -sum(a * (np.eye(3)[t] - 1 / 3) for a, t in flat) / len(flat)


def scaled(values: list[list[float]]) -> list[list[float]]:
    """Less the mean, over the unbiased std, of all numbers."""
    flat = [value for own in values for value in own]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))
    return [[(value - mean) / std for value in own] for own in values]


def test_reinforce_pp_baseline_scales_over_the_tokens_of_the_step():
    # less the group's mean: 1 on three tokens, -1 on one, 0 on three. Mean 2/7, variance (4 - 4/7) / 6 = 4/7
    std = math.sqrt(4 / 7)
    advantages = np.array([[5 / 7], [-9 / 7], [-2 / 7], [-2 / 7]]) / std
    gradient = gradient_of("reinforce_pp_baseline")
    assert gradient == pytest.approx(-(advantages * SCORES).sum(0) / 7, abs=1e-6)
    # from GRPO's +-sqrt(1/2) and 0 to .9449112, -1.7008401 and -.3779645
    change = np.array([[0.2378044], [-0.9937333], [-0.3779645], [-0.3779645]])
    assert gradient - GRPO == pytest.approx(-(change * SCORES).sum(0) / 7, abs=1e-6)
    # token 0: -(0 + .9937333/3 - .3779645 x 2/3 + .3779645 x 2/3) / 7
    assert (gradient - GRPO)[0] == pytest.approx(-0.9937333 / 21, abs=1e-6)


def test_reinforce_pp_has_no_group():
    # rewards 3 on three tokens, 1 on four: mean 13/7, variance (31 - 169/7) / 6 = 8/7
    std = math.sqrt(8 / 7)
    advantages = np.array([[8 / 7], [-6 / 7], [-6 / 7], [-6 / 7]]) / std
    gradient = gradient_of("reinforce_pp")
    assert gradient == pytest.approx(-(advantages * SCORES).sum(0) / 7, abs=1e-6)
    change = np.array([[1.0690450 - ROOT_HALF], [ROOT_HALF - 0.8017837], [-0.8017837], [-0.8017837]])
    assert gradient - GRPO == pytest.approx(-(change * SCORES).sum(0) / 7, abs=1e-6)


def test_the_returns_of_reinforce_pp_step_over_sampled_tokens():
    # gamma 1/2: the prompt token between the two segments of rollout 0 takes no step
    expected = token_gradient(scaled([[0.75, 1.5, 3.0], [1.0], [1.0], [0.5, 1.0]]))
    assert gradient_of("reinforce_pp", gamma=0.5) == pytest.approx(expected, abs=1e-6)


def test_the_kl_of_reinforce_pp_is_in_the_reward_of_a_token_and_of_those_before_it():
    # ref has 1/2, 1/4, 1/4 everywhere: log(old/ref) is log(2/3) for token 0, and log(4/3) for 1 and 2
    reference = torch.tensor([[0.5, 0.25, 0.25]] * 3, dtype=torch.float64).log()
    a, b = math.log(2 / 3), math.log(4 / 3)
    flags = {"reference": reference, "kl_coef": 0.5}
    expected = [[3 - (a + 2 * b) / 2, 3 - b, 3 - b / 2], [1 - b / 2], [1 - a / 2], [1 - b, 1 - b / 2]]
    assert gradient_of("reinforce_pp", **flags) == pytest.approx(token_gradient(scaled(expected)), abs=1e-6)
    faded = [[0.75 - (a + b / 2 + b / 4) / 2, 1.5 - (b + b / 2) / 2, 3 - b / 2], [1 - b / 2], [1 - a / 2],
             [0.5 - (b + b / 2) / 2, 1 - b / 2]]  # fmt: skip
    got = gradient_of("reinforce_pp", gamma=0.5, **flags)
    assert got == pytest.approx(token_gradient(scaled(faded)), abs=1e-6)
    _, metrics, _ = trained("reinforce_pp", committed_batch(), **flags)
    assert metrics["loss/kl"] == pytest.approx((2 * a + 5 * b) / 7, abs=1e-6)


def test_tokens_out_of_the_loss_still_take_a_step_and_carry_the_reward():
    rollouts = committed_batch()
    rollouts[0].segments[1].action_mask[:] = False  # the last token of rollout 0, as --late mask does it
    got = gradient_of("reinforce_pp", rollouts, gamma=0.5)
    (first, second), *others = scaled([[0.75, 1.5], [1.0], [1.0], [0.5, 1.0]])
    expected = token_gradient([[first, second, 0.0], *others]) * 7 / 6
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1000.0])
@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo"])
def test_masked_positions_of_the_others_may_hold_anything(name, garbage):
    policy_loss = importlib.import_module(f"algos.{name}").policy_loss
    logprobs = torch.tensor([[-1.0, garbage], [garbage] * 2], dtype=torch.float64, requires_grad=True)
    old, weights = (
        torch.tensor([[-1.0, garbage], [garbage] * 2]),
        torch.tensor([[2.0, garbage], [garbage] * 2]),
    )
    advantages = torch.tensor([[3.0, garbage], [garbage] * 2] if name == "reinforce_pp" else [3.0, garbage])
    mask, clip = torch.tensor([[True, False], [False, False]]), () if name == "rloo" else (0.2, 0.28)
    loss, sums = policy_loss(logprobs, old, weights, advantages, mask, *clip)
    loss.backward()
    assert loss.item() == -6.0 and float(sums["loss/policy"][1]) == 1
    assert logprobs.grad.tolist() == [[-6.0, 0.0], [0.0, 0.0]]
    loss, sums = policy_loss(logprobs, old, weights, advantages, torch.zeros_like(mask), *clip)
    assert loss.item() == 0.0 and float(sums["loss/policy"][1]) == 0


def test_equal_rewards_are_exactly_no_gradient():
    rollouts = committed_batch()
    for rollout in rollouts:
        rollout.rewards = [0.7]
    for name in ("grpo", "rloo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline", "dapo"):
        flags = {"episode_tokens": 30} if name == "dapo" else {}
        gradient, _, _ = trained(name, rollouts, **flags)
        assert not gradient.any(), name


def test_a_step_without_a_valid_rollout_has_no_rows():
    rollouts = committed_batch()
    for rollout in rollouts:
        rollout.invalid = "late"
    for name in (*LOSS_OF_GROUPS, "reinforce_pp", "distill", "distill_topk"):
        module = importlib.import_module(f"algos.{name}")
        assert module.make_rows(rollouts, module.Args()) == ([], {}), name


# --- The KL. Two actions, pi (.6, .4), ref (.5, .5): its derivative is .6 x .4 (ln 1.2 - ln .8) = .0973116


def test_the_kl_in_the_reward_has_the_gradient_of_the_kl():
    from algos.reinforce_pp import returns

    pi, kl = np.array([0.6, 0.4]), torch.tensor([[0.0, math.log(1.2)], [0.0, math.log(0.8)]])
    values = returns(torch.zeros(2), kl, torch.tensor([1, 1]), 1.0, 1.0)[:, 1].numpy()
    scores = np.array([1 - 0.6, -0.6])  # of log pi by the first logit
    assert -(pi * values * scores).sum() == pytest.approx(0.0973116, abs=1e-6)


@pytest.mark.parametrize("name", ["rloo", "cispo", "reinforce_pp_baseline"])
def test_the_kl_in_the_loss_has_the_gradient_of_the_kl(name):
    kl_loss, total = importlib.import_module(f"algos.{name}").kl_loss, 0.0
    logits = torch.tensor([math.log(1.5), 0.0], dtype=torch.float64, requires_grad=True)
    logprobs, ref = logits.log_softmax(0), torch.tensor([[math.log(0.5)]], dtype=torch.float64)
    for action in range(2):
        part = kl_loss(logprobs[action].view(1, 1), ref, torch.tensor([[True]]))
        total = total + logprobs[action].exp().item() * part
    (gradient,) = torch.autograd.grad(total, logits)
    # 0 is k1 in the loss, .1 is k3
    assert gradient.tolist() == pytest.approx([0.0973116, -0.0973116], abs=1e-6)


# --- DAPO


def test_dapo_punishes_what_comes_near_the_end_of_an_episode():
    # L_max 3, L_buffer 2: 3 sampled tokens lose 1, 2 lose 1/2, 1 loses 0. Scores 2, 1 and 1, 1/2: A is
    # +-sqrt(1/2) in both groups
    flags = {"episode_tokens": 3, "overlong_frac": 2 / 3}
    gradient = gradient_of("dapo", **flags)
    assert gradient - GRPO == pytest.approx(-(SCORES[2] - SCORES[3]) * ROOT_HALF / 7, abs=1e-6)
    assert gradient_of("dapo", episode_tokens=3, overlong_frac=0.0) == pytest.approx(GRPO, abs=1e-6)
    assert gradient_of("dapo", episode_tokens=30) == pytest.approx(GRPO, abs=1e-6)


def test_the_overlong_penalty_by_hand():
    from algos.dapo import overlong_penalty

    # L_max 20, L_buffer 4
    for length, penalty in ((1, 0.0), (16, 0.0), (17, 0.25), (19, 0.75), (20, 1.0), (25, 1.0)):
        assert overlong_penalty(length, 20, 0.2) == pytest.approx(penalty, abs=1e-12)


def test_only_sampled_tokens_count_as_long():
    # rollout 3 gets a long prompt and a masked, late token: 2 sampled tokens, as before
    rollouts = committed_batch()
    part = segment([0] * 9 + [1, 2])
    part.action_mask[:10], part.versions[:10] = False, -1
    rollouts[3].segments = [part]
    part.action_mask[10] = False
    got = gradient_of("dapo", rollouts, episode_tokens=3, overlong_frac=2 / 3)
    only_2 = np.array([-1, -1, 2]) / 3
    expected = -(SCORES[0] - SCORES[1] + SCORES[2] - only_2) * ROOT_HALF / 6
    assert got == pytest.approx(expected, abs=1e-6)


class Direct:
    """The queue as its actor handle: method.remote() is the method."""

    def __init__(self, queue: SampleQueue):
        self.queue = queue

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=getattr(self.queue, name))


async def dapo_steps(monkeypatch, script, *, steps, prompts_per_step, in_flight, bound, order):
    """[(tickets, drops)] of each step: the real worker and queue, `script(ticket)` is (seconds, rewards)."""
    from algos import dapo

    async def scripted(engine, tokenizer, envs, split, index, *, ticket, group_size, **settings):
        seconds, rewards = script(ticket)
        await asyncio.sleep(seconds)
        assert len(rewards) == group_size
        return [Rollout(f"{ticket}.{i}", f"g{ticket}", ticket, str(index), [segment([0])], [reward])
                for i, reward in enumerate(rewards)]  # fmt: skip

    monkeypatch.setattr(dapo, "rollout_group", scripted)
    queue, worker = SampleQueue(prompts_per_step, bound, order), dapo.RolloutWorker()
    worker.args = dapo.Args(group_size=4)
    worker.args.engine.max_in_flight = in_flight
    worker.engine = worker.tokenizer = None
    worker.envs, worker.settings = SimpleNamespace(num_tasks={"train": 100_000}), {}
    worker.busy, worker.epoch = BusyClock(), None
    await queue.set_version(0)
    producing, found = asyncio.ensure_future(worker.produce(Direct(queue))), []
    try:
        for step in range(steps):
            batch, drops, _ = await queue.get(step)
            for _, pieces in batch:
                assert len(unpack_group(pieces)) == 4
            found.append(([ticket for ticket, _ in batch], {key: n for key, (n, _) in drops.items()}))
            await asyncio.sleep(1.0)
            await queue.set_version(step + 1)
    finally:
        await queue.close("the end")
        await asyncio.gather(producing, return_exceptions=True)
    return found


def on_a_jumping_clock(coroutine):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)


@pytest.mark.parametrize("order", ["arrival", "ticket"])
def test_dynamic_sampling_fills_a_step_with_whole_groups(monkeypatch, order):
    # groups 0 and 2 are constant: step 0 trains 1 and 3, step 1 begins with 4
    rewards = [[1] * 4, [1, 0, 0, 0], [0] * 4, [1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    script = lambda ticket: (0.1, rewards[ticket] if ticket < 6 else [1, 0, 0, 1])  # noqa: E731
    how = {"steps": 2, "prompts_per_step": 2, "in_flight": 1, "bound": 0, "order": order}
    found = on_a_jumping_clock(dapo_steps(monkeypatch, script, **how))
    assert found == [([1, 3], {"equal_rewards": 2}), ([4, 5], {})]


def test_three_steps_of_equal_rewards_end_the_run_with_the_reason(monkeypatch):
    script = lambda ticket: (0.1, [1, 1, 1, 1])  # noqa: E731
    how = {"steps": 1, "prompts_per_step": 2, "in_flight": 1, "bound": 0, "order": "arrival"}
    with pytest.raises(
        QueueClosed, match="6 groups in a row were dropped, the last for equal_rewards: 4 rewards"
    ):
        on_a_jumping_clock(dapo_steps(monkeypatch, script, **how))


@pytest.mark.parametrize("order", ["arrival", "ticket"])
@pytest.mark.parametrize("bound", [0, 2, 4])
def test_dynamic_sampling_loses_no_long_or_hard_group(monkeypatch, order, bound):
    """Hard prompts take five times as long, and more often have no success at all. Over a run each group with
    a difference is trained once, but for the few that are on their way at the end."""
    rng = np.random.default_rng(bound)
    hard = rng.random(4000) < 0.5
    solved = rng.random((4000, 4)) < np.where(hard, 0.15, 0.7)[:, None]
    seconds = np.where(hard, 2.5, 0.5) * rng.lognormal(0, 0.5, 4000)
    script = lambda ticket: (seconds[ticket], solved[ticket].astype(float).tolist())  # noqa: E731
    how = {"steps": 200, "prompts_per_step": 8, "in_flight": 8, "bound": bound, "order": order}
    found = on_a_jumping_clock(dapo_steps(monkeypatch, script, **how))
    trained = [ticket for tickets, _ in found for ticket in tickets]
    assert len(trained) == len(set(trained)) == 1600 and all(len(tickets) == 8 for tickets, _ in found)
    differs = solved.any(1) & ~solved.all(1)
    assert differs[trained].all()
    # admission keeps at most P (bound + 1) groups ahead, and as many run as there are places
    eligible = np.flatnonzero(differs[: max(trained) + 1])
    left = sorted(set(eligible) - set(trained))
    assert len(left) <= 8 * (bound + 1)
    if order == "ticket":
        assert trained == eligible[:1600].tolist()
    # nobody starves: what is left began within the last 10% of the run
    assert not left or min(left) > 0.9 * max(trained)
    # as many hard ones, and as many of each length, as the filter leaves: from the shortest fifth to the longest
    tolerance = 8 * (bound + 1) / 1600
    assert hard[trained].mean() == pytest.approx(hard[eligible].mean(), abs=tolerance)
    for fifth in np.array_split(eligible[np.argsort(seconds[eligible])], 5):
        assert np.isin(trained, fifth).mean() == pytest.approx(0.2, abs=tolerance)
    # the filter's own doing: 0.48 of the hard and 0.75 of the easy have a difference
    assert hard[trained].mean() == pytest.approx(0.48 / (0.48 + 0.75), abs=0.04)


# --- Two ranks, one rollout on both


def rank_process(rank: int, folder: str) -> None:
    """What a rank gets from a batch whose rollout 0 lies on both: GSPO's ratios of a policy that moved, and
    its part of REINFORCE++'s gradient."""
    from algos import gspo, reinforce_pp

    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for module in (gspo, reinforce_pp):
        args = module.Args(lr=0.0, max_grad_norm=1e9)
        args.parallel.num_trainers, args.parallel.micro_batch_tokens, args.parallel.packing = 2, 1, False
        args.correction_cap, args.minibatches, args.epochs = 2.0, 1, 2 if module is gspo else 1
        rows, _ = module.make_rows(committed_batch(), args)
        share = module.make_minibatches(rows, args, step=0)[rank]
        trainer = module.Trainer(args, "", rank, False)
        trainer.model = TableLM(torch.zeros(3, 3, dtype=torch.float64))
        trainer.head = LogprobHead(trainer.model)
        ((batches, _),) = share[0]
        found["rollouts"] = [int(b["rollout_index"][0]) for b in batches if b["action_mask"].any()]
        if module is gspo:
            trainer.look_ahead(batches, share[1])
            trainer.model.lm_head.weight.data.copy_(torch.tensor(MOVED, dtype=torch.float64).log().T)
            trainer.mark_ratios(batches, share[1])
            found["ratios"] = {
                int(i): float(x) for b in batches for i, x in zip(b["rollout_index"], b["log_ratio"])
            }
        else:
            args.kl_coef, args.gamma = 0.5, 0.5
            trainer.ref_model = TableLM(torch.tensor([[0.5, 0.25, 0.25]] * 3, dtype=torch.float64).log())
            trainer.ref_head = LogprobHead(trainer.ref_model)
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
            trainer.train_step(share, None)
            found["gradient"] = trainer.model.lm_head.bias.grad
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


MOVED = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]]


def test_a_rollout_on_two_ranks_is_one_rollout(tmp_path):
    on_two_ranks(rank_process, str(tmp_path), num_ports=0)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert 0 in one["rollouts"] and 0 in two["rollouts"]
    # mean log(3 pi) over tokens: .6 .3 .3 after a 0; .1; .6; .3 after a 0 and .6 after a 1
    expected = [math.log(27 * 0.6 * 0.3 * 0.3) / 3, math.log(0.3), math.log(1.8), math.log(9 * 0.3 * 0.6) / 2]
    for ratios in (one["ratios"], two["ratios"]):
        assert [ratios[i] for i in ratios] == pytest.approx([expected[i] for i in ratios], abs=1e-6)
    a, b = math.log(2 / 3), math.log(4 / 3)
    faded = [[0.75 - (a + b / 2 + b / 4) / 2, 1.5 - (b + b / 2) / 2, 3 - b / 2], [1 - b / 2], [1 - a / 2],
             [0.5 - (b + b / 2) / 2, 1 - b / 2]]  # fmt: skip
    mean = (one["gradient"] + two["gradient"]) / 2
    assert mean.numpy() == pytest.approx(token_gradient(scaled(faded)), abs=1e-6)


@pytest.mark.parametrize("name", LOSS_OF_GROUPS)
def test_a_group_baseline_needs_two_rollouts_and_reinforce_pp_has_none(tmp_path, name):
    for module_name in (name, "reinforce_pp"):
        module = importlib.import_module(f"algos.{module_name}")
        args = module.Args(group_size=1)
        args.log.output_dir = str(tmp_path / "run")
        if module_name == "reinforce_pp":
            assert module.check_flags(args) > 0
        else:
            with pytest.raises(FlagError, match="--group-size 1: "):
                module.check_flags(args)
