"""Checkpoints of random weights in known shapes, for benchmarks: no hub, no download.

python scripts/bench/random_models.py 0.6b FOLDER       bf16, with SmolLM2's tokenizer
"""

import sys
from pathlib import Path

import torch

COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SIZES = {
    "0.6b": (1024, 28, 16, 3072),
    "1.7b": (2048, 28, 16, 6144),
    "4b": (2560, 36, 32, 9728),
    "8b": (4096, 36, 32, 12288),
    "moe": (1024, 8, 16, 3072),
    "moe32": (2048, 16, 16, 3072),
    "dense3k": (2048, 16, 16, 3072),  # what moe32 computes with, of a token
}  # Qwen3's; the mixtures of experts are in the style of its own
EXPERTS = {
    "moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
    "moe32": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768},
}
TIED = ("0.6b", "1.7b", "4b")  # AutoModel refuses tied mixtures of experts


def config_of(name: str):
    """The configuration of a shape in SIZES."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape = COMMON | dict(zip(KEYS, SIZES[name], strict=True)) | {"tie_word_embeddings": name in TIED}
    if name in EXPERTS:
        return Qwen3MoeConfig(**shape, **EXPERTS[name], norm_topk_prob=True)
    return Qwen3Config(**shape)


def make_checkpoint(name: str, path: str, dtype: torch.dtype) -> None:
    """Random weights, large enough that different ones give different log-probs."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path, max_shard_size="4GB")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def add_tokenizer(path: str) -> None:
    """SmolLM2's tokenizer and chat template; ids beyond its vocabulary have no text."""
    from common.models import load_tokenizer, resolve_model

    load_tokenizer(resolve_model("smollm2")).save_pretrained(path)


def flops_per_token(name: str, length: int) -> float:
    """Of a training step without recomputation: 6 for each weight that a token is multiplied by (its input
    embedding is looked up), and causal attention's 6 x layers x heads x head size x length."""
    hidden, layers, heads, intermediate = SIZES[name]
    kv, size = COMMON["num_key_value_heads"], COMMON["head_dim"]
    attention = hidden * size * (2 * heads + 2 * kv)
    experts = EXPERTS.get(name)
    wide = experts["num_experts_per_tok"] * experts["moe_intermediate_size"] if experts else intermediate
    weights = layers * (attention + 3 * hidden * wide) + hidden * COMMON["vocab_size"]
    return 6 * weights + 6 * layers * heads * size * length


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    make_checkpoint(sys.argv[1], sys.argv[2], torch.bfloat16)
    add_tokenizer(sys.argv[2])
