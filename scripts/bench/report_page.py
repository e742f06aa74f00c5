"""How long `scripts/report.py` takes for a long run: a real run's rows and transcripts, repeated.

    .venv/bin/python scripts/bench/report_page.py runs/a

Prints the size of what was read, the page's size, and the seconds of the whole program (wall and CPU; the
smallest of five), Python's start and imports included.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import tyro

SCRIPT = Path(__file__).parents[1] / "report.py"


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    steps: int = 6000
    """Steps of the long run that is made of it."""


def stretch(run: Path, folder: Path, steps: int) -> None:
    """A run's folder with `steps` steps: the rows and samples of `run`, again and again."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples: dict[int, list] = {}
    for line in (run / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        samples.setdefault(sample["step"], []).append(sample)
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "samples.jsonl", "w") as texts:
        for step, row in enumerate(islice(cycle(rows), steps)):
            metrics.write(json.dumps(row | {"step": step}) + "\n")
            for sample in samples.get(row["step"], []):
                texts.write(json.dumps(sample | {"step": step}) + "\n")
    config = json.loads((run / "config.json").read_text())
    config["flags"] |= {"max_steps": steps}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text("{}")


def timed(folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one report."""
    start, before = time.monotonic(), os.times()
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "--tokens", "0"], check=True, capture_output=True
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - start, cpu


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stretch(args.run, folder, args.steps)
        wall, cpu = (min(each) for each in zip(*(timed(folder) for _ in range(5))))
        sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.iterdir())}
    for name, megabytes in sizes.items():
        print(f"{name:<14} {megabytes:8.2f} MB")
    print(f"{args.steps} steps: {wall:.2f} s, of which CPU {cpu:.2f} s")


if __name__ == "__main__":
    main(tyro.cli(Args))
