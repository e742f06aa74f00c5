"""Checkpoints: the model in the Hugging Face format, and what a run needs to go on from it.

    checkpoints/step_40/           config, tokenizer, weights: transformers and vLLM load the folder
    checkpoints/step_40/trainer/   weights and optimizer of every rank (torch.distributed.checkpoint), and the
                                   rollouts that were finished and not trained
    checkpoints/step_40/progress.json   step, tickets, checksums of trainer/

A folder without the suffix .partial is complete. Only the newest ones keep their trainer/.
"""

import errno
import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from annotated_types import Ge, Gt, Lt
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint import CheckpointException, state_dict

from common.checks import FlagError
from common.debug import dump_rollouts, read_rollouts
from common.refit import checkpoint_tensors, clean


@dataclass
class SaveFlags:
    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints, which transformers loads and --resume goes on from. 0 saves only at the
    end."""
    resume: bool = False
    """Go on with the run in --output-dir from its last complete checkpoint."""
    keep_checkpoints: Annotated[int, Ge(1)] = 2
    """Newest checkpoints that --resume can go on from; of older ones the model stays."""
    max_checkpoint_gb: Annotated[float, Gt(0)] = float("inf")
    """GiB that the checkpoints may take together: the oldest go first, the newest --keep-checkpoints never."""
    fault_budget: Annotated[int, Ge(0)] = 0
    """How often the run starts again by itself, from its last checkpoint, when a process of it died or missed
    a deadline. 0: such a run ends."""
    grace_s: Annotated[float, Gt(0), Lt(1e9)] = 30.0
    """Seconds that a run has to save and end after SIGTERM, SIGUSR1 or Ctrl-C. Give less than what sends them
    waits before it kills."""
    init_from: str | None = None
    """Folder of a checkpoint of the same model whose weights the run starts from (a KL reference stays
    --model)."""

    def due(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint is due when `step` steps are trained."""
        return step == max_steps or self.save_every > 0 and step % self.save_every == 0


def starting_point(resume: bool, output_dir: str, max_steps: int) -> tuple[str | None, dict]:
    """The folder of the newest checkpoint that a run of `max_steps` can go on from, and its progress; of a
    new run no folder. `progress["rollouts"]` were finished and not trained.

    Newer checkpoints that cannot be used are set aside with a warning: those that are not as they were
    written, and the last one of a run that died in its last evaluation. Raises FlagError if none is left.
    """
    if not resume:
        return None, {"step": 0, "queue": None, "rollouts": []}
    folders = [each.parent for each in Path(output_dir, "checkpoints").glob("step_*[0-9]/trainer")]
    evaluated, unusable = Path(output_dir, "summary.json").exists(), {}
    for folder in sorted(folders, key=step_of, reverse=True):
        if step_of(folder) > max_steps - (evaluated or len(folders) == 1):
            what = f"--max-steps {max_steps}: {output_dir} is at step {step_of(folder)}"
            raise FlagError(f"{what}; ask for more steps")
        try:
            progress = read_progress(folder)
        except (OSError, ValueError) as error:
            unusable[folder] = str(error)
            continue
        if progress["step"] == max_steps:
            unusable[folder] = "all steps are trained, the last evaluation is missing"
            continue
        for other, why in unusable.items():
            print(f"warning: going on from {folder.name}, not from {other.name}: {why}")
            shutil.rmtree(f"{other}.aside", ignore_errors=True)
            other.rename(f"{other}.aside")
        return str(folder), progress
    fix = "--save-every writes them; without --resume, use another --output-dir"
    why = "".join(f" ({folder.name}: {why})" for folder, why in unusable.items())
    raise FlagError(f"--resume: {output_dir} has no checkpoint to go on from{why}; {fix}")


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def read_progress(folder: Path) -> dict:
    """What `save_checkpoint` got as progress. Raises OSError or ValueError if trainer/ is not as written."""
    progress, trainer = json.loads((folder / "progress.json").read_text()), folder / "trainer"
    for name, written in progress.pop("files", {}).items():
        if file_checksum(trainer / name) != written:
            raise ValueError(f"trainer/{name} has other bytes than were written")
    recorded = (trainer / f"step_{progress['step']:06}.jsonl").exists()
    rollouts = read_rollouts(str(trainer), progress["step"]) if recorded else []
    return progress | {"rollouts": rollouts}


def file_checksum(path: Path) -> int:
    """CRC-32 of a file, which is then on the disk and not in a buffer alone."""
    value = 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(16 << 20):
            value = zlib.crc32(chunk, value)
    return value


def may_restart(flags: SaveFlags, output_dir: str) -> bool:
    """Takes a restart from the fault budget. It goes on from the last checkpoint; without one, at step 0."""
    flags.fault_budget -= 1
    if flags.fault_budget >= 0:
        flags.resume = any(Path(output_dir, "checkpoints").glob("step_*[0-9]/trainer"))
        if not flags.resume:
            Path(output_dir, "metrics.jsonl").unlink(missing_ok=True)
        where = "from the last checkpoint" if flags.resume else "at step 0, there is no checkpoint yet"
        print(f"starting again {where}; {flags.fault_budget} of --fault-budget are left", flush=True)
    return flags.fault_budget >= 0


@torch.no_grad()
def save_model(model: torch.nn.Module, tokenizer, path: Path, rank: int) -> None:
    """Weights, config and tokenizer. Every rank must call it: gathering the shards is a collective."""
    state = {}
    for name, tensor in checkpoint_tensors(model.named_parameters()):
        if rank == 0:
            # experts are views of one tensor, and the file format wants storages of their own
            state[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, path)
        for part in (model.config, getattr(model, "generation_config", None), tokenizer):
            if part is not None:
                part.save_pretrained(path)


def trainer_state(parts: dict) -> dict:
    states = {name: state_dict.get_state_dict(model, optimizer) for name, (model, optimizer) in parts.items()}
    return {name: {"model": model, "optimizer": optimizer} for name, (model, optimizer) in states.items()}


def save_checkpoint(path: str, rank: int, model, tokenizer, parts: dict, progress: dict) -> None:
    """Writes the folder `path`, which is there complete or not at all. Every rank must call it.

    `parts` are the (model, optimizer) pairs to go on with, by name; `progress` is JSON with the key `step`,
    and may have `rollouts`. Raises OSError, before it writes, if the disk has too little space.
    """
    final, partial = Path(path), Path(f"{path}.partial")
    final.parent.mkdir(parents=True, exist_ok=True)
    weights = [weight for model, _ in parts.values() for weight in model.parameters()]
    # weights and two averages, and the model once more
    needed = 4 * sum(weight.numel() * weight.element_size() for weight in weights)
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        what = f"a checkpoint takes {needed / 2**30:.3g} GiB, {final.parent} has {free / 2**30:.3g}"
        raise OSError(errno.ENOSPC, what)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    save_model(model, tokenizer, partial, rank)
    try:
        dcp.save(trainer_state(parts), checkpoint_id=partial / "trainer")
    except CheckpointException as error:  # no Exception: Ray would say that the process died
        raise OSError(str(error)) from error
    if rank == 0:
        dump_rollouts(str(partial / "trainer"), progress["step"], progress.get("rollouts", []))
        files = {file.name: file_checksum(file) for file in (partial / "trainer").iterdir()}
        marker = {key: value for key, value in progress.items() if key != "rollouts"} | {"files": files}
        (partial / "progress.json").write_text(json.dumps(marker))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)


def prune_checkpoints(folder: Path, keep: int, max_gb: float) -> None:
    """Removes what the flags do not keep, and what a save that failed has left."""
    for partial in folder.glob("*.partial"):
        shutil.rmtree(partial)
    total = 0
    for place, each in enumerate(sorted(folder.glob("step_*[0-9]"), key=step_of, reverse=True)):
        if place >= keep:
            shutil.rmtree(each / "trainer", ignore_errors=True)
        total += sum(file.stat().st_size for file in each.rglob("*"))
        if place >= keep and total > max_gb * 2**30:
            shutil.rmtree(each)


def load_checkpoint(path: str, parts: dict) -> None:
    """Weights and optimizers of `parts` as they were saved, also by another number of ranks."""
    state = trainer_state(parts)
    dcp.load(state, checkpoint_id=Path(path) / "trainer")
    for name, (model, optimizer) in parts.items():
        loaded = {"model_state_dict": state[name]["model"], "optim_state_dict": state[name]["optimizer"]}
        state_dict.set_state_dict(model, optimizer, **loaded)


def load_weights(path: str, model: torch.nn.Module, rank: int) -> None:
    """The weights of a folder in the Hugging Face format. Raises if they are not those of this model."""
    from transformers import AutoModelForCausalLM

    state, fits = {}, [True]
    if rank == 0:
        other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        ours, theirs = ({clean(name): p.shape for name, p in m.named_parameters()} for m in (model, other))
        state, fits = other.state_dict(), [ours == theirs]
    dist.broadcast_object_list(fits)
    if not fits[0]:
        raise ValueError(f"{path}: its parameters are not those of the model to train")
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, state, options=options)
