"""Seconds of an optimizer step, MFU and memory: `algos/grpo.py`'s trainer beside plain FSDP2 with transformers.

    python scripts/bench/train_step.py --models 0.6b 1.7b 4b          one GPU
    python scripts/bench/train_step.py --models 0.6b --gpus 2         as many tokens on each of two
    python scripts/bench/train_step.py --models moe32 dense3k --gpus 2 --variants ours
    python scripts/bench/train_step.py --models 4b 8b --variants ours "ours, offload" "ours, recompute"

A step is the forward and backward pass of every micro-batch, clipping to a global norm and AdamW, on rows of
one length: nobody pads. Three plain references, all with FSDP2 around each layer, bf16 compute, fp32 weights,
fused AdamW and transformers' own model with sdpa: "hf" (log-probs from all logits), "hf, compiled" (the same
with torch.compile on each layer) and "hf, liger" (Liger's kernels, and its fused cross-entropy for a loss).

MFU = tokens/s x (6 x weights that a token meets + attention) / 989 TFLOP/s, H100's and H200's dense bf16 peak.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
import torch.distributed as dist
from random_models import EXPERTS, flops_per_token, make_checkpoint

PEAK_FLOPS = 989e12
OURS = {
    "ours": {},
    "ours, compiled": {"compile": True},
    "ours, recompute": {"activation_checkpointing": True},
    "ours, offload": {"offload_optimizer": True},
    "ours, offload, recompute": {"offload_optimizer": True, "activation_checkpointing": True},
}


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["0.6b"])
    """Shapes of scripts/bench/random_models.py."""
    variants: list[str] = field(
        default_factory=lambda: ["hf", "ours", "hf, compiled", "ours, compiled", "hf, liger"]
    )
    """What is timed, in this order."""
    gpus: int = 1
    """Ranks, each on a GPU of its own."""
    tokens: int = 16_384
    """Tokens of a step on each rank."""
    micro_batch_tokens: int = 8_192
    """Tokens of a micro-batch."""
    length: int = 1_024
    """Tokens of a row."""
    steps: int = 5
    """Timed steps, after two that are not."""
    out: str = ""
    """File for the figures as JSON."""


def rows_of(args: Args, seed: int) -> list[list[dict]]:
    """Rollouts of one row each, for all ranks."""
    rng, rollouts = np.random.default_rng(seed), []
    for _ in range(args.gpus * args.tokens // args.length):
        ids = rng.integers(0, 150_000, args.length + 1).astype(np.int32)  # the model sees one less
        mask = np.arange(args.length + 1) >= args.length // 8
        logprobs = np.full(args.length + 1, -12.0, np.float32)
        row = {"token_ids": ids, "action_mask": mask, "logprobs": logprobs, "advantage": rng.normal()}
        rollouts.append([row])
    return rollouts


def our_step(name: str, path: str, variant: str, rank: int, port: int, args: Args):
    """The trainer of algos/grpo.py, and a function that takes a step."""
    from algos import grpo

    flags = grpo.Args(lr=1e-6, correction="none", max_grad_norm=1.0)
    flags.parallel.num_trainers = args.gpus
    flags.parallel.trainer_ep = args.gpus if name in EXPERTS else 1
    flags.parallel.micro_batch_tokens = args.micro_batch_tokens + args.micro_batch_tokens // args.length
    flags.parallel.packing = "off" if name in EXPERTS else "on"
    vars(flags.parallel).update(OURS[variant])
    trainer = grpo.Trainer(flags, path, rank, True)
    trainer.setup("127.0.0.1", port, "bfloat16", num_workers=0)
    shares = [grpo.make_minibatches(rows_of(args, seed), flags, seed)[rank] for seed in range(2)]
    return trainer, lambda number: trainer.train_step(shares[number % 2], None)


def plain_step(path: str, variant: str, rank: int, port: int, args: Args):
    """Plain FSDP2, and a function that takes a step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    from common.refit import connect_store

    store = connect_store("127.0.0.1", port, 300)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=args.gpus)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", device_map="cuda"
    )
    if variant == "hf, liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        if variant == "hf, compiled":
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rollouts = [rows[0] for rows in rows_of(args, 0)][rank :: args.gpus]
    ids = torch.tensor(np.stack([row["token_ids"] for row in rollouts])).long().cuda()
    mask = torch.tensor(np.stack([row["action_mask"] for row in rollouts])).cuda()[:, 1:]
    advantages = torch.tensor([row["advantage"] for row in rollouts]).cuda()[:, None]
    size = args.micro_batch_tokens // args.length
    parts = [slice(start, start + size) for start in range(0, len(ids), size)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        for index, part in enumerate(parts):
            model.set_requires_gradient_sync(index + 1 == len(parts))
            if variant == "hf, liger":
                loss = model(input_ids=ids[part, :-1], labels=ids[part, :-1], use_cache=False).loss
            else:
                logits = model(input_ids=ids[part, :-1], use_cache=False).logits
                logprobs = logits.float().log_softmax(-1).gather(-1, ids[part, 1:, None]).squeeze(-1)
                loss = -(logprobs * advantages[part] * mask[part]).sum() / mask.sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, step


def measure(rank: int, name: str, path: str, ports: list[int], args: Args, results) -> None:
    """One rank: every variant one after the other."""
    torch.cuda.set_device(0)
    for variant, port in zip(args.variants, ports, strict=True):
        torch.cuda.reset_peak_memory_stats()
        start, row = time.perf_counter(), {"model": name, "variant": variant, "gpus": args.gpus}
        try:
            if variant.startswith("ours"):
                kept, step = our_step(name, path, variant, rank, port, args)
            else:
                kept, step = plain_step(path, variant, rank, port, args)
            row["load_s"], times = round(time.perf_counter() - start, 1), []
            for number in range(args.steps + 2):
                torch.cuda.synchronize()
                start = time.perf_counter()
                step(number)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            timed = times[2:]
            row |= {
                "first_s": round(times[0], 2),
                "step_s": [statistics.median(timed), min(timed), max(timed)],
            }
            rate = args.tokens * args.gpus / statistics.median(timed)
            flops = flops_per_token(name, args.length)
            row |= {"tokens_per_s": round(rate), "mfu": rate * flops / (PEAK_FLOPS * args.gpus)}
        except (RuntimeError, ImportError, TypeError) as error:  # memory, mostly: the others go on
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        row["gpu_mem_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if rank == 0:
            print(json.dumps(row), flush=True)
            results.append(row)
        kept = step = None
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def rank_process(rank: int, *arguments) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    measure(rank, *arguments)


def main(args: Args) -> None:
    from common.refit import open_store

    rows = []
    for name in args.models:
        folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        make_checkpoint(name, folder.name, torch.bfloat16)
        stores = [open_store("127.0.0.1", 300) for _ in args.variants]
        ports = [store.port for store in stores]
        if args.gpus == 1:
            measure(0, name, folder.name, ports, args, rows)
        else:
            context = torch.multiprocessing.get_context("spawn")
            with context.Manager() as manager:
                shared = manager.list()
                arguments = (name, folder.name, ports, args, shared)
                torch.multiprocessing.spawn(rank_process, arguments, nprocs=args.gpus)
                rows += list(shared)
        folder.cleanup()
        if args.out:
            Path(args.out).write_text(json.dumps(rows, indent=1))
    for row in rows:
        if "error" in row:
            print(f"{row['model']:8} {row['variant']:26} {row['error'][:80]}")
            continue
        median, low, high = row["step_s"]
        speed = (
            f"{median:.3f} s ({low:.3f} to {high:.3f})  {row['tokens_per_s']:7} tok/s  MFU {row['mfu']:.1%}"
        )
        print(f"{row['model']:8} {row['variant']:26} {speed}  {row['gpu_mem_peak_gb']} GB")


if __name__ == "__main__":
    main(tyro.cli(Args))
