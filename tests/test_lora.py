"""LoRA: what is trained, sent, merged and saved. The oracle merges by hand, in float64, into a plain model."""

import asyncio
from pathlib import Path

import pytest
import torch
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import common.refit
from algos.grpo import Args, Trainer, make_minibatches
from common.logprobs import LogprobHead
from common.metrics import training_metrics
from common.models import char_tokenizer, make_tiny, resolve_model
from common.parallel import ParallelFlags
from common.refit import RefitError, adapters_of, checkpoint_tensors, compare_probe, merged, open_store
from common.rollout import Engine, EngineFlags
from tests.ranks import on_two_ranks
from tests.test_gradient_parity import step_rows, whole
from tests.test_refit_engine import PROMPTS, Link, behaviour, flip_one_bit
from tests.test_run import Driver

RANK, ALPHA = 8, 16.0


def add_adapters(model, rank: int = RANK, alpha: float = ALPHA):
    apply_lora_to_linear_modules(model, PeftConfig(target_modules=["*_proj"], dim=rank, alpha=alpha))
    return model


def move_adapters(model, seed: int, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight += size * torch.randn(weight.shape, generator=generator)


def merged_by_hand(path: str, model, scale: float = ALPHA / RANK):
    """The model of the folder with scale x B A of `model` added to each weight."""
    factors = {name: value.detach().double() for name, value in model.named_parameters() if "lora_" in name}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            prefix = name.removesuffix(".weight")
            if f"{prefix}.lora_A.weight" in factors:
                a, b = factors.pop(f"{prefix}.lora_A.weight"), factors.pop(f"{prefix}.lora_B.weight")
                weight.copy_((weight.double() + scale * (b @ a)).float())
    assert not factors
    return plain


@torch.no_grad()
def logprobs(model, ids: list[int]) -> torch.Tensor:
    """Log-probs of ids[1:]."""
    values = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return values.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_what_is_sent_and_what_is_merged_are_as_by_hand():
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(1, 1, bias=False)})
    add_adapters(model, rank=1, alpha=2.0)
    with torch.no_grad():
        model["up_proj"].weight.fill_(1.0)
        model["up_proj"].lora_A.weight.fill_(0.2)
        model["up_proj"].lora_B.weight.fill_(0.5)
    # 1 + 2 x 0.5 x 0.2; the engine adds (2 x 0.5) x 0.2
    assert {n: t.item() for n, t in merged(model)} == {"up_proj.weight": pytest.approx(1.2, abs=1e-7)}
    sent = {name: tensor.item() for name, tensor in checkpoint_tensors(adapters_of(model))}
    assert sent == {"up_proj.lora_A": pytest.approx(0.2), "up_proj.lora_B": pytest.approx(1.0)}


@pytest.mark.parametrize("rank, share", [(8, 0.0085), (32, 0.034)])
def test_adapters_of_a_model_of_0_6B_are_less_than_5_percent_of_its_bytes(rank, share):
    # Qwen3-0.6B: by hand, a layer has rank x (3072 + 2 x 2048 + 3072 + 3 x 4096), of 28 layers
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
        full = sum(weight.numel() for weight in model.parameters())
        add_adapters(model, rank)
    sent = sum(tensor.numel() for _, tensor in adapters_of(model))
    assert sent == 28 * rank * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    assert sent / full == pytest.approx(share, rel=0.02) and sent / full < 0.05


def test_the_gradient_of_the_factors_is_that_of_the_merged_weights(tmp_path):
    path, ids = make_tiny(tmp_path / "model"), torch.tensor(PROMPTS)
    torch.manual_seed(0)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    move_adapters(model, seed=1)
    LogprobHead(model)(model, ids[:, :-1], ids[:, 1:], 1.0)[0].sum().backward()
    plain = merged_by_hand(path, model)
    plain(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().backward()
    for name, weight in plain.named_parameters():
        assert model.get_parameter(name).grad is None
        if name.endswith("_proj.weight"):
            a, b = (model.get_parameter(name.replace("weight", f"lora_{f}.weight")) for f in "AB")
            for ours, expected in ((a.grad, b.T @ weight.grad), (b.grad, weight.grad @ a.T)):
                torch.testing.assert_close(ours, ALPHA / RANK * expected, rtol=1e-3, atol=1e-4)


class LoraLink(Link):
    """A trainer's model with adapters, and an engine for them."""

    def __init__(self, path: str, workers: int = 1):
        super().__init__(path, workers=workers)
        torch.manual_seed(0)
        self.path = path
        add_adapters(self.model)

    async def join(self) -> None:
        flags = EngineFlags(max_model_len=64, engine_tp=self.workers)
        self.engine = Engine(self.path, "float32", 0, flags, gpus=0.0, lora_rank=RANK)
        await self.engine.start([char_tokenizer().eos_token_id])
        connecting = self.engine.connect("127.0.0.1", self.store.port, 0, 1, 60, self.timeout_s)
        joining = asyncio.to_thread(self.sender.join, self.store, 1, self.workers)
        await asyncio.gather(joining, connecting)


@pytest.mark.parametrize("tied, workers", [(True, 1), (False, 1), (True, 2)])
def test_after_every_refit_the_engine_is_the_merged_model_and_only_adapters_travelled(
    tied, workers, tmp_path, monkeypatch
):
    async def run():
        link = LoraLink(make_tiny(tmp_path / "model", tied=tied), workers)
        await link.join()
        sizes, send = [], common.refit.broadcast

        def watched(group, tensor):
            sizes.append(tensor.nbytes)
            return send(group, tensor)

        monkeypatch.setattr(common.refit, "broadcast", watched)
        assert (await link.refit(0))["mode"] == "plan"
        oracle = AutoModelForCausalLM.from_pretrained(link.path, dtype=torch.float32)
        previous = None
        for version in range(4):
            if version:
                move_adapters(link.model, seed=version)
                report = await link.refit(version)
                assert report["checked_tensors"] == report["tensors"] == 2 * 7 * 2  # factors, linears, layers
                oracle = merged_by_hand(link.path, link.model)
            forced = (await behaviour(link.engine))[1][: sum(len(ids) - 1 for ids in PROMPTS)]
            expected = torch.cat([logprobs(oracle, ids) for ids in PROMPTS])
            assert (forced - expected).abs().max() <= 1e-5
            assert previous is None or (forced - previous).abs().max() > 0.01  # else nothing was tested
            previous = forced
            (completion,) = await link.engine.generate(PROMPTS[0], 1, 1.0, 4)
            assert set(completion.versions.tolist()) == {version}
        full = sum(weight.nbytes for name, weight in link.model.named_parameters() if "lora_" not in name)
        # 5 passes: the gate makes two. Headers and checksums are small, and the first names the layout.
        factors = sum(tensor.nbytes for _, tensor in adapters_of(link.model))
        assert 5 * factors <= sum(sizes) <= 5 * factors + 20_000 and max(sizes) < 0.2 * full

        # a wrong scale is right on the wire: the probe tells
        monkeypatch.setattr(link.sender.model.model.layers[0].mlp.up_proj, "scale", 40.0)
        await link.refit(4)
        told = [await link.engine.prompt_logprobs(PROMPTS[1]), logprobs(oracle, PROMPTS[1]).tolist()]
        with pytest.raises(RefitError, match="engine 0, version 4: the probe's log-probs differ"):
            compare_probe(*told, "float32", "engine 0, version 4")

        # another bit is wrong on the wire
        monkeypatch.setattr(common.refit, "broadcast", flip_one_bit(send, header_bytes=10_000))
        move_adapters(link.model, seed=5)
        with pytest.raises(Exception, match="checksum of .*other bits than were sent"):
            await link.refit(5)
        assert await link.engine.llm.is_paused()
        link.engine.llm.shutdown()

    asyncio.run(run())


def forget_a_layer(link: LoraLink) -> None:
    del link.model.model.layers[1].mlp.down_proj.lora_A


def invent_a_layer(link: LoraLink) -> None:
    link.model.gamma = add_adapters(torch.nn.ModuleDict({"x_proj": torch.nn.Linear(3, 3)}))


def train_another_rank(link: LoraLink) -> None:
    link.model = AutoModelForCausalLM.from_pretrained(link.path, dtype=torch.float32)
    link.sender.model = add_adapters(link.model, 16)


REFUSED = [
    (forget_a_layer, "not written exactly once: .*layers.1.mlp.down_proj"),
    (invent_a_layer, "does not know a name .*gamma.x_proj"),
    (train_another_rank, "size"),
]


@pytest.mark.parametrize("spoil, message", REFUSED)
def test_the_gate_refuses_adapters_that_are_not_the_engines(spoil, message, tmp_path):
    async def run():
        link = LoraLink(make_tiny(tmp_path / "model"))
        await link.join()
        spoil(link)
        with pytest.raises(Exception, match=message):
            await link.refit(0)
        assert await link.engine.llm.is_paused()
        link.engine.llm.shutdown()

    asyncio.run(run())


# --- Training


def lora_rank_process(rank: int, path: str, out: str, alone, together) -> None:
    """A rank of two; before that, rank 0 trains alone. Then rank 0, alone again, goes on from what two
    saved."""
    if rank == 0:
        lora_train(0, 1, alone, path, out)
    lora_train(rank, 2, together, path, out)
    if rank == 0:
        lora_train(0, 1, alone, path, out, resume=True)


def lora_train(rank: int, num_ranks: int, port, path: str, out: str, resume: bool = False) -> None:
    args = Args(lr=0.01, lr_warmup_steps=0, lr_end_ratio=1.0, correction_cap=2.0, kl_coef=0.1)
    args.temperature = 0.9
    args.parallel = ParallelFlags(num_trainers=num_ranks, lora_rank=RANK, lora_alpha=ALPHA)
    if num_ranks > 1:  # several micro-batches, and wrapped layers, which changes names
        args.parallel.micro_batch_tokens, args.parallel.activation_checkpointing = 60, True
    args.deadline.start_timeout_s = args.deadline.step_timeout_s = 60.0
    trainer = Trainer(args, path, rank, False)
    if rank == 0:
        store = open_store("127.0.0.1", 60)
        port.put(store.port)
    trainer.setup("127.0.0.1", store.port if rank == 0 else port.get(timeout=120), "float32", num_workers=0)
    named = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in trainer.model.named_parameters()}
    if resume:
        trainer.load(f"{out}/saved.2", None)
        loaded = {name: whole(value.detach()) for name, value in named.items()}
    steps = [make_minibatches(step_rows(), args, step=step)[rank] for step in range(4)]
    reports, gradients = [], []
    for step in (2, 3) if resume else range(4):
        if step == 2 and not resume:
            trainer.save(f"{out}/saved.{num_ranks}", {"step": 2, "queue": None})
            saved = {name: whole(value.detach()) for name, value in named.items()}
        reports.append(trainer.train_step(steps[step], None))
        gradients.append({name: whole(p.grad) for name, p in named.items() if p.grad is not None})
    results = {"reports": reports, "gradients": gradients, "loaded": loaded if resume else saved}
    results["end"] = {name: whole(value.detach()) for name, value in named.items()}
    if rank == 0:
        torch.save(results, f"{out}/{'resumed' if resume else num_ranks}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    path = make_tiny(folder / "model")
    on_two_ranks(lora_rank_process, path, str(folder), num_ports=2)
    return path, folder


def test_two_ranks_train_the_same_adapters_as_one_and_never_the_base(trained):
    path, folder = trained
    one, two = (torch.load(folder / name, weights_only=False) for name in ("1", "2"))
    base = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for first, second in zip(one["gradients"], two["gradients"], strict=True):
        assert set(first) == set(second) == {name for name in one["end"] if "lora_" in name}
        ours, theirs = (
            torch.cat([each[name].flatten() for name in sorted(first)]) for each in (first, second)
        )
        assert (ours - theirs).norm() <= 1e-4 * ours.norm() and ours.norm() > 0
    for results in (one, two):
        assert all(torch.equal(results["end"][name], weight) for name, weight in base.items())
        moved = [n for n, value in results["end"].items() if "lora_B" in n and value.abs().max() > 0]
        assert len(moved) == 14
    for a, b in zip(one["reports"], two["reports"], strict=True):
        norms = [training_metrics([report])["grad_norm"] for report in (a, b)]  # before they were clipped
        assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def test_what_two_ranks_saved_is_a_plain_merged_model_and_one_rank_goes_on_from_it(trained):
    path, folder = trained
    two, resumed = (torch.load(folder / name, weights_only=False) for name in ("2", "resumed"))
    for name, value in two["loaded"].items():  # as they were when they were saved
        assert torch.equal(resumed["loaded"][name], value)
    for name, value in two["end"].items():  # two more steps, with the averages of the optimizer
        assert torch.allclose(resumed["end"][name], value, atol=2e-5)
    adapters = add_adapters(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    adapters.load_state_dict(two["loaded"], strict=False)
    exported, info = AutoModelForCausalLM.from_pretrained(
        folder / "saved.2", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for ids in PROMPTS:
        assert (logprobs(exported, ids) - logprobs(merged_by_hand(path, adapters), ids)).abs().max() <= 1e-5
        assert (logprobs(exported, ids) - logprobs(adapters, ids)).abs().max() <= 1e-5


# --- A run


def test_a_run_trains_adapters_sends_only_them_and_goes_on_from_its_checkpoint(tmp_path):
    flags = ("algos.grpo", "--lora-rank", "8", "--num-trainers", "2", "--kl-coef", "0.01")
    flags += ("--max-staleness", "0", "--output-dir")
    for more in (("--max-steps", "3"), ("--max-steps", "5", "--resume")):
        run = Driver(tmp_path / "run", *flags, str(tmp_path / "run"), *more)
        try:
            assert run.wait_for_end() == 0, run.output()[-4000:]
        finally:
            run.end()
        assert "refit gate passed: 0.0696 MB by plan" in run.output()  # 17,408 factors in fp32
    rows = run.read("metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["mismatch/abs_mean"] < 1e-5 for row in rows)  # trained by the weights that sampled
    assert all(row["grad_norm"] > 0 for row in rows)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_5", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    moved = {n for n, w in base.named_parameters() if not torch.equal(w, exported.get_parameter(n))}
    assert moved == {n for n, _ in base.named_parameters() if n.endswith("_proj.weight")}
