"""Experts spread over ranks beside a vision tower (Qwen3-VL-MoE, Qwen3.5-MoE): the gradient of rows with
images, and the names of what a refit sends. Processors want torchvision, so ids are laid out by hand; engines
are in tests/gpu."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, Glm4vMoeConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from algos.grpo import Args, Trainer, make_minibatches
from common.checks import FlagError, check_layout
from common.envs.shapes import draw
from common.parallel import ParallelFlags
from common.refit import checkpoint_tensors, open_store, weights_of
from tests.qwen_vl import PATCHES, TOKENS, make_qwen35_moe, make_qwen_vl_moe, qwen_tokenizer
from tests.ranks import on_two_ranks

LAYOUTS = {
    "data parallel": {"num_trainers": 2},
    "ep": {"num_trainers": 2, "trainer_ep": 2},
    "ep, zero 3, checkpointing": {
        "num_trainers": 2, "trainer_ep": 2, "zero": 3, "activation_checkpointing": True,
    },
    "ep, frozen": {"num_trainers": 2, "trainer_ep": 2, "freeze_vision": True},
}  # fmt: skip
ANSWER = [20, 21, 22, 23]
IMAGE, _, START, END = qwen_tokenizer().convert_tokens_to_ids(TOKENS)


def sighted_rows() -> list[list[dict]]:
    """Rollouts of one row: two images, one, none, one; each with an answer of four tokens."""
    size = dict(shortest_edge=16 * 16, longest_edge=64 * 64)
    arrays_of = Qwen2VLImageProcessorPil(size=size, **PATCHES)
    wide, square, rollouts = draw(3, 1), draw(2, 3), []
    for index, shown in enumerate(([wide, square], [square], [], [wide])):
        images, ids = [dict(arrays_of(image, return_tensors="np")) for image in shown], [7, 8 + index]
        for image in images:
            ids += [START, *[IMAGE] * (int(image["image_grid_thw"].prod()) // 4), END]
        mask = np.array([False] * len(ids) + [True] * len(ANSWER))
        rollouts.append([{
            "token_ids": np.array(ids + ANSWER, np.int32),
            "action_mask": mask,
            "logprobs": np.where(mask, -4.6, np.nan).astype(np.float32),
            "images": images,
            "advantage": (-1) ** index * 0.7 + 0.1 * index,
        }])  # fmt: skip
    return rollouts


def rank_process(rank: int, path: str, out: str, port) -> None:
    for name, layout in LAYOUTS.items():
        args = Args(lr=0.0, temperature=0.9, correction_cap=2.0, max_grad_norm=1e9)
        args.parallel = ParallelFlags(**layout, micro_batch_tokens=60, packing="off")
        args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
        trainer = Trainer(args, path, rank, False)
        if rank == 0:
            store = open_store("127.0.0.1", 60)
            port.put(store.port)
        at = store.port if rank == 0 else port.get(timeout=120)
        trainer.setup("127.0.0.1", at, "float32", num_workers=0)
        sent = {name: tensor.cpu() for name, tensor in checkpoint_tensors(weights_of(trainer.model))}
        trainer.train_step(make_minibatches(sighted_rows(), args, step=0)[rank], None)
        named = [(name, weight.grad) for name, weight in trainer.model.named_parameters()]
        # AutoModel has a plural there
        named = [(name.replace("shared_experts.", "shared_expert."), grad) for name, grad in named]
        gradients = dict(checkpoint_tensors((name, grad) for name, grad in named if grad is not None))
        torch.save((sent, gradients), f"{out}/{name}.{rank}")
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[make_qwen_vl_moe, make_qwen35_moe])
def path(request, tmp_path_factory) -> str:
    return request.param(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def oracle(path) -> tuple[dict, dict]:
    """Weights and gradients by Hugging Face's model, row by row: on-policy the surrogate's gradient is that
    of w A log pi. Stacked experts are taken apart here: [E, 2I, H] is I rows of gates, then I of ups."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    rows = [row for rollout in sighted_rows() for row in rollout]
    for row in rows:
        ids = torch.tensor(row["token_ids"]).long()[None]
        names = row["images"][0] if row["images"] else {}
        images = {name: torch.tensor(np.concatenate([i[name] for i in row["images"]])) for name in names}
        if images:
            images["mm_token_type_ids"] = (ids == IMAGE).int()
        logprobs = (model(input_ids=ids, **images).logits[0, :-1] / 0.9).log_softmax(-1)
        logprobs = logprobs.gather(1, ids[0, 1:, None])[:, 0][-len(ANSWER) :]
        weights = (logprobs.detach() + 4.6).exp().clamp(max=2.0)
        (-(weights * row["advantage"] * logprobs).sum() / (len(ANSWER) * len(rows))).backward()
    named = list(model.named_parameters())
    return apart((n, p.detach()) for n, p in named), apart((n, p.grad) for n, p in named)


def apart(named) -> dict:
    found = {}
    for name, tensor in named:
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for expert in range(4):
            if last == "gate_up_proj":
                found[f"{prefix}.{expert}.gate_proj.weight"] = tensor[expert, :48]
                found[f"{prefix}.{expert}.up_proj.weight"] = tensor[expert, 48:]
            else:
                found[f"{prefix}.{expert}.down_proj.weight"] = tensor[expert]
    return found


@pytest.fixture(scope="module")
def results(path, tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("ranks")
    on_two_ranks(rank_process, path, str(out), num_ports=1)
    return {(name, rank): torch.load(f"{out}/{name}.{rank}") for name in LAYOUTS for rank in (0, 1)}


def test_only_families_that_were_tried_spread_experts_beside_a_tower(path, tmp_path):
    def check(model: str, **flags) -> None:
        check_layout(model, ParallelFlags(num_trainers=2, **flags))

    check(path, trainer_ep=2)
    Glm4vMoeConfig().save_pretrained(tmp_path)
    qwen_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(FlagError, match="--trainer-ep 2: its experts beside a tower were not tried; use 1"):
        check(str(tmp_path), trainer_ep=2)
    check(str(tmp_path))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_refit_sends_each_weight_under_one_name_however_experts_are_spread(name, results, oracle):
    for rank in (0, 1):
        sent, _ = results[name, rank]
        assert sent.keys() == oracle[0].keys()
        assert all(torch.equal(sent[key], oracle[0][key]) for key in sent)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gradient_of_tower_experts_and_all_else_is_hugging_faces(name, results, oracle):
    wanted = oracle[1]
    assert sum(".visual." in key and bool(grad.abs().max() > 0) for key, grad in wanted.items()) > 20
    frozen = {key for key in wanted if ".visual." in key and "frozen" in name}
    for rank in (0, 1):
        _, gradients = results[name, rank]
        assert gradients.keys() == wanted.keys() - frozen
        for key, gradient in gradients.items():
            error = (gradient - wanted[key]).abs().max()
            assert error <= 1e-6 + 1e-4 * wanted[key].abs().max(), f"{key}, {error}"
