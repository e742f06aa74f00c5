"""Router replay from a real engine to the trainer's model: the experts that vLLM chose, for every token.

On a CPU they come through scripts/cpu_routes: vLLM's own recorder, on the model runner that it has there.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.logprobs import LogprobHead
from common.models import char_tokenizer, make_tiny
from common.rollout import Engine, EngineFlags
from common.sample import extend_segment
from tests.test_refit_engine import Link
from tests.test_versions import prompt_of

ON_GPU = torch.cuda.is_available()
# the share of choices that agree in fp32: all but ties, or close calls where a GPU's kernels round to tf32
SAME, NOISE = (0.97, 0.05) if ON_GPU else (0.999, 1e-5)
ROOT = Path(__file__).parents[1]
PLUGIN = str(ROOT / "scripts" / "cpu_routes")


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    if not ON_GPU:
        monkeypatch.syspath_prepend(PLUGIN)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLUGIN, os.environ.get("PYTHONPATH", "")]))
        from cpu_routes import register

        register()  # vLLM looks for plugins once in a process, which may be over


async def start_engine(path: str, dtype: str, **flags) -> Engine:
    flags = EngineFlags(max_model_len=256, router_replay="on", **flags)
    engine = Engine(path, dtype, 0, flags, gpus=0.4 * ON_GPU)
    await engine.start([char_tokenizer().eos_token_id])
    return engine


def choices(model, ids: list[int], run) -> np.ndarray:
    """What each layer's experts are given while `run` calls the model on `ids`, [tokens, layers, k]."""
    seen, hooks = {}, []
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            keep = lambda module, inputs, layer=layer: seen.update({layer: inputs[1].cpu()})  # noqa: E731
            hooks.append(block.mlp.experts.register_forward_pre_hook(keep))
    with torch.no_grad():
        run(torch.tensor([ids], device=model.device))
    for hook in hooks:
        hook.remove()
    zeros = torch.zeros_like(next(iter(seen.values())))
    return torch.stack([seen.get(layer, zeros) for layer in range(len(model.model.layers))], 1).numpy()


def same(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Whether each token and layer has the same experts, in whichever order."""
    return (np.sort(ours.astype(int), -1) == np.sort(theirs.astype(int), -1)).all(-1)


@pytest.mark.parametrize("moe", [True, "wide", "glm4"])
def test_the_routes_are_those_of_the_very_tokens_layers_and_experts(moe, tmp_path):
    async def run():
        path = make_tiny(tmp_path / "model", moe=moe, tied=False)
        engine = await start_engine(path, "float32")
        model, agree, others = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [], []
        prompts = [prompt_of(i) for i in range(24)]
        groups = await asyncio.gather(*(engine.generate(ids, 2, 1.0, 48) for ids in prompts))
        for prompt_ids, group in zip(prompts, groups):
            for each in group:
                ids = prompt_ids + each.token_ids
                assert each.routes.shape == (len(ids) - 1, 2, 2) and each.routes.dtype == np.uint8
                own = choices(model, ids, model)[:-1]
                agree += same(each.routes, own).flatten().tolist()
                others += same(each.routes[1:], own[:-1]).flatten().tolist()
        assert len(agree) > 1000 and np.mean(agree) > SAME
        assert np.mean(others) < 0.9, "routes that are one token off would be noticed"
        engine.llm.shutdown()

    asyncio.run(run())


def test_in_half_precision_the_trainer_without_the_routes_is_further_from_the_engine(tmp_path):
    async def run():
        path = make_tiny(tmp_path / "model", moe="wide", tied=False)
        engine = await start_engine(path, "bfloat16")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        head, dice = LogprobHead(model), torch.Generator().manual_seed(1)
        differences = {"replayed": [], "own": [], "shuffled": []}
        flipped = []
        prompts = [prompt_of(i) for i in range(48)]
        groups = await asyncio.gather(*(engine.generate(ids, 2, 1.0, 64) for ids in prompts))
        for prompt_ids, group in zip(prompts, groups):
            for each in group:
                ids = prompt_ids + each.token_ids
                routes = torch.tensor(each.routes)[None]
                order = torch.randperm(len(ids) - 1, generator=dice)
                lengths = torch.tensor([len(ids) - 1])
                for kind, given in (("replayed", routes), ("own", None), ("shuffled", routes[:, order])):
                    with torch.no_grad():
                        at = torch.tensor([ids])
                        logprobs, _ = head(model, at[:, :-1], at[:, 1:], 1.0, lengths, given)
                    own = logprobs[0, len(prompt_ids) - 1 :].numpy()
                    differences[kind] += (own - np.array(each.logprobs, np.float32)).tolist()
                replay = lambda x: head(model, x[:, :-1], x[:, 1:], 1.0, lengths, routes)  # noqa: E731, B023
                assert np.array_equal(choices(model, ids, replay), each.routes), (
                    "the engine's, for every token"
                )
                plain = lambda x: head(model, x[:, :-1], x[:, 1:], 1.0, lengths)  # noqa: E731, B023
                flipped += (~same(choices(model, ids, plain), each.routes)).flatten().tolist()
        k3 = {kind: float(np.mean(np.exp(d) - 1 - np.array(d))) for kind, d in differences.items()}
        absolute = {kind: float(np.mean(np.abs(d))) for kind, d in differences.items()}
        print(f"flipped {np.mean(flipped):.4f}, mean |d| {absolute}, k3 {k3}")
        assert np.mean(flipped) > 0.003, "else there is nothing to mend"
        assert absolute["replayed"] < 0.8 * absolute["own"] and k3["replayed"] < 0.5 * k3["own"]
        assert absolute["shuffled"] > 2 * absolute["own"], "other tokens' routes would be noticed"
        engine.llm.shutdown()

    asyncio.run(run())


def test_a_later_turn_gives_the_routes_of_what_is_new_also_where_the_prefix_is_cached(tmp_path):
    async def run():
        path = make_tiny(tmp_path / "model", moe="wide", tied=False)
        engine = await start_engine(path, "float32")
        prompt = [5 + (7 * i) % 90 for i in range(150)]  # more than a block of KV
        (first,) = await engine.generate(prompt, 1, 1.0, 8)
        assert first.routes.shape == (157, 2, 2)
        segment = extend_segment(
            None, prompt, first.token_ids, first.logprobs, first.versions, "stop", routes=first.routes
        )
        ids = [*segment.token_ids.tolist(), 9, 10, 11]
        (told,) = await engine.generate(ids, 1, 0.0, 8, len(segment.token_ids) - 1)
        (whole,) = await engine.generate(ids, 1, 0.0, 8)
        assert told.token_ids == whole.token_ids
        assert len(told.routes) == 3 + len(told.token_ids) and len(whole.routes) == 157 + len(told.routes)
        assert np.array_equal(whole.routes[157:], told.routes)
        assert np.array_equal(whole.routes[:157], first.routes)
        sampling = engine.make_sampling(max_tokens=1, detokenize=False)
        assert (await engine._ask(ids, sampling)).num_cached_tokens >= 128
        engine.llm.shutdown()

    asyncio.run(run())


def test_across_refits_each_token_has_the_routes_of_the_weights_that_went_on_from_it(tmp_path):
    """A token is read by the weights that sample the next one. What a refit reads again stays as it was."""

    async def run():
        path = make_tiny(tmp_path / "model", moe="wide", tied=False)
        link = Link(path, max_model_len=256, router_replay="on")
        await link.join(path)
        await link.refit(0)
        models = {0: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)}
        version, spanning, agree, others = 0, 0, [], []
        for number in range(20):
            prompts = [prompt_of(8 * number + i) for i in range(8)]
            asked = [asyncio.ensure_future(link.engine.generate(ids, 2, 1.0, 200)) for ids in prompts]
            for _ in range(2):
                await asyncio.sleep(0.05)
                version += 1
                link.perturb(seed=version)
                models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
                models[version].load_state_dict(link.model.state_dict())
                await link.refit(version)
            for prompt_ids, completions in zip(prompts, await asyncio.gather(*asked)):
                for each in completions:
                    ids, spans = prompt_ids + each.token_ids, sorted(set(each.versions.tolist()))
                    spanning += len(spans) == 3
                    assert len(each.routes) == len(ids) - 1
                    read_by = np.concatenate([np.full(len(prompt_ids) - 1, each.versions[0]), each.versions])
                    for span in spans:
                        here = read_by == span
                        agree += same(each.routes, choices(models[span], ids, models[span])[:-1])[
                            here
                        ].tolist()
                        wrong = models[(span + 1) % (version + 1)]
                        others += same(each.routes, choices(wrong, ids, wrong)[:-1])[here].tolist()
            if spanning >= 5:
                break
        assert spanning >= 5 and len(agree) > 500
        assert np.mean(agree) > SAME and np.mean(others) < SAME - 0.02, (np.mean(agree), np.mean(others))
        link.engine.llm.shutdown()

    asyncio.run(run())


def test_a_run_replays_and_tells_and_ends_where_routes_belong_to_other_tokens(tmp_path):
    def grpo(out: str, *flags: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "algos.grpo",
            "--model",
            path,
            "--env",
            "reverse",
            "--max-steps",
            "2",
        ]
        command += ["--prompts-per-step", "4", "--group-size", "4", "--eval-every", "5", "--lr", "1e-3"]
        command += ["--output-dir", str(tmp_path / out), *flags]
        with open(tmp_path / f"{out}.out", "w") as file:
            return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def output(out: str) -> str:
        return (tmp_path / f"{out}.out").read_text()[-6000:]

    path, folder = make_tiny(tmp_path / "model", moe="wide", tied=False), tmp_path / "rollouts"
    on = grpo("on", "--router-replay", "on", "--dump-rollouts", str(folder), "--kl-coef", "0.1")
    assert on.wait(400) == 0, output("on")
    first = json.loads((tmp_path / "on" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < first["moe/load_entropy"] < 1 < first["moe/max_load"] <= 8
    assert first["moe/route_mismatch"] < 1 - SAME and first["mismatch/abs_mean"] < NOISE
    assert first["loss/kl"] < 1e-9, "the reference takes the same routes, so it is the same policy"
    other = tmp_path / "other"  # the same rollouts with the routes of other tokens
    other.mkdir()
    for file in folder.glob("*.jsonl"):
        rollouts = [json.loads(line) for line in file.read_text().splitlines()]
        for segment in (segment for rollout in rollouts for segment in rollout["segments"]):
            routes = np.array(segment["routed_experts"])
            segment["routed_experts"] = ((routes + 5) % 16).tolist()
        (other / file.name).write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    again, wrong = (
        grpo("again", "--replay-rollouts", str(folder)),
        grpo("wrong", "--replay-rollouts", str(other)),
    )
    assert again.wait(400) == 0, output("again")
    assert wrong.wait(400) == 1, output("wrong")
    assert "of the replayed experts are not those of the trainer's router" in output("wrong")
