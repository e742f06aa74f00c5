"""Checkpoints: the model in the Hugging Face format, and what a run needs to go on from it.

    checkpoints/step_40/           config, tokenizer, weights: transformers and vLLM load the folder
    checkpoints/step_40/trainer/   weights and optimizer of every rank (torch.distributed.checkpoint), and the
                                   rollouts that were finished and not trained
    checkpoints/step_40/progress.json   step, steps that made an update, tickets, checksums of trainer/

A folder without the suffix .partial is complete. Only the newest two keep their trainer/. In the background
a thread of every rank writes copies, while the ranks train on.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from annotated_types import Ge, Gt, Lt
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint import CheckpointException, state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from common.checks import FlagError
from common.debug import dump_rollouts, read_rollouts
from common.models import auto_class
from common.refit import checkpoint_tensors, clean, merged


@dataclass
class SaveFlags:
    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints, which transformers loads and --resume goes on from. 0 saves only at the
    end."""
    resume: bool = False
    """Go on with the run in --output-dir from its last complete checkpoint."""
    fault_budget: Annotated[int, Ge(0)] = 0
    """How often the run starts again by itself, from its last checkpoint, when a process of it died or missed
    a deadline. 0: such a run ends."""
    grace_s: Annotated[float, Gt(0), Lt(1e9)] = 30.0
    """Seconds that a run has to save and end after SIGTERM, SIGUSR1 or Ctrl-C, with the checkpoint that is
    being written then. Give less than what sends them waits before it kills."""
    save_in_background: bool = True
    """Write a checkpoint while training goes on. Until it is written, the trainers' hosts hold a copy of it
    in memory: 16 bytes for each weight that trains."""
    keep_checkpoints: Annotated[int, Ge(0)] = 0
    """Newest checkpoints that stay, the older ones are deleted. 0 keeps all: the newest two to go on from,
    older ones as models."""
    keep_gb: Annotated[float, Ge(0), Lt(1e9)] = 0.0
    """GB (1e9 bytes) that all checkpoints of the run may take: beyond it the oldest are deleted, the newest
    one never. 0 is no limit. While one is written, it comes on top."""
    init_from: str | None = None
    """Folder of a checkpoint of the same model whose weights the run starts from (a KL reference stays
    --model)."""


def starting_point(resume: bool, output_dir: str, max_steps: int) -> tuple[str | None, dict]:
    """The folder of the newest checkpoint that a run of `max_steps` can go on from, and its progress; of a
    new run no folder. `progress["rollouts"]` were finished and not trained.

    A checkpoint whose trainer/ is not as it was written is set aside, and the one before it taken. Raises
    FlagError if there is none to go on from.
    """
    if not resume:
        return None, {"step": 0, "queue": None, "rollouts": []}
    found, broken = Path(output_dir).glob("checkpoints/step_*[0-9]/trainer"), ""
    for trainer in sorted(found, key=lambda found: step_of(found.parent), reverse=True):
        try:
            progress = json.loads((trainer.parent / "progress.json").read_text())
            for name, written in progress.pop("files").items():
                if digest(trainer / name) != written:
                    raise ValueError(f"trainer/{name} is not as it was written")
            progress["rollouts"] = read_rollouts(str(trainer), progress["step"])
        except (OSError, ValueError, LookupError) as error:
            broken += f"; {trainer.parent.name}: {error}"
            print(f"warning: going back to an earlier checkpoint{broken}")
            os.replace(trainer.parent, f"{trainer.parent}.broken")
            continue
        if progress["step"] < max_steps:
            return str(trainer.parent), progress
        is_at = f"{output_dir} is at step {progress['step']}"
        raise FlagError(f"--max-steps {max_steps}: {is_at}; ask for more steps")
    fix = "--save-every writes them; without --resume, use another --output-dir"
    raise FlagError(f"--resume: {output_dir} has no checkpoint to go on from{broken}; {fix}")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def gather_model(model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """All weights (with LoRA, merged) in the memory of rank 0's host. Every rank must call it: gathering the
    shards is a collective."""
    state = {}
    for name, tensor in checkpoint_tensors(merged(model)):
        if rank == 0:
            # experts are views of one tensor, and the file format wants storages of their own
            state[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return state


def write_model(state: dict[str, torch.Tensor], model: torch.nn.Module, tokenizer, path: Path) -> None:
    """Weights, config and tokenizer in the Hugging Face format."""
    path.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, path)
    for part in (model.config, getattr(model, "generation_config", None), tokenizer):
        if part is not None:
            part.save_pretrained(path)
    for file in Path(tokenizer.name_or_path).glob("*processor_config.json"):  # of a model with images
        shutil.copy(file, path)


def trainer_state(parts: dict) -> dict:
    fresh = [optimizer for _, optimizer in parts.values() if not optimizer.state]
    for optimizer in fresh:
        optimizer.zero_grad()  # with gradients torch would leave out the averages that it has yet to make
    states = {name: state_dict.get_state_dict(model, optimizer) for name, (model, optimizer) in parts.items()}
    for made in (made for optimizer in fresh for made in optimizer.state.values() if "step" in made):
        made["step"].zero_()  # making them counted as one
    return {name: {"model": model, "optimizer": optimizer} for name, (model, optimizer) in states.items()}


writer, writing = ThreadPoolExecutor(1), []  # this rank's thread, and what it writes


@functools.cache
def writers_group() -> dist.ProcessGroup:
    """Of the ranks' threads: their collectives must not come between those of the training."""
    return dist.new_group(backend="gloo")


def save_checkpoint(path: str, rank: int, model, tokenizer, parts: dict, progress: dict) -> None:
    """Writes the folder `path`, which is there complete or not at all. Every rank must call it.

    `parts` are the (model, optimizer) pairs to go on with, by name; `progress` is JSON with the key `step`,
    and may have `rollouts`, and `flags` (SaveFlags), by which it may return before anything is written: see
    `finish_saving`. Raises OSError, before it writes, if the disk has too little space.
    """
    finish_saving()
    final, partial = Path(path), Path(f"{path}.partial")
    final.parent.mkdir(parents=True, exist_ok=True)
    # in fp32: weights, two averages of those that train, and the model once more
    weights = [weight for model, _ in parts.values() for weight in model.parameters()]
    needed = sum(weight.numel() * (16 if weight.requires_grad else 8) for weight in weights)
    if (free := shutil.disk_usage(final.parent).free) < needed:
        raise OSError(f"{needed / 2**30:.3g} GiB are needed, {final.parent} has {free / 2**30:.3g}")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    flags, rollouts = progress.pop("flags", SaveFlags(save_in_background=False)), progress.pop("rollouts", [])
    state, whole, group = trainer_state(parts), gather_model(model, rank), None
    if flags.save_in_background:
        stager, group = DefaultStager(StagingOptions(*[False] * 4)), writers_group()
        state = stager.stage(state)
        stager.close()  # or it keeps the copy too, in a cycle that only a full collection ends

    def write() -> None:
        try:
            dcp.save(state, checkpoint_id=partial / "trainer", process_group=group)
        except CheckpointException as error:  # no Exception: Ray would say that the process died
            raise OSError(f"{error}\n{partial} could not be written; is the disk full?") from error
        if rank == 0:
            write_model(whole, model, tokenizer, partial)
            dump_rollouts(str(partial / "trainer"), progress["step"], rollouts)
            files = {file.name: digest(file) for file in (partial / "trainer").iterdir()}
            (partial / "progress.json").write_text(json.dumps(progress | {"files": files}))
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, f"{final}.old.partial")
            os.rename(partial, final)
            delete_old(final.parent, flags.keep_checkpoints, flags.keep_gb)

    if flags.save_in_background:
        writing.append(writer.submit(write))
    else:
        write()


def finish_saving(trainer=None) -> None:
    """Waits until this rank's part of the checkpoint is written. Raises OSError if it could not be."""
    while writing:
        writing.pop().result()


def delete_old(folder: Path, keep: int, keep_gb: float) -> None:
    """What failed, and the oldest checkpoints beyond `keep` (0: all) and `keep_gb` (0: no limit); of those
    before the newest two, what is there to go on from."""
    for failed in folder.glob("*.partial"):
        shutil.rmtree(failed, ignore_errors=True)
    saved = sorted(folder.glob("step_*[0-9]"), key=step_of)
    for older in saved[:-2]:
        shutil.rmtree(older / "trainer", ignore_errors=True)
    for index, oldest in enumerate(saved[:-1]):
        size = 0
        with contextlib.suppress(FileNotFoundError):  # anybody may delete old ones
            size = keep_gb and sum(file.stat().st_size for file in folder.glob("step_*[0-9]/**/*"))
        if 0 < keep < len(saved) - index or 0 < keep_gb * 1e9 < size:
            shutil.rmtree(oldest, ignore_errors=True)


def load_checkpoint(path: str, parts: dict) -> int:
    """Weights and optimizers of `parts` as they were saved, also by another number of ranks. Returns how many
    steps made an update; of a checkpoint that does not say, all of its steps."""
    state, folder = trainer_state(parts), Path(path) / "trainer"
    saved = {
        key.rpartition(".")[0] for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    }
    for name, part in state.items():
        averages = part["optimizer"]["state"]
        for weight in [each for each in averages if f"{name}.optimizer.state.{each}" not in saved]:
            del averages[weight]  # one that had no gradient yet, as a tower without images
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:  # no Exception, as above
        raise OSError(f"{path} could not be loaded: {error}") from error
    for name, (model, optimizer) in parts.items():
        loaded = {"model_state_dict": state[name]["model"], "optim_state_dict": state[name]["optimizer"]}
        lenient = state_dict.StateDictOptions(strict=False)  # to those averages: all else has been loaded
        state_dict.set_state_dict(model, optimizer, **loaded, options=lenient)
    progress = json.loads((Path(path) / "progress.json").read_text())
    return progress.get("trained", progress["step"])


def load_weights(path: str, model: torch.nn.Module, rank: int) -> None:
    """The weights of a folder in the Hugging Face format. Raises if they are not those of this model."""
    state, fits = {}, [True]
    if rank == 0:
        other = auto_class(path).from_pretrained(path, dtype=torch.float32)
        ours, theirs = ({clean(name): p.shape for name, p in m.named_parameters()} for m in (model, other))
        state, fits = other.state_dict(), [ours == theirs]
    dist.broadcast_object_list(fits)
    if not fits[0]:
        raise ValueError(f"{path}: its parameters are not those of the model to train")
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, state, options=options)
