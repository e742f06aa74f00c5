"""The critic: the policy's backbone under a head of one number, on the same ranks as the policy."""

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from common.attention import pack
from common.parallel import ParallelFlags, build_model, reshard


class ValueHead(torch.nn.Linear):
    """One number a position, in fp32 whatever the backbone computes in. It starts at zero."""

    def __init__(self, hidden_size: int, device: torch.device):
        super().__init__(hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden_BTH: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_BTH.float()).clone()  # FSDP warns of outputs that are views


def put_value_head(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Puts a new value head in place of a causal LM's output head. Before the optimizer and any forward.

    In a sharded model the head is an FSDP unit of its own: AutoModel shards while it loads, and only in its
    own unit is the head fp32 beside a bf16 backbone. An embedding tied to the old head stays as it is.
    """
    embedding = model.get_input_embeddings().weight
    head = ValueHead(model.get_output_embeddings().weight.shape[1], device)
    if isinstance(model, FSDPModule):
        fp32, mesh = MixedPrecisionPolicy(torch.float32, torch.float32), embedding.device_mesh
        fully_shard(head, mesh=mesh, mp_policy=fp32)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False  # else saving drops the head, and loading ties it again
    model.all_tied_weights_keys = {}
    return model


def build_critic(path: str, device: torch.device, flags: ParallelFlags | None = None) -> torch.nn.Module:
    """The model of `path` in fp32, sharded like the policy, under a value head. Every value is 0 at first."""
    return put_value_head(build_model(path, device, flags=flags), device)


def values(model: torch.nn.Module, ids_BT: torch.Tensor, lengths_B: torch.Tensor | None = None, images=None):
    """The value of the state after each token, [B, T] in fp32. Rows are padded on the right; `lengths_B` are
    their lengths without that, on the CPU.

    Token t was sampled in the state after t - 1: [:, :-1] lies beside the log-probs of tokens 1 to T - 1. The
    last column is the state that a cut rollout was left in.
    """
    packed = pack(model, ids_BT, lengths_B, images)
    output = model(**packed.inputs, use_cache=False)
    if not torch.is_grad_enabled():
        reshard(model)
    return packed.spread(output.logits).squeeze(-1)
