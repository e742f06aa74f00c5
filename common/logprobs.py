"""Log-prob and entropy of given tokens without the [tokens, vocab] logits of a whole batch in memory."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common.parallel import reshard

CHUNK_BYTES = 128 << 20  # of fp32 logits that exist at a time


def chunk_logprobs(hidden_TH, weight_VH, bias_V, targets_T, temperature: float):
    """Log-prob of each target and entropy of its distribution, both [T] in fp32."""
    logits_TV = F.linear(hidden_TH, weight_VH, bias_V).float() / temperature
    logprobs_TV = F.log_softmax(logits_TV, dim=-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1), entropy_T


class LogprobHead:
    """Stands in for the forward of `model`'s output head.

    While `targets` is set, the head returns [B, S, 2] (log-prob, entropy) in place of logits. It runs inside
    the model's own forward, so that FSDP's hooks around the head fire as for any other layer.
    """

    def __init__(self, model: torch.nn.Module):
        self.head = model.get_output_embeddings()
        self.plain_forward = self.head.forward
        self.head.forward = self.forward
        self.targets_BS: torch.Tensor | None = None
        self.temperature = 1.0

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        if self.targets_BS is None:
            return self.plain_forward(hidden_BSH)
        if hidden_BSH.shape[:2] != self.targets_BS.shape:
            sizes = tuple(hidden_BSH.shape[:2]), tuple(self.targets_BS.shape)
            raise ValueError("{} positions, {} targets".format(*sizes))
        hidden, targets = hidden_BSH.flatten(0, 1), self.targets_BS.flatten()
        size = max(1, CHUNK_BYTES // (4 * len(self.head.weight)))
        parts = []
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            chunk = hidden[part], self.head.weight, self.head.bias, targets[part]
            if len(targets) <= size:
                parts.append(chunk_logprobs(*chunk, self.temperature))
            else:  # only the last chunk's logits would be needed again: recompute each in the backward pass
                parts.append(checkpoint(chunk_logprobs, *chunk, self.temperature, use_reentrant=False))
        logprobs, entropies = (torch.cat(values) for values in zip(*parts))
        values = torch.stack([logprobs, entropies], dim=-1).unflatten(0, self.targets_BS.shape)
        return values.clone()  # FSDP warns of outputs that are views

    def __call__(self, model, input_ids_BS, targets_BS, temperature: float):
        """(log-probs, entropies) of `targets_BS` given `input_ids_BS` up to the same position, both [B, S],
        fp32.

        Rows are padded on the right, so a causal model needs no attention mask. Raises ValueError where the
        two shapes differ.
        """
        if input_ids_BS.shape != targets_BS.shape:
            raise ValueError(f"input ids {tuple(input_ids_BS.shape)}, targets {tuple(targets_BS.shape)}")
        self.targets_BS, self.temperature = targets_BS, temperature
        try:
            output = model(input_ids=input_ids_BS, use_cache=False)
        finally:
            self.targets_BS = None
        if not torch.is_grad_enabled():
            reshard(model)
        return output.logits.unbind(-1)
