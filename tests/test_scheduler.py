"""Log-probs of an answer leave the engine once, whole and in order; streams and aborted requests are let be."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from common.scheduler import FinalLogprobs

FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture
def scheduler(monkeypatch):
    """FinalLogprobs over a scheduler whose steps are given; `step` is what then goes to the front end."""
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self: setattr(self, "requests", {}))
    monkeypatch.setattr(
        AsyncScheduler, "add_request", lambda self, r: self.requests.update({r.request_id: r})
    )
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda self, scheduled, outputs: outputs)
    monkeypatch.setattr(AsyncScheduler, "finish_requests", lambda self, ids, status: [self.requests.pop(ids)])
    made = FinalLogprobs()

    def add(name: str, kind: RequestOutputKind, stop=()) -> None:
        params = SimpleNamespace(output_kind=kind, stop=list(stop))
        made.add_request(SimpleNamespace(request_id=name, sampling_params=params))

    def step(*outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
        return made.update_from_output(None, {0: EngineCoreOutputs(outputs=list(outputs))})[0].outputs

    made.add, made.step = add, step
    return made


def sampled(name: str, *tokens: int, end: FinishReason | None = None, logprobs: bool = True):
    """Tokens of one step, each with one more entry beside it; log-prob and rank follow from the id."""
    ids = np.array([[token, token + 100] for token in tokens], np.int32)
    lists = LogprobsLists(ids, -ids.astype(np.float32), np.array(tokens, np.int32) % 7)
    return EngineCoreOutput(name, list(tokens), lists if logprobs else None, finish_reason=end)


def test_an_answer_has_its_logprobs_with_its_last_token(scheduler):
    scheduler.add("a", FINAL)
    scheduler.add("b", FINAL)
    for outputs in (
        scheduler.step(sampled("a", 3), sampled("b", 9)),
        scheduler.step(sampled("b", 10), sampled("a", 4, 5)),  # two at once, as speculation has them
    ):
        assert [len(output.new_token_ids) > 0 for output in outputs] == [True, True], (
            "ids go out as they come"
        )
        assert [output.new_logprobs for output in outputs] == [None, None]
    (a,) = scheduler.step(sampled("a", 6, end=FinishReason.STOP))
    assert a.new_token_ids == [6]
    ids, logprobs, ranks, _ = a.new_logprobs
    assert ids.tolist() == [[3, 103], [4, 104], [5, 105], [6, 106]]
    assert logprobs.tolist() == [[-3, -103], [-4, -104], [-5, -105], [-6, -106]]
    assert ranks.tolist() == [3, 4, 5, 6]
    assert list(scheduler.held) == ["b"]
    (b,) = scheduler.step(sampled("b", end=FinishReason.LENGTH, logprobs=False))
    assert b.new_logprobs.logprob_token_ids.tolist() == [[9, 109], [10, 110]]
    assert scheduler.held == {}


def test_what_is_streamed_or_has_no_logprobs_goes_out_as_it_is(scheduler):
    scheduler.add("stream", DELTA)
    scheduler.add("plain", FINAL)
    stream, plain = scheduler.step(sampled("stream", 3), sampled("plain", 4, logprobs=False))
    assert stream.new_logprobs.logprob_token_ids.tolist() == [[3, 103]]
    (plain,) = scheduler.step(sampled("plain", 5, end=FinishReason.STOP, logprobs=False))
    assert plain.new_logprobs is None and scheduler.held == {}


def test_log_probs_come_with_their_tokens_where_the_front_end_may_end_the_answer(scheduler):
    scheduler.add("tool", FINAL, stop=["</tool>"])
    (tool,) = scheduler.step(sampled("tool", 3))
    assert tool.new_logprobs.logprob_token_ids.tolist() == [[3, 103]] and scheduler.held == {}


def test_a_long_answer_is_whole_and_keeps_no_array_of_a_whole_step(scheduler):
    scheduler.add("long", FINAL)
    everybody = np.arange(1000 * 512 * 2, dtype=np.int32).reshape(1000, 512, 2)
    for ids in everybody[:200]:
        part = LogprobsLists(ids[:1], -ids[:1].astype(np.float32), ids[:1, 0])
        scheduler.step(EngineCoreOutput("long", [int(ids[0, 0])], part))
    assert sum(part.logprob_token_ids.base is not None for part in scheduler.held["long"]) < 64
    (whole,) = scheduler.step(sampled("long", 7, end=FinishReason.STOP))
    assert whole.new_logprobs.logprob_token_ids[:, 0].tolist() == [*everybody[:200, 0, 0].tolist(), 7]


def test_an_answer_that_ends_while_another_is_aborted_is_whole(scheduler, monkeypatch):
    """vLLM ends a request that failed from inside of the update, when what ended by itself is gone."""
    scheduler.add("ends", FINAL)
    scheduler.add("fails", FINAL)
    scheduler.step(sampled("ends", 3))

    def update(self, scheduled, outputs):
        self.requests.pop("ends")
        self.finish_requests("fails", RequestStatus.FINISHED_ERROR)
        return outputs

    monkeypatch.setattr(AsyncScheduler, "update_from_output", update)
    (ends,) = scheduler.step(sampled("ends", 4, end=FinishReason.STOP))
    assert ends.new_logprobs.logprob_token_ids.tolist() == [[3, 103], [4, 104]] and scheduler.held == {}


def test_nothing_is_kept_of_an_aborted_request(scheduler):
    scheduler.add("gone", FINAL)
    scheduler.add("stays", FINAL)
    scheduler.step(sampled("gone", 3), sampled("stays", 4))
    scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    assert list(scheduler.held) == ["stays"]
