"""What thirteen changes take: here, from the patches of tests/edits; in Molt, as docs/editing.json has it.

    python scripts/edit_sizes.py        the table of docs/editing.md

Lines of code, as the budgets count them: a replaced line is one added and one removed. "Read" is all code of the
files that have to be opened.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

try:
    from scripts.diff_sizes import code_lines, diff_size
except ModuleNotFoundError:  # as a program
    from diff_sizes import code_lines, diff_size

ROOT = Path(__file__).parents[1]


def ours(name: str) -> tuple[int, int, int]:
    """Files changed, lines changed and lines read of a change."""
    path = re.search(r"File: `(.*)`", (ROOT / f"tests/edits/{name}.md").read_text())[1]
    patch = ROOT / f"tests/edits/{name}.patch"
    before = (ROOT / path).read_text()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path)
        copy.parent.mkdir()
        shutil.copy(ROOT / path, copy)
        subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
        changed = sum(diff_size(before, copy.read_text()))
    return len(re.findall(r"^\+\+\+ ", patch.read_text(), re.M)), changed, len(code_lines(before))


def table() -> list[str]:
    molt = json.loads((ROOT / "docs/editing.json").read_text())["tasks"]
    rows = ["| change | here: files, lines, read | Molt: files, lines, read |", "|---|---|---|"]
    sums = [0] * 6
    for name in sorted(molt):
        theirs = [molt[name][key] for key in ("files_changed", "lines_changed", "lines_read")]
        numbers = [*ours(name), *theirs]
        sums = [a + b for a, b in zip(sums, numbers)]
        cells = [f"{files}, {lines}, {read:,}" for files, lines, read in (numbers[:3], numbers[3:])]
        rows.append(f"| {name.replace('_', ' ')} | {cells[0]} | {cells[1]} |")
    mean = [value / len(molt) for value in sums]
    cells = [f"{files:.1f}, {lines:.0f}, {read:,.0f}" for files, lines, read in (mean[:3], mean[3:])]
    return [*rows, f"| mean | {cells[0]} | {cells[1]} |"]


if __name__ == "__main__":
    print("\n".join(table()))
