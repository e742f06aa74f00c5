"""GPU kernels: sums and gradients of logits, and the checksum of a refit.

Each reads its input once, and none writes fp32 logits.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # of logits or words at a time; of words 16 a thread: more would spill registers


@triton.jit
def sums_kernel(logits, targets, sums, rows, columns, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest, total, weighted = -1.0e30, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(highest, tl.max(x))
        below = tl.where(inside, x - new, 0.0)
        exp = tl.where(inside, tl.exp(below), 0.0)
        shrink = tl.exp(highest - new)
        weighted = (weighted + (highest - new) * total) * shrink + tl.sum(below * exp)
        total = total * shrink + tl.sum(exp)
        highest = new
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    x = tl.load(logits + row * columns + target, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(sums + row, highest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    tl.store(sums + 3 * rows + row, x)


@triton.jit
def gradients_kernel(logits, targets, log_z, entropy, grad, grad_h, columns, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = logits + row * columns + column
    logprob = tl.load(place, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(log_z + row)
    g, h = tl.load(grad + row), tl.load(grad_h + row)  # of the log-prob and of the entropy
    gradient = -tl.exp(logprob) * (g + h * (logprob + tl.load(entropy + row)))
    gradient += tl.where(column == tl.load(targets + row), g, 0.0)
    tl.store(place, (gradient * scale).to(logits.dtype.element_ty), mask=inside)


def sums_on_gpu(logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logit_sums` of contiguous logits."""
    rows, columns = logits_TV.shape
    sums = torch.empty(4, rows, device=logits_TV.device)
    sums_kernel[(rows,)](logits_TV, targets_T, sums, rows, columns, 1 / temperature, BLOCK, num_warps=8)
    return sums


def gradients_on_gpu(logits_TV, targets_T, log_z_T, entropy_T, grad_T, entropy_grad_T, temperature: float):
    """`logit_gradients_` of contiguous logits."""
    rows, columns = logits_TV.shape
    of_rows = [x.contiguous() for x in (targets_T, log_z_T, entropy_T, grad_T, entropy_grad_T)]
    grid = (rows, triton.cdiv(columns, BLOCK))
    gradients_kernel[grid](logits_TV, *of_rows, columns, 1 / temperature, BLOCK, num_warps=8)
    return logits_TV


@triton.jit
def hash_kernel(words, total, count, step, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + position, mask=position < count, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * (position * step + 1)))


def hash_on_gpu(words: torch.Tensor, step: int) -> torch.Tensor:
    """The sum of word x (position x step + 1) modulo 2^64, a 0-d int64 tensor on the GPU of `words`."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    grid = (triton.cdiv(len(words), BLOCK),)  # where it is empty, triton launches nothing
    hash_kernel[grid](words, total, len(words), step, BLOCK, num_warps=8)
    return total
