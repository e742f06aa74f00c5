"""The training model on a mesh of ranks: NeMo AutoModel and FSDP2. The only file that imports AutoModel."""

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal
from unittest import mock

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Lt
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from common.attention import use_packed_attention
from common.checks import EXPERTS
from common.models import auto_class, sees, text_config
from common.routing import routers

TOWERS = ("vision_model", "vision_tower", "visual")  # how models call the part that sees


@dataclass
class ParallelFlags:
    num_trainers: Annotated[int, Ge(1)] = 1
    """Trainer ranks: one FSDP2 mesh over all of them; on GPUs each takes one GPU.
    Raise it when time/train is most of time/step, or a model does not fit."""
    trainer_tp: Annotated[int, Ge(1)] = 1
    """Trainer ranks over which each layer is split (tensor parallelism), for models too large for FSDP
    alone. They train the same rollouts."""
    trainer_ep: Annotated[int, Ge(1)] = 1
    """Trainer ranks over which the experts of a mixture of experts are spread."""
    micro_batch_tokens: Annotated[int, Ge(1)] = 8192
    """Tokens of a micro-batch on one rank.
    Raise it while GPU memory is left, lower it when the trainer runs out of it."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Lays the rows of a micro-batch end to end instead of padding them. auto: on GPUs, where attention has
    a kernel for it, for models of nothing but attention and dense layers."""
    activation_checkpointing: bool = False
    """Keeps fewer activations and computes the others again: less memory, more time."""
    offload_optimizer: bool = False
    """Keeps Adam's averages (8 bytes a parameter) in CPU memory between steps."""
    zero: Literal[2, 3] = 2
    """What is divided by the ranks all the time: 2 gradients and averages, while a rank has all weights and
    sums of gradients during a step (6 bytes a parameter), which it exchanges once; 3 weights and gradients
    too, exchanged in every micro-batch."""
    compile: bool = False
    """On GPUs, compiles each layer (torch.compile): a first step of some seconds for faster ones."""
    fp32_head: bool = False
    """Computes logits in fp32 instead of the dtype of the weights: exacter, slower, and not what the engine
    does."""
    freeze_vision: bool = False
    """Does not train the vision tower of a model that reads images."""
    freeze_router: bool = False
    """Does not train the routers of a mixture of experts."""
    fp32_router: bool = False
    """On GPUs, computes the routers of a mixture of experts in fp32 instead of the dtype of the weights."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon needs the package dion."""
    lora_rank: Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512] = 0  # those that vLLM has
    """Rank of LoRA adapters on every linear layer but the output head. They are all that is trained, and all
    that a refit sends. 0: none, the whole model is trained."""
    lora_alpha: Annotated[float, Gt(0), Lt(float("inf"))] = 32.0
    """An adapter adds alpha / rank times its product of two factors. Raising it works like a higher --lr."""

    @property
    def data_ranks(self) -> int:
        """Ranks that train different rollouts."""
        return self.num_trainers // self.trainer_tp


def join_world(rank: int, world_size: int, store: dist.Store, device: torch.device, timeout_s: float) -> None:
    """The trainer's own process group. Raises at the deadline if a rank does not come."""
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def build_model(
    path: str, device: torch.device, dtype: str = "bfloat16", flags: ParallelFlags | None = None
) -> torch.nn.Module:
    """A causal LM with fp32 weights, spread over all ranks as `flags` say. On a GPU it computes in `dtype`,
    on a CPU in fp32. What LoRA freezes is kept in that dtype.

    Build the optimizer before any forward: parameters that FSDP2 has unsharded are not the ones to train.
    """
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

    flags, on_gpu = flags or ParallelFlags(), device.type == "cuda"
    compute = getattr(torch, dtype) if on_gpu else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    sharding = {"mp_policy": policy, "reshard_after_forward": flags.zero == 3}
    setup = DistributedSetup.build(
        strategy=FSDP2Config(**sharding, enable_compile=flags.compile),
        parallelism_sizes=ParallelismSizes(tp_size=flags.trainer_tp, ep_size=flags.trainer_ep),
        activation_checkpointing=flags.activation_checkpointing,
        world_size=dist.get_world_size(),
    )
    sparse, lora = any(text_config(path).get(key) for key in EXPERTS), None
    if flags.lora_rank:
        from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

        lora = PeftConfig(target_modules=["*_proj"], dim=flags.lora_rank, alpha=flags.lora_alpha)
    if on_gpu or flags.trainer_ep > 1:
        gate = torch.float32 if flags.fp32_router else None
        model = load_by_automodel(path, setup, sparse, compute, on_gpu, gate, lora)
    else:  # AutoModel's own loader asks for a CUDA device; its parallelizer does not
        model = auto_class(path).from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        if lora:
            apply_lora_to_linear_modules(model, lora)
        model = parallelize_model(model, setup.mesh_context)
    if on_gpu and dist.get_world_size() == 1:  # AutoModel leaves a single rank as it is, in fp32
        for weight in filter(lambda each: each.requires_grad, model.parameters()):
            weight.data = weight.data.float()  # but LoRA's factors, which it gives in the compute dtype
        layers = (model.get_decoder() if sees(path) else model.model).layers
        for layer in layers.values() if isinstance(layers, torch.nn.ModuleDict) else layers:
            fully_shard(layer, **sharding)
        fully_shard(model, mp_policy=policy)
    if flags.packing == "on":
        use_packed_attention(model)
    frozen = [*routers(model).values()] if flags.freeze_router else []
    frozen += [part for name, part in model.named_modules() if flags.freeze_vision and name.endswith(TOWERS)]
    for module in frozen:
        module.requires_grad_(False)
    model.mesh = setup.mesh_context
    return model


def load_by_automodel(path: str, setup, sparse: bool, compute, on_gpu: bool, gate, lora) -> torch.nn.Module:
    """Through AutoModel's own loader, which shards while it loads and has its own mixtures of experts, whose
    routers compute in the dtype `gate` (None: as all else)."""
    from nemo_automodel import NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText
    from nemo_automodel.components.models.common import BackendConfig

    settings = {"dtype": torch.float32, "attn_implementation": "sdpa", "use_liger_kernel": False}
    settings["peft_config"] = lora
    if sparse:  # neither TransformerEngine nor DeepEP
        plain = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "dispatcher": "torch"}
        experts = "torch_mm" if compute == torch.bfloat16 else "torch"  # the faster one is for bf16 alone
        settings["backend"] = BackendConfig(**plain, experts=experts, rope_fusion=False, gate_precision=gate)
    with contextlib.ExitStack() as no_cuda:
        if not on_gpu:
            no_cuda.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
            no_cuda.enter_context(CudaIsCpu())
        kind = NeMoAutoModelForImageTextToText if sees(path) else NeMoAutoModelForCausalLM
        model = kind.from_pretrained(path, distributed_setup=setup, **settings)
    for module in model.modules():
        if "aux_loss_coeff" in vars(module):
            module.aux_loss_coeff = 0.0  # else every loss would have a term that its file does not show
        if "device" in vars(module) and not on_gpu:  # a rotary embedding remembers where it was made
            module.device = torch.device("cpu")
    return model


class CudaIsCpu(TorchFunctionMode):
    """On a machine without a GPU: what AutoModel makes on, or moves to, GPU 0 stays on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        args = ["cpu" if isinstance(each, torch.device) and each.type == "cuda" else each for each in args]
        if kwargs.get("device") in (0, torch.device("cuda"), torch.device("cuda", 0)):
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


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


def sync_gradients(model: torch.nn.Module, flags: ParallelFlags, last: bool) -> None:
    """Before a micro-batch: whether its backward exchanges gradients, and gives up the other ranks'
    weights."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or flags.zero == 3)
        model.set_reshard_after_backward(last or flags.zero == 3)


def clip_gradients(model: torch.nn.Module, max_norm: float, flags: ParallelFlags) -> float:
    """Scales all gradients to a global L2 norm of at most `max_norm`. Returns the norm before, equal on all
    ranks: where it is not finite, no rank may take the step."""
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    synchronize_tp_replica_gradients([model], model.mesh.device_mesh)
    meshes = {"device_mesh": model.mesh.device_mesh, "moe_mesh": model.mesh.moe_mesh, "ep_axis_name": "ep"}
    norm = scale_grads_and_clip_grad_norm(max_norm, [model], **meshes, dp_group_size=flags.data_ranks)
    return float(norm)


# --- The optimizer


def make_optimizer(model: torch.nn.Module, weight_decay: float, flags: ParallelFlags) -> Optimizer:
    """AdamW (fused on a GPU, its averages offloaded if so asked), or Muon. The learning rate is set later."""
    if flags.optimizer == "muon":
        from nemo_automodel.components.optim.optimizer import MuonConfig

        muon = MuonConfig(lr=0.0, weight_decay=weight_decay)
        return muon.build(model, device_mesh=model.mesh.device_mesh)[0]
    kind = OffloadedAdamW if flags.offload_optimizer else AdamW
    fused = next(model.parameters()).device.type == "cuda"
    return kind(model.parameters(), lr=0.0, weight_decay=weight_decay, fused=fused)


class OffloadedAdamW(AdamW):
    """AdamW with its averages in CPU memory: those of one parameter at a time come to the GPU."""

    def step(self, closure=None) -> None:
        (group,) = self.param_groups
        for parameter in group["params"]:
            self._move(parameter, lambda average: average.to(parameter.device, non_blocking=True))
            self.param_groups = [group | {"params": [parameter]}]
            super().step()
            self._move(parameter, to_pinned)
        self.param_groups = [group]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was copied without blocking is there

    def _move(self, parameter: torch.nn.Parameter, copy) -> None:
        """Averages stay DTensors on the mesh of their parameter; their local part changes its place."""
        for name, average in self.state[parameter].items():
            if name != "step":
                local = average._local_tensor if isinstance(average, DTensor) else average
                local.data = copy(local)


def to_pinned(average: torch.Tensor) -> torch.Tensor:
    if average.device.type == "cpu":
        return average
    return torch.empty_like(average, device="cpu", pin_memory=True).copy_(average, non_blocking=True)
