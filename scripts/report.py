"""One HTML page about one run or several: curves, who waited, transcripts, and where their flags differ.

    .venv/bin/python scripts/report.py runs/a                                   writes runs/a/report.html
    .venv/bin/python scripts/report.py runs/seed1 runs/seed2 runs/control --out report.html

Runs whose flags differ in the seed alone are one setting: its line is their mean, its band reaches from the
lowest of them to the highest. A long run is drawn in at most 150 points, each the mean of its steps (of a
metric named max: the largest). Tokens are coloured where a run had --dump-rollouts; --mismatch computes the
trainer's log-probs of them again, in fp32, from a checkpoint. The page loads nothing and works offline.
"""

import base64
import hashlib
import html
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import tyro
from annotated_types import Ge

POINTS, COLOURS = 150, 8  # of a line; of settings, in report.html
OWN = ("seed", "output_dir", "resume", "dump_rollouts", "tensorboard", "wandb_project", "trackio_project")
TEXT_LIMIT, TOKEN_LIMIT = 6000, 3000  # of one transcript on the page
CHARTS = (  # title, unit, metrics (the second is dashed)
    ("Reward", "mean of the step", ("reward/mean",)),
    ("Loss of SFT", "nats a token", ("loss/sft", "loss/eval")),
    ("Engine against trainer", "nats, with any lag", ("mismatch/abs_mean", "mismatch/abs_max")),
    ("Staleness", "policy versions", ("staleness/mean", "staleness/max")),
    ("Waiting", "% of the time", ("trainer waits", "engines wait")),
    ("Length", "sampled tokens a rollout", ("rollout/len_mean",)),
    ("Cut off, invalid", "share of rollouts", ("rollout/truncated_frac", "reward/invalid_frac")),
    ("Groups of equal rewards", "share", ("reward/zero_std_group_frac",)),
    ("Gradient", "L2 norm before clipping", ("grad_norm",)),
    ("Entropy", "nats a token", ("loss/entropy",)),
    ("Weights of the correction", "share of the tokens", ("is/ess", "is/dropped_frac")),
    ("KL to the start", "nats a token", ("loss/kl",)),
    ("Critic", "share of variance explained", ("value/explained_var",)),
    ("Speed", "rollouts a second", ("perf/samples_per_s",)),
)  # fmt: skip
DROPPED = "rollout/dropped/"
PARTS = {
    "train": "train", "trainer_wait": "wait for rollouts", "refit": "refit", "prepare": "prepare",
    "save": "save",
}  # fmt: skip
esc = html.escape


@dataclass
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs."""
    out: Path | None = None
    """File to write. Default: report.html in the first run's folder."""
    tokens: Annotated[int, Ge(0)] = 3
    """Recorded rollouts of each run that are shown token by token. Raise it to see more of a step."""
    mismatch: bool = False
    """Also colour them by mismatch: loads a checkpoint of each run, in fp32."""


@dataclass
class Run:
    name: str
    path: Path
    rows: list[dict]
    samples: list[dict]  # of three steps
    config: dict  # command, flags (in groups), versions
    notes: list[str]  # what is wrong with its files
    setting: int = 0

    @property
    def algorithm(self) -> str:
        found = re.search(r"algos[./](\w+)", self.config["command"])
        return found[1] if found else "run"

    @property
    def flags(self) -> dict:
        """By name, without their groups."""
        groups = [value for value in self.config["flags"].values() if isinstance(value, dict)]
        return {
            k: v
            for part in (self.config["flags"], *groups)
            for k, v in part.items()
            if not isinstance(v, dict)
        }

    @cached_property
    def scores(self) -> dict[str, dict[int, float | None]]:
        """{`eval/<env>/mean`: {policy version: score}}."""
        found: dict = {}
        for row in self.rows:
            for key in row:
                if key.startswith(("eval/", "eval_end/")) and key.endswith("/mean"):
                    version = row["step"] + key.startswith("eval_end/")
                    found.setdefault(key.replace("eval_end/", "eval/", 1), {})[version] = row[key]
        return found


# --- Reading


def read_lines(path: Path, notes: list[str], choose=lambda lines: lines) -> list[dict]:
    """The records that `choose`, of {line number: text}, keeps. A killed run may leave half a line at the
    end."""
    records, text = [], path.read_text(encoding="utf-8") if path.exists() else ""
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    for number, line in choose(lines).items():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            notes.append(f"{path.name}: line {number} is broken and left out")
    return records


def of_three_steps(lines: dict[int, str]) -> dict[int, str]:
    """The samples of the first, a middle and the last step that has some: the others are not even parsed."""
    found = {number: re.match(r'{"step": (\d+)', line) for number, line in lines.items()}
    step = {number: int(match[1]) if match else 0 for number, match in found.items()}
    steps = sorted(set(step.values()))
    chosen = {steps[0], steps[len(steps) // 2], steps[-1]} if steps else set()
    return {number: line for number, line in lines.items() if step[number] in chosen}


def finite(value) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def read_run(path: Path, name: str) -> Run:
    if not (path / "metrics.jsonl").exists():
        sys.exit(f"error: {path}: has no metrics.jsonl; name the --output-dir of a run")
    notes: list[str] = []
    rows, lost = [], 0
    for row in read_lines(path / "metrics.jsonl", notes):
        kept = {k: v if isinstance(v, list) else finite(v) for k, v in row.items()}
        lost += sum(value is None for value in kept.values())
        if step_s := kept.get("time/step"):
            whole_s = step_s + (kept.get("time/eval") or 0)  # engines work on through an evaluation
            kept["trainer waits"] = 100 * (kept.get("time/trainer_wait") or 0) / step_s
            kept["engines wait"] = 100 * (kept.get("time/rollout_wait") or 0) / whole_s
        rows.append(kept)
    config = {"command": "", "flags": {}, "versions": {}}
    if (path / "config.json").exists():
        config |= json.loads((path / "config.json").read_text(encoding="utf-8"))
    else:
        notes.append("config.json is missing: its flags are unknown")
    samples = read_lines(path / "samples.jsonl", notes, of_three_steps)
    run = Run(name, path, rows, samples, config, notes)
    if not (path / "summary.json").exists():
        notes.append(f"has no summary.json: it did not finish, or goes on (step {len(rows)})")
    if lost:
        notes.append(f"{lost} values were not finite: gaps in the lines")
    return run


def assign_settings(runs: list[Run]) -> list[str]:
    """Gives each run the number of its setting, and returns what the settings are called."""
    keys = [(run.algorithm, {k: v for k, v in run.flags.items() if k not in OWN}) for run in runs]
    distinct = [key for at, key in enumerate(keys) if key not in keys[:at]]
    for run, key in zip(runs, keys):
        run.setting = distinct.index(key)
    if len(distinct) > COLOURS:
        sys.exit(f"error: {len(distinct)} settings: a page shows {COLOURS}, name fewer runs")
    common = [flag for flag in distinct[0][1] if all(flag in flags for _, flags in distinct)]
    varying = [flag for flag in common if any(flags[flag] != distinct[0][1][flag] for _, flags in distinct)]
    labels = []
    for number, (algorithm, flags) in enumerate(distinct):
        label = ", ".join([algorithm, *(f"{flag} {show(flags[flag])}" for flag in varying[:4])])
        labels.append(f"{label} ({number + 1})" if label in labels else label)
    return labels


# --- Curves


def show(value) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def curve(runs: list[dict[int, float | None]], size: int, largest: bool) -> list[tuple]:
    """[(x, mean, lowest, highest)] over `runs`, {x: value} each, in buckets of `size`. None is a gap."""
    buckets: dict[int, list[list]] = {}
    for index, values in enumerate(runs):
        for x, value in values.items():
            buckets.setdefault(x // size, [[] for _ in runs])[index].append((x, value))
    points = []
    for _, by_run in sorted(buckets.items()):
        known = [[y for _, y in values if y is not None] for values in by_run]
        means = [max(ys) if largest else fmean(ys) for ys in known if ys]
        x = fmean(x for values in by_run for x, _ in values)
        points.append((x, fmean(means), min(means), max(means)) if means else (x, None, None, None))
    return points


def chart(title: str, unit: str, lines: list[tuple], x_name: str = "step") -> dict:
    """What report.html draws. Lines are (setting, key number, name, points);
    a point without a mean is a gap."""
    drawn = [
        {"setting": setting, "key": number, "name": name, "points": [[_short(v) for v in p] for p in points]}
        for setting, number, name, points in lines
        if any(mean is not None for _, mean, *_ in points)
    ]
    return {"title": title, "unit": unit, "x_name": x_name, "lines": drawn}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def make_charts(runs: list[Run], num_settings: int) -> list[dict]:
    last = max((row["step"] for run in runs for row in run.rows), default=0)
    size = -(-(last + 1) // POINTS)
    members = [[run for run in runs if run.setting == number] for number in range(num_settings)]
    charts = []
    for title, unit, keys in CHARTS:
        lines = []
        for number, key in enumerate(keys):
            for setting, own in enumerate(members):
                values = [{row["step"]: row[key] for row in run.rows if key in row} for run in own]
                lines.append((setting, number, key, curve(values, size, "max" in key)))
        charts.append(chart(title, unit, lines))
    for key in sorted({key for run in runs for key in run.scores}, reverse=True):  # after the reward
        lines = [
            (setting, 0, key, curve([run.scores.get(key, {}) for run in own], size, False))
            for setting, own in enumerate(members)
        ]
        charts.insert(1, chart("Evaluation", key, lines, x_name="policy version"))
    return [each for each in charts if each["lines"]]


# --- Tables, bars and transcripts


def table(head: list[str], rows: list[list[str]]) -> str:
    """Of cells that are HTML."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    top = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{top}</tr>\n{body}</table></div>'


def bar(name: str, parts: list[tuple[str, float, str]]) -> str:
    """Of (name, share, what it is in words); a share of 0 is left out, a small one has no text."""
    cells = words = ""
    for number, (part, share, told) in enumerate(parts):
        if share > 0:
            text = f"{part} {share:.0%}" if share > 0.12 else ""
            cells += f'<span class="part p{number}" style="flex:{share:.4f}">{esc(text)}</span>'
            words += f'<span><i class="swatch p{number}"></i>{esc(part)} {esc(told)}</span>'
    return f'<div class="bar"><b>{esc(name)}</b><div>{cells}</div><small>{words}</small></div>\n'


def who_waited(rows: list[dict]) -> str:
    """Bars of the trainer's time, the engines' and the tokens' lag, summed over `rows`."""
    if not rows:
        return "<p>No step has its time.</p>"
    total = Counter()
    for key in {key for row in rows for key in row if key.startswith(("time/", DROPPED))}:
        total[key] = sum(row.get(key) or 0 for row in rows)
    spent = {name: total[f"time/{key}"] for key, name in PARTS.items()}
    spent["other"] = max(0.0, total["time/step"] - sum(spent.values()))
    told = [(name, s / total["time/step"], f"{s / len(rows):.2g} s a step") for name, s in spent.items()]
    text = bar("trainer", told)
    if "time/rollout_wait" in total:
        idle = total["time/rollout_wait"] / (total["time/step"] + total["time/eval"])
        parts = {"have rollouts": 1 - idle, "have none": idle}
        text += bar("engines", [(name, share, f"{share:.1%}") for name, share in parts.items()])
    lags = [row["staleness/hist"] for row in rows if row.get("staleness/hist")]
    counts = np.array([sum(column) for column in zip_longest(*lags, fillvalue=0)])
    if counts.sum():
        shares = [*counts[:5], counts[5:].sum()] / counts.sum()
        names = [*(f"lag {lag}" for lag in range(len(shares) - 1)), "lag 5 and more"]
        text += bar("tokens", [(name, share, f"{share:.1%}") for name, share in zip(names, shares)])
    drops = {key.removeprefix(DROPPED): count for key, count in total.items() if key.startswith(DROPPED)}
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(drops.items()))
    return text + (f"<p>Invalid rollouts, dropped groups: {esc(reasons)}</p>" if reasons else "")


def results(runs: list[Run]) -> str:
    """A row for each run, from its own metrics: a run that was killed has no summary."""
    scores = sorted({key for run in runs for key in run.scores})
    head = ["run", "algorithm", "steps", "reward, first and last 10 steps"]
    head += [*(esc(f"{key}: first, best, last") for key in scores), "training", "worst mismatch"]
    rows = []
    for run in runs:
        rewards = [row["reward/mean"] for row in run.rows if row.get("reward/mean") is not None]
        rows.append([f'<i class="swatch c{run.setting}"></i>{esc(run.name)}', esc(run.algorithm)])
        rows[-1] += [f"{len(run.rows):,} of {esc(show(run.flags.get('max_steps')))}"]
        rows[-1] += [f"{np.mean(rewards[:10]):.3f} → {np.mean(rewards[-10:]):.3f}" if rewards else "–"]
        for key in scores:
            known = {at: value for at, value in run.scores.get(key, {}).items() if value is not None}
            best, values = max(known, key=known.get, default=0), [f"{value:.3f}" for value in known.values()]
            told = f"{values[0]}, {known[best]:.3f} (version {best}), {values[-1]}" if known else "–"
            rows[-1].append(told)
        worst = max((row.get("mismatch/abs_mean") or 0 for row in run.rows), default=0)
        rows[-1] += [f"{sum(row.get('time/step') or 0 for row in run.rows) / 60:.1f} min", f"{worst:.2g}"]
    notes = "".join(f"<li><b>{esc(run.name)}</b>: {esc(note)}</li>" for run in runs for note in run.notes)
    return table(head, rows) + (f'<ul class="notes">{notes}</ul>' if notes else "")


def shade(advantage: float | None, mismatch=None, lag=None, trained: bool = True) -> str:
    """Attributes of a coloured span: full at an advantage of 1, a mismatch of 1 nat, a lag of 8."""
    strength = {"a": advantage or 0, "m": mismatch or 0, "l": (lag or 0) / 8}
    style = ";".join(f"--{name}:{min(abs(value), 1):.2f}" for name, value in strength.items() if value)
    classes = "t" + " neg" * ((advantage or 0) < 0) + " out" * (not trained)
    return f'class="{classes}" style="{style}"'


def article(head: str, body: str) -> str:
    return f"<article><header>{esc(head)}</header><pre>{body}</pre></article>\n"


def transcripts(run: Run) -> str:
    """The samples, coloured by advantage."""
    parts = []
    for sample in run.samples:
        told = [f"{name} {show(sample.get(name))}" for name in ("step", "rollout_id", "reward", "advantage")]
        told += [f"{show(sample.get('num_actions'))} tokens"]
        told += ["versions {} to {}".format(*sample["versions"])] if sample.get("versions") else []
        told += [f"invalid: {sample['invalid']}"] if sample.get("invalid") else []
        prompt, answer = str(sample.get("prompt") or ""), str(sample.get("transcript") or "")
        cut = f" … {len(answer) - TEXT_LIMIT:,} more characters" if len(answer) > TEXT_LIMIT else ""
        look = shade(finite(sample.get("advantage")))
        body = f'<span class="dim">{esc(prompt[-TEXT_LIMIT:])}</span>'
        parts.append(article(" · ".join(told), f"{body}<span {look}>{esc(answer[:TEXT_LIMIT])}</span>{cut}"))
    return "".join(parts)


def recorded_tokens(run: Run, count: int, mismatch: bool) -> str:
    """Rollouts of the last recorded step, of low to high reward, token by token; with `mismatch`, of the last
    step whose weights were saved."""
    folder = run.flags.get("dump_rollouts")
    files = sorted(Path(folder).glob("step_*.jsonl")) if folder and count else []
    if not files:
        run.notes += [f"{folder}: has none of its recorded rollouts"] if folder and count else []
        return ""
    import show_tokens  # brings torch

    flags, steps = run.config["flags"], [int(path.stem.removeprefix("step_")) for path in files]
    exact = [step for step in steps if show_tokens.nearest_model(run.path, flags, step)[1] == step]
    step = max(exact) if mismatch and exact else max(steps)
    weights, version = show_tokens.nearest_model(run.path, flags, step)
    rollouts, advantages = show_tokens.read_step(run.config, folder, step)
    ranked = sorted((r for r in rollouts if r.segments), key=lambda r: (r.reward, r.rollout_id))
    chosen = [ranked[round(at)] for at in np.linspace(0, len(ranked) - 1, min(count, len(ranked)))]
    read = show_tokens.read_tokens(flags, step, chosen, advantages, weights if mismatch else None)
    whose = f"Trainer: {weights}, policy version {version}; the step trained version {step}."
    parts = [f"<p>{esc(whose)}</p>"] if mismatch else []
    for rollout, segments in zip(chosen, read):
        for number, tokens in enumerate(segments):
            told = f"step {step} · rollout {rollout.rollout_id}.{number} · reward {show(rollout.reward)}"
            text = "".join(token_span(token, show_tokens.COLUMNS) for token in tokens[:TOKEN_LIMIT])
            more = f" … {len(tokens) - TOKEN_LIMIT:,} more tokens" if len(tokens) > TOKEN_LIMIT else ""
            parts.append(article(f"{told} · {show_tokens.summary(tokens)}", text + more))
    return "".join(parts)


def token_span(token, columns: tuple[str, ...]) -> str:
    if token.version is None:
        return f'<span class="dim">{esc(token.text)}</span>'
    told = "\n".join(f"{name}: {cell}" for name, cell in zip(columns, token.cells) if cell)
    look = shade(token.advantage, token.difference, token.lag, token.trained)
    return f'<span {look} title="{esc(told)}">{esc(token.text)}</span>'


def flag_tables(runs: list[Run]) -> str:
    """The flags and package versions in which runs differ, and all of them, folded."""
    text = ""
    columns_by_name = {
        "flag": [run.flags for run in runs],
        "package": [run.config["versions"] for run in runs],
    }
    for title, columns in columns_by_name.items():
        head = [title, *(esc(run.name) for run in runs)]
        names, rows = sorted({name for column in columns for name in column}), {}
        for name in names:
            values = [column.get(name) for column in columns]
            rows[name] = (
                [esc(name), *(esc(show(value)) for value in values)],
                values != values[:1] * len(values),
            )
        differing = [cells for cells, differs in rows.values() if differs]
        if len(runs) > 1:
            text += table(head, differing) if differing else f"<p>No {title} differs.</p>"
        everything = table(head, [cells for cells, _ in rows.values()])
        text += f"<details><summary>all {title}s</summary>{everything}</details>"
    commands = "\n\n".join(f"# {run.name}\n{run.config['command']}" for run in runs)
    return text + f"<details><summary>commands</summary><pre>{esc(commands)}</pre></details>"


def page(runs: list[Run], tokens: int, mismatch: bool) -> str:
    """The same runs give the same page."""
    labels = assign_settings(runs)
    legend, waited, shown, samples = "", "", "", ""
    for setting, label in enumerate(labels):
        own = [run for run in runs if run.setting == setting]
        name = f'<i class="swatch c{setting}"></i>{esc(label)}' + f" ({len(own)} runs)" * (len(own) > 1)
        legend += f"<span>{name}</span>"
        timed = [row for run in own for row in run.rows if row.get("time/step")]
        waited += f"<h3>{name}</h3>{who_waited(timed)}"
    for run in runs:
        name = f'<summary><i class="swatch c{run.setting}"></i>{esc(run.name)}</summary>'
        samples += f"<details{' open' * (run is runs[0])}>{name}{transcripts(run)}</details>\n"
        if text := recorded_tokens(run, tokens, mismatch):
            shown += f"<details open>{name}{text}</details>\n"
    data = json.dumps(make_charts(runs, len(labels)), separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)[1]
    fill = {
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "title": esc(", ".join(run.name for run in runs)), "results": results(runs), "legend": legend,
        "waited": waited, "tokens": shown, "samples": samples, "flags": flag_tables(runs), "data": data,
    }  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda name: fill[name[1]], template)


def main(args: Args) -> None:
    unique = len({path.resolve().name for path in args.runs}) == len(args.runs)
    runs = [read_run(path, path.resolve().name if unique else str(path)) for path in args.runs]
    out = args.out or args.runs[0] / "report.html"
    out.write_text(page(runs, args.tokens, args.mismatch), encoding="utf-8", errors="replace")
    print(f"written to {out}")


if __name__ == "__main__":
    main(tyro.cli(Args))
