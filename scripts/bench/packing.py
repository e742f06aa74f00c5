"""A training step on rows of uneven length: packed, padded, and rows of one length with as many tokens.

    python scripts/bench/packing.py --model 0.6b        one GPU
    python scripts/bench/packing.py --gpus 2            two

64 rows for each rank, lognormal lengths with as large a deviation as mean (1,024 tokens), 4,096 at most.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
from random_models import make_checkpoint

ROWS, MEAN, LONGEST = 64, 1_024, 4_096


@dataclass
class Args:
    model: str = "0.6b"
    """A shape of scripts/bench/random_models.py."""
    gpus: int = 1
    """Ranks, each on a GPU of its own."""
    micro_batch_tokens: int = 16_384
    """Tokens of a micro-batch."""
    steps: int = 5
    """Timed steps of each kind, in turns, after two that are not."""
    out: str = ""
    """File for the figures as JSON."""


def uneven_lengths(count: int) -> np.ndarray:
    sigma = np.sqrt(np.log(2))  # a coefficient of variation of 1
    lengths = np.random.default_rng(0).lognormal(np.log(MEAN) - sigma**2 / 2, sigma, count)
    return np.clip(lengths, 16, LONGEST).astype(int)


def rollouts_of(lengths) -> list[list[dict]]:
    rng, rollouts = np.random.default_rng(1), []
    for length in lengths:
        ids, mask = rng.integers(0, 150_000, length).astype(np.int32), np.arange(length) >= length // 8
        logprobs = np.full(length, -12.0, np.float32)
        rollouts.append(
            [{"token_ids": ids, "action_mask": mask, "logprobs": logprobs, "advantage": rng.normal()}]
        )
    return rollouts


def rank_process(rank: int, path: str, port: int, args: Args, results) -> None:
    from algos import grpo

    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    flags = grpo.Args(lr=1e-6, correction="none")
    flags.parallel.num_trainers, flags.parallel.micro_batch_tokens = args.gpus, args.micro_batch_tokens
    flags.parallel.packing = "on"
    trainer = grpo.Trainer(flags, path, rank, True)
    trainer.setup("127.0.0.1", port, "bfloat16", num_workers=0)
    uneven = uneven_lengths(ROWS * args.gpus)
    even = np.full(len(uneven), uneven.mean().round(), int)
    times, shares, tokens = {"packed": [], "padded": [], "ideal": []}, {}, {}
    attention = {"packed": "instar_packed", "padded": "sdpa", "ideal": "instar_packed"}
    for kind in times:
        flags.parallel.packing = "off" if kind == "padded" else "on"
        rows = rollouts_of(even if kind == "ideal" else uneven)
        all_shares = grpo.make_minibatches(rows, flags, 0)
        shares[kind], tokens[kind] = (
            all_shares[rank],
            [
                [
                    sum(
                        batch["token_ids"].size if kind == "padded" else batch["lengths"].sum()
                        for batch in batches
                    )
                ]
                for ((batches, _),), _ in all_shares
            ],
        )
    for _ in range(args.steps + 2):
        for kind in times:
            trainer.model.config._attn_implementation = attention[kind]
            torch.cuda.synchronize()
            torch.distributed.barrier()
            start = time.perf_counter()
            trainer.train_step(shares[kind], None)
            torch.cuda.synchronize()
            times[kind].append(time.perf_counter() - start)
    if rank == 0:
        row = {"model": args.model, "gpus": args.gpus, "tokens": int(uneven.sum())}
        for kind in times:
            timed = times[kind][2:]
            row[f"{kind}_s"] = [statistics.median(timed), min(timed), max(timed)]
            row[f"{kind}_tokens_of_ranks"] = [int(each[0]) for each in tokens[kind]]
        results.append(row)


def main(args: Args) -> None:
    from common.refit import open_store

    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        make_checkpoint(args.model, path, torch.bfloat16)
        store, context = open_store("127.0.0.1", 300), torch.multiprocessing.get_context("spawn")
        with context.Manager() as manager:
            shared = manager.list()
            arguments = (path, store.port, args, shared)
            torch.multiprocessing.spawn(rank_process, arguments, nprocs=args.gpus)
            row = list(shared)[0]
    ideal = row["ideal_s"][0]
    for kind in ("packed", "padded"):
        row[f"{kind}_over_ideal"] = row[f"{kind}_s"][0] / ideal
    print(json.dumps(row, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Args))
