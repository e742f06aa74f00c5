"""FP8 rollout: after a refit the engine is what a fresh FP8 engine on the new weights is, bit for bit.

On a GPU (`tests/gpu/test_fp8.py`) the trainer is on the engine's, and more models are tested: a mixture of
experts, for which a CPU has no kernel.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common.refit
from common.checkpoint import gather_model, write_model
from common.models import char_tokenizer, save
from common.refit import RefitError, WeightSender, compare_probe
from common.rollout import Engine, EngineFlags
from tests.test_refit_engine import Link

ON_GPU = torch.cuda.is_available()
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2, max_position_embeddings=2048,
)  # fmt: skip
KINDS = {
    "tied": dict(model_type="qwen3", tie_word_embeddings=True),
    "untied": dict(model_type="qwen3", tie_word_embeddings=False),
    "experts": dict(
        model_type="qwen3_moe", tie_word_embeddings=False, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=128, norm_topk_prob=True,
    ),
}  # fmt: skip
PROMPTS = [[5 + (7 * i + 3 * j) % 90 for j in range(24)] for i in range(8)]
ANSWER = 8  # tokens


class Fp8Link(Link):
    """A link in bfloat16, with an FP8 engine."""

    async def join(self, path: str) -> None:
        self.model.to("cuda" if ON_GPU else "cpu")
        self.sender = WeightSender(self.model, rank=0, dtype="bfloat16", timeout_s=60)
        self.engine = await start_engine(path)
        connecting = self.engine.connect("127.0.0.1", self.store.port, 0, 1, 60, 60)
        await asyncio.gather(asyncio.to_thread(self.sender.join, self.store, 1, 1), connecting)


def make_model(folder: Path, kind: str) -> str:
    """A random model. (FP8's kernels want sizes that are multiples of 16.)"""
    tokenizer = char_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.05}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**KINDS[kind], **SIZES, **ids))
    return save(model.to(torch.bfloat16), tokenizer, folder)


async def start_engine(path: str, quantization: str = "fp8") -> Engine:
    flags = EngineFlags(max_model_len=128, kv_cache_gb=0.5, quantization=quantization)
    engine = Engine(path, "bfloat16", 0, flags, gpus=0.2 * ON_GPU)
    await engine.start([char_tokenizer().eos_token_id])
    return engine


async def behaviour(engine: Engine) -> torch.Tensor:
    """For each prompt its log-probs, and what is sampled greedily after it: log-probs and ids, filled up."""
    rows = []
    for ids in PROMPTS:  # one by one: equal batches
        (answer,) = await engine.generate(ids, 1, 0.0, ANSWER)
        missing = [0.0] * (ANSWER - len(answer.token_ids))
        sampled = [*answer.logprobs, *missing, *answer.token_ids, *missing]
        rows.append([*(await engine.prompt_logprobs(ids)), *sampled])
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", KINDS if ON_GPU else ["tied"])
def test_after_refits_an_fp8_engine_equals_a_fresh_one_on_the_new_weights(kind, tmp_path):
    async def run():
        path = make_model(tmp_path / "old", kind)
        link, forced = Fp8Link(path), slice(len(PROMPTS[0]) - 1)  # of a row: log-probs of a given text
        await link.join(path)
        before = await behaviour(link.engine)
        gate = await link.refit(0)
        assert gate["mode"] == "reload" and gate["checked_tensors"] == 0
        assert torch.equal(await behaviour(link.engine), before), "its own weights"
        for version in (1, 2, 3):
            link.perturb(seed=version)
            await link.refit(version)
        refitted = await behaviour(link.engine)
        assert (refitted - before)[:, forced].abs().max() > 0.1, "the perturbation must be visible"
        link.engine.llm.shutdown()
        write_model(gather_model(link.model, 0), link.model, char_tokenizer(), tmp_path / "new")
        fresh = await start_engine(str(tmp_path / "new"))
        assert torch.equal(refitted, await behaviour(fresh)), "bit for bit"
        fresh.llm.shutdown()
        plain = await start_engine(str(tmp_path / "new"), "none")
        noise = (refitted - await behaviour(plain))[:, forced].abs().mean()
        assert 1e-3 < noise < 0.2, "rounded, and not far from what it was"
        plain.llm.shutdown()

    asyncio.run(run())


def test_a_weight_that_is_not_sent_ends_the_run_at_the_gate(tmp_path, monkeypatch):
    """The engine would keep the one that it has, and no checksum of what came could show it."""
    missing, every = "model.layers.2.mlp.down_proj.weight", common.refit.weights_of
    monkeypatch.setattr(
        common.refit, "weights_of", lambda model: [x for x in every(model) if x[0] != missing]
    )

    async def run():
        path = make_model(tmp_path / "old", "tied")
        link = Fp8Link(path)
        await link.join(path)
        with pytest.raises(Exception, match=f"did not write all of {missing}"):
            await link.refit(0)
        link.engine.llm.shutdown()

    asyncio.run(run())


def test_the_probe_tells_right_weights_from_wrong_ones(tmp_path):
    async def run():
        path = make_model(tmp_path / "old", "tied")
        link = Fp8Link(path)
        await link.join(path)
        await link.refit(0)
        link.perturb(seed=1)
        dtype = (await link.refit(1))["dtype"]
        told = await link.engine.prompt_logprobs(PROMPTS[0])
        link.engine.llm.shutdown()

        @torch.no_grad()
        def own() -> list[float]:
            ids = torch.tensor([PROMPTS[0]], device=link.model.device)
            logprobs = link.model(ids).logits[0, :-1].float().log_softmax(-1)
            return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

        assert dtype == "fp8" and 0 < compare_probe(told, own(), dtype, "here") < 0.2
        for seed in (2, 3, 4):  # and no refit
            link.perturb(seed)
        with pytest.raises(RefitError, match="the probe's log-probs differ"):
            compare_probe(told, own(), dtype, "here")

    asyncio.run(run())


def test_a_run_rounds_guesses_and_tells(tmp_path):
    """Both at once, at staleness 0: what mismatch there is comes from rounding."""
    flags = (
        "--model tiny --env reverse --max-steps 3 --eval-every 9 --max-staleness 0 --rollout-dtype bfloat16"
    )
    flags += (
        f" --quantization fp8 --speculative-tokens 3 --speculative-model tiny --output-dir {tmp_path / 'run'}"
    )
    command = [sys.executable, "-m", "algos.grpo", *flags.split()]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "MB by reload" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(1e-3 < row["mismatch/abs_mean"] < 0.3 for row in rows)
    assert all(0.1 < row["rollout/accepted_frac"] < 1 for row in rows), "the policy as it began guesses well"
