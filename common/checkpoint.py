"""Saving the model in the Hugging Face format."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


@dataclass
class SaveFlags:
    save_every: int = 0
    """Steps between checkpoints that transformers loads. 0 saves only at the end."""


@torch.no_grad()
def save_model(model: torch.nn.Module, tokenizer, path: str, rank: int) -> None:
    """Writes the folder `path` with weights, config and tokenizer; it is there complete or not at all.

    Every rank must call it: gathering the shards is a collective. Rank 0 writes.
    """
    state = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if rank == 0:
            state[name] = tensor.detach().cpu()
    if rank != 0:
        return
    partial = Path(f"{path}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=state)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.rename(partial, path)
