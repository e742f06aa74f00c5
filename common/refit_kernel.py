"""The checksum of a refit as one GPU kernel: `hash_words` reads each word once."""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words of a program, 16 of a thread: more would spill registers


@triton.jit
def hash_kernel(words, total, count, step, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + position, mask=position < count, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * (position * step + 1)))


def hash_on_gpu(words: torch.Tensor, step: int) -> torch.Tensor:
    """The sum of word x (position x step + 1) modulo 2^64, a 0-d int64 tensor on the GPU of `words`."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if len(words):
        grid = (triton.cdiv(len(words), BLOCK),)
        hash_kernel[grid](words, total, len(words), step, BLOCK, num_warps=8)
    return total
