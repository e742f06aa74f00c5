"""Blocks that all algorithms share are the same in every file, and `scripts/sync_shared.py` keeps them so."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALGORITHMS = [path for path in sorted((ROOT / "algos").glob("*.py")) if path.name != "__init__.py"]
FENCE = re.compile(r"^ *# \[(/?)shared:(\w+)\]$", re.MULTILINE)

spec = importlib.util.spec_from_file_location("sync_shared", ROOT / "scripts" / "sync_shared.py")
sync_shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sync_shared)


def listed() -> dict[str, set[str]]:
    """Which file has which blocks, from the table in algos/README.md: | `NAME` | `grpo.py`, `ppo.py` |."""
    rows = re.findall(r"^\| `shared:(\w+)` \|([^|]*)\|", (ROOT / "algos/README.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+\.py)`", cell)) for name, cell in rows}


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_blocks_are_those_of_grpo(path):
    source = (ROOT / "algos/grpo.py").read_text()
    text = path.read_text()
    assert sync_shared.synced(text, source) == (text, []), "run python scripts/sync_shared.py"


def test_the_readme_lists_which_file_has_which_block():
    has = {}
    for path in ALGORITHMS:
        for closing, name in FENCE.findall(path.read_text()):
            if not closing:
                has.setdefault(name, set()).add(path.name)
    assert listed() == has


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_fences_are_closed_and_hold_whole_definitions(path):
    text = path.read_text()
    fences = FENCE.findall(text)
    assert fences == [(mark, name) for _, name in fences[::2] for mark in ("", "/")]
    spans = [
        (number, node.end_lineno)
        for node in ast.parse(text).body
        for number in [getattr(node, "lineno", 0)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    lines = [text[: match.start()].count("\n") + 1 for match in FENCE.finditer(text)]
    for first, last in spans:
        assert not any(first <= line <= last for line in lines), f"a fence inside a definition, line {first}"


SOURCE = "a\n# [shared:x]\nnew\n# [/shared:x]\nb\n"


def test_sync_replaces_what_differs_and_nothing_else():
    stale = "mine\n# [shared:x]\nold\n# [/shared:x]\nmine too\n"
    assert sync_shared.synced(stale, SOURCE) == (stale.replace("old", "new"), ["x"])
    assert sync_shared.synced("x = 1\n", SOURCE) == ("x = 1\n", [])
    with pytest.raises(ValueError, match="block y is not in grpo.py, which has x"):
        sync_shared.synced("# [shared:y]\n# [/shared:y]\n", SOURCE)


def test_check_tells_and_does_not_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sync_shared, "ALGOS", tmp_path)
    (tmp_path / "grpo.py").write_text(SOURCE)
    (tmp_path / "copy.py").write_text(SOURCE.replace("new", "old"))
    assert sync_shared.main(check=True) == 1 and "copy.py: x differ" in capsys.readouterr().out
    assert "old" in (tmp_path / "copy.py").read_text()
    assert sync_shared.main(check=False) == 0 and (tmp_path / "copy.py").read_text() == SOURCE
    assert sync_shared.main(check=True) == 0
