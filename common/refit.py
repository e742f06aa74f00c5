"""Weights from the trainer into running engines, every value checked. This half needs no vLLM.

A refit is one header (version, names, shapes, dtypes, checksums, bucket layout) and then packed buckets,
broadcast from trainer rank 0 to every engine worker through a process group of its own.
`common/refit_worker.py` is the receiving half. Rank 0 of the group is the sender.
"""

import json
import math
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

BUCKET_BYTES = 64 << 20
ALIGNMENT = 64
PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 0123456789"
CHUNK = 1 << 20  # elements hashed at a time, so that a checksum needs 8 MiB and no more


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent. It is never resumed after this."""


# --- Checksums


def checksum(tensor: torch.Tensor) -> int:
    """A position-sensitive 64-bit hash of a tensor's bits.

    The sum of value x odd weight modulo 2^64, so changing one element, or swapping two, always changes it.
    """
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().reshape(-1).view(width)
    weights = 2 * torch.arange(min(CHUNK, len(flat)), device=flat.device) * 0x1E3779B97F4A7C15 + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for index, chunk in enumerate(flat.split(CHUNK)):
        part = (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
        total += part * ((2 * index + 1) * 0x2545F4914F6CDD1D % (1 << 62) | 1)
    return int(total)


# --- What is sent


def checkpoint_tensors(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under the names that checkpoints (and vLLM's loaders) use: stacked experts become one per
    expert.

    `experts.gate_up_proj` [E, 2I, H] holds the I gate rows first, then the I up rows; `experts.down_proj` is
    [E, H, I]. FSDP shards are gathered, so every rank must iterate in step.
    """
    for name, parameter in named_parameters:
        tensor = parameter.detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                prefix = name.removesuffix("gate_up_proj")
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down
        else:
            yield name, tensor


@dataclass
class Entry:
    """Where a tensor lies in the packed stream."""

    name: str
    shape: list[int]
    dtype: str  # "float32", "bfloat16"
    bucket: int
    offset: int  # bytes from the start of its bucket

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        end = self.offset + math.prod(self.shape) * dtype.itemsize
        return bucket[self.offset : end].view(dtype).view(self.shape)


def lay_out(
    tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> tuple[list[Entry], list[int]]:
    """Packs tensors into buckets in order. Returns the entries and the size of each bucket in bytes."""
    entries, sizes = [], [0]
    for name, tensor in tensors:
        nbytes = math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT) * ALIGNMENT
        if sizes[-1] and sizes[-1] + nbytes > bucket_bytes:
            sizes.append(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, list(tensor.shape), dtype, len(sizes) - 1, sizes[-1]))
        sizes[-1] += nbytes
    return entries, sizes


# --- The learned plan


@dataclass
class Copy:
    """One copy of a loader: where it wrote, and which part of the source tensor."""

    destination: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, relative to the source tensor

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class CopyRecorder(TorchDispatchMode):
    """Records every `copy_` out of `source`'s storage while a loader runs."""

    def __init__(self, source: torch.Tensor):
        super().__init__()
        self.source_ptr, self.source_offset = source.untyped_storage().data_ptr(), source.storage_offset()
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            destination, source = args[0], args[1]
            if source.untyped_storage().data_ptr() == self.source_ptr:
                offset = source.storage_offset() - self.source_offset
                self.copies.append(Copy(destination, tuple(source.shape), source.stride(), offset))
        return func(*args, **(kwargs or {}))


def learn_plan(load_weights, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[Copy]]:
    """Loads the tensors once through the model's own loader and records what it copied where, by name."""
    plan = {}
    for name, tensor in tensors:
        with CopyRecorder(tensor) as recorder:
            load_weights([(name, tensor)])
        plan[name] = recorder.copies
    return plan


def check_coverage(
    plan: dict[str, list[Copy]], parameters: dict[str, torch.Tensor], padding: dict[str, int]
) -> None:
    """Every element of every parameter is written exactly once, and every sent name is used.

    `padding` gives, for a parameter with rows that no checkpoint has, its first such row. Raises RefitError
    with the names.
    """
    unused = [name for name, copies in plan.items() if not copies]
    if unused:
        raise RefitError(f"the engine has no place for {', '.join(unused)}")
    by_storage: dict[int, list[Copy]] = {}
    for copies in plan.values():
        for copy in copies:
            by_storage.setdefault(copy.destination.untyped_storage().data_ptr(), []).append(copy)
    wrong = []
    for name, parameter in parameters.items():
        storage = parameter.untyped_storage()
        size = storage.nbytes() // parameter.element_size()
        written = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
        for copy in by_storage.get(storage.data_ptr(), []):
            destination = copy.destination
            written.as_strided(destination.shape, destination.stride(), destination.storage_offset()).add_(1)
        counts = written.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        counts = counts[: padding[name]] if name in padding else counts
        if parameter.numel() == 0 or not bool((counts == 1).all()):
            wrong.append(f"{name} ({int((counts == 0).sum())} of {parameter.numel()} elements missing)")
    if wrong:
        raise RefitError(f"not written exactly once: {', '.join(wrong)}")


def read_back(copies: list[Copy], like: torch.Tensor) -> torch.Tensor:
    """The tensor `like` as the engine now holds it, put together from the places it was copied to."""
    held = torch.empty_like(like, memory_format=torch.contiguous_format)
    for copy in copies:
        copy.source(held).copy_(copy.destination)
    for copy in copies:
        if not torch.equal(copy.source(held).to(copy.destination.dtype), copy.destination):
            raise RefitError("the places that a weight was copied to differ")
    return held


# --- The wire


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """A rendezvous store on a free port of `host` and of no other address; its `port` tells the others."""
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
    )  # fmt: skip


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(store: dist.Store, rank: int, world_size: int, backend: str, timeout_s: float):
    """A process group apart from the default one: trainer rank 0 is its rank 0, the engine workers follow."""
    timeout, store = timedelta(seconds=timeout_s), dist.PrefixStore("refit", store)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)])  # as long as the store waits: a start-up
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def broadcast(group, tensor: torch.Tensor) -> None:
    """From rank 0 to all, in place. Raises RuntimeError at the group's deadline or when a peer is gone."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


def send_object(group, value: dict) -> None:
    """A small dict as JSON, before the tensors."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    broadcast(group, torch.tensor([len(payload)]))
    broadcast(group, payload)


def receive_object(group) -> dict:
    size = torch.zeros(1, dtype=torch.int64)
    broadcast(group, size)
    payload = torch.empty(int(size), dtype=torch.uint8)
    broadcast(group, payload)
    return json.loads(bytes(payload.numpy()))


class WeightSender:
    """The trainer's side, one on every trainer rank; only rank 0 touches the wire.

    `dtype` is what the engine holds; the fp32 masters are cast to it before they are hashed and sent.
    """

    def __init__(self, model: torch.nn.Module, rank: int, dtype: str, timeout_s: float):
        self.model, self.rank, self.dtype, self.timeout_s = model, rank, getattr(torch, dtype), timeout_s
        self.group = None
        self.last_checksum: int | None = None

    def join(self, store: dist.Store, world_size: int) -> None:
        """Waits for the `world_size - 1` engine workers. Rank 0 only."""
        self.group = join_group(store, 0, world_size, "gloo", self.timeout_s)

    @torch.no_grad()
    def send(self, version: int) -> dict:
        """Broadcasts all weights as policy `version`. Returns bytes and whether the payload differs from the
        last.

        Every rank must call it: gathering the shards is a collective.
        """
        tensors, checksums = [], []
        for name, tensor in checkpoint_tensors(self.model.named_parameters()):
            if self.rank == 0:
                cast = tensor.to(self.dtype)
                checksums.append(checksum(cast))  # where the tensor is: a GPU hashes it in no time
                tensors.append((name, cast.cpu()))
        if self.rank != 0:
            return {}
        entries, sizes = lay_out(tensors)
        buckets = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for entry, (_, tensor) in zip(entries, tensors, strict=True):
            entry.view(buckets[entry.bucket]).copy_(tensor)
        header = {"version": version, "sizes": sizes, "checksums": checksums}
        send_object(self.group, header | {"entries": [vars(entry) for entry in entries]})
        for bucket in buckets:
            broadcast(self.group, bucket)
        total = sum(value * (2 * index + 1) for index, value in enumerate(checksums)) % (1 << 64)
        changed, self.last_checksum = total != self.last_checksum, total
        return {"version": version, "bytes": sum(sizes), "changed": changed}


def compare_probe(engine: list[float], trainer: list[float], dtype: str, where: str) -> float:
    """Mean difference of the log-probs of a fixed prompt. Raises RefitError where it is beyond the dtype's
    noise.

    It catches what no checksum can: copies of a weight that a kernel keeps in a layout of its own.
    """
    if len(engine) != len(trainer):
        raise RefitError(f"{where}: {len(engine)} log-probs of the probe, the trainer has {len(trainer)}")
    difference = (torch.tensor(engine) - torch.tensor(trainer)).abs().mean().item()
    bound = 1e-3 if dtype == "float32" else 0.2
    if not difference <= bound:
        raise RefitError(f"{where}: the probe's log-probs differ from the trainer's by {difference:.3g}")
    return difference
