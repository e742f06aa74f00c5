"""Packed rows: each attends to itself alone, and gives what it would give by itself."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from common.attention import pack, packed_attention, use_packed_attention
from common.critic import put_value_head, values
from common.logprobs import LogprobHead
from common.models import make_tiny


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    """The same weights twice: one that packs, one that does not."""
    path = make_tiny(tmp_path_factory.mktemp("tiny") / "tiny")
    found = {}
    for kind in ("packed", "padded"):
        found[kind] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if kind == "packed":
            use_packed_attention(found[kind])
        found[f"{kind} head"] = LogprobHead(found[kind])
    return found


def batch_of(rows: list[list[int]], padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B, T], lengths [B])."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
    return ids, torch.tensor([len(row) for row in rows])


def logprobs(models: dict, kind: str, rows: list[list[int]], padding: int = 0) -> torch.Tensor:
    ids, lengths = batch_of(rows, padding)
    head = models[f"{kind} head"]
    return head(models[kind], ids[:, :-1], ids[:, 1:], 0.8, lengths - 1)[0].detach()


def test_a_packed_document_gives_what_it_gives_alone(models):
    documents = [[1, 2, 3, 4, 5, 6], [7, 8]]
    together = logprobs(models, "packed", documents)
    for row, document in zip(together, documents):
        alone = logprobs(models, "padded", [document])[0]
        assert len(alone) == len(document) - 1, "the last token has nothing to predict"
        torch.testing.assert_close(row[: len(alone)], alone, rtol=0, atol=1e-6)
    assert together[1, 1:].tolist() == [0.0] * 4, "nothing is computed for padding"


def test_another_first_document_leaves_the_second_as_it_is_to_the_bit(models):
    one = logprobs(models, "packed", [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    other = logprobs(models, "packed", [[60, 50, 40, 30, 20, 10], [7, 8, 9]])
    assert torch.equal(one[1], other[1]) and not torch.equal(one[0], other[0])


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=12), min_size=1, max_size=6))
def test_packed_rows_give_the_values_and_gradients_of_padded_ones(models, rows):
    ids, lengths = batch_of(rows, padding=99)
    mask, gradients, found = torch.arange(ids.shape[1] - 1) < (lengths - 1)[:, None], [], []
    for kind in ("packed", "padded"):
        model = models[kind]
        model.zero_grad()
        pair = models[f"{kind} head"](model, ids[:, :-1], ids[:, 1:], 0.8, lengths - 1)
        found.append([torch.where(mask, value, 0.0) for value in pair])
        sum((value * torch.cos(value.detach())).sum() for value in found[-1]).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    for packed, padded in zip(*found):
        torch.testing.assert_close(packed, padded, rtol=0, atol=2e-5)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm() + 1e-7


def test_the_critic_packs_as_the_policy_does(tmp_path):
    path, rows, got = make_tiny(tmp_path / "tiny"), [[5, 6, 7, 8], [9], [10, 11]], []
    for packs in (True, False):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if packs:
            use_packed_attention(model)
        critic = put_value_head(model, torch.device("cpu"))
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.get_output_embeddings().weight)
        ids, lengths = batch_of(rows)
        got.append(values(critic, ids, lengths).detach())
    inside = torch.arange(4) < lengths[:, None]
    torch.testing.assert_close(got[0][inside], got[1][inside], rtol=0, atol=1e-5)
    assert got[0][inside].abs().min() > 0 and not got[0][~inside].any()


def test_only_rows_of_several_lengths_are_laid_end_to_end(models):
    ids = torch.arange(1, 9).view(2, 4)
    for lengths in (None, torch.tensor([4, 4])):
        even = pack(models["packed"], ids, lengths)
        assert list(even.inputs) == ["input_ids"] and torch.equal(even.inputs["input_ids"], ids)
        assert torch.equal(even.spread(even.select(ids)), ids)
    packed = pack(models["packed"], ids, torch.tensor([2, 4]))
    assert packed.inputs["input_ids"].tolist() == [[1, 2, 5, 6, 7, 8]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert packed.inputs["cu_seq_lens_q"].tolist() == [0, 2, 6] and packed.inputs["max_length_q"] == 4
    assert packed.spread(packed.select(ids)).tolist() == [[1, 2, 0, 0], [5, 6, 7, 8]]


def test_rows_of_one_length_give_what_each_gives_alone(models):
    together = logprobs(models, "packed", [[1, 2, 3, 4], [9, 8, 7, 6]])
    for row, document in zip(together, [[1, 2, 3, 4], [9, 8, 7, 6]]):
        torch.testing.assert_close(row, logprobs(models, "padded", [document])[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", [{"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"sliding_window": 8}])
def test_attention_that_needs_more_is_refused_with_the_flag_to_change(more):
    x = torch.zeros(1, 2, 4, 8)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="--packing off"):
        packed_attention(SimpleNamespace(), x, x, x, None, cu_seq_lens_q=ends, max_length_q=4, **more)
