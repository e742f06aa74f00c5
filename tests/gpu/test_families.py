"""Whole runs of the families behind the large recipes, tiny and random: DeepSeek-V3 (MLA, a router with a bias)
and Qwen3-VL-MoE, Qwen3.5-MoE (experts beside a vision tower, with images).

    python -m pytest -q -s tests/gpu/test_families.py        one GPU, and torchvision for the second

A run ends well only if the gate changed no bit of the engine, every weight arrived at each refit, and the
engine's log-probs of the probe are the trainer's.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.models import char_tokenizer, save
from tests.qwen_vl import add_processor, make_qwen35_moe, make_qwen_vl_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parents[2]


def make_deepseek(folder: Path) -> str:
    """Two layers with DeepSeek-V3's own sizes of heads and latents, which GPU kernels are written for."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    tokenizer = char_tokenizer()
    config = DeepseekV3Config(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=2048,
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, first_k_dense_replace=1,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=128,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=8, n_group=4, topk_group=2, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=128, norm_topk_prob=True, topk_method="noaux_tc", scoring_func="sigmoid",
        initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero in a new model, where nothing would test it
            bias.normal_(std=0.1)
    return save(model, tokenizer, folder)


def run(path: str, env: str, out: Path) -> tuple[list[dict], str]:
    """Four steps at a learning rate that moves log-probs by far more than the two sides differ."""
    command = [sys.executable, "-m", "algos.grpo", "--model", path, "--env", env, "--output-dir", str(out)]
    command += ["--max-steps", "4", "--eval-every", "99", "--max-new-tokens", "8", "--lr", "1e-3"]
    command += ["--prompts-per-step", "8", "--group-size", "4", "--max-staleness", "0", "--kv-cache-gb", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gate = next(line for line in done.stdout.splitlines() if "gate passed" in line)
    print(gate.strip(), [{k: row[k] for k in ("mismatch/abs_mean", "mismatch/k3")} for row in rows])
    return rows, gate


def test_mla_is_refitted_by_the_plan(tmp_path):
    """vLLM's W_UK and W_UV are views of kv_b_proj where nothing is quantized, so copies into that reach them."""
    rows, gate = run(make_deepseek(tmp_path / "model"), "reverse", tmp_path / "run")
    assert "by plan" in gate and len(rows) == 4
    assert all(row["mismatch/abs_mean"] < 0.05 for row in rows)


@pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="its processor needs torchvision")
@pytest.mark.parametrize("make", [make_qwen_vl_moe, make_qwen35_moe])
def test_experts_beside_a_vision_tower_are_trained_and_refitted(make, tmp_path):
    path = make(tmp_path / "model")
    add_processor(path)
    rows, _ = run(path, "shapes", tmp_path / "run")
    assert len(rows) == 4 and all(row["mismatch/abs_mean"] < 0.05 for row in rows)
