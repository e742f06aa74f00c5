"""FP8 rollout on a GPU: after a refit the engine is what a fresh FP8 engine on the new weights is, bit for bit.

python -m pytest -q tests/gpu/test_fp8.py        one GPU that computes in FP8, in about five minutes
"""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common.refit
from common.checkpoint import save_model
from common.models import char_tokenizer, save
from common.refit import RefitError, WeightSender, compare_probe, open_store
from common.rollout import Engine, EngineFlags

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not FP8, reason="needs a GPU that computes in FP8")
SIZES = dict(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
KINDS = {
    "dense": dict(model_type="qwen3", tie_word_embeddings=True),
    "untied": dict(model_type="qwen3", tie_word_embeddings=False),
    "experts": dict(
        model_type="qwen3_moe", tie_word_embeddings=False, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=256, norm_topk_prob=True,
    ),
}  # fmt: skip
PROMPTS = [[5 + (7 * i + 3 * j) % 90 for j in range(24)] for i in range(8)]


def make_model(folder: Path, kind: str) -> str:
    """A random model large enough for FP8's kernels (their sizes are multiples of 16)."""
    tokenizer = char_tokenizer()
    config = AutoConfig.for_model(
        **KINDS[kind], **SIZES, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return save(model, tokenizer, folder)


class Link:
    """A trainer's model and sender on the GPU, and an engine on the same weights beside it."""

    async def join(self, path: str, **flags) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
        self.sender = WeightSender(self.model, rank=0, dtype="bfloat16", timeout_s=60)
        store = open_store("127.0.0.1", 60)
        self.engine = await start_engine(path, **flags)
        connecting = self.engine.connect("127.0.0.1", store.port, 0, 1, 60, 60)
        await asyncio.gather(asyncio.to_thread(self.sender.join, store, 1, 1), connecting)

    async def refit(self, version: int) -> dict:
        await self.engine.pause()
        sent = asyncio.to_thread(self.sender.send, version)
        report, _ = await asyncio.gather(self.engine.receive_weights(version), sent)
        await self.engine.resume()
        return report

    def perturb(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator, device="cuda")


async def start_engine(path: str, quantization: str = "fp8") -> Engine:
    flags = EngineFlags(
        max_model_len=128, kv_cache_gb=1.0, gpu_memory_utilization=0.2, quantization=quantization
    )
    engine = Engine(path, "bfloat16", 0, flags, gpus=0.2)
    await engine.start([char_tokenizer().eos_token_id])
    return engine


async def behaviour(engine: Engine) -> torch.Tensor:
    """Log-probs of the prompts, and of what is sampled greedily after them (filled up to 8)."""
    rows = []
    for ids in PROMPTS:  # one by one: equal batches
        (completion,) = await engine.generate(ids, 1, 0.0, 8)
        filled = [*completion.logprobs, *[0.0] * 8][:8]
        rows += [*(await engine.prompt_logprobs(ids)), *filled, *completion.token_ids, *[0.0] * 8][:39]
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_after_refits_an_fp8_engine_equals_a_fresh_one_on_the_new_weights(kind, tmp_path):
    async def run():
        path = make_model(tmp_path / "old", kind)
        link = Link()
        await link.join(path)
        before = await behaviour(link.engine)
        gate = await link.refit(0)
        assert gate["mode"] == "reload" and gate["checked_tensors"] == 0
        assert torch.equal(await behaviour(link.engine), before), "its own weights"
        for version in (1, 2, 3):
            link.perturb(seed=version)
            await link.refit(version)
        refitted = await behaviour(link.engine)
        link.engine.llm.shutdown()
        save_model(link.model, char_tokenizer(), tmp_path / "new", rank=0)
        fresh, plain = [await start_engine(str(tmp_path / "new"), how) for how in ("fp8", "none")]
        assert torch.equal(refitted, await behaviour(fresh)), "bit for bit"
        assert (refitted - before).abs().max() > 0.1, "the perturbation must be visible"
        noise = (refitted - await behaviour(plain))[: len(PROMPTS[0]) - 1].abs().mean()
        assert 0 < noise < 0.2, "FP8 is not bfloat16, and not far from it"
        fresh.llm.shutdown()
        plain.llm.shutdown()

    asyncio.run(run())


def test_a_weight_that_is_not_sent_ends_the_run_at_the_gate(tmp_path, monkeypatch):
    """The engine would keep the one it has, and no checksum of what came could show it."""
    every = common.refit.weights_of
    missing = "model.layers.2.mlp.down_proj.weight"
    monkeypatch.setattr(
        common.refit, "weights_of", lambda model: [x for x in every(model) if x[0] != missing]
    )

    async def run():
        link = Link()
        await link.join(make_model(tmp_path / "old", "dense"))
        with pytest.raises(Exception, match=f"did not write all of {missing}"):
            await link.refit(0)
        link.engine.llm.shutdown()

    asyncio.run(run())


def test_the_probe_tells_right_weights_from_wrong_ones(tmp_path):
    async def run():
        link = Link()
        await link.join(make_model(tmp_path / "old", "dense"))
        await link.refit(0)
        link.perturb(seed=1)
        await link.refit(1)
        told = await link.engine.prompt_logprobs(PROMPTS[0])

        def own() -> list[float]:
            ids = torch.tensor([PROMPTS[0]], device="cuda")
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                logprobs = link.model(ids).logits[0, :-1].float().log_softmax(-1)
            return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

        assert compare_probe(told, own(), "bfloat16", "here") > 0
        link.perturb(seed=2)  # and no refit
        with pytest.raises(RefitError, match="the probe's log-probs differ"):
            compare_probe(told, own(), "bfloat16", "here")
        link.engine.llm.shutdown()

    asyncio.run(run())
