"""Log-prob and entropy of given tokens without the [tokens, vocab] logits of a whole batch in memory."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from common.attention import pack
from common.parallel import reshard
from common.routing import RouterReplay

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 5 << 28}  # of logits that are made at a time
KEPT_CHUNKS = 2  # that the backward pass finds, and need not make again


def logit_sums(logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """What log-prob and entropy are made of, [4, T] in fp32. With x = logits / temperature and m = max x:
    m, sum exp(x - m), sum (x - m) exp(x - m), and x of the target, or 0 where it is not among these."""
    if logits_TV.device.type == "cuda":
        from common.kernels import sums_on_gpu

        return sums_on_gpu(logits_TV, targets_T, temperature)
    x_TV = logits_TV.float() / temperature
    inside_T = (targets_T >= 0) & (targets_T < x_TV.shape[1])
    target_T = x_TV.gather(-1, targets_T.clamp(0, x_TV.shape[1] - 1)[:, None]).squeeze(-1)
    max_T = x_TV.amax(-1)
    below_TV = x_TV - max_T[:, None]
    exp_TV = below_TV.exp()
    sums = exp_TV.sum(-1), (below_TV * exp_TV).sum(-1)
    return torch.stack([max_T, *sums, torch.where(inside_T, target_T, 0.0)])


def logit_gradients_(logits_TV, targets_T, log_z_T, entropy_T, grad_T, entropy_grad_T, temperature: float):
    """Turns logits, in place, into the gradient of sum(grad x log-prob + entropy_grad x entropy) for them."""
    if logits_TV.device.type == "cuda":
        from common.kernels import gradients_on_gpu

        return gradients_on_gpu(logits_TV, targets_T, log_z_T, entropy_T, grad_T, entropy_grad_T, temperature)
    logprobs_TV = logits_TV.float() / temperature - log_z_T[:, None]
    p_TV = logprobs_TV.exp()
    gradient_TV = -p_TV * (grad_T[:, None] + entropy_grad_T[:, None] * (logprobs_TV + entropy_T[:, None]))
    inside_T = ((targets_T >= 0) & (targets_T < logits_TV.shape[1])).nonzero().squeeze(-1)
    gradient_TV[inside_T, targets_T[inside_T]] += grad_T[inside_T]
    return logits_TV.copy_(gradient_TV / temperature)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b in place, in fp32 at least, also where the factors are narrower. None is a total of 0."""
    wide = torch.promote_types(a.dtype, torch.float32)
    how = {} if wide == a.dtype else {"out_dtype": wide}
    return torch.mm(a, b, **how) if total is None else torch.addmm(total, a, b, **how, out=total)


class LinearLogprobs(torch.autograd.Function):
    """(log-probs, entropies), both [T] in fp32, of targets under softmax(hidden @ weight.T / temperature).

    Logits are made in chunks, in the dtype of the weights, and most of them again for the backward pass, if
    there will be one (`backward`). With `group` (tensor parallelism) each rank has the rows of the vocabulary
    from `first` on, and adds up with the others.
    """

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, bias_V, targets_T, temperature, group, first, backward):
        targets_T, count = targets_T - first, len(targets_T)
        limit = CHUNK_BYTES[weight_VH.device.type] // (weight_VH.shape[0] * weight_VH.element_size())
        size = max(1, -(-count // max(1, -(-count // max(1, limit)))))  # as equal as can be
        chunks = [slice(at, at + size) for at in range(0, count, size)]
        parts, ctx.kept = [], {}
        for number, c in enumerate(chunks):
            logits_TV = F.linear(hidden_TH[c], weight_VH, bias_V)
            parts.append(logit_sums(logits_TV, targets_T[c], temperature))
            if backward and number >= len(chunks) - KEPT_CHUNKS:
                ctx.kept[number] = logits_TV
            del logits_TV  # before the next one is made
        max_T, exp_T, weighted_T, target_T = torch.cat(parts, dim=1)
        if group is not None:
            highest_T = max_T.clone()
            dist.all_reduce(highest_T, dist.ReduceOp.MAX, group)
            scale_T = (max_T - highest_T).exp()
            weighted_T = (weighted_T + (max_T - highest_T) * exp_T) * scale_T
            sums = torch.stack([exp_T * scale_T, weighted_T, target_T])
            dist.all_reduce(sums, group=group)
            max_T, (exp_T, weighted_T, target_T) = highest_T, sums
        entropy_T = exp_T.log() - weighted_T / exp_T
        log_z_T = max_T + exp_T.log()
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, log_z_T, entropy_T)
        ctx.chunks, ctx.temperature = chunks, temperature
        return target_T - log_z_T, entropy_T

    @staticmethod
    @once_differentiable  # it works in place
    def backward(ctx, grad_T, entropy_grad_T):
        hidden_TH, weight_VH, bias_V, targets_T, log_z_T, entropy_T = ctx.saved_tensors
        hidden_grad_TH, weight_grad_VH, bias_grad_V = torch.empty_like(hidden_TH), None, None
        for number, c in reversed(list(enumerate(ctx.chunks))):
            logits_TV = ctx.kept.pop(number, None)
            if logits_TV is None:
                logits_TV = F.linear(hidden_TH[c], weight_VH, bias_V)
            rows = targets_T[c], log_z_T[c], entropy_T[c], grad_T[c], entropy_grad_T[c]
            gradient_TV = logit_gradients_(logits_TV, *rows, ctx.temperature)
            hidden_grad_TH[c] = gradient_TV @ weight_VH
            if ctx.needs_input_grad[1]:  # beside LoRA a head is frozen
                weight_grad_VH = add_product(weight_grad_VH, gradient_TV.T, hidden_TH[c])
            if ctx.needs_input_grad[2]:
                part_V = gradient_TV.sum(0, dtype=weight_grad_VH.dtype)
                bias_grad_V = part_V if bias_grad_V is None else bias_grad_V + part_V
            del logits_TV, gradient_TV
        return hidden_grad_TH, weight_grad_VH, bias_grad_V, None, None, None, None, None


class LogprobHead:
    """Stands in for the forward of `model`'s output head.

    While `targets` is set, the head returns [B, S, 2] (log-prob, entropy) in place of logits. It runs inside
    the model's own forward, so that FSDP's hooks around the head fire as for any other layer.
    """

    def __init__(self, model: torch.nn.Module, fp32: bool = False):
        self.head, self.fp32, self.place = model.get_output_embeddings(), fp32, None
        self.plain_forward = self.head.forward
        self.head.forward = self.forward
        self.targets_BS: torch.Tensor | None = None
        self.temperature, self.router = 1.0, RouterReplay(model)

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        if self.targets_BS is None:
            return self.plain_forward(hidden_BSH)
        if hidden_BSH.shape[:2] != self.targets_BS.shape[:2]:
            raise ValueError(f"{hidden_BSH.shape[:2]} positions, {self.targets_BS.shape} targets")
        hidden, weight, bias, mesh, group, first = hidden_BSH, self.head.weight, self.head.bias, None, None, 0
        if isinstance(hidden_BSH, DTensor):  # tensor parallelism: each rank has a part of the vocabulary
            mesh, self.place = hidden_BSH.device_mesh, hidden_BSH.device_mesh.get_local_rank()
            first = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)[1][0]
            hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
            bias, group = None if bias is None else bias.to_local(), mesh.get_group()
        if self.fp32:
            hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
        arguments = self.targets_BS.flatten(), self.temperature, group, first, torch.is_grad_enabled()
        values = LinearLogprobs.apply(hidden.flatten(0, 1), weight, bias, *arguments)
        values = torch.stack([value.unflatten(0, self.targets_BS.shape) for value in values], dim=-1)
        # with a mesh, as one slice of [B, S, 2 x ranks]: the plan for the head expects a sharded last axis
        return values if mesh is None else DTensor.from_local(values, mesh, [Shard(2)], run_check=False)

    def __call__(self, model, ids_BS, targets_BS, temperature, lengths_B=None, routes=None, images=None):
        """(log-probs, entropies) of `targets_BS` given `ids_BS` up to the same position, both [B, S],
        fp32.

        Rows are padded on the right, so a causal model needs no attention mask. `lengths_B` are their lengths
        without padding, on the CPU (default: S); a model that packs computes nothing past them, and gives 0
        there. `routes` [B, T, L, K] are the experts to replay, `images` the arrays of the rows' images.
        Raises ValueError where shapes differ or they don't fit.
        """
        if ids_BS.shape != targets_BS.shape[:2]:
            raise ValueError(f"input ids {tuple(ids_BS.shape)}, targets {tuple(targets_BS.shape)}")
        self.router.set(ids_BS, lengths_B, routes)
        packed = pack(model, ids_BS, lengths_B, images)
        self.targets_BS, self.temperature = packed.select(targets_BS), temperature
        try:
            output = model(**packed.inputs, use_cache=False)
        finally:
            self.targets_BS = None
        if not torch.is_grad_enabled():
            reshard(model)
        values = output.logits.to_local() if isinstance(output.logits, DTensor) else output.logits
        if self.place is not None and values.shape[-1] > 2:  # a plan that gathers what the ranks have
            values = values[..., 2 * self.place : 2 * self.place + 2]
        return packed.spread(values).unbind(-1)
