"""For looking inside: recorded rollouts, a profiler trace, the plan of a run."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.sample import Rollout, Segment


@dataclass
class DebugFlags:
    dry_run: bool = False
    """Check all flags, print the batch arithmetic, and end."""
    eval_only: bool = False
    """Evaluate --model (or --init-from, or the run to --resume), and end."""
    dump_rollouts: str | None = None
    """Folder that gets all rollouts of every step, with tokens, log-probs and versions."""
    replay_rollouts: str | None = None
    """Folder that --dump-rollouts filled: train from it in this process, without Ray and engines, so that
    breakpoints work."""
    profile_steps: int = 0
    """Steps after the first whose training is traced, into profile/ (chrome://tracing, ui.perfetto.dev)."""


def plain(record) -> dict:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(record).items()}


def dump_rollouts(folder: str, step: int, rollouts: list[Rollout]) -> None:
    """One file a step, one rollout a line. Floats survive exactly."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    records = [plain(rollout) | {"segments": [plain(s) for s in rollout.segments]} for rollout in rollouts]
    text = "".join(json.dumps(record) + "\n" for record in records)
    Path(folder, f"step_{step:06}.jsonl").write_text(text)


def read_rollouts(folder: str, step: int) -> list[Rollout]:
    """What `dump_rollouts` wrote. Raises FileNotFoundError if the step was not recorded."""
    dtypes = {"token_ids": np.int32, "action_mask": bool, "logprobs": np.float32, "versions": np.int32}
    rollouts = []
    for line in Path(folder, f"step_{step:06}.jsonl").read_text().splitlines():
        record = json.loads(line)
        for segment in record["segments"]:
            segment |= {name: np.array(segment[name], dtype) for name, dtype in dtypes.items()}
        rollouts.append(Rollout(**record | {"segments": [Segment(**s) for s in record["segments"]]}))
    return rollouts


@contextlib.contextmanager
def traced(path: str | None):
    """Writes a torch profiler trace of the block to `path`; None does nothing."""
    if path is None:
        yield
        return
    with torch.profiler.profile(with_stack=True) as profile:
        yield
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(path)


def batch_plan(
    *, prompts_per_step: int, group_size: int, minibatches: int, epochs: int, max_steps: int,
    max_new_tokens: int, max_staleness: int, max_in_flight: int, num_engines: int, num_tasks: int,
) -> list[str]:  # fmt: skip
    """The arithmetic of a run, line by line."""
    rollouts = prompts_per_step * group_size
    updates = minibatches * epochs
    ahead, flying = prompts_per_step * (max_staleness + 1), max_in_flight * num_engines
    return [
        f"a step: {prompts_per_step} prompts x {group_size} rollouts = {rollouts} rollouts, "
        f"at most {rollouts * max_new_tokens} new tokens a turn",
        f"updates: {epochs} epochs x {minibatches} minibatches = {updates} a step, "
        f"{rollouts // minibatches} rollouts each; {max_steps * updates} in {max_steps} steps",
        f"data: {max_steps * prompts_per_step} prompts in all, {num_tasks} training tasks: "
        f"{max_steps * prompts_per_step / num_tasks:.3g} passes",
        f"in flight: {flying} groups ({num_engines} x {max_in_flight}), "
        f"{min(flying, ahead)} of them within --max-staleness {max_staleness} ({ahead} groups)",
    ]
