"""The engine's half of a refit. vLLM imports this module in its worker process (`worker_extension_cls`).

Two ways in. The learned plan copies straight into the parameters, and is sound where the engine keeps plain
tensors. vLLM's layer-wise reload repacks layers through their own hooks, and is always available. The first
refit is the gate: it sends what the engine loaded from disk, so whatever changes a bit is wrong.
"""

import time
from dataclasses import dataclass

import torch
import vllm.model_executor.layers.utils
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from common import refit
from common.refit import Copy, Entry, RefitError, checksum

pack_linear = vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm


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


vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = keep_linear_plain


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    host: str
    port: int
    first_rank: int  # of this engine's workers in the transfer group
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    version: int


class TransferEngine(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, info: InitInfo) -> None:
        store = refit.connect_store(info.host, info.port, info.timeout_s)
        rank = info.first_rank + self.parallel_config.rank
        self.group = refit.join_group(store, rank, info.world_size, "gloo", info.timeout_s)
        self.mode: str | None = None  # "plan" or "reload", decided by the gate
        self.plan: dict[str, list[Copy]] = {}
        self.entries: list[Entry] = []
        self.report: dict = {}

    def start_weight_update(self) -> None:
        self.reloading = self.mode == "reload"  # not yet at the gate, which runs its own reload
        if self.reloading:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, info: UpdateInfo) -> None:
        start = time.monotonic()
        header = refit.receive_object(self.group)
        if header["version"] != info.version:
            raise RefitError(f"expected weights of version {info.version}, got {header['version']}")
        entries = [Entry(**entry) for entry in header["entries"]]
        if self.mode is not None and entries != self.entries:
            raise RefitError("the trainer's parameters are not those of the first refit")
        self.entries, self.checksums = entries, header["checksums"]
        by_bucket: list[list[Entry]] = [[] for _ in header["sizes"]]
        for entry in entries:
            by_bucket[entry.bucket].append(entry)
        received = []
        for size, members in zip(header["sizes"], by_bucket, strict=True):
            bucket = torch.empty(size, dtype=torch.uint8)
            refit.broadcast(self.group, bucket)
            tensors = [(entry.name, entry.view(bucket).to(self.device)) for entry in members]
            if self.mode is None:
                received += tensors
            else:
                self._load(tensors)
        if self.mode is None:
            self._gate(received)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        self.report = {"mode": self.mode, "dtype": dtype, "receive_s": time.monotonic() - start}

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if self.mode == "reload":
            self.model.load_weights(tensors)
            return
        for name, tensor in tensors:
            for copy in self.plan[name]:
                copy.destination.copy_(copy.source(tensor))

    def finish_weight_update(self) -> None:
        if self.reloading:
            self._finish_reload()
        self._check_resident()

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

    def _check_resident(self) -> None:
        """The bits that the engine now holds are those that the trainer hashed.

        Under the reload, layers whose kernels repack their weights can't be read back; the probe covers them.
        """
        live = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        checked = 0
        for entry, expected in zip(self.entries, self.checksums, strict=True):
            copies = self.plan.get(entry.name, [])
            if entry.name in self.repacked or any(
                copy.destination.untyped_storage().data_ptr() not in live for copy in copies
            ):
                continue
            like = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=self.device)
            if checksum(refit.read_back(copies, like)) != expected:
                raise RefitError(f"checksum of {entry.name}: the engine holds other bits than were sent")
            checked += 1
        self.report |= {"checked_tensors": checked, "tensors": len(self.entries)}

    def _gate(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Loads the engine's own weights again, by the plan or else by the reload: no bit may change."""
        parameters = dict(self.model.named_parameters())
        before = self._state_checksums()
        self.repacked: set[str] = set()
        try:
            self.plan = refit.learn_plan(self.model.load_weights, tensors)
        except (KeyError, ValueError) as error:
            raise RefitError(f"the engine does not know a name that the trainer sent: {error}") from error
        padding = {
            f"{name}.weight": module.shard_indices.num_org_elements
            for name, module in self.model.named_modules()
            if isinstance(module, VocabParallelEmbedding)
        }
        refit.check_coverage(self.plan, parameters, padding)
        changed = self._changed(before)
        self.mode = "plan"
        if changed:
            self.mode = "reload"
            tensors_changed = [parameters[name] for name in changed if name in parameters]
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_changed}
            for name, copies in self.plan.items():
                if any(copy.destination.untyped_storage().data_ptr() in storages for copy in copies):
                    self.repacked.add(name)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(tensors)
            self._finish_reload()
            changed = self._changed(before)
        if changed:
            raise RefitError(f"gate: sending the engine its own weights changed {', '.join(changed)}")

    def _state_checksums(self) -> dict[str, int]:
        state = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: checksum(tensor) for name, tensor in state if tensor.numel()}

    def _changed(self, before: dict[str, int]) -> list[str]:
        after = self._state_checksums()
        return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("instar", TransferEngine)


class WorkerExtension:
    """Methods that vLLM mixes into its worker."""

    def refit(self, version: int) -> dict:
        """One refit in one control call. Returns mode, bytes and seconds; raises RefitError."""
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update()
        return self.weight_transfer_engine.report
