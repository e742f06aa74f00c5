"""The trainer's gradient is that of the step: the same on one rank and on two, in micro-batches of any size.

The ranks are processes with a gloo group. The learning rate is 0, so a process can take the same step again.
"""

import math

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from algos.grpo import Args, Trainer, make_minibatches
from common.logger import mean_of, merge
from common.models import make_tiny
from common.parallel import ParallelFlags
from common.refit import open_store
from tests.ranks import on_two_ranks

TOKENS = [10_000, 60, 1]  # of a micro-batch: all rows at once, a few, one
NO_CLIP, CLIP = 1e9, 0.01
GATED = {"seq-mask": 1.28, "kl-gate": 4.6e-3}  # caps that some of the rollouts below pass
VARIANTS = {"plain": {}, "kl": {"kl_coef": 0.1}, "minibatches": {"minibatches": 2}}
for gated, cap in GATED.items():
    VARIANTS[gated] = {"correction": gated, "correction_cap": cap}
    VARIANTS[f"{gated}, minibatches"] = VARIANTS[gated] | {"minibatches": 2}


def step_rows() -> list[list[dict]]:
    """Ten random rollouts: one forked into two segments, one without a token to train."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index in range(10):
        rows = []
        for _ in range(2 if index == 4 else 1):
            length, first = int(rng.integers(6, 30)), int(rng.integers(1, 5))
            mask = (np.arange(length) >= first) & (rng.random(length) < 0.8) & (index != 7)
            logprobs = np.where(mask, rng.uniform(-5.5, -3.5, length), np.nan).astype(np.float32)
            rows.append({"token_ids": rng.integers(0, 100, length).astype(np.int32), "action_mask": mask,
                         "logprobs": logprobs, "advantage": 0.7 * (-1) ** index + 0.05 * index})  # fmt: skip
        rollouts.append(rows)
    return rollouts


def rank_process(rank: int, paths: dict[str, str], out: str, alone, together) -> None:
    """A rank of two; before that, rank 0 trains alone. The queues carry the rendezvous port of each run."""
    for model, path in paths.items():
        if rank == 0:
            train(0, 1, alone, path, f"{out}/{model}.1.0")
        train(rank, 2, together, path, f"{out}/{model}.2.{rank}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(rank: int, num_ranks: int, port, path: str, out: str) -> None:
    """One rank: takes the step in every variant and size, and leaves gradients and metrics in a file."""
    args = Args(lr=0.0, kl_coef=0.1, temperature=0.9, correction_cap=2.0)
    args.parallel.num_trainers = num_ranks
    args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
    trainer = Trainer(args, path, rank, False)
    if rank == 0:
        store = open_store("127.0.0.1", 60)  # lives until the last step
        port.put(store.port)
    trainer.setup("127.0.0.1", store.port if rank == 0 else port.get(timeout=120), "float32", num_workers=0)
    named = dict(trainer.model.named_parameters())
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    results = {
        "sharded": [isinstance(parameter, DTensor) for parameter in held],
        "same": [id(parameter) for parameter in held] == [id(parameter) for parameter in named.values()],
    }
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    cases = [("plain", tokens, max_norm) for tokens in TOKENS for max_norm in (NO_CLIP, CLIP)]
    cases += [(variant, tokens, NO_CLIP) for variant in ("kl", "minibatches") for tokens in (10_000, 60)]
    gated = [variant for variant in VARIANTS if "correction" in VARIANTS[variant]]
    cases += [(variant, tokens, NO_CLIP) for variant in gated for tokens in TOKENS]
    for case in cases:
        variant, args.parallel.micro_batch_tokens, args.max_grad_norm = case
        args.kl_coef, args.minibatches, args.correction, args.correction_cap = 0.0, 1, "tis", 2.0
        vars(args).update(VARIANTS[variant])
        reported = trainer.train_step(make_minibatches(step_rows(), args, step=5)[rank], None)
        results[case] = reported, {name: whole(parameter.grad) for name, parameter in named.items()}
    results["moved"] = [name for name, parameter in named.items() if not torch.equal(parameter, before[name])]
    torch.save(results, out)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": make_tiny(folder / "dense"), "moe": make_tiny(folder / "moe", moe=True, tied=False)}


@pytest.fixture(scope="module")
def all_results(paths, tmp_path_factory) -> dict:
    """model -> (ranks, rank) -> what `train` saved."""
    out = str(tmp_path_factory.mktemp("out"))
    on_two_ranks(rank_process, paths, out, num_ports=2)

    def load(model: str, size: int, rank: int) -> dict:
        return torch.load(f"{out}/{model}.{size}.{rank}", weights_only=False)

    return {model: {who: load(model, *who) for who in ((1, 0), (2, 0), (2, 1))} for model in paths}


@pytest.fixture(params=["dense", "moe"])
def results(request, all_results) -> dict:
    """(ranks, rank) -> what `train` saved: of a dense model with a tied head, of an MoE without one."""
    return all_results[request.param]


def flat(gradients: dict) -> torch.Tensor:
    return torch.cat([gradient.double().flatten() for gradient in gradients.values()])


def kl_of(mu_logprob: float, logprob: float) -> float:
    """KL of the sampled token against all others."""
    p, q = math.exp(mu_logprob), math.exp(logprob)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def passes(gated: str, mean: float) -> bool:
    return 1 / GATED[gated] <= math.exp(mean) <= GATED[gated] if gated == "seq-mask" else mean <= GATED[gated]


@pytest.fixture(scope="module")
def oracle(paths) -> dict:
    """The dense model's gradients of the whole step in float64, row by row, from the formula alone: as the
    default has it, and by each gate. Also (action tokens, whether it passes) of each rollout by each gate.

    On the first update old = pi, so a token's gradient is that of -w A log pi with the constant
    w = min(pi / mu, 2), or pi / mu where its rollout passes the gate and 0 where not; N is the same. The KL
    to the starting policy, which is pi itself here, is 0 with gradient 0.
    """
    from transformers import AutoModelForCausalLM

    kind = {"dtype": torch.float64, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(paths["dense"], **kind)
    total, verdicts = dict.fromkeys(("plain", *GATED), 0.0), {gated: [] for gated in GATED}
    for rollout in step_rows():
        pairs, raw = [], 0.0  # (log mu, log pi) of its tokens, and the loss with the raw ratio
        for row in rollout:
            ids = torch.as_tensor(row["token_ids"], dtype=torch.int64)
            logits = model(input_ids=ids[None]).logits[0, :-1] / 0.9
            logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
            for position in np.flatnonzero(row["action_mask"]):
                logprob, mu = logprobs[position - 1], float(row["logprobs"][position])
                pairs.append((mu, logprob.item()))
                ratio = math.exp(logprob.item() - mu)
                raw = raw - ratio * row["advantage"] * logprob
                total["plain"] = total["plain"] - min(ratio, 2.0) * row["advantage"] * logprob
        scores = {"seq-mask": [pi - mu for mu, pi in pairs], "kl-gate": [kl_of(*pair) for pair in pairs]}
        for gated in GATED:
            passed = not pairs or passes(gated, sum(scores[gated]) / len(pairs))
            verdicts[gated].append((len(pairs), passed))
            total[gated] = total[gated] + (raw if passed else 0.0)
    num_tokens, gradients = sum(count for count, _ in verdicts["seq-mask"]), {}
    for variant, loss in total.items():
        model.zero_grad()
        (loss / num_tokens).backward(retain_graph=True)
        gradients[variant] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return gradients | {"verdicts": verdicts}


def test_the_optimizer_holds_the_sharded_parameters(results):
    for rank in (0, 1):
        assert results[2, rank]["same"] and all(results[2, rank]["sharded"])
    assert results[1, 0]["same"]


def test_a_learning_rate_of_zero_left_the_weights_alone(results):
    assert all(result["moved"] == [] for result in results.values())


@pytest.mark.parametrize("variant", ["plain", "kl", *GATED])
def test_the_gradient_is_that_of_the_formula(all_results, oracle, variant):
    expected = oracle[variant if variant in GATED else "plain"]
    reference = flat(expected)
    assert reference.norm() > 0.01
    for who, result in all_results["dense"].items():
        for tokens in TOKENS if variant in GATED else [10_000]:
            _, gradients = result[variant, tokens, NO_CLIP]
            assert list(gradients) == list(expected)
            assert (flat(gradients) - reference).norm() <= 1e-5 * reference.norm(), (who, tokens)


@pytest.mark.parametrize("gated", GATED)
def test_a_gate_drops_whole_rollouts_and_divides_by_all_tokens(all_results, oracle, gated):
    verdicts = oracle["verdicts"][gated]
    dropped, num_tokens = sum(count for count, passed in verdicts if not passed), sum(n for n, _ in verdicts)
    assert 0 < dropped < num_tokens and verdicts[7] == (0, True)
    assert verdicts[4][1] == (gated == "kl-gate"), "the forked rollout passes one of the two"
    for num_ranks in (1, 2):
        for tokens in TOKENS:
            parts = [
                all_results["dense"][num_ranks, rank][gated, tokens, NO_CLIP][0] for rank in range(num_ranks)
            ]
            sums = merge([part["sums"] for part in parts])
            assert sums["is/dropped_frac"] == (dropped, num_tokens), (num_ranks, tokens)
            assert sums["loss/policy"][1] == num_tokens


def test_the_segments_of_the_forked_rollout_lie_on_two_ranks():
    args = Args(parallel=ParallelFlags(num_trainers=2, micro_batch_tokens=1))
    shares = make_minibatches(step_rows(), args, step=5)
    owners = [
        {int(i) for batches, _ in share for b in batches for i in b["rollout_index"]} for share, _ in shares
    ]
    assert 4 in owners[0] and 4 in owners[1]


@pytest.mark.parametrize("variant, max_norm", [("plain", NO_CLIP), ("plain", CLIP), ("kl", NO_CLIP),
                                               ("minibatches", NO_CLIP), ("seq-mask, minibatches", NO_CLIP),
                                               ("kl-gate, minibatches", NO_CLIP)])  # fmt: skip
def test_the_gradient_does_not_depend_on_ranks_and_micro_batches(results, variant, max_norm):
    reference = flat(results[1, 0][variant, 10_000, max_norm][1])
    for who, result in results.items():
        for tokens in TOKENS if variant not in ("kl", "minibatches") else TOKENS[:2]:
            difference = flat(result[variant, tokens, max_norm][1]) - reference
            assert difference.norm() <= 1e-5 * reference.norm(), (who, tokens)


def test_clipping_scales_to_the_global_norm(results):
    norm = flat(results[1, 0]["plain", 10_000, NO_CLIP][1]).norm()
    assert norm > 2 * CLIP
    for who, result in results.items():
        for tokens in TOKENS:
            reported, gradients = result["plain", tokens, CLIP]
            assert flat(gradients).norm().item() == pytest.approx(CLIP, rel=1e-4), who
            before = reported["sums"]["grad_norm"]
            assert before == (pytest.approx(norm.item(), rel=1e-5), 1.0)


def test_the_metrics_do_not_depend_on_ranks_and_micro_batches(results):
    reference, reference_peaks = None, None
    for num_ranks in (1, 2):
        for tokens in TOKENS:
            reports = [results[num_ranks, rank]["plain", tokens, NO_CLIP][0] for rank in range(num_ranks)]
            means = mean_of(merge([report["sums"] for report in reports]))
            peaks = {key: max(report["peaks"][key] for report in reports) for key in reports[0]["peaks"]}
            reference, reference_peaks = reference or means, reference_peaks or peaks
            assert means == pytest.approx(reference, rel=1e-4, abs=1e-6), (num_ranks, tokens)
            assert peaks == pytest.approx(reference_peaks, rel=1e-4), (num_ranks, tokens)
    assert all(math.isfinite(value) for value in (*reference.values(), *reference_peaks.values()))
