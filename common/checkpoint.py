"""Checkpoints: the model in the Hugging Face format, and what a run needs to go on from it.

    checkpoints/step_40/           config, tokenizer, weights: transformers and vLLM load the folder
    checkpoints/step_40/trainer/   weights and optimizer of every rank (torch.distributed.checkpoint)
    checkpoints/step_40/progress.json

A folder without the suffix .partial is complete. Only the newest one keeps its trainer/.
"""

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from annotated_types import Ge
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint import CheckpointException, state_dict

from common.checks import FlagError
from common.refit import checkpoint_tensors, clean, weights_of


@dataclass
class SaveFlags:
    save_every: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints, which transformers loads and --resume goes on from. 0 saves only at the
    end."""
    resume: bool = False
    """Go on with the run in --output-dir from its last complete checkpoint."""
    init_from: str | None = None
    """Folder of a checkpoint of the same model whose weights the run starts from (a KL reference stays
    --model)."""


def starting_point(resume: bool, output_dir: str, max_steps: int) -> tuple[str | None, dict]:
    """The folder of the newest checkpoint that a run of `max_steps` can go on from, and its progress; of a
    new run no folder. Raises FlagError if there is none to resume from.
    """
    if not resume:
        return None, {"step": 0, "queue": None}
    found = []
    for trainer in Path(output_dir, "checkpoints").glob("step_*[0-9]/trainer"):
        with contextlib.suppress(OSError, ValueError):  # it is not complete
            progress = json.loads((trainer.parent / "progress.json").read_text())
            found.append((progress["step"], str(trainer.parent), progress))
    if not found:
        fix = "--save-every writes them; without --resume, use another --output-dir"
        raise FlagError(f"--resume: {output_dir} has no checkpoint to go on from; {fix}")
    step, path, progress = max(found)
    if step >= max_steps:
        raise FlagError(f"--max-steps {max_steps}: {output_dir} is at step {step}; ask for more steps")
    return path, progress


@torch.no_grad()
def save_model(model: torch.nn.Module, tokenizer, path: Path, rank: int) -> None:
    """Weights, config and tokenizer. Every rank must call it: gathering the shards is a collective."""
    state = {}
    for name, tensor in checkpoint_tensors(weights_of(model)):
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

    `parts` are the (model, optimizer) pairs to go on with, by name; `progress` is JSON with the key `step`.
    """
    final, partial = Path(path), Path(f"{path}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    save_model(model, tokenizer, partial, rank)
    try:
        dcp.save(trainer_state(parts), checkpoint_id=partial / "trainer")
    except CheckpointException as error:  # no Exception: Ray would say that the process died
        raise OSError(str(error)) from error
    if rank == 0:
        (partial / "progress.json").write_text(json.dumps(progress))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        others = set(final.parent.glob("step_*")) - {final}
        for other in others:
            shutil.rmtree(other if other.suffix == ".partial" else other / "trainer", ignore_errors=True)


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
