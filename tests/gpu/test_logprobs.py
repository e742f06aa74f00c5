"""The GPU's log-prob kernels give the values and gradients of the formulas that a CPU computes.

python -m pytest -q tests/gpu        one GPU
"""

import pytest
import torch
import torch.nn.functional as F

import common.logprobs
from common.logprobs import LinearLogprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(hidden, weight, bias, targets, mix, temperature=0.7) -> list[torch.Tensor]:
    """Values and gradients, on the CPU in fp32."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropies = LinearLogprobs.apply(*leaves, targets, temperature, None, 0, True)
    (logprobs * mix[0] + entropies * mix[1]).sum().backward()
    return [x.detach().float().cpu() for x in (logprobs, entropies, *(leaf.grad for leaf in leaves))]


def exact(hidden, weight, bias, targets, mix, temperature=0.7) -> list[torch.Tensor]:
    """The same by the definition, in fp64."""
    leaves = [x.detach().double().cpu().requires_grad_() for x in (hidden, weight, bias)]
    every = (F.linear(*leaves) / temperature).log_softmax(-1)
    logprobs = every.gather(-1, targets.cpu()[:, None]).squeeze(-1)
    entropies = -(every.exp() * every).sum(-1)
    (logprobs * mix[0].cpu() + entropies * mix[1].cpu()).sum().backward()
    return [x.detach().float() for x in (logprobs, entropies, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tokens, words", [(1, 3), (7, 4095), (65, 4097), (130, 20_000)])
@pytest.mark.parametrize("tokens_per_chunk", [16, 1000])
def test_values_and_gradients_are_those_of_the_definition(
    dtype, bound, tokens, words, tokens_per_chunk, monkeypatch
):
    monkeypatch.setitem(common.logprobs.CHUNK_BYTES, "cuda", words * dtype.itemsize * tokens_per_chunk)
    torch.manual_seed(tokens)
    make = {"device": "cuda"}
    hidden, weight = torch.randn(tokens, 32, **make).to(dtype), torch.randn(words, 32, **make).to(dtype)
    bias, mix = torch.randn(words, **make).to(dtype), torch.randn(2, tokens, **make)
    targets = torch.randint(words, (tokens,), **make)
    got, expected = run(hidden, weight, bias, targets, mix), exact(hidden, weight, bias, targets, mix)
    for value, reference in zip(got, expected):
        assert (value - reference).norm() <= bound * reference.norm() + 1e-6
