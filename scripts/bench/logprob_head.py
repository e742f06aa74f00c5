"""Log-probs of the sampled tokens: time, memory and gradient error of `common/logprobs.py` beside others.

    python scripts/bench/logprob_head.py        one GPU

16,384 tokens, 151,936 words, bf16 weights, forward and backward with a weight of its own for every token.
"naive" makes all logits, in bf16, and takes log_softmax in fp32. "torch, chunked" is the same in chunks of 512
that are made again in the backward pass. "liger" is its fused linear cross-entropy: a mean, which is all that
it has a right gradient for. "ours" also gives every entropy.

Memory is what the peak has above inputs and the gradient of the weights. The error is that of both gradients
against fp32, by norm.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.logprobs import LinearLogprobs

TOKENS, WORDS, TEMPERATURE = 16_384, 151_936, 1.0


def naive(hidden, weight, targets):
    return F.linear(hidden, weight).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def chunked(hidden, weight, targets):
    parts = zip(hidden.split(512), targets.split(512))
    return torch.cat([checkpoint(naive, h, weight, t, use_reentrant=False) for h, t in parts])


def ours(hidden, weight, targets):
    return LinearLogprobs.apply(hidden, weight, None, targets, TEMPERATURE, None, 0, True)[0]


def ours_fp32(hidden, weight, targets):
    return ours(hidden.float(), weight.float(), targets)


def liger(hidden, weight, targets):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets)


def gradients(function, hidden, weight, targets, weights):
    """One forward and backward. A function that returns a sum gets no weights."""
    hidden.grad = weight.grad = None
    value = function(hidden, weight, targets)
    (value if value.ndim == 0 else (value * weights).sum()).backward()
    return hidden.grad, weight.grad


def time_ms(call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", default="", help="file for the figures as JSON")
    out, rows = parser.parse_args().out, []
    for width in (1024, 2560, 4096):
        generator = torch.Generator("cuda").manual_seed(width)
        make = {"device": "cuda", "generator": generator}
        hidden = torch.randn(TOKENS, width, **make).bfloat16().requires_grad_()
        weight = (0.02 * torch.randn(WORDS, width, **make)).bfloat16().requires_grad_()
        targets = torch.randint(WORDS, (TOKENS,), **make)
        weights = torch.randn(TOKENS, **make)
        functions = {"naive": naive, "torch, chunked": chunked, "liger": liger, "ours": ours}
        functions["ours, fp32 head"] = ours_fp32
        times, found, memory = {name: [] for name in functions}, {}, {}
        exact = [x.detach().float().requires_grad_() for x in (hidden, weight)]
        reference = gradients(ours, *exact, targets, weights)
        del exact
        for name, function in functions.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            got = gradients(function, hidden, weight, targets, weights)
            peak = torch.cuda.max_memory_allocated() - before
            memory[name] = (peak - got[1].numel() * got[1].element_size()) / 1e9
            pairs = zip(got, reference)
            found[name] = (
                [float((g.float() - r).norm() / r.norm()) for g, r in pairs] if name != "liger" else []
            )
            hidden.grad = weight.grad = got = None
        del reference
        for _ in range(7):  # in turns
            for name, function in functions.items():
                times[name].append(time_ms(lambda: gradients(function, hidden, weight, targets, weights)))
        for name in functions:
            timed = times[name][2:]
            row = {"hidden": width, "name": name, "ms": [statistics.median(timed), min(timed), max(timed)]}
            rows.append(row | {"memory_gb": round(memory[name], 2), "error": found[name]})
            print(rows[-1], flush=True)
        del hidden, weight
    if out:
        Path(out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
