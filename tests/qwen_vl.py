"""A tiny mixture of experts with a vision tower, in Qwen3-VL-MoE's shapes and as its checkpoints are written."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from common.models import MAX_LENGTH, char_tokenizer, save

IMAGE, VIDEO, START, END = 110, 111, 112, 113  # ids that the tokenizer does not have


def make_qwen_vl_moe(folder: Path) -> str:
    """2 layers of 4 experts, a token to 2; a tower of 2 blocks, the first of which feeds the first layer too.
    The released checkpoints hold experts as [E, in, out]; transformers, which would save [E, out, in], turns
    either."""
    layers = dict(hidden_size=64, initializer_range=0.1)
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[6, 5, 5], mrope_interleaved=True)
    text = dict(vocab_size=120, num_hidden_layers=2, intermediate_size=128, num_attention_heads=2)
    text |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH, rope_parameters=rope)
    text |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
    tower = dict(depth=2, num_heads=2, patch_size=8, intermediate_size=128, out_hidden_size=64)
    tower |= dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    config = Qwen3VLMoeConfig(
        text_config=text | layers, vision_config=tower | layers, tie_word_embeddings=False,
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    save(model, char_tokenizer(), folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
