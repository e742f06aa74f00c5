"""An engine that spreads whole experts over two GPUs (--engine-ep), refitted by two trainer ranks beside it.

python -m pytest -q -s tests/gpu/test_experts.py       two GPUs, in about five minutes
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.models import char_tokenizer, save
from scripts.bench.router_replay import config32

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RUN = "--env reverse --max-steps 4 --max-staleness 0 --num-engines 1 --engine-tp 2 --num-trainers 2 --lr 1e-5"
RUN += " --max-new-tokens 64 --eval-every 9"


def test_an_engine_with_its_experts_spread_is_as_near_to_the_trainer_as_one_with_each_expert_split(tmp_path):
    """Four refits each, with the gate, the checksums and the probe of every run. Random weights, 32 experts;
    staleness 0, so that engine and trainer have the same weights in all steps."""
    tokenizer, root, found = char_tokenizer(), Path(__file__).parents[2], {}
    torch.manual_seed(0)
    path = save(AutoModelForCausalLM.from_config(config32(tokenizer)), tokenizer, tmp_path / "model")
    for kind, flags in {
        "split": "",
        "spread": "--engine-ep",
        "fp8": "--engine-ep --quantization fp8",
    }.items():
        out = tmp_path / kind
        command = [sys.executable, "-m", "algos.grpo", "--model", path, "--output-dir", str(out)]
        command += [*RUN.split(), *flags.split()]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert ("by reload" if kind == "fp8" else "by plan") in done.stdout
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[kind] = [row["mismatch/abs_mean"] for row in rows]
        print(kind, found[kind])
    assert max(found["spread"]) < 1.5 * max(found["split"])
    assert max(found["split"]) < min(found["fp8"]) < 10 * max(found["split"])
