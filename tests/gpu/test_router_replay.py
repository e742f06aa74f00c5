"""Router replay on GPUs, where vLLM itself records the experts: `tests/test_router_replay.py` there, and a run
of 32 experts over two trainer ranks.

python -m pytest -q -s tests/gpu/test_router_replay.py       one GPU; the last test needs two
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.router_replay import config32
from tests.test_router_replay import (
    test_a_later_turn_gives_the_routes_of_what_is_new_also_where_the_prefix_is_cached,
    test_a_run_replays_and_tells_and_ends_where_routes_belong_to_other_tokens,
    test_across_refits_each_token_has_the_routes_of_the_weights_that_went_on_from_it,
    test_in_half_precision_the_trainer_without_the_routes_is_further_from_the_engine,
    test_the_routes_are_those_of_the_very_tokens_layers_and_experts,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = [name for name in dir() if name.startswith("test_")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_32_experts_over_two_ranks_are_nearer_to_the_engine_with_its_routes(tmp_path):
    """Eight layers, random weights, engine and trainer in bf16; step 0, where both have the same weights."""
    from transformers import AutoModelForCausalLM

    from common.models import char_tokenizer, save

    tokenizer, root = char_tokenizer(), Path(__file__).parents[2]
    torch.manual_seed(0)
    path = save(AutoModelForCausalLM.from_config(config32(tokenizer)), tokenizer, tmp_path / "model")
    first = {}
    for replay in ("on", "off"):
        out = tmp_path / replay
        command = [
            sys.executable,
            "-m",
            "algos.grpo",
            "--model",
            path,
            "--env",
            "reverse",
            "--max-steps",
            "3",
        ]
        command += ["--num-engines", "2", "--num-trainers", "2", "--trainer-ep", "2", "--eval-every", "9"]
        command += [
            "--max-new-tokens",
            "64",
            "--lr",
            "1e-5",
            "--router-replay",
            replay,
            "--output-dir",
            str(out),
        ]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=560)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        first[replay] = {k: v for k, v in rows[0].items() if k.startswith(("mismatch", "moe"))}
        print(replay, first[replay], {k: rows[-1][k] for k in ("perf/rollout_tokens_per_s", "time/train")})
    assert 0 < first["on"]["moe/route_mismatch"] < 0.2
    assert first["on"]["mismatch/k3"] < 0.7 * first["off"]["mismatch/k3"]
    assert first["on"]["mismatch/abs_mean"] < first["off"]["mismatch/abs_mean"]
