"""Speculative decoding: guesses change how fast tokens come, not which ones, nor their log-probs.

The oracle is transformers' full forward pass with the weights of the version that a token claims. On a GPU
(`tests/gpu/test_speculative.py`) engine and oracle are on the same one.
"""

import asyncio
import copy
from collections import Counter

import numpy as np
import pytest
import torch

from common.checkpoint import gather_model, write_model
from common.models import char_tokenizer, make_tiny
from common.rollout import Engine, EngineFlags
from tests.test_refit_engine import Link
from tests.test_versions import VOCAB, prompt_of

ON_GPU = torch.cuda.is_available()
CLOSE = 2e-3 if ON_GPU else 1e-5  # of single precision, which kernels on a GPU may round for matrix products
REPEATS = [5, 6, 7, 8] * 6  # ngram guesses that it goes on like that
TEMPERATURE = 0.3  # so low that a random model repeats itself, and guesses are accepted


class Here(Link):
    """A link whose trainer and engine are on the GPU if there is one."""

    async def join(self, path: str) -> None:
        if ON_GPU:
            self.model.cuda()
        self.engine = await start_engine(path, **self.flags)
        connecting = self.engine.connect("127.0.0.1", self.store.port, 0, 1, 60, self.timeout_s)
        await asyncio.gather(asyncio.to_thread(self.sender.join, self.store, 1, 1), connecting)


async def start_engine(path: str, **flags) -> Engine:
    flags = EngineFlags(**{"max_model_len": 512, "record_top_k": 3, "kv_cache_gb": 0.5} | flags)
    engine = Engine(path, "float32", 0, flags, gpus=0.2 * ON_GPU)
    await engine.start([char_tokenizer().eos_token_id])
    return engine


@torch.no_grad()
def distributions(model, rows: list[list[int]], temperature: float) -> torch.Tensor:
    """Log-probs of all tokens after each token of each row, [rows, T, V]."""
    logits = model(torch.tensor(rows, device=model.device)).logits.float().cpu()
    return (logits / temperature).log_softmax(-1)


@pytest.fixture(scope="module", params=["ngram", "draft model"])
def link(request, tmp_path_factory):
    """An engine that speculates, its trainer, and the event loop that both belong to. The draft model is a
    random one like the model."""
    folder = tmp_path_factory.mktemp("speculative")
    path, draft = make_tiny(folder / "model"), make_tiny(folder / "draft", seed=5)
    guesser = draft if request.param == "draft model" else "ngram"
    link = Here(path, speculative_tokens=3, speculative_model=guesser)
    with asyncio.Runner() as runner:
        runner.run(link.join(path))
        runner.run(link.refit(0))
        link.run, link.folder = runner.run, folder
        yield link
        link.engine.llm.shutdown()
        del link.engine


def check_completion(each, models: dict, prompt_ids: list[int]) -> None:
    """Its log-probs, and those of the likeliest tokens, are the model's of the version of each token."""
    assert len(each.token_ids) == len(each.logprobs) == len(each.versions)
    for version in set(each.versions.tolist()):
        here = each.versions == version
        (every,) = distributions(models[version], [prompt_ids + each.token_ids], TEMPERATURE)
        every = every[len(prompt_ids) - 1 : -1][here]
        own = every.gather(1, torch.tensor(each.token_ids)[here][:, None])[:, 0]
        assert (own - torch.tensor(each.logprobs)[here]).abs().max() <= CLOSE / TEMPERATURE
        top = torch.tensor(each.top_k)[here][..., 1]
        assert (every.topk(3)[0] - top).abs().max() <= CLOSE / TEMPERATURE


def test_log_probs_are_the_models_at_the_temperature_also_across_refits(link):
    async def run():
        models, version, spanning, accepted = {0: copy.deepcopy(link.model)}, 0, 0, 0
        for number in range(20):  # how many requests cross two refits is up to time
            prompts = [[*prompt_of(8 * number + i), *REPEATS] for i in range(8)]
            asked = [link.engine.generate(ids, 2, TEMPERATURE, 400) for ids in prompts]
            asked = [asyncio.ensure_future(each) for each in asked]
            for _ in range(2):
                await asyncio.sleep(0.05)
                version += 1
                accepted += link.engine.accepted
                link.perturb(seed=version)
                models[version] = copy.deepcopy(link.model)
                await link.refit(version)
            for prompt_ids, completions in zip(prompts, await asyncio.gather(*asked)):
                for each in completions:
                    assert each.versions.tolist() == sorted(each.versions)
                    spanning += len(set(each.versions.tolist())) == 3
                    check_completion(each, models, prompt_ids)
            accepted, link.engine.accepted = accepted + link.engine.accepted, 0
            if spanning >= 5 and accepted >= 50:
                break
        assert spanning >= 5 and accepted >= 50
        prompt = prompt_of(0)
        told = await link.engine.prompt_logprobs(prompt)  # as the probe of a refit takes them
        own = distributions(link.model, [prompt], 1.0)[0, :-1].gather(1, torch.tensor(prompt[1:])[:, None])
        assert (own[:, 0] - torch.tensor(told)).abs().max() <= CLOSE

    link.run(run())


def test_answers_that_a_refit_throws_away_are_sampled_again(link):
    async def run():
        link.engine.flags.refit_mode = "abort"
        before = link.engine.requests
        asked = [link.engine.generate([*prompt_of(i), *REPEATS], 2, TEMPERATURE, 300) for i in range(8)]
        asked = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0.1)
        await link.refit(50)
        completions = [each for group in await asyncio.gather(*asked) for each in group]
        link.engine.flags.refit_mode = "keep"
        assert link.engine.requests - before > 8 and len(completions) == 16
        assert all(len(set(each.versions.tolist())) == 1 for each in completions)

    link.run(run())


def test_tokens_are_distributed_as_the_model_says(link):
    """4,000 samples of two tokens; the second one can be a guess: after any first token, ngram finds it in the
    prompt with a 9 behind it. A guess that is always taken, or drawn once more when it is refused, would show."""

    async def run():
        eos, count = char_tokenizer().eos_token_id, 4000
        prompt = [each for token in range(VOCAB) for each in (6, token, 9)] + [6]
        guessed = link.engine.guessed
        asked = [link.engine.generate(prompt, count // 8, 1.0, 3) for _ in range(8)]
        completions = [each for group in await asyncio.gather(*asked) for each in group]
        assert len(completions) == count and link.engine.guessed - guessed > count / 2
        first_V = distributions(link.model, [prompt], 1.0)[0, -1].exp()
        longer = [[*prompt, token] for token in range(VOCAB)]
        joint_VV = first_V[:, None] * distributions(link.model, longer, 1.0)[:, -1].exp()
        joint_VV[eos] = 0  # there the answer ends
        for position, expected_V in enumerate((first_V, joint_VV.sum(0))):
            seen = Counter(each.token_ids[position] for each in completions if len(each.token_ids) > position)
            for token, probability in enumerate(expected_V.tolist()):
                deviation = (count * probability * (1 - probability)) ** 0.5
                assert abs(seen[token] - count * probability) <= 5 * deviation + 1, (position, token)

    link.run(run())


def test_greedy_answers_are_those_of_an_engine_that_guesses_nothing(link):
    async def run():
        write_model(gather_model(link.model, 0), link.model, char_tokenizer(), link.folder / "new")
        plain = await start_engine(str(link.folder / "new"))
        for index in range(8):
            prompt = [*prompt_of(index), *REPEATS]
            (ours,), (theirs,) = [await e.generate(prompt, 1, 0.0, 100) for e in (link.engine, plain)]
            assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
            assert np.abs(np.array(ours.logprobs) - theirs.logprobs).max() <= CLOSE
        plain.llm.shutdown()

    link.run(run())


def test_the_report_of_a_refit_has_the_share_of_guesses_that_were_accepted(link):
    async def run():
        await link.refit(100)
        assert link.engine.guessed == link.engine.accepted == 0
        (completion,) = await link.engine.generate([*prompt_of(0), *REPEATS], 1, 0.0, 100)
        accepted, guessed = link.engine.accepted, link.engine.guessed
        assert 0 <= accepted <= guessed and accepted < len(completion.token_ids) and guessed > 0
        assert (await link.refit(101))["rollout/accepted_frac"] == accepted / guessed

    link.run(run())
