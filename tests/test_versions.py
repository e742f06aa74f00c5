"""Versions in a real engine: each token belongs to the weights that sampled it, whenever a refit comes.

The oracle is a full forward pass of Hugging Face's model with the weights of the version that a token claims.
"""

import asyncio
import copy
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.logprobs import LogprobHead
from common.models import char_tokenizer, make_tiny, resolve_model
from common.sample import extend_segment
from common.sample_queue import QueueClosed, SampleQueue
from tests.test_refit_engine import Link, start_engine

VOCAB = len(char_tokenizer())


def prompt_of(index: int) -> list[int]:
    """A prompt of its own for every index below 90^2."""
    return [5 + index // 90, 5 + index % 90, *(5 + (index * step) % 90 for step in (3, 7, 11, 13))]


class Oracle:
    """The weights of every version, kept as they were."""

    def __init__(self, model: torch.nn.Module):
        self.models = {0: copy.deepcopy(model)}

    @torch.no_grad()
    def distribution(self, version: int, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
        """Log-probs of all tokens at the place of each of `token_ids`, [T, V]."""
        logits = self.models[version](torch.tensor([prompt_ids + token_ids])).logits[0].float()
        return logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]

    def logprobs(self, version: int, prompt_ids: list[int], token_ids: list[int]) -> np.ndarray:
        every = self.distribution(version, prompt_ids, token_ids)
        return every.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def shared_link(tmp_path_factory):
    """One engine for all tests that refit it, the weights that it began with, and its event loop."""
    path = make_tiny(tmp_path_factory.mktemp("engine") / "model")
    link = Link(path, max_model_len=512, record_top_k=4)

    async def shut_down() -> None:
        link.engine.llm.shutdown()
        del link.engine

    with asyncio.Runner() as runner:
        runner.run(link.join(path))
        yield link, copy.deepcopy(link.model.state_dict()), runner
        runner.run(shut_down())


@pytest.fixture
def on_link(shared_link):
    """on_link(test, refit_mode): runs `test(link)` from version 0 on, which has the weights of the beginning."""
    link, weights, runner = shared_link

    async def begin(test, refit_mode: str) -> None:
        link.engine.flags.refit_mode = refit_mode
        link.model.load_state_dict(weights)
        await link.refit(0)
        await test(link)

    return lambda test, refit_mode="keep": runner.run(begin(test, refit_mode))


async def refit_and_remember(link: Link, oracle: Oracle, version: int, queue=None) -> None:
    link.perturb(seed=version)
    oracle.models[version] = copy.deepcopy(link.model)
    await link.refit(version, queue)


def test_tokens_of_a_request_that_spans_refits_are_those_of_the_versions_they_claim(on_link):
    async def run(link):
        oracle, version, spanning, checked, apart = Oracle(link.model), 0, [], 0, []
        for number in range(20):  # requests long enough for two refits; how many cross both is up to time
            prompts = [prompt_of(8 * number + i) for i in range(8)]
            asked = [asyncio.ensure_future(link.engine.generate(ids, 2, 1.0, 200)) for ids in prompts]
            for _ in range(2):
                await asyncio.sleep(0.05)
                version += 1
                await refit_and_remember(link, oracle, version)
            for prompt_ids, completions in zip(prompts, await asyncio.gather(*asked)):
                for each in completions:
                    spans = list(dict.fromkeys(each.versions.tolist()))
                    assert len(each.token_ids) == len(each.logprobs) == len(each.versions)
                    assert spans == sorted(spans) and each.versions.tolist() == sorted(each.versions)
                    spanning += [each] if len(spans) == 3 else []
                    for span in spans:
                        here = each.versions == span
                        every = oracle.distribution(span, prompt_ids, each.token_ids)[here]
                        ids = torch.tensor(each.token_ids)[here]
                        told = torch.tensor(each.logprobs)[here]
                        own = every.gather(1, ids[:, None])[:, 0]
                        assert (own - told).abs().max() <= 1e-5
                        checked += len(ids)
                        # what --record-top-k keeps is the top of the same distribution
                        top = torch.tensor(each.top_k)[here]
                        assert (every.topk(4)[0] - top[..., 1]).abs().max() <= 1e-5
                        assert (every.gather(1, top[..., 0].long()) - top[..., 1]).abs().max() <= 1e-5
                        other = oracle.logprobs((span + 1) % (version + 1), prompt_ids, each.token_ids)
                        apart += np.abs(other[here] - told.numpy()).tolist()
            if len(spanning) >= 5:
                break
        assert len(spanning) >= 5 and checked > 500
        assert np.mean(apart) > 0.01, "another version's weights would have been noticed"
        prompt = prompt_of(0)
        segment = extend_segment(
            None, prompt, spanning[0].token_ids, spanning[0].logprobs, spanning[0].versions,
            spanning[0].finish_reason, spanning[0].top_k,
        )  # fmt: skip
        assert segment.versions.tolist() == [-1] * len(prompt) + spanning[0].versions.tolist()
        assert (
            segment.top_k.shape == (len(segment.token_ids), 4, 2) and not segment.top_k[: len(prompt)].any()
        )

    on_link(run)


GROUPS_PER_STEP, STEPS, SIZE = 10, 50, 2


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_thousand_requests_with_refits_at_random_times_lose_and_repeat_nothing(mode, on_link):
    async def run(link):
        dice = random.Random(1)
        oracle, queue = Oracle(link.model), SampleQueue(GROUPS_PER_STEP, 2, "arrival")
        await queue.set_version(0)
        started: list[int] = []

        async def produce() -> None:
            while True:
                ticket = await queue.next_ticket()
                started.append(ticket)
                group = await link.engine.generate(prompt_of(ticket), SIZE, 1.0, 12)
                newest = max(int(each.versions.max(initial=0)) for each in group)
                await queue.put(ticket, group, newest)

        producers = [asyncio.ensure_future(produce()) for _ in range(16)]
        before, trained = link.engine.requests, {}
        for step in range(STEPS):
            groups, drops, _ = await asyncio.wait_for(queue.get(step), 60)
            assert not drops and not trained.keys() & {ticket for ticket, _ in groups}
            trained |= dict(groups)
            await asyncio.sleep(dice.uniform(0, 0.03))
            await asyncio.wait_for(refit_and_remember(link, oracle, step + 1, queue), 60)
        await asyncio.sleep(0.5)
        in_flight = (await queue.snapshot(10**9))[0]["again"]
        await queue.close("the end")
        ends = await asyncio.wait_for(asyncio.gather(*producers, return_exceptions=True), 60)
        assert all(isinstance(end, QueueClosed) for end in ends), ends
        # every ticket that was handed out is trained or still there, and each prompt was asked once
        assert sorted([*trained, *in_flight]) == sorted(started) == list(range(len(started)))
        assert len(trained) == GROUPS_PER_STEP * STEPS
        crossed, distance = 0, []
        for ticket, group in trained.items():
            assert len(group) == SIZE
            for each in group:
                assert each.finish_reason in ("stop", "length") and len(each.token_ids) <= 12
                crossed += len(set(each.versions.tolist())) > 1
                for version in set(each.versions.tolist()):  # an answer of another prompt would not fit
                    own = oracle.logprobs(version, prompt_of(ticket), each.token_ids)
                    distance += np.abs(own - each.logprobs)[each.versions == version].tolist()
        assert max(distance) <= 1e-4 and np.mean(distance) <= 1e-6
        if mode == "keep":
            assert crossed > 0
        else:
            assert crossed == 0, "whole answers are of one version"
        again = link.engine.requests - before - len(started)
        assert again > 0 if mode == "abort" else again == 0

    on_link(run, mode)


def test_a_prompt_is_computed_again_after_a_refit_and_shared_before(on_link):
    async def run(link):
        prompt = [5 + (7 * i) % 90 for i in range(300)]  # more than two blocks of KV

        async def cached() -> int:
            sampling = link.engine.make_sampling(max_tokens=1, detokenize=False)
            return (await link.engine._ask(prompt, sampling)).num_cached_tokens

        for version in (1, 2, 3):
            assert await cached() == 0, "KV of other weights"
            assert await cached() >= 128
            link.perturb(seed=version)
            await link.refit(version)

    on_link(run)


def test_trainer_and_engine_agree_in_single_precision():
    async def run():
        path = resolve_model("tiny")
        engine = await start_engine(path, max_model_len=128)
        prompts = [char_tokenizer().encode(f"<|im_start|>user\n{i:04}<|im_end|>\n") for i in range(128)]
        groups = await asyncio.gather(*(engine.generate(ids, 8, 1.0, 64) for ids in prompts))
        engine.llm.shutdown()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        head, differences = LogprobHead(model), []
        for prompt_ids, group in zip(prompts, groups):
            for each in group:
                ids = torch.tensor([prompt_ids + each.token_ids])
                with torch.no_grad():
                    logprobs, _ = head(model, ids[:, :-1], ids[:, 1:], 1.0)
                own = logprobs[0, len(prompt_ids) - 1 :].numpy()
                differences += np.abs(own - np.array(each.logprobs, np.float32)).tolist()
        assert len(differences) > 1000
        assert np.mean(differences) <= 1e-6 and max(differences) <= 1e-4

    asyncio.run(run())
