"""Seconds of a refit beside raw copies and vLLM's own weight transfer, in turns, and whether it was right.

    python scripts/bench/refit.py --models tiny                       a CPU
    python scripts/bench/refit.py --models 0.6b 4b 8b moe             one GPU for both
    python scripts/bench/refit.py --layout apart --models 4b 8b       trainer and engine on a GPU each
    python scripts/bench/refit.py --layout pairs --models 0.6b        two GPUs, a rank and an engine on each
    python scripts/bench/refit.py --layout tp --models 0.6b           the same with one engine over both

The models have random weights. For each one: a trainer (fp32 masters, FSDP2) and engines on its old weights;
every refit sends moved weights, and the last of them are also loaded from disk by two fresh engines. Right is
an engine whose log-probs are as far from a fresh one as two fresh ones are from each other.

vLLM's own engine is "ipc" on one GPU and "nccl" between two. The latter needs a newer NCCL than torch 2.11
brings, in VLLM_NCCL_SO_PATH; without that it is left out.
"""

import asyncio
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
import torch
import torch.distributed as dist
from random_models import make_checkpoint

PROMPTS = [[5 + 7 * i % 90, 11, 23 + i, 40, 71, 8 + i, 60, 33] * 6 for i in range(16)]


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["tiny"])
    """tiny, 0.6b, 4b, 8b (Qwen3's shapes; 8b unties its head), moe (8 experts)."""
    layout: Literal["shared", "apart", "pairs", "tp"] = "shared"
    """Which GPUs the trainer's ranks and the engines under test have; see above."""
    refits: int = 6
    """Timed refits of each kind; medians and ranges count."""
    in_flight: int = 64
    """Sequences that are being sampled in the refits under load."""
    alone: bool = False
    """Our engine alone, without the fresh ones and vLLM's: seconds only."""
    vllm: bool = True
    """vLLM's own engine beside ours."""
    bucket_mb: int = 0
    """Size of a bucket in MiB; 0 leaves the run's own."""
    out: str = ""
    """File for the figures as JSON."""


# Which GPUs each trainer rank has, and each engine under test.
GPUS = {
    "shared": (["0"], ["0"]),
    "apart": (["0"], ["1"]),
    "pairs": (["0", "1"], ["0", "1"]),
    "tp": (["0", "1"], ["0,1"]),
}


class Worker:
    """An engine as a run has it; another `backend` than "instar" is vLLM's own transfer instead."""

    async def start(self, path: str, dtype: str, backend: str, sizes: dict, gpus: float) -> None:
        from common.rollout import Engine, EngineFlags

        if backend != "instar":
            import vllm.config
            import vllm.engine.arg_utils  # first: it takes the class into its annotations

            plain = vllm.config.WeightTransferConfig
            kind = backend
            vllm.config.WeightTransferConfig = lambda backend: plain(backend=kind)
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        flags = EngineFlags(max_model_len=1024, gpu_memory_utilization=0.2, **sizes)
        self.engine = Engine(path, dtype, 0, flags, gpus)
        await self.engine.start([1])

    async def connect(self, host: str, port: int, index: int, num_trainers: int) -> None:
        await self.engine.connect(host, port, index, num_trainers, 120.0, 120.0)

    async def noop(self) -> float:
        start = time.perf_counter()
        await self.engine.pause()
        await self.engine.resume()
        return time.perf_counter() - start

    async def refit(self, version: int) -> dict:
        start = time.perf_counter()
        await self.engine.pause()
        paused = time.perf_counter()
        report = await self.engine.receive_weights(version)
        await self.engine.resume()
        return report | {"pause_call_s": paused - start, "pause_s": time.perf_counter() - start}

    async def load(self, count: int, tokens: int) -> list[int]:
        """`count` sequences of `tokens` sampled tokens; how many versions each one has."""
        prompts = PROMPTS[: max(1, count // 8)]
        groups = await asyncio.gather(*(self.engine.generate(ids, 8, 1.0, tokens) for ids in prompts))
        return [len(set(completion.versions.tolist())) for group in groups for completion in group]

    async def probe(self) -> float:
        """Seconds of the check that a run makes after each refit, beside its next step."""
        start = time.perf_counter()
        await self.engine.prompt_logprobs(PROMPTS[0])
        return time.perf_counter() - start

    async def logprobs(self) -> list[float]:
        return [value for ids in PROMPTS for value in await self.engine.prompt_logprobs(ids)]

    async def call(self, method: str, *values):
        """One of vLLM's own weight transfer calls."""
        return await getattr(self.engine.llm, method)(*values)


def load_masters(path: str, device: str) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map=device)
    if device == "cuda":
        fully_shard(model)
        torch.cuda.empty_cache()  # the unsharded copy
    return model


class Masters:
    """A trainer's rank: fp32 weights, and the sending half of a refit."""

    def setup(
        self, path: str, dtype: str, rank: int, world_size: int, host: str, port: int, bucket_mb: int
    ) -> None:
        from common.refit import BUCKET_BYTES, WeightSender, connect_store

        BUCKET_BYTES.update(dict.fromkeys(BUCKET_BYTES, bucket_mb << 20) if bucket_mb else {})
        self.path, self.dtype, self.rank, self.world_size = path, dtype, rank, world_size
        self.on_gpu = torch.cuda.is_available()
        self.device = "cuda" if self.on_gpu else "cpu"
        self.store = connect_store(host, port, 120)
        backend = "nccl" if self.on_gpu else "gloo"
        dist.init_process_group(backend, store=self.store, rank=rank, world_size=world_size)
        self.model = load_masters(path, self.device)
        self.sender = WeightSender(self.model, rank, dtype, 120)
        self.initial = [shard.clone() for shard in self.shards()]

    def join(self, num_workers: int) -> None:
        self.sender.join(self.store, self.world_size, num_workers)

    @torch.no_grad()
    def move(self, seed: int) -> None:
        """The same small change of all weights for the same seed."""
        for index, local in enumerate(self.shards()):
            number = 10_000 * seed + 10 * index + self.rank
            generator = torch.Generator(local.device).manual_seed(number)
            local.add_(0.002 * torch.randn(local.shape, generator=generator, device=local.device))
        if self.on_gpu:
            torch.cuda.synchronize()  # a trainer, too, is done with its step before the refit

    def save(self, folder: str) -> None:
        """The weights as the engine would be sent them, beside the files of the old checkpoint."""
        from huggingface_hub import save_torch_state_dict

        from common.refit import checkpoint_tensors

        dtype, tensors = getattr(torch, self.dtype), {}
        for name, tensor in checkpoint_tensors(self.model.named_parameters()):
            tensors |= {name: tensor.to(dtype).cpu()} if self.rank == 0 else {}
        if self.rank == 0:
            shutil.copytree(self.path, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
            save_torch_state_dict(tensors, folder, max_shard_size="4GB")

    @torch.no_grad()
    def restore(self) -> None:
        """Back to the weights that the engines under test start from."""
        for parameter, initial in zip(self.shards(), self.initial, strict=True):
            parameter.copy_(initial)
        self.initial = []
        if self.on_gpu:
            torch.cuda.empty_cache()

    def shards(self) -> list[torch.Tensor]:
        parameters = (parameter.detach() for parameter in self.model.parameters())
        return [each.to_local() if hasattr(each, "to_local") else each for each in parameters]

    def send(self, version: int) -> dict:
        start = time.perf_counter()
        report = self.sender.send(version)
        return report | {"send_s": time.perf_counter() - start}

    def open_raw(self) -> None:
        """A plain group with the process on the other GPU."""
        self.raw = dist.ProcessGroupNCCL(dist.PrefixStore("raw", self.store), 0, 2)

    def raw_seconds(self, num_bytes: int) -> float:
        return broadcast_seconds(self.raw, num_bytes)

    def copy_seconds(self, num_bytes: int) -> float:
        """A plain copy of as many bytes from GPU memory to GPU memory, from the time of 1 GiB."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 4 * num_bytes / (1 << 30)

    def hash_seconds(self, num_bytes: int) -> float:
        from common.refit import hash_words

        bucket = torch.zeros(min(num_bytes, 1 << 30), dtype=torch.uint8, device=self.device)
        hash_words(bucket.view(torch.int32))
        start = time.perf_counter()
        int(hash_words(bucket.view(torch.int32)))
        return (time.perf_counter() - start) * num_bytes / len(bucket)

    def peak_gb(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 1e9, 1) if self.on_gpu else 0.0

    def join_theirs(self, worker, backend: str) -> None:
        self.theirs = Theirs(worker, self.model, getattr(torch, self.dtype), backend)

    def their_refit(self) -> float:
        return self.theirs.refit()


def broadcast_seconds(group, num_bytes: int) -> float:
    """`num_bytes` from rank 0 to rank 1 in buckets of 1 GiB."""
    from common.refit import broadcast

    sizes = [1 << 30] * (num_bytes >> 30) + [num_bytes % (1 << 30)]
    bucket = torch.empty(max(sizes), dtype=torch.uint8, device="cuda")
    broadcast(group, bucket[:1024]).wait()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for size in sizes:
        broadcast(group, bucket[:size])
    torch.cuda.synchronize()
    return time.perf_counter() - start


class RawPeer:
    """The other end of a raw broadcast."""

    def open_raw(self, host: str, port: int) -> None:
        from common.refit import connect_store

        store = dist.PrefixStore("raw", connect_store(host, port, 120))
        torch.cuda.set_device(0)
        self.raw = dist.ProcessGroupNCCL(store, 1, 2)

    def raw_seconds(self, num_bytes: int) -> float:
        return broadcast_seconds(self.raw, num_bytes)


class Theirs:
    """vLLM's own transfer, driven by its own trainer-side engine."""

    def __init__(self, worker, model: torch.nn.Module, dtype: torch.dtype, backend: str):
        from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
        from vllm.distributed.weight_transfer.base import ModuleSource

        class Cast(ModuleSource):
            def metadata(self):
                return [replace(each, dtype=dtype) for each in super().metadata()]

            def __iter__(self):
                return ((name, tensor.to(dtype)) for name, tensor in super().__iter__())

        self.worker = worker
        if backend == "ipc":
            kind, info = ipc_engine.IPCTrainerWeightTransferEngine, ipc_engine.IPCTrainerInitInfo(rank=0)
        else:
            with socket.create_server(("127.0.0.2", 0)) as free:
                address = {"master_address": "127.0.0.2", "master_port": free.getsockname()[1]}
            kind = nccl_engine.NCCLTrainerWeightTransferEngine
            info = nccl_engine.NCCLTrainerInitInfo(rank=0, world_size=2, **address)
        self.engine = kind.trainer_init(info, client=self, source=Cast(model))

    def _call(self, method: str, *values) -> None:
        ray.get(self.worker.call.remote(method, *values), timeout=300)

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call("update_weights", WeightTransferUpdateRequest(update_info=info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def refit(self) -> float:
        start = time.perf_counter()
        self._call("pause_generation")
        self.engine.send_weights()
        self._call("resume_generation")
        return time.perf_counter() - start


def measure(name: str, args: Args) -> dict:
    from common.models import make_tiny
    from common.refit import open_store

    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    trainer_gpus, engine_gpus = GPUS[args.layout]
    folder = tempfile.mkdtemp(dir="/dev/shm" if on_gpu else None)
    old, new, phases, clock = f"{folder}/old", f"{folder}/new", {}, time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        phases[phase], clock = round(time.perf_counter() - clock, 1), time.perf_counter()

    def everyone(actors: list, method: str, *values) -> list:
        return ray.get([getattr(actor, method).remote(*values) for actor in actors], timeout=300)

    def spawn(kind: type, gpus: str):
        env = {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus}} if on_gpu else {}
        return ray.remote(kind).options(num_cpus=0, runtime_env=env).remote()

    if name == "tiny":
        make_tiny(Path(old))
    else:
        make_checkpoint(name, old, getattr(torch, dtype))
    lap("checkpoint")

    # ours start on the old weights; the trainer moves its own, saves them for the fresh ones and goes back
    sizes = {"kv_cache_gb": 8.0 if on_gpu else 0.5, "engine_tp": len(engine_gpus[0].split(","))}
    sizes["num_engines"] = len(engine_gpus)
    ours = [spawn(Worker, gpus) for gpus in engine_gpus]
    starts = [each.start.remote(old, dtype, "instar", sizes, 0.2 * on_gpu) for each in ours]
    fresh, theirs, small = [], [], sizes | {"kv_cache_gb": 0.5, "num_engines": 1}
    backend = "ipc" if args.layout == "shared" else "nccl"
    possible = args.layout == "shared" or args.layout == "apart" and "VLLM_NCCL_SO_PATH" in os.environ
    room = not (name == "8b" and args.layout == "shared")  # for more than two engines of 8B
    if on_gpu and args.vllm and not args.alone and possible and room:
        theirs = [spawn(Worker, engine_gpus[-1])]
        starts += [theirs[0].start.remote(old, dtype, backend, small, 0.2)]
    store = open_store("127.0.0.2", 120)
    masters, address = [spawn(Masters, gpus) for gpus in trainer_gpus], ("127.0.0.2", store.port)
    count = len(masters)
    setting_up = [
        each.setup.remote(old, dtype, rank, count, *address, args.bucket_mb)
        for rank, each in enumerate(masters)
    ]
    ray.get(setting_up, timeout=300)
    for seed in range(args.refits + 3):
        everyone(masters, "move", seed)
    everyone(masters, "save", new)
    everyone(masters, "restore")
    lap("trainer")
    if not args.alone:
        fresh = [spawn(Worker, engine_gpus[-1]) for _ in range(1 + room)]
        starts += [each.start.remote(new, dtype, "instar", small, 0.2 * on_gpu) for each in fresh]
    ray.get(starts, timeout=400)
    lap("engines")

    num_workers = len(ours) * sizes["engine_tp"]
    joining = [each.join.remote(num_workers) for each in masters]
    joining += [each.connect.remote(*address, index, count) for index, each in enumerate(ours)]
    ray.get(joining, timeout=120)

    def refit(version: int) -> dict:
        receiving = [each.refit.remote(version) for each in ours]
        sent = everyone(masters, "send", version)[0]
        reports = ray.get(receiving, timeout=120)
        slowest = {key: max(report[key] for report in reports) for key in ("pause_s", "receive_s")}
        return sent | reports[0] | slowest

    start = time.perf_counter()
    refit(0)
    gate_s = time.perf_counter() - start
    if theirs:
        ray.get(masters[0].join_theirs.remote(theirs[0], backend), timeout=120)
    if on_gpu and args.layout == "apart":
        peer = spawn(RawPeer, engine_gpus[0])
        ray.get([peer.open_raw.remote(*address), masters[0].open_raw.remote()], timeout=60)
    before, rows = everyone(ours, "logprobs"), []
    for seed in range(args.refits):
        everyone(masters, "move", seed)
        row = {"noop_s": ray.get(ours[0].noop.remote())} | refit(seed + 1)
        row["probe_s"] = ray.get(ours[0].probe.remote())
        if theirs:
            row["vllm_s"] = ray.get(masters[0].their_refit.remote(), timeout=300)
        if on_gpu and args.layout == "apart":
            calls = [each.raw_seconds.remote(row["bytes"]) for each in (masters[0], peer)]
            row["raw_s"] = min(
                ray.get(calls, timeout=60)
            )  # the later one to start did not wait for the other
        elif on_gpu:
            row["copy_s"] = ray.get(masters[0].copy_seconds.remote(row["bytes"]))
        rows.append(row)
    lap("idle refits")
    loaded, noops = [], []
    going = [each.load.remote(args.in_flight, 600 if on_gpu else 60) for each in ours]
    for seed in range(args.refits, args.refits + 3):
        time.sleep(0.3)
        noops.append({"loaded_noop_s": ray.get(ours[0].noop.remote())})
        everyone(masters, "move", seed)
        loaded.append(refit(seed + 1))
    versions = sum(ray.get(going, timeout=300), [])
    lap("refits under load")

    after, others = everyone(ours, "logprobs"), everyone(fresh, "logprobs")
    pairs = {
        "moved": list(zip(after, before)),
        "difference": [(each, f) for each in after for f in others[:1]],
    }
    pairs["noise"] = [tuple(others)] if len(others) == 2 else []
    result = {
        "layout": args.layout,
        "bucket_mb": args.bucket_mb,
        "gate_s": round(gate_s, 2),
        "phases": phases,
    }
    hash_s = ray.get(masters[0].hash_seconds.remote(rows[0]["bytes"]))
    result |= {"hash_s": round(hash_s, 5), "trainer_gpu_mem_peak_gb": max(everyone(masters, "peak_gb"))}
    for actor in [*ours, *fresh, *theirs, *masters]:
        ray.kill(actor)
    shutil.rmtree(folder)

    def spread(key: str, of: list[dict]) -> list[float]:
        values = [row[key] for row in of if key in row]
        return [round(f(values), 5) for f in (statistics.median, min, max)] if values else []

    keys = (
        "noop_s",
        "pause_s",
        "pause_call_s",
        "receive_s",
        "send_s",
        "probe_s",
        "copy_s",
        "raw_s",
        "vllm_s",
    )
    result |= {key: spread(key, rows) for key in keys}
    result |= {f"loaded_{key}": spread(key, loaded) for key in ("pause_s", "pause_call_s", "receive_s")}
    result["loaded_noop_s"] = spread("loaded_noop_s", noops)
    result |= {key: rows[0][key] for key in ("bytes", "mode", "transport", "checked_tensors", "tensors")}
    for kind, compared in pairs.items():
        gaps = [(torch.tensor(one) - torch.tensor(other)).abs() for one, other in compared]
        if gaps:
            result[f"mean_{kind}"] = max(float(gap.mean()) for gap in gaps)
            result[f"max_{kind}"] = max(float(gap.max()) for gap in gaps)
    result["sequences_over_several_versions"] = f"{sum(v > 1 for v in versions)} of {len(versions)}"
    return result


def main(args: Args) -> None:
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= env
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.2",
        runtime_env={"env_vars": env}, log_to_driver=False,
    )  # fmt: skip
    results = {}
    for name in args.models:
        results[name] = measure(name, args)
        print(f"{name}: {json.dumps(results[name], indent=1)}", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(results, indent=1))
    ray.shutdown()
    print("seconds: median (lowest to highest)")
    for name, row in results.items():
        for key, value in row.items():
            if key.endswith("_s") and isinstance(value, list) and len(value) == 3:
                rate = f"  {row['bytes'] / 1e9 / max(value[0], 1e-9):.1f} GB/s"
                print(f"{name:5} {key:20} {value[0]:.4f} ({value[1]:.4f} to {value[2]:.4f}){rate}")


if __name__ == "__main__":
    main(tyro.cli(Args))
