"""Rows laid end to end, without padding: each one attends to itself alone."""

from dataclasses import dataclass
from inspect import signature

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from common.images import WITH_BATCH_AXIS

# Before torch 2.13 it takes fewer heads of keys than of queries without being told.
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
PACKED = "instar_packed"  # the name under which transformers finds it: config._attn_implementation


def packed_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """Causal attention of documents: query [1, heads, N, D], key and value [1, kv heads, N, D], their ends in
    `cu_seq_lens_q`. Returns ([1, N, heads, D], None). Raises NotImplementedError for a model whose attention
    needs more than that. Without ends it is that of rows of one length."""
    extra = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if extra or (sliding_window and (query.dtype == torch.float32 or "cu_seq_lens_q" not in kwargs)):
        what = ", ".join(extra) or "a sliding window in fp32"
        raise NotImplementedError(f"packing is not written for attention with {what}; use --packing off")
    if "cu_seq_lens_q" not in kwargs:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    ends, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    if query.device.type == "cuda" and query.dtype != torch.float32:  # there is no fp32 kernel
        window = (sliding_window - 1 if sliding_window else -1, 0)
        sizes = (ends, ends, longest, longest)
        packed = varlen_attn(query, key, value, *sizes, scale=scaling, window_size=window, **GROUPED)
        return packed[None], None
    lengths = ends.diff().tolist()
    documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)))
    how = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    each = [F.scaled_dot_product_attention(*document, **how) for document in documents]
    return torch.cat(each, dim=1).transpose(0, 1)[None], None


def use_packed_attention(model: torch.nn.Module) -> None:
    """From now on the model takes rows that `pack` laid end to end."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)  # the documents' ends say it all
    model.config._attn_implementation = PACKED


@dataclass
class Packed:
    """A batch of rows as the model takes it, and the way back."""

    inputs: dict
    index: torch.Tensor | None  # of each token in the flattened rows; None where nothing was packed
    shape: torch.Size

    def select(self, values_BS: torch.Tensor) -> torch.Tensor:
        """[B, S, ...] to [1, N, ...]."""
        return values_BS if self.index is None else values_BS.flatten(0, 1)[self.index][None]

    def spread(self, values_1N: torch.Tensor) -> torch.Tensor:
        """[1, N, ...] to [B, S, ...], 0 where there is padding."""
        if self.index is None:
            return values_1N
        rows = values_1N.new_zeros(self.shape.numel(), *values_1N.shape[2:])
        return rows.index_copy(0, self.index, values_1N[0]).unflatten(0, self.shape)


def image_inputs(model: torch.nn.Module, ids_BS: torch.Tensor, images: dict[str, torch.Tensor]) -> dict:
    """What the model's forward takes for the images whose ids are in `ids_BS`, in the order of its rows."""
    if images and model.config.model_type in WITH_BATCH_AXIS:
        images = {name: value[None] for name, value in images.items()}
    # with a grid too, as AutoModel's forward takes them without naming them
    if images and ("image_grid_thw" in images or "mm_token_type_ids" in signature(model.forward).parameters):
        images = images | {"mm_token_type_ids": (ids_BS == model.config.image_token_id).int()}
    if images and model.config.model_type == "qwen3_5_moe":  # AutoModel's would place its tokens as text
        places = images["mm_token_type_ids"], images["image_grid_thw"]
        images["position_ids"], _ = model.model.get_rope_index(ids_BS, *places)
    return images


def pack(model: torch.nn.Module, ids_BS: torch.Tensor, lengths_B: torch.Tensor | None, images=None) -> Packed:
    """Rows of `ids_BS`, of which the first `lengths_B` tokens count (a CPU tensor; default: all), end to end
    if the model was built to take them so. One that takes `images` is not (`checks.check_layout`)."""
    count, width = ids_BS.shape
    lengths_B = torch.full((count,), width) if lengths_B is None else lengths_B
    even = bool((lengths_B == width).all())  # the kernel for that is the faster one
    if model.config._attn_implementation != PACKED or even and not vars(model.config).get("sliding_window"):
        return Packed({"input_ids": ids_BS} | image_inputs(model, ids_BS, images or {}), None, ids_BS.shape)
    positions = torch.arange(width).expand(count, width)
    kept_BS = positions < lengths_B[:, None]
    index = kept_BS.flatten().nonzero().squeeze(-1)
    ends = F.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    index, positions, ends = (x.to(ids_BS.device) for x in (index, positions[kept_BS][None], ends))
    sizes = {"cu_seq_lens_q": ends, "max_length_q": int(lengths_B.max())}
    inputs = {"input_ids": ids_BS.flatten()[index][None], "position_ids": positions} | sizes
    return Packed(inputs, index, ids_BS.shape)
