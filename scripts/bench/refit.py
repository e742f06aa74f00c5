"""Seconds of a refit beside raw copies and vLLM's own weight transfer, in turns, and whether it was right.

    python scripts/bench/refit.py --models tiny                     a CPU
    python scripts/bench/refit.py --models 0.6b 4b 8b moe           one GPU, which engines and trainer share

The models have random weights. For each one: a trainer (fp32 masters, FSDP2) and an engine on its old weights;
every refit sends moved weights, and the last of them are also loaded from disk by two fresh engines. Right is
an engine whose log-probs are as far from a fresh one as two fresh ones are from each other.
"""

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
import torch
import torch.distributed as dist

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096}
SIZES = {
    "0.6b": (1024, 28, 16, 3072),
    "4b": (2560, 36, 32, 9728),
    "8b": (4096, 36, 32, 12288),
    "moe": (1024, 8, 16, 3072),
}  # hidden size, layers, heads, intermediate size
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
PROMPTS = [[5 + 7 * i % 90, 11, 23 + i, 40, 71, 8 + i, 60, 33] * 6 for i in range(16)]


@dataclass
class Args:
    models: list[str] = field(default_factory=lambda: ["tiny"])
    """tiny, 0.6b, 4b, 8b (Qwen3's shapes; 8b unties its head), moe (8 experts)."""
    refits: int = 6
    """Timed refits of each kind; medians and ranges count."""
    in_flight: int = 64
    """Sequences that are being sampled in the refits under load."""
    alone: bool = False
    """Our engine alone, without the fresh ones and vLLM's: seconds only."""
    out: str = ""
    """File for the figures as JSON."""


class Worker:
    """An engine as a run has it; `backend` "ipc" is vLLM's own transfer instead."""

    async def start(self, path: str, dtype: str, backend: str, gpus: float, kv_cache_gb: float) -> None:
        from common.rollout import Engine, EngineFlags

        if backend != "instar":
            import vllm.config
            import vllm.engine.arg_utils  # first: it takes the class into its annotations

            plain = vllm.config.WeightTransferConfig
            vllm.config.WeightTransferConfig = lambda backend: plain(backend="ipc")
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        flags = EngineFlags(max_model_len=1024, kv_cache_gb=kv_cache_gb, gpu_memory_utilization=0.2)
        self.engine = Engine(path, dtype, 0, flags, gpus)
        await self.engine.start([1])

    async def connect(self, host: str, port: int) -> None:
        await self.engine.connect(host, port, 0, 120.0, 120.0)

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

    async def logprobs(self) -> list[float]:
        return [value for ids in PROMPTS for value in await self.engine.prompt_logprobs(ids)]

    async def call(self, method: str, *values):
        """One of vLLM's own weight transfer calls."""
        return await getattr(self.engine.llm, method)(*values)


def make_checkpoint(name: str, path: str, dtype: torch.dtype) -> None:
    """Random weights, large enough that different ones give different log-probs."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    kinds = (Qwen3MoeConfig, Qwen3MoeForCausalLM) if name == "moe" else (Qwen3Config, Qwen3ForCausalLM)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shape = dict(zip(keys, SIZES[name], strict=True)) | (EXPERTS if name == "moe" else {})
    config = kinds[0](**QWEN3, **shape, tie_word_embeddings=name != "8b")
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kinds[1](config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(path, max_shard_size="4GB")


def load_masters(path: str, device: str) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map=device)
    if device == "cuda":
        fully_shard(model)
        torch.cuda.empty_cache()  # the unsharded copy
    return model


@torch.no_grad()
def move(model: torch.nn.Module, seed: int) -> None:
    """The same small change of all weights for the same seed."""
    for index, parameter in enumerate(model.parameters()):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        generator = torch.Generator(local.device).manual_seed(1000 * seed + index)
        local.add_(0.002 * torch.randn(local.shape, generator=generator, device=local.device))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a trainer, too, is done with its step before the refit


def save_moved(model: torch.nn.Module, old: str, new: str, dtype: torch.dtype) -> None:
    """The weights as the engine would be sent them, beside the files of the old checkpoint."""
    from huggingface_hub import save_torch_state_dict

    from common.refit import checkpoint_tensors

    shutil.copytree(old, new, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor.to(dtype).cpu() for name, tensor in checkpoint_tensors(model.named_parameters())}
    save_torch_state_dict(tensors, new, max_shard_size="4GB")


class Theirs:
    """vLLM's own IPC transfer, driven by its own trainer-side engine."""

    def __init__(self, worker, model: torch.nn.Module, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        class Cast(ModuleSource):
            def __iter__(self):
                return ((name, tensor.to(dtype)) for name, tensor in super().__iter__())

        self.worker = worker
        self.engine = IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(rank=0), client=self, source=Cast(model)
        )

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


def copy_seconds(num_bytes: int) -> float:
    """A plain copy of as many bytes from GPU memory to GPU memory, from the time of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 4 * num_bytes / (1 << 30)


def measure(name: str, args: Args) -> dict:
    from common.models import make_tiny
    from common.refit import WeightSender, hash_words, open_store

    on_gpu = torch.cuda.is_available()
    device, dtype, gpus = ("cuda", "bfloat16", 0.2) if on_gpu else ("cpu", "float32", 0.0)
    folder = tempfile.mkdtemp(dir="/dev/shm" if on_gpu else None)
    old, new = f"{folder}/old", f"{folder}/new"
    phases, clock = {}, time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        phases[phase], clock = round(time.perf_counter() - clock, 1), time.perf_counter()

    if name == "tiny":
        make_tiny(Path(old))
    else:
        make_checkpoint(name, old, getattr(torch, dtype))
    masters = load_masters(old, device)
    for seed in range(args.refits + 3):
        move(masters, seed)
    save_moved(masters, old, new, getattr(torch, dtype))
    del masters
    if on_gpu:
        torch.cuda.empty_cache()
    lap("checkpoints")

    kinds = {"ours": (old, "instar"), "fresh a": (new, "instar"), "fresh b": (new, "instar")}
    kinds |= {"vllm": (old, "ipc")} if on_gpu else {}
    if name == "8b":
        del kinds["fresh b"], kinds["vllm"]  # one GPU has no room for them
    kinds = {"ours": kinds["ours"]} if args.alone else kinds
    actor = ray.remote(Worker)
    workers = {kind: actor.options(num_cpus=0, num_gpus=gpus).remote() for kind in kinds}
    starts = [
        workers[kind].start.remote(path, dtype, how, gpus, 8.0 if on_gpu and kind == "ours" else 0.5)
        for kind, (path, how) in kinds.items()
    ]
    masters = load_masters(old, device)
    ray.get(starts, timeout=400)
    lap("engines")

    ours, store = workers["ours"], open_store("127.0.0.2", 120)
    sender = WeightSender(masters, 0, dtype, 120)
    joining = threading.Thread(target=sender.join, args=(store, 2))
    joining.start()
    ray.get(ours.connect.remote("127.0.0.2", store.port), timeout=120)
    joining.join()

    def refit(version: int) -> dict:
        receiving = ours.refit.remote(version)
        start = time.perf_counter()
        sent = sender.send(version)
        return sent | {"send_s": time.perf_counter() - start} | ray.get(receiving, timeout=120)

    meet, met = sender.wire.meet, []

    def timed_meet() -> None:
        start = time.perf_counter()
        meet()
        met.append(time.perf_counter() - start)

    sender.wire.meet = timed_meet
    start = time.perf_counter()
    refit(0)
    gate_s = time.perf_counter() - start
    rows = []
    theirs = Theirs(workers["vllm"], masters, getattr(torch, dtype)) if "vllm" in workers else None
    before = ray.get(ours.logprobs.remote())
    for seed in range(args.refits):
        move(masters, seed)
        met.clear()
        row = {"noop_s": ray.get(ours.noop.remote())} | refit(seed + 1)
        row["meet_s"] = sum(met)  # of send_s: until the GPU has packed and the engine has placed
        if theirs:
            row["vllm_s"] = theirs.refit()
        if on_gpu:
            row["copy_s"] = copy_seconds(row["bytes"])
        rows.append(row)
    lap("idle refits")
    loaded, noops = [], []
    going = ours.load.remote(args.in_flight, 600 if on_gpu else 60)
    for seed in range(args.refits, args.refits + 3):
        time.sleep(0.3)
        noops.append(ray.get(ours.noop.remote()))
        move(masters, seed)
        loaded.append(refit(seed + 1))
    versions = ray.get(going, timeout=300)
    lap("refits under load")

    logprobs = {k: torch.tensor(ray.get(w.logprobs.remote())) for k, w in workers.items() if k != "vllm"}
    differences = {"moved": (logprobs["ours"] - torch.tensor(before)).abs()}
    if "fresh a" in workers:
        differences["difference"] = (logprobs["ours"] - logprobs["fresh a"]).abs()
    if "fresh b" in workers:
        differences["noise"] = (logprobs["fresh a"] - logprobs["fresh b"]).abs()
    bucket = torch.zeros(min(rows[0]["bytes"], 1 << 30), dtype=torch.uint8, device=device)
    hash_words(bucket.view(torch.int32))
    start = time.perf_counter()
    int(hash_words(bucket.view(torch.int32)))
    hash_s = (time.perf_counter() - start) * rows[0]["bytes"] / len(bucket)
    for worker in workers.values():
        ray.kill(worker)
    shutil.rmtree(folder)
    del masters, sender, theirs, bucket
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()

    def spread(key: str, of: list[dict]) -> list[float]:
        values = [row[key] for row in of if key in row]
        return [round(f(values), 5) for f in (statistics.median, min, max)] if values else []

    keys = ("noop_s", "pause_s", "pause_call_s", "receive_s", "send_s", "meet_s", "copy_s", "vllm_s")
    result = {key: spread(key, rows) for key in keys} | {"gate_s": round(gate_s, 2), "phases": phases}
    result |= {f"loaded_{key}": spread(key, loaded) for key in ("pause_s", "pause_call_s", "receive_s")}
    result |= {"loaded_noop_s": [round(value, 5) for value in sorted(noops)], "hash_s": round(hash_s, 5)}
    if on_gpu:
        result["trainer_gpu_mem_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    result |= {key: rows[0][key] for key in ("bytes", "mode", "transport", "checked_tensors", "tensors")}
    for kind, values in differences.items():
        result |= {f"mean_{kind}": float(values.mean()), f"max_{kind}": float(values.max())}
    result["sequences_over_several_versions"] = f"{sum(v > 1 for v in versions)} of {len(versions)}"
    return result


def main(args: Args) -> None:
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= env
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.2",
        runtime_env={"env_vars": env}, log_to_driver=False,
    )  # fmt: skip
    if torch.cuda.is_available():
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
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
