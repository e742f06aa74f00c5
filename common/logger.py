"""Metrics and transcripts on disk, progress on the screen.

A run's directory gets `config.json`, `metrics.jsonl` (one row a step), `samples.jsonl` (one rollout a line)
and, at its end, `summary.json` and `curve.png`. A terminal gets a live last line, others plain lines.
"""

import contextlib
import importlib.metadata
import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from annotated_types import Ge
from rich.console import Console
from rich.text import Text


@dataclass
class LogFlags:
    output_dir: str = field(default_factory=lambda: time.strftime("runs/%Y%m%d-%H%M%S"))
    """Folder for metrics, transcripts and checkpoints. Default: a new one under runs/, named by the time."""
    samples_per_step: Annotated[int, Ge(0)] = 4
    """Rollouts of a step that go to samples.jsonl as text, with reward and advantage."""
    tensorboard: bool = True
    """Write TensorBoard files to tensorboard/ in --output-dir."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (pip install wandb)."""
    trackio_project: str | None = None
    """Also log to this trackio project (pip install trackio)."""


def merge(parts: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Adds the (sum, count) pairs of several ranks or micro-batches, key by key. A part may lack keys."""
    keys = dict.fromkeys(key for pairs in parts for key in pairs)
    columns = {key: zip(*(pairs[key] for pairs in parts if key in pairs)) for key in keys}
    return {key: (sum(sums), sum(counts)) for key, (sums, counts) in columns.items()}


def mean_of(pairs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Divides each (sum, count) once. A key with count 0 is left out: nothing measured is not 0."""
    return {key: value / count for key, (value, count) in pairs.items() if count}


def _to_json(record: dict) -> tuple[dict, list[str]]:
    """`record` as JSON data with NaN and infinities as None, and the keys under which there were some."""
    plain, non_finite = {}, []
    for key, value in record.items():
        found: list[str] = []
        text = json.dumps(value, default=lambda array: array.tolist())  # numpy and torch, scalars included
        plain[key] = json.loads(text, parse_constant=found.append)  # append returns None, which is the value
        non_finite += [key] if found else []
    return plain, non_finite


def _show(value) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_show(item)}" for key, item in value.items() if item is not None)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(config: dict) -> dict:
    """Flags by name, without their groups."""
    groups = [value for value in config.values() if isinstance(value, dict)]
    return {k: v for part in (config, *groups) for k, v in part.items() if not isinstance(v, dict)}


def scores_by_version(frame):
    """`eval/<env>/mean` over policy versions, of rows by step. `eval_end` is one version later than its
    row."""
    last = frame.filter(regex="^eval_end/.*/mean$")
    last = last.rename(columns=lambda key: key.replace("_end", "", 1), index=lambda step: step + 1)
    return frame.filter(regex="^eval/.*/mean$").combine_first(last)


class Logger(contextlib.AbstractContextManager):
    """Use as a context manager around the run: an error that leaves it is named in one line and not hidden.

    `config` holds all flags (`dataclasses.asdict(args)`). `headline` are the metrics that each printed line
    shows (evaluation scores come on top); the first, usually the reward, is also in the live line, the
    summary and the curve. A resumed run passes `first_step`: rows and samples of that step and later, which
    it will measure again, are removed. The row before it may be missing, and is then written without metrics.
    Raises ValueError if an earlier one is missing. `trackers` get what the files get (`open_trackers`).
    """

    def __init__(self, output_dir, config: dict, total_steps: int, headline, first_step=0, trackers=()):
        self.trackers = trackers
        self.output_dir, self.total_steps, self.headline = Path(output_dir), total_steps, headline
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.live = self.console.status("", refresh_per_second=4)
        self.started = time.monotonic()
        self.warned: set[str] = set()
        self.scores: dict[str, float] = {}  # the newest evaluation scores
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self._write_config(config)
        self.rows = self._keep_before("metrics.jsonl", first_step)  # all rows of the run stay in memory
        self._keep_before("samples.jsonl", first_step)
        steps = [row["step"] for row in self.rows]
        if steps not in (list(range(first_step)), list(range(first_step - 1))):
            raise ValueError(f"{self.output_dir}/metrics.jsonl lacks a row before step {first_step}")
        if len(steps) < first_step:  # the run was killed after a step's checkpoint and before its row
            self.rows.append(self._append("metrics.jsonl", {"step": first_step - 1}))

    def __exit__(self, kind, error, traceback) -> None:
        self.live.stop()
        for tracker in self.trackers:
            tracker.close()
        if error is not None:
            self.console.print(error.__cause__ or "")  # as another process told it, above the line to read
            last_line = (str(error).strip().splitlines() or ["(no message)"])[-1]
            self.console.print(f"run ended: {kind.__name__}: {last_line}", style="bold red")
            with contextlib.suppress(OSError):  # a full disk must not hide what ended the run
                self.draw_curve()

    def _write_config(self, config: dict) -> None:
        """Writes config.json, and warns of what differs from the flags that the run was started with."""
        versions = {each.name: each.version for each in importlib.metadata.distributions() if each.name}
        versions["python"] = sys.version.split()[0]
        content = {"command": shlex.join(sys.orig_argv), "flags": config, "versions": versions}
        text = json.dumps(content, default=str, indent=2, sort_keys=True) + "\n"
        path = self.output_dir / "config.json"
        before = _flat(json.loads(path.read_text())["flags"]) if path.exists() else {}
        partial = path.with_suffix(".tmp")
        partial.write_text(text)
        partial.replace(path)
        for name, value in _flat(json.loads(text)["flags"]).items():
            if before.get(name, value) != value and name != "resume":
                self.warn(f"--{name.replace('_', '-')} was {before[name]}, now it is {value}")

    def _keep_before(self, name: str, first_step: int) -> list[dict]:
        """Cuts a file to its whole lines of steps before `first_step`, and returns them parsed."""
        path = self.output_dir / name
        path.touch()
        rows = [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]
        kept = [row for row in rows if row["step"] < first_step]
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(row) + "\n" for row in kept))
        rewritten.replace(path)
        return kept

    def _append(self, name: str, record: dict) -> dict:
        record, non_finite = _to_json(record)
        with open(self.output_dir / name, "a") as file:
            file.write(json.dumps(record) + "\n")
        for key in non_finite:
            self.warn(f"{key} is not finite: null in {name}")
        return record

    def _set_live(self, text: str) -> None:
        self.live.update(Text(text))
        self.live.start()  # which shows nothing where there is no terminal

    def phase(self, text: str) -> None:
        """Says what the run does while there are no steps yet, and how many seconds it took to get there."""
        self.console.print(f"[{time.monotonic() - self.started:5.1f} s] {text}")
        self._set_live(text)

    def warn(self, message: str, kind: str | None = None) -> None:
        """Prints a warning, once for each `kind` (by itself: for each distinct message)."""
        if (kind or message) not in self.warned:
            self.warned.add(kind or message)
            self.console.print(f"warning: {message}", style="yellow")

    def preview(self, samples: list[dict]) -> None:
        """Shows rollouts before the first step trains them: what the model is asked, answers and earns."""
        for sample in samples:
            why = f" (invalid: {sample['invalid']})" if sample["invalid"] else ""
            self.console.rule(f"rollout {sample['rollout_id']}: reward {sample['reward']:.3g}{why}")
            self.console.print(Text(sample["prompt"], style="dim"), Text(sample["transcript"]))
        self.console.rule("training starts")

    def log_step(self, row: dict) -> None:
        """Adds the row of one step. Values are numbers or lists of numbers, keys are in algos/README.md.

        Raises ValueError unless row["step"] is the step after the last row's and below `total_steps`.
        """
        step = len(self.rows)
        if row.get("step") != step or step >= self.total_steps:
            raise ValueError(f"a row of step {row.get('step')}; due is step {step} of {self.total_steps}")
        row = self._append("metrics.jsonl", {"step": step} | row)
        self.rows.append(row)
        scalars = {key: value for key, value in row.items() if isinstance(value, int | float)}
        for tracker in self.trackers:
            tracker.log(step, scalars)
        scores = {k: value for k, value in row.items() if k.startswith("eval") and k.endswith("/mean")}
        self.scores |= scores
        recent, left = self.rows[-20:], self.total_steps - step - 1
        spent = sum(each.get(key) or 0 for each in recent for key in ("time/step", "time/eval"))
        eta = f"eta {timedelta(seconds=round(spent / len(recent) * left))}"

        shown = {key: row.get(key) for key in self.headline} | scores
        self.console.print(f"step {step}/{self.total_steps}  {_show(shown)}  {eta}")
        keys = (self.headline[0], "time/trainer_wait", "perf/samples_per_s")
        live = self.scores | {key: row.get(key) for key in keys}
        self._set_live(f"step {step}/{self.total_steps}  {eta}  {_show(live)}")

    def log_samples(self, step: int, samples: list[dict]) -> None:
        """Adds rollouts to samples.jsonl.

        A sample has ticket, rollout_id, prompt, transcript (decoded text), reward, score (evaluation only),
        advantage, versions [min, max] of its tokens, num_actions and invalid (the reason, or None).
        """
        for sample in samples:
            self._append("samples.jsonl", {"step": step} | sample)
        for tracker in self.trackers:
            tracker.log_samples(step, samples)

    def _frame(self):
        import pandas  # which takes its time: a run needs it at its end

        return pandas.DataFrame(self.rows).set_index("step")

    def summary(self, extra: dict) -> None:
        """Prints the run's result with `extra`, writes it to summary.json and draws curve.png."""
        self.live.stop()
        result: dict = {"steps": len(self.rows)}
        if self.rows:
            frame = self._frame()
            seconds, headline = frame["time/step"], frame[self.headline[0]].dropna()
            result["train_s"] = seconds.sum()
            if len(headline):
                result[headline.name] = {"first": headline.iloc[0], "last": headline.iloc[-1]}
            for key, scores in scores_by_version(frame).items():
                scores = scores.dropna()
                best = {"best": scores.max(), "best_version": scores.idxmax()}
                result[key] = {"first": scores.iloc[0]} | best | {"end": scores.iloc[-1]}
            for key in frame.columns.intersection(["time/trainer_wait", "time/refit"]):
                result[f"{key.removeprefix('time/')}_frac"] = frame[key].sum() / seconds.sum()
            if "perf/samples_per_s" in frame:
                result["samples_per_s"] = (frame["perf/samples_per_s"] * seconds).sum() / seconds.sum()
            if "mismatch/abs_mean" in frame:
                result["mismatch_worst"] = frame["mismatch/abs_mean"].max()
        result, _ = _to_json(result | extra)
        (self.output_dir / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        self.draw_curve()
        self.console.print(f"run finished, its files are in {self.output_dir}", style="bold")
        for key, value in result.items():
            self.console.print(f"  {key:<20} {_show(value)}")

    def draw_curve(self) -> None:
        """Draws curve.png: reward and scores, staleness and shares of the time. Needs two rows or more."""
        if len(self.rows) < 2:
            return
        from matplotlib.figure import Figure

        frame = self._frame()
        figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
        left, right = figure.subplots(1, 2)
        frame[self.headline[0]].dropna().plot(ax=left, alpha=0.6, linewidth=0.8)
        for key, curve in scores_by_version(frame).combine_first(frame.filter(["loss/eval"])).items():
            curve.dropna().plot(ax=left, marker="o", markersize=4, label=key)
        shares = 100 * frame.filter(["time/train", "time/trainer_wait", "time/refit"])
        shares = shares.div(frame["time/step"], axis=0).rolling(9, min_periods=1, center=True).mean()
        if len(shares.columns):
            shares.plot(ax=right, ylim=(0, 105))
        if "staleness/mean" in frame:
            frame["staleness/mean"].plot(ax=right, secondary_y=True, color="black", ls=":", legend=True)
        left.set(title="Learning", xlabel="step")
        right.set(title="Asynchrony", xlabel="step", ylabel="share of time/step (%)")
        for ax in (left, right):
            ax.grid(alpha=0.3)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
        figure.savefig(self.output_dir / "curve.png")
