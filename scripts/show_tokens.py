"""Every token of a recorded rollout: who sampled it, how sure engine and trainer were, and whether it trains.

    .venv/bin/python scripts/show_tokens.py runs/a                              the last recorded step
    .venv/bin/python scripts/show_tokens.py runs/a --step 12 --rollout 190.3    one rollout, by its id
    .venv/bin/python scripts/show_tokens.py runs/a --step 12 --html tokens.html

The run must have had --dump-rollouts. The trainer's log-probs are computed again, in fp32, from the
checkpoint nearest to the step; with that of the step itself (--save-every) they are those that it trained
with. Colours: the prompt is dim, a sampled token green where its lag is 0, yellow where it is behind, magenta
past --max-staleness; red where the two log-probs differ by more than 0.5; struck through where it is masked.
"""

import html
import importlib
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.attention import image_inputs
from common.batching import end_to_end
from common.debug import read_rollouts
from common.models import auto_class, load_tokenizer, resolve_model
from common.sample import Rollout, Segment

WIDE = 0.5  # nats between engine and trainer, from which a token is shown in red
COLUMNS = ("token", "version", "lag", "engine", "trainer", "difference", "trained", "advantage")


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """Output folder of the run."""
    rollouts: Path | None = None
    """Folder of its recorded rollouts. Default: the run's --dump-rollouts."""
    step: int | None = None
    """Step that trained the rollout. Default: the last one that was recorded."""
    rollout: str | None = None
    """Rollout id, like 190.3 (the fourth of ticket 190). Default: the one with the most versions."""
    checkpoint: str | None = None
    """Folder of a model for the trainer's log-probs, or "none" for none. Default: the run's nearest."""
    html: Path | None = None
    """Writes a page instead: the values of a token show when the pointer is on it."""


@dataclass
class Token:
    """One token of a segment as it is shown. None: there is no such number."""

    text: str
    version: int | None  # None: not sampled
    lag: int | None
    engine: float | None  # log-probs
    trainer: float | None
    trained: bool
    advantage: float | None
    late: bool

    @property
    def difference(self) -> float | None:
        return None if None in (self.trainer, self.engine) else self.trainer - self.engine

    @property
    def style(self) -> str:
        """As rich and the page's style sheet know it."""
        if self.version is None:
            return "dim"
        wide = self.difference is not None and abs(self.difference) > WIDE
        colour = "red" if wide else "magenta" if self.late else "yellow" if self.lag else "green"
        return colour if self.trained else f"{colour} strike"

    @property
    def cells(self) -> list[str]:
        numbers = (self.version, self.lag, self.engine, self.trainer, self.difference)
        shown = ["" if x is None else f"{x:.4f}" if isinstance(x, float) else str(x) for x in numbers]
        advantage = "" if self.advantage is None else f"{self.advantage:+.4f}"
        return [self.text, *shown, "yes" if self.trained else "no", advantage]


def read_segment(
    segment: Segment, tokenizer, version: int, bound: int, advantage: float | None, trainer: list | None
) -> list[Token]:
    """`trainer` has the log-probs of all tokens but the first. `version` is the policy's that trained."""
    tokens = []
    for place, token_id in enumerate(segment.token_ids.tolist()):
        sampled = segment.versions[place] >= 0
        lag = version - int(segment.versions[place]) if sampled else None
        tokens.append(
            Token(
                text=tokenizer.decode([token_id]),
                version=int(segment.versions[place]) if sampled else None,
                lag=lag,
                engine=float(segment.logprobs[place]) if sampled else None,
                trainer=trainer[place - 1] if sampled and trainer and place else None,
                trained=bool(segment.action_mask[place]),
                advantage=advantage if segment.action_mask[place] else None,
                late=sampled and lag > bound,
            )
        )
    return tokens


def read_step(config: dict, folder: str | Path, step: int) -> tuple[list[Rollout], dict[str, float]]:
    """The rollouts of a recorded step, late tokens masked as in the run, and the advantages by rollout id."""
    rollouts, flags = read_rollouts(str(folder), step), config["flags"]
    name = re.search(r"algos[./](\w+)", config["command"])
    algorithm = importlib.import_module(f"algos.{name[1]}" if name else "algos.grpo")
    algorithm.mark_late(rollouts, step, flags["max_staleness"], flags["late"])
    return rollouts, algorithm.make_rows(rollouts, algorithm.Args())[1]


def read_tokens(
    flags: dict, step: int, rollouts: list[Rollout], advantages: dict[str, float], path: str | None
) -> list[list[list[Token]]]:
    """The tokens of each segment of each rollout. `path`: a model for the trainer's log-probs."""
    model, tokenizer = None, load_tokenizer(resolve_model(flags["model"]))
    if path is not None:
        path = resolve_model(path)
        model = auto_class(path).from_pretrained(path, dtype=torch.float32)
    return [
        [
            read_segment(
                segment, tokenizer, step, flags["max_staleness"], advantages.get(rollout.rollout_id),
                trainer_logprobs(model, segment, flags["temperature"]) if model else None,
            )
            for segment in rollout.segments
        ]
        for rollout in rollouts
    ]  # fmt: skip


@torch.no_grad()
def trainer_logprobs(model, segment: Segment, temperature: float) -> list[float]:
    """Log-probs of all tokens but the first, by a plain forward pass in fp32."""
    ids = torch.tensor(segment.token_ids.astype(np.int64))[None]
    images = {name: torch.tensor(value) for name, value in end_to_end(segment.images).items()}
    logits = model(ids[:, :-1], **image_inputs(model, ids[:, :-1], images)).logits.float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0].tolist()


def nearest_model(run: Path, flags: dict, step: int) -> tuple[str, int]:
    """The checkpoint whose policy version is nearest to the step's, and that version; 0 is where it began."""
    found = {0: flags["save"]["init_from"] or flags["model"]}
    for path in (run / "checkpoints").glob("step_*"):
        if path.suffix != ".partial":
            found[int(path.name.removeprefix("step_"))] = str(path)
    version = min(found, key=lambda each: (abs(each - step), each))
    return found[version], version


def summary(tokens: list[Token]) -> str:
    """Lag and mismatch of the sampled tokens of a rollout, and how many are left out of the loss."""
    sampled = [token for token in tokens if token.version is not None]
    if not sampled:
        return "no sampled token"
    lags, versions = [token.lag for token in sampled], Counter(token.version for token in sampled)
    told = ", ".join(f"{count} of version {version}" for version, count in sorted(versions.items()))
    text = f"{len(sampled)} sampled tokens: {told}; lag mean {np.mean(lags):.3g}, max {max(lags)}"
    text += f"; {sum(token.late for token in sampled)} late, {sum(not t.trained for t in sampled)} masked"
    differences = [abs(token.difference) for token in sampled if token.difference is not None]
    if differences:
        text += f"; trainer against engine mean {np.mean(differences):.3g}, max {max(differences):.3g}"
    return text


def step_summary(rows: list[dict], step: int) -> list[str]:
    """What metrics.jsonl has on lag, mismatch, weights and drops: of the step, and means over the run."""
    lines = []
    row = next((row for row in rows if row["step"] == step), {})
    for group in ("staleness", "mismatch", "is", "gate", "rollout/dropped"):
        keys = sorted(
            {key for each in rows for key in each if key.startswith(f"{group}/")} - {"staleness/hist"}
        )
        known = {key: [r[key] for r in rows if isinstance(r.get(key), int | float)] for key in keys}
        if group == "rollout/dropped":
            cells = [
                f"{k.removeprefix(group + '/')} {row.get(k, 0)} ({sum(known[k])} in the run)" for k in keys
            ]
        else:
            cells = [
                f"{key.split('/')[1]} {row[key]:.4g} (run: {np.mean(known[key]):.4g})"
                for key in keys
                if isinstance(row.get(key), int | float)
            ]
        lines.append(f"{group}: {', '.join(cells) or 'nothing'}")
    if "staleness/hist" in row:
        lines.append(f"tokens at lag 0, 1, 2, ...: {row['staleness/hist']}")
    return lines


def show(console: Console, title: str, notes: list[str], segments: list[list[Token]]) -> None:
    console.rule(title)
    for note in notes:
        console.print(note)
    for number, tokens in enumerate(segments):
        console.rule(f"segment {number}")
        console.print(summary(tokens))
        console.print(Text.assemble(*((token.text, token.style) for token in tokens)))
        table = Table(*("place", *COLUMNS), box=None, header_style="bold", padding=(0, 1, 0, 0))
        for place, token in enumerate(tokens):
            if token.version is not None:
                first, *others = token.cells
                table.add_row(str(place), Text(repr(first)[1:-1], token.style), *others)
        console.print(table)


PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.6 sans-serif; margin: 2em; max-width: 70em; color: #222; background: #fff }}
.tokens {{ font-family: monospace; white-space: pre-wrap; border: 1px solid #ccc; padding: 1em }}
.tokens span:hover {{ outline: 1px solid #000 }}
.dim {{ color: #888 }} .green {{ background: #d8f5d8 }} .yellow {{ background: #fbf0b5 }}
.magenta {{ background: #efcdf5 }} .red {{ background: #f8b9b0 }} .strike {{ text-decoration: line-through }}
</style>
<h1>{title}</h1>
<ul>{notes}</ul>
{segments}
"""


def page(title: str, notes: list[str], segments: list[list[Token]]) -> str:
    """A page without scripts; all that came from the model or the data is escaped."""
    parts = []
    for number, tokens in enumerate(segments):
        spans = []
        for token in tokens:
            told = [f"{name}: {cell}" for name, cell in zip(COLUMNS, token.cells) if cell]
            tip = html.escape("\n".join(told if token.version is not None else told[:1]), quote=True)
            spans.append(f'<span class="{token.style}" title="{tip}">{html.escape(token.text)}</span>')
        heading = html.escape(f"segment {number}: {summary(tokens)}")
        parts.append(f'<h3>{heading}</h3>\n<div class="tokens">{"".join(spans)}</div>')
    escaped = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return PAGE.format(title=html.escape(title), notes=escaped, segments="\n".join(parts))


def pick(rollouts: list[Rollout], rollout_id: str | None) -> Rollout:
    """The rollout with that id, or the one whose tokens have the most versions."""
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    if rollout_id is not None and rollout_id not in by_id:
        sys.exit(f"error: --rollout {rollout_id}: the step has {', '.join(list(by_id)[:20])}")
    return by_id.get(rollout_id) or max(rollouts, key=lambda rollout: len(set(rollout.lags(10**6).tolist())))


def main(args: Args) -> None:
    if not (args.run / "config.json").exists():
        sys.exit(f"error: {args.run}: has no config.json; name the --output-dir of a run")
    config = json.loads((args.run / "config.json").read_text())
    flags = config["flags"]
    folder = args.rollouts or flags["debug"]["dump_rollouts"]
    if folder is None:
        sys.exit(f"error: {args.run}: was run without --dump-rollouts, so that there are no tokens to show")
    recorded = sorted(int(path.stem.removeprefix("step_")) for path in Path(folder).glob("step_*.jsonl"))
    step = args.step if args.step is not None else max(recorded, default=0)
    if step not in recorded:
        sys.exit(
            f"error: --step {step}: {folder} has {len(recorded)} steps, {recorded[:1]} to {recorded[-1:]}"
        )
    rollouts, advantages = read_step(config, folder, step)
    chosen = pick(rollouts, args.rollout)
    path, version = args.checkpoint, None
    if path is None:
        path, version = nearest_model(args.run, flags, step)
    notes = [f"reward {chosen.reward:.4g}, {'invalid: ' + chosen.invalid if chosen.invalid else 'valid'}"]
    if path != "none":
        which = "" if version is None else f", policy version {version}"
        notes.append(f"trainer's log-probs by {path}{which}; the step trained version {step}")
    metrics = args.run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    notes += step_summary(rows, step)
    (segments,) = read_tokens(flags, step, [chosen], advantages, None if path == "none" else path)
    title = f"rollout {chosen.rollout_id}, trained in step {step}"
    if args.html:
        args.html.write_text(page(title, notes, segments))
        print(f"written to {args.html}")
    else:
        show(Console(highlight=False, markup=False, emoji=False), title, notes, segments)


if __name__ == "__main__":
    main(tyro.cli(Args))
