"""For looking inside: recorded rollouts, a profiler trace, the plan of a run."""

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from annotated_types import Ge

from common.sample import Rollout, Segment


@dataclass
class DebugFlags:
    dry_run: Annotated[bool, tyro.conf.arg(aliases=["--print-plan"])] = False
    """Check all flags, print the batch arithmetic, and end."""
    eval_only: bool = False
    """Evaluate --model, or the weights of --init-from, and end."""
    dump_rollouts: str | None = None
    """Folder that gets all rollouts of every step, with tokens, log-probs and versions."""
    replay_rollouts: str | None = None
    """Folder that --dump-rollouts filled: train from it in this process, without Ray and engines, so that
    breakpoints work."""
    profile_steps: Annotated[int, Ge(0)] = 0
    """Steps after the first whose training is traced, into profile/ (chrome://tracing, ui.perfetto.dev)."""


def dump_rollouts(folder: str | None, step: int, rollouts: list[Rollout]) -> None:
    """One file a step, one rollout a line; None does nothing. Floats survive exactly."""
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(rollout), default=np.ndarray.tolist) for rollout in rollouts]
    Path(folder, f"step_{step:06}.jsonl").write_text("".join(line + "\n" for line in lines))


def read_rollouts(folder: str, step: int) -> list[Rollout]:
    """What `dump_rollouts` wrote. Raises FileNotFoundError if the step was not recorded."""
    lines = Path(folder, f"step_{step:06}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record["segments"] = [Segment(**segment) for segment in record["segments"]]
    return [Rollout(**record) for record in records]


def traced(path: str | None):
    """A context that writes a torch profiler trace of its block to `path`; None does nothing."""
    if path is None:
        return contextlib.nullcontext()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return torch.profiler.profile(with_stack=True, on_trace_ready=lambda done: done.export_chrome_trace(path))


def batch_plan(prompts: int, group_size: int, minibatches: int, epochs: int, steps: int, tasks: int) -> str:
    """The arithmetic of a run, in three lines. `prompts` a step."""
    rollouts, updates = prompts * group_size, minibatches * epochs
    return (
        f"a step: {prompts} prompts x {group_size} = {rollouts} rollouts\n"
        f"updates: {epochs} epochs x {minibatches} minibatches of {rollouts // minibatches} rollouts = "
        f"{updates} a step, {steps * updates} in {steps} steps\n"
        f"data: {steps * prompts} prompts, {steps * prompts / tasks:.3g} passes over {tasks} training tasks"
    )
