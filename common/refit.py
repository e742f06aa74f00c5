"""Weights from the trainer into running engines, every value checked. This half needs no vLLM.

A refit is a header (version; the first time also names, shapes and layout), packed buckets from trainer rank
0 to every engine worker, and the buckets' checksums. Two buffers on either side: while one travels, the next
is packed and the last is placed. `common/refit_worker.py` is the receiving half.
"""

import json
import math
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BUCKET_BYTES = {"gloo": 64 << 20, "nccl": 256 << 20, "ipc": 1 << 30}  # two are allocated on each side
ALIGNMENT = 64
PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 0123456789"
CHUNK = 1 << 20  # elements that a CPU hashes at a time, so that it needs 8 MiB and no more
WEIGHT_STEP = 0x3C6EF372FE94F82A  # of the hash; even, so that every weight is odd


# Stacked experts, by the end of their name, and what each one of them holds.
STACKED = dict.fromkeys(("gate_up_proj", "gate_and_up_projs"), ("gate_proj", "up_proj"))
STACKED |= dict.fromkeys(("down_proj", "down_projs"), ("down_proj",))
Named = Iterable[tuple[str, torch.Tensor]]
CHOICE_BIAS = "e_score_correction_bias"  # fp32 in every engine: rounded, it would choose other experts


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent. It is never resumed after this."""


# --- Checksums


def hash_words(words: torch.Tensor) -> torch.Tensor:
    """A position-sensitive 64-bit hash of a flat tensor of integers of up to 32 bits, left where they are.

    The sum of word x odd weight modulo 2^64, so changing one word, or swapping two, always changes it
    (several changes made to fit could cancel out). On a GPU a kernel reads them once.
    """
    if words.device.type == "cuda":
        from common.kernels import hash_on_gpu

        return hash_on_gpu(words, WEIGHT_STEP)
    total = torch.zeros((), dtype=torch.int64)
    for index, chunk in enumerate(words.split(CHUNK)):
        position = torch.arange(index * CHUNK, index * CHUNK + len(chunk))
        total += (chunk.to(torch.int64) * (position * WEIGHT_STEP + 1)).sum()
    return total


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, in place."""
    return tensor.detach().view({1: torch.int8, 2: torch.int16}.get(tensor.itemsize, torch.int32))


def checksum(tensor: torch.Tensor) -> int:
    """`hash_words` of a tensor's bits."""
    return int(hash_words(words_of(tensor.contiguous().reshape(-1))))


# --- What is sent


def gather(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Without a copy where one rank has it all: a DTensor's calls take longer than that."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    return parameter.to_local() if parameter.device_mesh.size() == 1 else parameter.full_tensor()


def weights_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters by name, and the biases that only choose experts, which are buffers."""
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith(CHOICE_BIAS)]
    named = [*model.named_parameters(), *biases]
    # what AutoModel calls shared_experts there is shared_expert to everybody else
    theirs = "shared_experts." if "Qwen3_5Moe" in type(model).__name__ else "shared_expert."
    return [(name.replace(theirs, "shared_expert."), tensor) for name, tensor in named]


def adapters_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The factors A [rank, in] and B [out, rank] of LoRA layers, B times alpha / rank: what vLLM has as well,
    which adds B A x to W x. Empty where the whole model is trained."""
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    factors_A = [(f"{name}.lora_A", layer.lora_A.weight) for name, layer in layers]
    return factors_A + [(f"{name}.lora_B", layer.scale * layer.lora_B.weight) for name, layer in layers]


def merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights_of` a model after training: W + alpha / rank x B A for a layer with LoRA."""
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, weight in weights_of(model):
        if ".lora_" not in name:
            yield name, layers[name].materialize_effective_weight() if name in layers else weight


def clean(name: str) -> str:
    """A parameter's name without what wrappers add: that recomputes activations, that keeps fp32."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_fp32_params.", "")


def checkpoint_tensors(named_parameters: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under the names that checkpoints (and vLLM's loaders) use: stacked experts become one per
    expert.

    transformers has `experts.gate_up_proj` [E, 2I, H], the I gate rows first, then the I up rows, and
    `experts.down_proj` [E, H, I]; AutoModel has both transposed, as `gate_and_up_projs` and `down_projs`.
    FSDP shards are gathered, so every rank must iterate in step.
    """
    for name, parameter in named_parameters:
        name, tensor = clean(name), gather(parameter)
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith("experts") or last not in STACKED:
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            weight = weight.T if last.endswith("projs") else weight
            for kind, part in zip(STACKED[last], weight.chunk(len(STACKED[last])), strict=True):
                yield f"{prefix}.{expert}.{kind}.weight", part


@dataclass
class Entry:
    """Where a tensor lies in the packed stream."""

    name: str
    shape: list[int]
    dtype: str  # "float32", "bfloat16"
    offset: int  # bytes from the start of its bucket

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize

    @property
    def end(self) -> int:
        """Where the next one begins; of the last one, the size of the bucket."""
        return self.offset + math.ceil(self.nbytes / ALIGNMENT) * ALIGNMENT

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        flat = bucket[self.offset : self.offset + self.nbytes]
        return flat.view(getattr(torch, self.dtype)).view(self.shape)

    def gap(self, bucket: torch.Tensor) -> torch.Tensor:
        return bucket[self.offset + self.nbytes : self.end]


def lay_out(tensors: Named, bucket_bytes: int) -> list[list[Entry]]:
    """Packs tensors in order into buckets of at most `bucket_bytes`; a larger tensor has one of its own."""
    buckets, end = [[]], 0
    for name, tensor in tensors:
        entry = Entry(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), end)
        if buckets[-1] and entry.end > bucket_bytes:
            buckets.append([])
            entry.offset = 0
        buckets[-1].append(entry)
        end = entry.end
    return buckets


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


Plan = dict[str, list[Copy]]  # by the name of the source tensor


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


def learn_plan(load_weights, tensors: Named) -> Plan:
    """Loads the tensors once through the model's own loader and records what it copied where, by name."""
    plan = {}
    for name, tensor in tensors:
        with CopyRecorder(tensor) as recorder:
            load_weights([(name, tensor)])
        plan[name] = recorder.copies
    return plan


def check_coverage(plan: Plan, parameters: dict[str, torch.Tensor], padding: dict[str, int], ep=False):
    """Every element of every parameter is written exactly once, and every sent name is used; with `ep` not
    those of experts, which another worker may hold.

    `padding` gives, for a parameter with rows that no checkpoint has, its first such row. Raises RefitError
    with the names.
    """
    unused = [name for name, copies in plan.items() if not copies and not (ep and ".experts." in name)]
    if unused:
        raise RefitError(f"the engine has no place for {', '.join(unused)}")
    by_storage: dict[int, list[torch.Tensor]] = {}
    for destination in [copy.destination for copies in plan.values() for copy in copies]:
        by_storage.setdefault(destination.untyped_storage().data_ptr(), []).append(destination)
    wrong = []
    for name, parameter in parameters.items():
        storage = parameter.untyped_storage()
        size = storage.nbytes() // parameter.element_size()
        written = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
        for destination in by_storage.get(storage.data_ptr(), []):
            written.as_strided(destination.shape, destination.stride(), destination.storage_offset()).add_(1)
        counts = written.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        counts = counts[: padding[name]] if name in padding else counts
        if parameter.numel() == 0 or not bool((counts == 1).all()):
            wrong.append(f"{name} ({int((counts == 0).sum())} of {parameter.numel()} elements missing)")
    if wrong:
        raise RefitError(f"not written exactly once: {', '.join(wrong)}")


def copies_of(plan: Plan, entries: list[Entry], bucket: torch.Tensor) -> tuple:
    """The plan for a bucket: (engine tensors, their parts of the bucket, twins), of which the first two are
    lists of equal length. A twin is one more (engine tensor, part) of a part that went elsewhere already."""
    first, twins = [], []
    for entry in entries:
        tensor = entry.view(bucket)
        taken = torch.zeros_like(tensor, dtype=torch.bool)
        for copy in plan[entry.name]:
            region = taken.as_strided(copy.size, copy.stride, copy.offset)
            pairs = twins if bool(region.any()) else first
            pairs.append((copy.destination, copy.source(tensor)))
            region.fill_(True)
    return [parameter for parameter, _ in first], [part for _, part in first], twins


def place(parameters: list[torch.Tensor], parts: list[torch.Tensor], twins: list[tuple]) -> list:
    """Copies a bucket into the engine, and back: then the bucket holds what is resident (and, of what other
    ranks of the engine hold, what was sent). Returns whether each twin differs, as tensors on the device."""
    torch._foreach_copy_(parameters, parts)
    for parameter, part in twins:
        parameter.copy_(part)
    torch._foreach_copy_(parts, parameters)
    return [(parameter != part).any() for parameter, part in twins]


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


def choose_transport(trainers: list[str], workers: list[str]) -> str:
    """How buckets travel, from the GPU of each trainer rank and engine worker ("cpu" for none): "gloo"
    between CPUs, "nccl" from trainer rank 0 to other GPUs, "ipc" (CUDA memory that both map) from the trainer
    rank on a worker's own GPU. Raises RefitError for any other sharing."""
    sender_and_workers = [trainers[0], *workers]
    if "cpu" in sender_and_workers:
        return "gloo"
    if len(set(sender_and_workers)) == len(sender_and_workers):
        return "nccl"
    if set(workers) <= set(trainers) and len(set(workers)) == len(workers):
        return "ipc"
    raise RefitError("either one engine worker shares the GPU of a trainer, or each has a GPU of its own")


class Wire:
    """The way from the trainer's ranks, the first ones here, to every engine worker. Apart from all other
    groups. Rank 0 sends; where memory is shared, every trainer rank packs for the worker beside it.

    Every wait ends soon after `timeout_s` with RefitError or RuntimeError, also when a peer is gone.
    """

    def __init__(self, store, rank: int, num_trainers: int, num_workers: int, device, timeout_s: float):
        self.rank, self.device, self.timeout_s = rank, device, timeout_s
        self.store, self.buffers = dist.PrefixStore("refit", store), []
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        self.store.set(f"gpu/{rank}", gpu)  # waits for the others as long as the store does: a start-up
        gpus = [self.store.get(f"gpu/{r}").decode() for r in range(num_trainers + num_workers)]
        self.transport = choose_transport(gpus[:num_trainers], gpus[num_trainers:])
        self.sender = gpus.index(gpu) if self.transport == "ipc" else 0  # the trainer rank that packs for us
        members = [r for r in range(len(gpus)) if r == 0 or r >= num_trainers or self.transport == "ipc"]
        self.member = rank in members
        if not self.member:
            return
        place = (members.index(rank), len(members))
        timeout = timedelta(seconds=timeout_s + 5)  # after the driver's, which says who does not answer
        self.control = self.data = dist.ProcessGroupGloo(self.store, *place, timeout)
        if self.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * timeout  # `finish` comes first: NCCL's own watchdog ends the process
            self.data = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self.store), *place, options)

    def share(self, value: dict | None = None) -> dict:
        """A small dict as JSON, rank 0's `value`, to everybody."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)])
        broadcast(self.control, size).wait()
        payload = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        broadcast(self.control, payload).wait()
        return json.loads(bytes(payload.numpy()))

    def allocate(self, sizes: list[int]) -> None:
        """A sender's two buffers, and what a receiver on the same GPU needs to map them."""
        self.buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in sizes[:2]]
        if self.transport == "ipc":
            handles = [buffer.untyped_storage()._share_cuda_() for buffer in self.buffers]
            plain = [[p.hex() if isinstance(p, bytes) else p for p in handle] for handle in handles]
            self.store.set(f"handles/{self.rank}", json.dumps(plain))

    def map(self, sizes: list[int]) -> None:
        """The receiver's buffers: its own two, or those of the sender."""
        if self.transport != "ipc":
            return self.allocate(sizes)
        for _, *handle in json.loads(self.store.get(f"handles/{self.sender}")):
            parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index or 0, *parts)
            mapped = torch.empty(0, dtype=torch.uint8, device=self.device)
            self.buffers.append(mapped.set_(storage, 0, (max(sizes),)))

    def meet(self) -> None:
        """On shared memory nothing travels: the sender has packed, the receivers have placed."""
        self.finish()
        self.control.barrier().wait()  # ty: ignore[missing-attribute]

    def send(self, sizes: list[int], pack) -> None:
        """`pack(index, bucket)` fills each bucket; it leaves while the next one is packed."""
        sent = {}
        if self.transport == "ipc":
            self.meet()  # the engine has paused: on one GPU, packing would slow its last step down
        for index, size in enumerate(sizes):
            bucket = self.buffers[index % 2][:size]
            if index - 2 in sent:
                sent.pop(index - 2).wait()
            pack(index, bucket)
            if self.transport == "ipc":
                self.meet()  # also: what lay in the other buffer is placed
            else:
                sent[index] = broadcast(self.data, bucket)
        for work in sent.values():
            work.wait()

    def receive(self, sizes: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Each bucket in order. It is overwritten once the next but one is asked for."""
        buckets = [self.buffers[index % 2][:size] for index, size in enumerate(sizes)]
        coming = []
        if self.transport == "ipc":
            self.meet()
        for index, bucket in enumerate(buckets):
            if self.transport == "ipc":
                self.meet()
            else:
                coming += [broadcast(self.data, each) for each in buckets[len(coming) : index + 2]]
                coming[index].wait()
            yield index, bucket

    def finish(self) -> None:
        """Waits until the GPU has done everything, at most `timeout_s`. Raises RefitError at the deadline."""
        if self.device.type != "cuda":
            return
        done, deadline = torch.cuda.Event(), time.monotonic() + self.timeout_s
        done.record()
        while not done.query():
            if time.monotonic() > deadline:
                if self.transport == "nccl":
                    self.data.abort()
                raise RefitError(f"the transfer was not over after {self.timeout_s:.0f} s: a peer is gone")
            time.sleep(0)  # it is a matter of milliseconds


def broadcast(group, tensor: torch.Tensor) -> dist.Work:
    """From rank 0 to all, in place. Waiting raises RuntimeError at the group's deadline."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.broadcast([tensor], options)


class WeightSender:
    """The trainer's side, one on every trainer rank.

    `dtype` is what the engine holds; the fp32 masters are cast to it before they are hashed and sent.
    """

    def __init__(self, model: torch.nn.Module, rank: int, dtype: str, timeout_s: float):
        self.model, self.rank, self.timeout_s = model, rank, timeout_s
        self.dtype, self.wire, self.buckets, self.sizes = getattr(torch, dtype), None, [], []
        self.views: dict[int, tuple] = {}  # of the tensors, and of the gaps between them, by bucket
        self.last: list[int] = []  # the checksums of the payload before

    def join(self, store: dist.Store, num_trainers: int, num_workers: int) -> None:
        """Waits for the other ranks and the engine workers."""
        device = next(self.model.parameters()).device
        self.wire = Wire(store, self.rank, num_trainers, num_workers, device, self.timeout_s)

    @torch.no_grad()
    def send(self, version: int) -> dict:
        """Sends all weights as policy `version`. Returns bytes and whether the payload differs from the last.

        Every rank must call it: gathering the shards is a collective.
        """
        first, named = not self.last, adapters_of(self.model) or weights_of(self.model)
        if first and self.wire.member:
            dtypes = [tensor.dtype if CHOICE_BIAS in name else self.dtype for name, tensor in named]
            shapes = [(n, torch.empty(t.shape, dtype=d, device="meta")) for (n, t), d in zip(named, dtypes)]
            self.buckets = lay_out(checkpoint_tensors(shapes), BUCKET_BYTES[self.wire.transport])
            self.sizes = [members[-1].end for members in self.buckets]
            self.wire.allocate(self.sizes)
        if self.wire.member:
            layout = [[vars(entry) for entry in members] for members in self.buckets] if first else []
            self.wire.share({"version": version, "buckets": layout})
        for _ in range(1 + first):  # twice at the gate: to learn the way in, and to try it
            hashes = self._send_buckets(named)
        changed, self.last = hashes != self.last, hashes
        return {"version": version, "bytes": sum(self.sizes), "changed": changed}

    def _send_buckets(self, named: list[tuple[str, torch.Tensor]]) -> list[int]:
        """One pass over all weights. Returns the checksums of the buckets."""
        gathered, hashes = checkpoint_tensors(named), []

        def pack(index: int, bucket: torch.Tensor) -> None:
            if index not in self.views:
                members = self.buckets[index]
                gaps = [gap for entry in members if len(gap := entry.gap(bucket))]
                self.views[index] = [entry.view(bucket) for entry in members], gaps
            views, gaps = self.views[index]
            torch._foreach_copy_(views, [next(gathered)[1] for _ in views])
            if gaps:
                torch._foreach_zero_(gaps)  # they are hashed too
            hashes.append(hash_words(bucket.view(torch.int32)))

        if not self.wire.member:
            return [0 for _ in gathered]
        self.wire.send(self.sizes, pack)
        self.wire.finish()  # before anything waits for the GPU without a deadline
        checksums = torch.stack(hashes).tolist()
        self.wire.share({"checksums": checksums})
        return checksums


def compare_probe(engine: list[float], trainer: list[float], dtype: str, where: str) -> float:
    """Mean difference of the log-probs of a fixed prompt. Raises RefitError where it is beyond the dtype's
    noise.

    It catches what no checksum can: copies of a weight that a kernel keeps in a layout of its own.
    """
    if len(engine) != len(trainer):
        raise RefitError(f"{where}: {len(engine)} log-probs of the probe, the trainer has {len(trainer)}")
    difference = (torch.tensor(engine) - torch.tensor(trainer)).abs().mean().item()
    bound = {"float32": 1e-3, "bfloat16": 0.2, "fp8": 0.5}[dtype]
    if not difference <= bound:
        raise RefitError(f"{where}: the probe's log-probs differ from the trainer's by {difference:.3g}")
    return difference
