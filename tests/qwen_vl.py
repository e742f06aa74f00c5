"""A tiny mixture of experts with a vision tower, in Qwen3-VL-MoE's shapes and as its checkpoints are written."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from common.models import CHATML, CONTENT, MAX_LENGTH, PARTS, char_tokenizer, save

TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
PATCHES = dict(patch_size=8, merge_size=2, temporal_patch_size=2)


def make_qwen_vl_moe(folder: Path) -> str:
    """2 layers of 4 experts, a token to 2; a tower of 2 blocks, the first of which feeds the first layer too.
    The released checkpoints hold experts as [E, in, out]; transformers, which would save [E, out, in], turns
    either."""
    layers = dict(hidden_size=64, initializer_range=0.1)
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
    tokenizer = qwen_tokenizer()
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), tokenizer.convert_tokens_to_ids(TOKENS)))
    text = dict(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
    )
    text |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH, rope_parameters=rope)
    text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
    tower = dict(depth=2, num_heads=2, patch_size=8, intermediate_size=128, out_hidden_size=64)
    tower |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    ids = {f"{name}_token_id": i for name, i in ids.items()}
    config = Qwen3VLMoeConfig(
        text_config=text | layers, vision_config=tower | layers, tie_word_embeddings=False, **ids
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save(model, tokenizer, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
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
