"""The engine's half of a refit. vLLM imports this module in its worker process (`worker_extension_cls`).

Two ways in. The learned plan copies straight into the parameters, and is sound where the engine keeps plain
tensors. vLLM's layer-wise reload repacks layers through their own hooks. The first refit is the gate: it
sends what the engine loaded from disk, so whatever changes a bit is wrong.
"""

import math
import threading
import time
from dataclasses import dataclass

import torch
import tqdm
import vllm.model_executor.layers.utils
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample import rejection_sampler

from common import refit
from common.refit import Entry, Plan, RefitError, checksum, words_of

tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore in /dev/shm that a killed process leaves there
pack_linear = vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm
rotate = RotaryEmbedding.forward_cpu


def keep_linear_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """On a CPU vLLM packs linear weights: the parameter becomes empty, and a tied head goes stale at a
    reload.

    torch's own linear, which vLLM falls back to as well, keeps every parameter readable and writable in
    place.
    """
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        pack_linear(layer, remove_weight)


def rotate_rows(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None):
    """On a CPU vLLM's kernel turns the wrong numbers of a query [tokens, heads, size], as MLA has it."""
    rows = [x.flatten(1).contiguous() for x in (query, key)] if query.ndim == 3 else [query, key]
    turned = rotate(self, positions, *rows)
    return turned if query.ndim == 2 else (turned[0].view(query.shape), turned[1].view(key.shape))


vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = keep_linear_plain
RotaryEmbedding.forward_cpu = rotate_rows


def expand(values: torch.Tensor, ends: torch.Tensor, num_tokens: int, replace_from=0, replace_to=0):
    """The temperature of each request for each of its guesses. vLLM's own for a CPU writes into a copy: what
    was sampled there, and its log-probs, would be those of some random temperature. (On a GPU vLLM's newer
    runner has a sampler of its own.)"""
    counts = ends.diff(prepend=ends.new_zeros(1))
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


rejection_sampler.expand_batch_to_tokens = expand


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    host: str
    port: int
    num_trainers: int
    num_workers: int  # of all engines
    first_worker: int  # of this engine
    start_timeout_s: float  # until all have come
    timeout_s: float  # of a transfer


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    version: int


class TransferEngine(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, info: InitInfo) -> None:
        store = refit.connect_store(info.host, info.port, info.start_timeout_s)
        rank = info.num_trainers + info.first_worker + self.parallel_config.rank
        self.device, sizes = torch.device(self.device), (info.num_trainers, info.num_workers)
        self.wire = refit.Wire(store, rank, *sizes, self.device, info.timeout_s)
        self.mode: str | None = None  # "plan" or "reload", decided by the gate
        self.plan: Plan = {}
        self.places: dict[int, tuple] = {}  # the plan as lists of views, by bucket
        self.received: dict[str, int] = {}  # checksums of tensors, for the reload alone
        self.manager = getattr(self.model, "lora_manager", None)
        self.quantized = self.model_config.quantization is not None
        self.poisoned = False

    def start_weight_update(self) -> None:
        if self.poisoned:
            raise RefitError("this engine failed a refit before, and nobody knows what it holds")
        self.poisoned = True  # until all checks have passed
        self.reloading = self.mode == "reload"  # not yet at the gate, which runs its own reload
        if self.reloading:
            self._begin_reload()

    def receive_weights(self, info: UpdateInfo) -> None:
        header = self.wire.share()
        start = time.monotonic()
        if header["version"] != info.version:
            raise RefitError(f"expected weights of version {info.version}, got {header['version']}")
        if self.mode is None:
            self.members = [[Entry(**entry) for entry in members] for members in header["buckets"]]
            self.sizes = [members[-1].end for members in self.members]
            self.wire.map(self.sizes)
            self._gate()
        else:
            self._receive(self._place if self.mode == "plan" else self._reload)
        dtype = "fp8" if self.quantized else str(self.model_config.dtype).removeprefix("torch.")
        self.report = {"mode": self.mode, "transport": self.wire.transport, "dtype": dtype}
        self.report["receive_s"] = time.monotonic() - start

    def _receive(self, load) -> None:
        """`load(index, bucket)` for every bucket, after which the bits in it must be those that were sent."""
        hashes, self.differ = [], []
        for index, bucket in self.wire.receive(self.sizes):
            load(index, bucket)
            hashes.append(refit.hash_words(bucket.view(torch.int32)))
        sent = self.wire.share()["checksums"]
        self.wire.finish()
        for members, ours, theirs in zip(self.members, torch.stack(hashes).tolist(), sent, strict=True):
            if ours != theirs:
                names = " ... ".join(dict.fromkeys([members[0].name, members[-1].name]))
                raise RefitError(f"checksum of {names}: the engine holds other bits than were sent")
        if self.differ and bool(torch.stack(self.differ).any()):
            raise RefitError("the places that a weight was copied to differ")

    def _learn(self, index: int, bucket: torch.Tensor) -> None:
        """Loads through the model's own loader, and records where it put what. Not if it quantizes: what is
        sent would have no place."""
        if self.quantized:
            return
        tensors = [(entry.name, entry.view(bucket)) for entry in self.members[index]]
        try:
            load = self._load_factors if self.manager else self.model.load_weights
            self.plan |= refit.learn_plan(load, tensors)
        except (KeyError, ValueError) as error:
            raise RefitError(f"the engine does not know a name that the trainer sent: {error}") from error

    def _load_factors(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """LoRA's counterpart of `load_weights`. Each factor goes to the slot of the only adapter through its
        layer's own method, which takes two factors or a list for each part of a merged layer."""
        parts = self.manager.packed_modules
        place = {part: (name, i) for name, merged in parts.items() for i, part in enumerate(merged)}
        for name, tensor in tensors:
            module, _, kind = name.rpartition(".")
            name, index = place.get(module, (module, None))
            other = tensor.new_empty(0, 0) if index is None else [None] * len(parts[name])
            own = tensor if index is None else [*other[:index], tensor, *other[index + 1 :]]
            self.manager.modules[name].set_lora(0, *((own, other) if kind == "lora_A" else (other, own)))

    def _place(self, index: int, bucket: torch.Tensor) -> None:
        if index not in self.places:
            self.places[index] = refit.copies_of(self.plan, self.members[index], bucket)
        self.differ += refit.place(*self.places[index])

    def _begin_reload(self) -> None:
        """Quantized weights cannot be compared with what was sent, but nothing may stay as it was: where a
        parameter is all ones afterwards, which is a NaN, no weight was written."""
        for parameter in self.model.parameters() if self.quantized else ():
            words_of(parameter).fill_(-1)
        initialize_layerwise_reload(self.model)

    def _reload(self, index: int, bucket: torch.Tensor) -> None:
        """Through vLLM's layer-wise reload, which keeps tensors until their layer is whole."""
        tensors = [(entry.name, entry.view(bucket).clone()) for entry in self.members[index]]
        self.received |= {name: checksum(tensor) for name, tensor in tensors}
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        if self.reloading:
            self._finish_reload()
            wrong = next((entry.name for entry in self.checked if not self._holds(entry)), None)
            if wrong:
                raise RefitError(f"checksum of {wrong}: the engine holds other bits than were sent")
        self.report |= {"checked_tensors": len(self.checked), "tensors": sum(map(len, self.members))}
        self.poisoned = False

    def _finish_reload(self) -> None:
        """With two packings that vLLM 0.32 makes at the first load only: a tied head and experts on CPU."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)
        state = self.model.named_parameters() if self.quantized else ()
        if stale := [name for name, parameter in state if bool((words_of(parameter) == -1).any())]:
            raise RefitError(f"the refit did not write all of {', '.join(stale)}")

    def _holds(self, entry: Entry) -> bool:
        """After a reload: whether the places of this tensor hold what was received."""
        held = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=self.device)
        for copy in self.plan[entry.name]:
            copy.source(held).copy_(copy.destination)
        return checksum(held) == self.received[entry.name]

    def _is_readable(self, entry: Entry, live: set[int]) -> bool:
        """After the gate's reload, with the storages of the model's parameters: whether this tensor can be
        read back. Where a kernel repacked it, it can't be, nor where it is spread over ranks; the probe
        covers those."""
        places = [copy.destination for copy in self.plan.get(entry.name, ())]
        there = all(place.untyped_storage().data_ptr() in live for place in places)
        return there and sum(map(torch.numel, places)) == math.prod(entry.shape) and self._holds(entry)

    def _gate(self) -> None:
        """Loads the engine's own weights again, twice: learning the plan, then by the plan or else by the
        reload. No bit may change."""
        before = self._state_checksums()
        self._receive(self._learn)
        modules = self.model.named_modules()
        padded = [(name, module) for name, module in modules if isinstance(module, VocabParallelEmbedding)]
        padding = {f"{name}.weight": module.shard_indices.num_org_elements for name, module in padded}
        slots: dict[str, torch.Tensor] = {}  # of the adapter
        for name, layer in self.manager.modules.items() if self.manager else ():
            slots |= {f"{name} {i}": x for i, x in enumerate(layer.lora_a_stacked + layer.lora_b_stacked)}
        parameters = {} if self.quantized else slots or dict(self.model.named_parameters())
        refit.check_coverage(self.plan, parameters, padding, self.parallel_config.enable_expert_parallel)
        self.mode = "reload" if self.quantized or self._changed(before) else "plan"
        self.checked = [entry for members in self.members for entry in members]
        if self.mode == "reload":
            self._begin_reload()
            self._receive(self._reload)
            self._finish_reload()
            live = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
            self.checked = [entry for entry in self.checked if self._is_readable(entry, live)]
        else:
            self._receive(self._place)
        if changed := self._changed(before):
            raise RefitError(f"gate: sending the engine its own weights changed {', '.join(changed)}")

    def _state_checksums(self) -> dict[str, int]:
        state = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: checksum(tensor) for name, tensor in state if tensor.numel()}

    def _changed(self, before: dict[str, int]) -> list[str]:
        after = self._state_checksums()
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))

    def shutdown(self) -> None:
        self.wire = None


WeightTransferEngineFactory.register_engine("instar", TransferEngine)


class WorkerExtension:
    """Methods that vLLM mixes into its worker."""

    def make_adapter(self) -> None:
        """LoRA: adapter 1, all zeros until a refit. At its end vLLM would forget all adapters, as those of an
        older base."""
        manager = self.model_runner.get_model().lora_manager
        manager.add_adapter(manager.create_dummy_lora(1, manager.lora_config.max_lora_rank, {}))
        manager.activate_adapter(1)
        self.model_runner.reset_lora_state = lambda: None

    def refit(self, version: int) -> dict:
        """One refit in one control call. Returns mode, bytes and seconds; raises RefitError."""
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        return self.weight_transfer_engine.report
