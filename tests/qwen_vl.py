"""Tiny mixtures of experts with a vision tower, written as the released checkpoints are."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig, Qwen3VLMoeConfig

from common.models import CHATML, CONTENT, MAX_LENGTH, PARTS, char_tokenizer, save

TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
PATCHES = dict(patch_size=8, merge_size=2, temporal_patch_size=2)


def make_qwen_vl_moe(folder: Path) -> str:
    """Qwen3-VL-MoE: 2 layers of 4 experts, a token to 2; a tower of 2 blocks, the first of which feeds the
    first layer too."""
    text = dict(intermediate_size=128, norm_topk_prob=True, rope_parameters=rope(mrope_section=[6, 5, 5]))
    return make(folder, Qwen3VLMoeConfig, text, dict(deepstack_visual_indexes=[0]))


def make_qwen35_moe(folder: Path) -> str:
    """Qwen3.5-MoE: a layer of linear attention and one of attention, each with 4 experts and a shared one."""
    text = dict(layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=48)
    text |= dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_conv_kernel_dim=4)
    text |= dict(linear_key_head_dim=32, linear_value_head_dim=32)
    text |= dict(rope_parameters=rope(mrope_section=[2, 1, 1], partial_rotary_factor=0.25))
    return make(folder, Qwen3_5MoeConfig, text, {})


def rope(**more) -> dict:
    return dict(rope_type="default", rope_theta=10_000.0, mrope_interleaved=True) | more


def make(folder: Path, kind, text: dict, tower: dict) -> str:
    """Random weights, with experts stacked as released checkpoints have them: [E, in, out] in Qwen3-VL-MoE,
    which transformers turns when it loads, [E, out, in] in Qwen3.5-MoE."""
    tokenizer, both = qwen_tokenizer(), dict(hidden_size=64, initializer_range=0.1)
    named = zip(("image", "video", "vision_start", "vision_end"), tokenizer.convert_tokens_to_ids(TOKENS))
    text |= dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, num_hidden_layers=2)
    text |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
    text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    tower |= dict(depth=2, num_heads=2, patch_size=8, intermediate_size=128, out_hidden_size=64)
    tower |= dict(num_position_embeddings=64)
    config = kind(
        text_config=text | both | {"max_position_embeddings": MAX_LENGTH}, vision_config=tower | both,
        tie_word_embeddings=False, **{f"{name}_token_id": i for name, i in named},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # engines keep it in fp32, and released checkpoints hold it in bf16
            weight.data = weight.data.bfloat16().float()
    save(model, tokenizer, folder)
    weights = model.state_dict()
    for name in [name for name in weights if ".experts." in name and kind is Qwen3VLMoeConfig]:
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def qwen_tokenizer():
    tokenizer = char_tokenizer()
    image = "'<|vision_start|><|image_pad|><|vision_end|>'"
    tokenizer.chat_template = CHATML.replace(CONTENT, PARTS.replace("'<image>'", image))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *TOKENS]})
    return tokenizer


def add_processor(folder: str) -> None:
    """What turns images into patches. Only where torchvision is: it insists on a processor of videos."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = dict(shortest_edge=16 * 16, longest_edge=64 * 64)
    images, videos = Qwen2VLImageProcessor(size=size, **PATCHES), Qwen3VLVideoProcessor(size=size, **PATCHES)
    tokenizer = qwen_tokenizer()
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)
