"""The trainer's gradient is the same however the model and the batch are spread: packed rows, tensor and expert
parallelism, recomputed activations, deferred exchange, logits in fp32; and what is skipped, and offloaded.

The ranks are processes with a gloo group. The learning rate is 0 until a test says otherwise.
"""

import math
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from algos.grpo import Args, Trainer, make_minibatches
from common import routing
from common.logger import mean_of, merge
from common.models import make_tiny
from common.parallel import OffloadedAdamW, ParallelFlags
from common.refit import checkpoint_tensors, open_store
from tests.ranks import on_two_ranks
from tests.test_gradient_parity import step_rows

LAYOUTS = {
    "one rank": {},
    "packed": {"packing": "on"},
    "checkpointing": {"activation_checkpointing": True},
    "packed, checkpointing": {"packing": "on", "activation_checkpointing": True},
    "fp32 head": {"fp32_head": True},
    "two ranks": {"num_trainers": 2},
    "two ranks, zero 3": {"num_trainers": 2, "zero": 3},
    "two ranks, packed": {"num_trainers": 2, "packing": "on"},
    "two ranks, packed, checkpointing": {
        "num_trainers": 2, "packing": "on", "activation_checkpointing": True,
    },
    "tp": {"num_trainers": 2, "trainer_tp": 2},
    "tp, packed": {"num_trainers": 2, "trainer_tp": 2, "packing": "on"},
    "tp, checkpointing": {"num_trainers": 2, "trainer_tp": 2, "activation_checkpointing": True},
    "ep": {"num_trainers": 2, "trainer_ep": 2},
    "ep, checkpointing, zero 3": {
        "num_trainers": 2, "trainer_ep": 2, "activation_checkpointing": True, "zero": 3,
    },
}  # fmt: skip
OF_DENSE = [name for name in LAYOUTS if not name.startswith("ep")]
OF_MOE = [name for name in LAYOUTS if not name.startswith("tp") and "packed" not in name]
REPLAYED = ["one rank", "checkpointing", "two ranks", "ep", "ep, checkpointing, zero 3"]
PLAN = {
    "dense": OF_DENSE,
    "moe": OF_MOE,
    "deepseek": ["one rank", "ep"],
    "replayed": REPLAYED,
}  # the last one: the mixture under given routes
TOKENS, CLIP = [10_000, 60], 0.01  # of a micro-batch: all rows at once, and a few
SPOILED = [name for name in ("two ranks", "tp", "ep")]


def rank_process(rank: int, paths: dict[str, str], out: str, on_gpu: bool, port) -> None:
    """A rank of two; rank 0 also trains alone. The queue carries the rendezvous port of each run."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": str(rank)} if on_gpu else {}
    routing.MISMATCH_BOUND = 2  # these routes are drawn at random
    for model, names in PLAN.items():
        for name in names:
            flags = ParallelFlags(**LAYOUTS[name])
            print(f"rank {rank}: {model}, {name}", flush=True)
            out_of_rank, spoil = f"{out}/{model}.{name}.{rank}", name in SPOILED
            rows_of = routed_rows if model == "replayed" else step_rows
            if flags.num_trainers == 2:
                train(rank, flags, port, paths[model], out_of_rank, spoil, on_gpu, rows_of)
            elif rank == 0 or on_gpu:  # on both GPUs: NCCL numbers the groups that a process has had
                train(0, flags, port, paths[model], out_of_rank, spoil, on_gpu, rows_of)


def routed_rows() -> list[list[dict]]:
    """The same rows with experts for every token and layer: 2 of 4, in 2 layers."""
    dice, rows = np.random.default_rng(7), step_rows()
    for row in (row for rollout in rows for row in rollout):
        scores = dice.random((len(row["token_ids"]), 2, 4))
        row["routed_experts"] = scores.argsort(-1)[..., :2].astype(np.uint8)
    return rows


def train(
    rank: int, flags: ParallelFlags, port, path: str, out: str, spoil: bool, on_gpu: bool, rows_of=step_rows
) -> None:
    """One rank: takes the step in every size, and leaves gradients and metrics in a file."""
    args = Args(lr=0.0, temperature=0.9, parallel=flags, correction_cap=2.0, max_grad_norm=1e9)
    args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
    trainer = Trainer(args, path, rank, on_gpu)
    if rank == 0:
        store = open_store("127.0.0.1", 60)
        for _ in range(flags.num_trainers - 1):
            port.put(store.port)
    trainer.setup("127.0.0.1", store.port if rank == 0 else port.get(timeout=120), "float32", num_workers=0)
    results = {}

    def step(tokens: int, rows: list, lr: float) -> tuple[dict, dict]:
        args.parallel.micro_batch_tokens, args.lr = tokens, lr
        reported = trainer.train_step(make_minibatches(rows, args, step=5)[rank], None)
        named = ((name, parameter.grad) for name, parameter in trainer.model.named_parameters())
        return reported, {name: tensor.to("cpu", copy=True) for name, tensor in checkpoint_tensors(named)}

    for tokens in TOKENS:
        results[tokens] = step(tokens, rows_of(), 0.0)
    args.max_grad_norm = CLIP
    results["clipped"] = step(60, rows_of(), 0.0)
    if spoil:
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        rows = rows_of()
        rows[3][0]["advantage"] = math.nan  # one rollout, so on one rank, and in one of its micro-batches
        results["spoiled"] = step(60, rows, 0.1)[0]
        equal = [torch.equal(whole(a), whole(b)) for a, b in zip(before, trainer.model.parameters())]
        results["moved"] = not all(equal)
    torch.save(results, out)
    torch.distributed.destroy_process_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    return train_all(tmp_path_factory.mktemp("layouts"), on_gpu=False)


def train_all(folder, on_gpu: bool) -> dict:
    """(model, layout) -> what `train` saved, by rank."""
    paths = {"dense": make_tiny(folder / "dense"), "moe": make_tiny(folder / "moe", moe=True, tied=False)}
    paths["replayed"] = paths["moe"]
    paths["deepseek"] = make_tiny(folder / "deepseek", moe="deepseek", tied=False)
    on_two_ranks(rank_process, paths, str(folder), on_gpu, num_ports=1)
    found = {}
    for model, names in PLAN.items():
        for name in names:
            ranks = range(LAYOUTS[name].get("num_trainers", 1))
            files = [f"{folder}/{model}.{name}.{rank}" for rank in ranks]
            found[model, name] = [torch.load(file, weights_only=False) for file in files]
    return found


def flat(gradients: dict, like: dict) -> torch.Tensor:
    assert set(gradients) == set(like)
    return torch.cat([gradients[name].double().flatten() for name in like])


CASES = [(model, name) for model, names in PLAN.items() for name in names]


def test_replayed_experts_give_another_gradient_and_the_router_is_in_it(results):
    plain, replayed = (results[model, "one rank"][0][10_000][1] for model in ("moe", "replayed"))
    reference = flat(plain, plain)
    assert (flat(replayed, plain) - reference).norm() > 0.1 * reference.norm()
    gates = [name for name in replayed if name.endswith("gate.weight")]
    assert len(gates) == 2 and all(replayed[name].norm() > 1e-3 * reference.norm() for name in gates)


@pytest.mark.parametrize("model, name", CASES)
def test_the_gradient_is_that_of_one_rank_with_padded_rows(results, model, name):
    expected = results[model, "one rank"][0][10_000][1]
    reference = flat(expected, expected)
    assert reference.norm() > 0.01
    for result in results[model, name]:
        for tokens in TOKENS:
            difference = flat(result[tokens][1], expected) - reference
            assert difference.norm() <= 1e-5 * reference.norm(), tokens


@pytest.mark.parametrize("model, name", CASES)
def test_the_norm_is_that_of_all_parameters_on_every_rank_and_is_clipped_to(results, model, name):
    expected = results[model, "one rank"][0][10_000][1]
    norm = flat(expected, expected).norm().item()
    assert norm > 2 * CLIP
    for result in results[model, name]:
        reported, gradients = result["clipped"]
        assert reported["sums"]["grad_norm"] == (pytest.approx(norm, rel=1e-5), 1.0)
        assert flat(gradients, expected).norm().item() == pytest.approx(CLIP, rel=1e-4)


@pytest.mark.parametrize("model, name", CASES)
def test_the_metrics_do_not_depend_on_the_layout(results, model, name):
    expected = mean_of(merge([results[model, "one rank"][0][10_000][0]["sums"]]))
    for tokens in TOKENS:
        means = mean_of(merge([result[tokens][0]["sums"] for result in results[model, name]]))
        assert means == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("model, name", [case for case in CASES if case[1] in SPOILED])
def test_a_gradient_that_is_not_finite_on_one_rank_moves_no_rank_and_is_counted(results, model, name):
    for result in results[model, name]:
        assert not result["moved"]
        assert result["spoiled"]["sums"]["skipped_frac"] == (1.0, 1.0)
        assert "grad_norm" not in result["spoiled"]["sums"]


def test_offloaded_averages_make_the_same_steps():
    torch.manual_seed(0)
    start = [torch.randn(size) for size in (7, 40, 3, 60)]
    runs = []
    for kind in (torch.optim.AdamW, OffloadedAdamW):
        parameters = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = kind(parameters, lr=0.0, weight_decay=0.1)
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * (1 + number))
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == parameters
        runs.append(parameters)
    assert all(torch.equal(plain, offloaded) for plain, offloaded in zip(*runs))
    assert not any(torch.equal(plain, before) for plain, before in zip(runs[0], start))
