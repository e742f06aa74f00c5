"""Log-probs and entropies of given tokens: aligned, temperature applied, in chunks the same as at once."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedConfig

import common.logprobs
from algos.grpo import Args, Trainer
from common.logprobs import LogprobHead
from tests.fakes import TableLM, step_table

IDS = [0, 1, 2, 4, 0]
MASK = [0, 0, 1, 1, 1]


def row_logprobs(model, ids=IDS, temperature=1.0):
    """The trainer's log-probs of ids[1:], [1, S]."""
    trainer = Trainer(Args(temperature=temperature), "", 0, False)
    batch = {"token_ids": torch.tensor([ids], dtype=torch.int32), "lengths": torch.tensor([len(ids)])}
    return trainer.logprobs(batch, model, LogprobHead(model))[0]


def test_the_logprob_at_a_position_belongs_to_the_token_there():
    # 1 -> 2 is the likely step, 2 -> 4 is not, 4 -> 0 is; the last token counts
    actions = row_logprobs(TableLM(step_table()))[0][torch.tensor(MASK[1:], dtype=torch.bool)]
    assert actions.tolist() == pytest.approx([-0.2231436, -2.9957323, -0.2231436], abs=1e-6)
    assert actions.sum().item() == pytest.approx(-3.4420194, abs=1e-6), "-3.2188759 lost the last token"


def test_a_constant_added_to_all_logits_changes_nothing():
    model = TableLM(step_table())
    plain = row_logprobs(model)
    model.lm_head.bias.data += 3.0
    torch.testing.assert_close(row_logprobs(model), plain, rtol=0, atol=1e-6)


def test_what_the_model_says_after_the_last_token_is_not_used():
    # the row of ids[-1] = 3 in the table is read at no other position
    changed = step_table()
    changed[3] = torch.arange(5.0)
    ids = [0, 1, 2, 4, 3]
    plain, other = row_logprobs(TableLM(step_table()), ids), row_logprobs(TableLM(changed), ids)
    assert torch.equal(plain, other)


def test_shapes_that_do_not_fit_are_an_error():
    ids = torch.tensor([IDS])
    head = LogprobHead(model := TableLM(step_table()))
    with pytest.raises(ValueError, match="input ids.*targets"):
        head(model, ids, ids[:, 1:], 1.0)
    longer = TableLM(step_table(), extra_positions=2)  # 7 rows of logits for 5 ids: gather would not notice
    with pytest.raises(ValueError, match="7.*positions.*5.*targets"):
        LogprobHead(longer)(longer, ids, ids, 1.0)


def test_the_head_is_an_ordinary_one_again_after_a_call_and_after_an_error():
    model = TableLM(step_table(), extra_positions=0)
    ids = torch.tensor([IDS])
    logits = model(ids, use_cache=False).logits
    head = LogprobHead(model)
    head(model, ids[:, :-1], ids[:, 1:], 2.0)
    assert torch.equal(model(ids, use_cache=False).logits, logits)
    model.extra_positions = 1
    with pytest.raises(ValueError):
        head(model, ids[:, :-1], ids[:, 1:], 1.0)
    model.extra_positions = 0
    assert torch.equal(model(ids, use_cache=False).logits, logits)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_temperature_divides_the_logits(temperature):
    (logprobs,) = row_logprobs(TableLM(step_table()), temperature=temperature)
    # p(likely) = .8^(1/t) / (.8^(1/t) + 4 * .05^(1/t))
    likely, other = 0.8 ** (1 / temperature), 0.05 ** (1 / temperature)
    expected = [math.log(x / (likely + 4 * other)) for x in (likely, likely, other, likely)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_entropy_is_that_of_the_distribution_at_each_position():
    model = TableLM(step_table())
    ids = torch.tensor([IDS])
    _, entropy = LogprobHead(model)(model, ids[:, :-1], ids[:, 1:], 1.0)
    expected = -(0.8 * math.log(0.8) + 4 * 0.05 * math.log(0.05))
    assert entropy[0].tolist() == pytest.approx([expected] * 4, abs=1e-6)


class TiedLM(torch.nn.Module):
    """An embedding, one layer, and a head that shares the embedding's weight."""

    config = PreTrainedConfig(attn_implementation="sdpa")

    def __init__(self, bias: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6, dtype=torch.float64)
        self.layer = torch.nn.Linear(6, 6, dtype=torch.float64)
        self.lm_head = torch.nn.Linear(6, 11, bias=bias, dtype=torch.float64)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.lm_head(self.layer(self.embed(input_ids)).tanh()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 7, 14, 1000])
def test_chunks_give_the_values_and_gradients_of_dense_logits(bias, tokens_per_chunk, monkeypatch):
    monkeypatch.setitem(common.logprobs.CHUNK_BYTES, "cpu", 8 * 11 * tokens_per_chunk)
    torch.manual_seed(1)
    ids, targets = torch.randint(11, (2, 7)), torch.randint(11, (2, 7))
    mix = torch.randn(2, 2, 7, dtype=torch.float64)

    dense = TiedLM(bias)
    logits = dense(ids, use_cache=False).logits / 0.7
    every = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = every[torch.arange(2)[:, None], torch.arange(7), targets], -(every.exp() * every).sum(-1)
    (expected[0] * mix[0] + expected[1] * mix[1]).sum().backward()

    model = TiedLM(bias)
    got = LogprobHead(model)(model, ids, targets, 0.7)
    (got[0] * mix[0] + got[1] * mix[1]).sum().backward()
    for value, reference in zip(got, expected):
        assert value.dtype == torch.float32 and value.shape == (2, 7)
        torch.testing.assert_close(value.double(), reference, rtol=0, atol=1e-5)
    for (name, parameter), reference in zip(model.named_parameters(), dense.parameters()):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=1e-5, msg=name)


def test_no_gradient_is_kept_where_none_is_wanted(monkeypatch):
    monkeypatch.setitem(common.logprobs.CHUNK_BYTES, "cpu", 8 * 11 * 2)
    model, ids = TiedLM(False), torch.randint(11, (2, 7))
    with torch.no_grad():
        logprobs, _ = LogprobHead(model)(model, ids, ids, 1.0)
    assert not logprobs.requires_grad
