"""What weight updates cost an engine that is busy: none, in mid-rollout, and after everything has ended.

    python scripts/bench/partial_rollout.py                  a CPU: tiny
    python scripts/bench/partial_rollout.py --model 0.6b     one GPU, shared with a trainer that only sends

The same requests, whose lengths are lognormal (deviation as large as the mean), with as many in flight as slots:
`none` has no update; `keep` pauses every --interval-s, sends moved weights and goes on with what is in flight,
whose KV is computed again; `drain` stops admitting, waits for what is in flight, and then sends. In turns; the
rate is sampled tokens over the seconds that all of them take.
"""

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import refit as bench  # the engine, and the trainer's rank, of that benchmark

import ray
import torch
from random_models import make_checkpoint

KINDS = ("none", "keep", "drain")


@dataclass
class Args:
    model: str = "tiny"
    """tiny, or a shape of random_models.py."""
    requests: int = 400
    """Of a round."""
    slots: int = 64
    """Requests in flight."""
    mean_tokens: int = 64
    """Mean of the sampled tokens of a request; four times as many at most."""
    interval_s: float = 4.0
    """Seconds from an update to the next."""
    rounds: int = 2
    """Of each kind, in turns."""
    out: str = ""
    """File for the figures as JSON."""


class Worker(bench.Worker):
    async def work(self, lengths: list[int], slots: int) -> dict:
        """All requests, `slots` at a time. Tokens sampled, tokens whose KV was computed again, versions."""
        self.open, self.active, todo = asyncio.Event(), 0, iter(lengths)
        self.open.set()
        sampled, again, versions = 0, 0, 0

        async def slot() -> None:
            nonlocal sampled, again, versions
            for length in todo:
                await self.open.wait()
                self.active += 1
                (completion,) = await self.engine.generate(bench.PROMPTS[length % 16], 1, 1.0, length)
                self.active -= 1
                crossed = np.flatnonzero(np.diff(completion.versions))
                sampled += len(completion.token_ids)
                again += int((crossed + 1 + len(bench.PROMPTS[0])).sum())
                versions = max(versions, len(crossed) + 1)

        start = time.perf_counter()
        await asyncio.gather(*(slot() for _ in range(slots)))
        seconds = time.perf_counter() - start
        return {"tokens": sampled, "again": again, "most_versions": versions, "seconds": seconds}

    async def drain(self) -> None:
        self.open.clear()
        while self.active:
            await asyncio.sleep(0.001)

    def admit(self) -> None:
        self.open.set()


def round_of(kind: str, args: Args, lengths: list[int], worker, masters, version: int) -> tuple[dict, int]:
    going, pauses = worker.work.remote(lengths, args.slots), []
    while kind != "none":
        done, _ = ray.wait([going], timeout=args.interval_s)
        if done:
            break
        if kind == "drain":
            ray.get(worker.drain.remote(), timeout=300)
        version += 1
        receiving = worker.refit.remote(version)
        ray.get(masters.send.remote(version), timeout=120)
        pauses.append(ray.get(receiving, timeout=120)["pause_s"])
        worker.admit.remote()
    return ray.get(going, timeout=900) | {"updates": len(pauses), "pauses": pauses}, version


def main(args: Args) -> None:
    from common.models import make_tiny
    from common.refit import open_store

    on_gpu = torch.cuda.is_available()
    dtype, env = "bfloat16" if on_gpu else "float32", {"GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    os.environ |= env
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.2",
        runtime_env={"env_vars": env}, log_to_driver=False,
    )  # fmt: skip
    folder = tempfile.mkdtemp(dir="/dev/shm" if on_gpu else None)
    path = f"{folder}/model"
    if args.model == "tiny":
        make_tiny(Path(path))
    else:
        make_checkpoint(args.model, path, getattr(torch, dtype))
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": first}} if on_gpu else {}}
    worker, masters = (ray.remote(kind).options(**options).remote() for kind in (Worker, bench.Masters))
    sizes = {"kv_cache_gb": 16.0 if on_gpu else 0.5, "num_engines": 1}
    ray.get(worker.start.remote(path, dtype, "instar", sizes, 0.4 * on_gpu), timeout=400)
    store = open_store("127.0.0.2", 120)
    address = ("127.0.0.2", store.port)
    ray.get(masters.setup.remote(path, dtype, 0, 1, *address, 0), timeout=300)
    ray.get([masters.join.remote(1), worker.connect.remote(*address, 0, 1)], timeout=120)
    sigma = np.sqrt(np.log(2))
    drawn = np.random.default_rng(0).lognormal(np.log(args.mean_tokens) - sigma**2 / 2, sigma, args.requests)
    lengths = np.clip(drawn, 4, 4 * args.mean_tokens).astype(int).tolist()
    version, rows = 0, {kind: [] for kind in KINDS}
    ray.get([worker.refit.remote(0), masters.send.remote(0)], timeout=120)  # with the gate
    ray.get(worker.work.remote(lengths[: args.slots], args.slots), timeout=300)  # warms up
    ray.get(masters.move.remote(1), timeout=60)
    for _ in range(args.rounds):
        for kind in KINDS:
            row, version = round_of(kind, args, lengths, worker, masters, version)
            rows[kind].append(row | {"rate": row["tokens"] / row["seconds"]})
    rates = {kind: statistics.median(row["rate"] for row in rows[kind]) for kind in KINDS}
    for kind in KINDS:
        row = rows[kind][-1]
        print(
            f"{kind:5} {rates[kind]:8.0f} tokens/s  {rates[kind] / rates['none']:.3f} of none  "
            f"{row['updates']} updates, {row['again']} of {row['tokens']} tokens' KV again, "
            f"up to {row['most_versions']} versions, pause {1e3 * np.mean(row['pauses'] or [0]):.0f} ms"
        )
    print(f"keep / drain: {rates['keep'] / rates['drain']:.3f}")
    if args.out:
        Path(args.out).write_text(json.dumps({"args": vars(args), "rounds": rows}, indent=1) + "\n")
    for actor in (worker, masters):
        ray.kill(actor)
    ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Args))
