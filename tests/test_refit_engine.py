"""Refit into a running vLLM engine: afterwards it is what a fresh engine on the new weights would be."""

import asyncio
from pathlib import Path

import pytest
import torch

import common.refit
from common.checkpoint import gather_model, write_model
from common.models import auto_class, char_tokenizer, make_tiny
from common.refit import WeightSender, compare_probe, open_store
from common.rollout import Engine, EngineFlags

PROMPTS = [[5 + 7 * i % 90, 11, 23 + i, 40, 71, 8 + i, 60, 33] for i in range(8)]
MODELS = {"tied": {}, "untied": {"tied": False}, "moe": {"moe": True}, "tied, two workers": {}}
MODELS["grouped"] = {"moe": "glm4", "tied": False}  # DeepSeek-V3's router: its bias is sent too
MODELS["latent"] = {"moe": "deepseek", "tied": False}  # and its attention: views of kv_b_proj
REPACKED = {"moe": 2 * 4 * 3, "grouped": 1 * 8 * 3, "latent": 1 * 8 * 3}  # experts: a CPU kernel packs them


class Link:
    """A trainer's model and sender, and an engine on the same weights, joined for refits."""

    def __init__(self, path: str, timeout_s: float = 60, workers: int = 1, **flags):
        self.workers, self.flags = workers, flags  # of the engine; workers: tensor parallelism
        self.model, self.timeout_s = (
            auto_class(path).from_pretrained(path, dtype=torch.float32),
            timeout_s,
        )
        self.sender = WeightSender(self.model, rank=0, dtype="float32", timeout_s=timeout_s)
        self.store = open_store("127.0.0.1", 60)

    async def join(self, path: str) -> None:
        self.engine = await start_engine(path, self.workers, **self.flags)
        await self.meet()

    async def meet(self) -> None:
        connecting = self.engine.connect("127.0.0.1", self.store.port, 0, 1, 60, self.timeout_s)
        joining = asyncio.to_thread(self.sender.join, self.store, 1, self.workers)
        await asyncio.gather(joining, connecting)

    async def refit(self, version: int, queue=None) -> dict:
        """As a run does it: a `queue` knows the version before any token of it can arrive there."""
        await self.engine.pause()
        sent = asyncio.to_thread(self.sender.send, version)
        report, _ = await asyncio.gather(self.engine.receive_weights(version), sent)
        if queue:
            await queue.set_version(version)
        await self.engine.resume()
        return report

    def perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            biases = [b for name, b in self.model.named_buffers() if name.endswith("e_score_correction_bias")]
            for weight in [*self.model.parameters(), *biases]:
                weight += 0.05 * torch.randn(weight.shape, generator=generator).to(weight.device)


async def start_engine(path: str, workers: int = 1, **flags) -> Engine:
    flags = EngineFlags(**{"max_model_len": 64, "engine_tp": workers} | flags)
    engine = Engine(path, "float32", 0, flags, gpus=0.0)
    await engine.start([char_tokenizer().eos_token_id])
    return engine


@torch.no_grad()
def logprobs_of(model) -> torch.Tensor:
    """Those of the prompts by transformers."""
    rows = [torch.tensor(ids) for ids in PROMPTS]
    logprobs = [model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]) for ids in rows]
    return torch.cat(logprobs)[:, 0]


async def behaviour(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens and their log-probs after each prompt, and the log-probs of the prompts themselves."""
    completions = [await engine.generate(ids, 1, 0.0, 8) for ids in PROMPTS]  # one by one: equal batches
    prompts = [await engine.prompt_logprobs(ids) for ids in PROMPTS]
    logprobs = [value for (completion,) in completions for value in completion.logprobs]
    return [c.token_ids for (c,) in completions], torch.tensor([v for row in prompts for v in row] + logprobs)


def flip_one_bit(send, header_bytes=100_000):
    def broadcast(group, tensor):
        if tensor.dtype == torch.uint8 and tensor.numel() > header_bytes:  # the bucket, which is larger
            tensor = tensor.clone()
            tensor[4097] ^= 1
        return send(group, tensor)

    return broadcast


def send_the_first_bucket_again(send):
    first: list[torch.Tensor] = []

    def broadcast(group, tensor):
        if tensor.dtype == torch.uint8 and tensor.numel() > 100_000:
            first.append(tensor.clone())
            tensor = first[0]
        return send(group, tensor)

    return broadcast


def stop_in_the_middle(send):
    def broadcast(group, tensor):
        if tensor.dtype == torch.uint8 and tensor.numel() > 100_000:
            raise RuntimeError("the trainer stopped here")
        return send(group, tensor)

    return broadcast


def send_half_a_bucket(send):
    def broadcast(group, tensor):
        if tensor.dtype == torch.uint8 and tensor.numel() > 100_000:
            tensor = tensor[: len(tensor) // 2].clone()
        return send(group, tensor)

    return broadcast


FAULTS = {  # on the wire to the engine of a kind
    "tied": send_half_a_bucket,
    "untied": send_the_first_bucket_again,
    "tied, two workers": flip_one_bit,
}


def move_weights(link: Link) -> None:
    link.perturb(seed=1)


def add_a_name(link: Link) -> None:
    link.model.register_parameter("gamma", torch.nn.Parameter(torch.ones(3)))


REFUSED = {  # by the gate of a kind's fresh engine
    "tied": (move_weights, "gate: sending the engine its own weights changed .*embed_tokens"),
    "untied": (add_a_name, "does not know a name .*gamma"),
}


async def spoil_a_transfer(link: Link, fault, version: int, message: str, monkeypatch) -> None:
    """The fault is an error, and the engine is never resumed, also not by a later, correct refit."""
    send = common.refit.broadcast
    monkeypatch.setattr(common.refit, "broadcast", fault(send))
    if fault is send_the_first_bucket_again:
        await link.refit(version)  # the weights did not move yet: nothing is wrong with the first bucket
    link.perturb(seed=1)
    with pytest.raises(Exception, match=message):
        await asyncio.wait_for(link.refit(version + 1), 60)
    assert await link.engine.llm.is_paused()
    monkeypatch.setattr(common.refit, "broadcast", send)
    if fault is stop_in_the_middle:
        await asyncio.sleep(6)  # what still waits there has reached its deadline
    with pytest.raises(Exception, match="failed a refit before"):
        await link.engine.receive_weights(version + 2)


@pytest.mark.parametrize("kind", MODELS)
def test_after_every_refit_the_engine_equals_a_fresh_one_on_the_new_weights(kind, tmp_path, monkeypatch):
    """And with the engines at hand: a fault on the wire ends the one, other weights at its gate the fresh
    one."""

    async def run():
        old, new = make_tiny(tmp_path / "old", **MODELS[kind]), str(tmp_path / "new")
        link = Link(old, workers=2 if "two workers" in kind else 1)
        await link.join(old)
        before = await behaviour(link.engine)
        gate = await link.refit(0)  # its own weights: nothing may change
        assert gate["mode"] == ("reload" if kind in REPACKED else "plan")
        after_gate = await behaviour(link.engine)
        assert after_gate[0] == before[0] and (after_gate[1] - before[1]).abs().max() <= 1e-6
        for version in (1, 2, 3):
            link.perturb(seed=version)
            report = await link.refit(version)
        # everything but the experts that a CPU kernel repacks was read back and compared bit for bit
        assert report["checked_tensors"] == report["tensors"] - REPACKED.get(kind, 0)
        refitted, theirs = await behaviour(link.engine), logprobs_of(link.model)
        completion = (await link.engine.generate(PROMPTS[0], 1, 1.0, 4))[0]
        assert set(completion.versions.tolist()) == {3}
        write_model(gather_model(link.model, 0), link.model, char_tokenizer(), Path(new))
        if kind in FAULTS:
            await spoil_a_transfer(
                link, FAULTS[kind], 4, "checksum of .*other bits than were sent", monkeypatch
            )
        link.engine.llm.shutdown()
        other = Link(new, workers=link.workers)
        other.engine = await start_engine(new, link.workers)
        fresh = await behaviour(other.engine)
        if kind in REFUSED:
            spoil, message = REFUSED[kind]
            await other.meet()
            spoil(other)
            with pytest.raises(Exception, match=message):
                await other.refit(0)
            assert await other.engine.llm.is_paused()
        other.engine.llm.shutdown()
        assert refitted[0] == fresh[0]
        assert torch.equal(refitted[1], fresh[1]), "bit for bit"
        num_forced = sum(len(ids) - 1 for ids in PROMPTS)  # how many tokens were sampled may differ
        moved = (refitted[1][:num_forced] - before[1][:num_forced]).abs().max()
        assert moved > 0.01, "the perturbation must be visible"
        assert (refitted[1][:num_forced] - theirs).abs().max() <= 1e-4

    asyncio.run(run())


def test_a_transfer_that_stops_in_the_middle_is_an_error_at_its_deadline(tmp_path, monkeypatch):
    async def run():
        path = make_tiny(tmp_path / "model")
        link = Link(path, timeout_s=3)
        await link.join(path)
        await link.refit(0)
        await spoil_a_transfer(link, stop_in_the_middle, 1, "the trainer stopped here", monkeypatch)
        link.engine.llm.shutdown()

    asyncio.run(run())


def test_the_probe_tells_noise_from_wrong_weights():
    assert compare_probe([-1.0, -2.0], [-1.0, -2.00001], "float32", "engine 0") < 1e-3
    with pytest.raises(common.refit.RefitError, match="engine 0, version 3: .* differ"):
        compare_probe([-1.0, -2.0], [-1.0, -2.5], "float32", "engine 0, version 3")
    with pytest.raises(common.refit.RefitError):
        compare_probe([-1.0, float("nan")], [-1.0, -2.0], "float32", "engine 0")
