"""The training model on a mesh of ranks: NeMo AutoModel and FSDP2. The only file that imports AutoModel."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class ParallelFlags:
    num_trainers: Annotated[int, Ge(1)] = 1
    """Trainer ranks: one FSDP2 mesh over all of them; on GPUs each takes one GPU."""
    micro_batch_tokens: Annotated[int, Ge(1)] = 8192
    """Tokens of a micro-batch on one rank, padding included. Lower it when the trainer runs out of memory."""


def join_world(rank: int, world_size: int, store: dist.Store, device: torch.device, timeout_s: float) -> None:
    """The trainer's own process group. Raises at the deadline if a rank does not come."""
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def build_model(path: str, device: torch.device, dtype: str = "bfloat16") -> torch.nn.Module:
    """A causal LM with fp32 weights, sharded over all ranks. On a GPU it computes in `dtype`, on a CPU in
    fp32.

    Build the optimizer before any forward: parameters that FSDP2 has unsharded are not the ones to train.
    """
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
    from transformers import AutoModelForCausalLM

    compute = getattr(torch, dtype) if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    setup = DistributedSetup.build(
        strategy=FSDP2Config(mp_policy=policy),
        parallelism_sizes=ParallelismSizes(),
        world_size=dist.get_world_size(),
    )
    if device.type == "cuda":
        model = NeMoAutoModelForCausalLM.from_pretrained(
            path, distributed_setup=setup, dtype=torch.float32, attn_implementation="sdpa",
            use_liger_kernel=False,
        )  # fmt: skip
    else:  # AutoModel's own loader asks for a CUDA device; its parallelizer does not
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        model = parallelize_model(model, setup.mesh_context)
    if (
        device.type == "cuda" and dist.get_world_size() == 1
    ):  # AutoModel leaves a single rank as it is, in fp32
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def reshard(model: torch.nn.Module) -> None:
    """Frees what a forward without a backward leaves whole. FSDP2 keeps its root so, and then the parameters
    that one sees there are copies in the compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def describe(model: torch.nn.Module) -> str:
    """One line: the model's class, its size, and how many of its parameters are sharded over how many
    ranks."""
    parameters = list(model.parameters())
    sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    size = sum(parameter.numel() for parameter in parameters)
    kind = type(model).__name__.removeprefix("FSDP")
    shards = f"{sharded} of {len(parameters)} sharded over {dist.get_world_size()} ranks"
    return f"{kind}, {size / 1e6:.3g}M parameters, {shards}"


def clip_gradients(model: torch.nn.Module, max_norm: float) -> float:
    """Scales all gradients to a global L2 norm of at most `max_norm`. Returns the norm before, equal on all
    ranks.

    Raises FloatingPointError where it is not finite: such a step would destroy the weights.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not torch.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {float(norm)}")
    return float(norm)
