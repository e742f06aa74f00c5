"""Size budgets: an algorithm file stays readable in one sitting, and what it imports stays thin."""

import ast
import importlib.util
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALGORITHMS = [path for path in sorted((ROOT / "algos").glob("*.py")) if path.name != "__init__.py"]
AGENTS = [ROOT / "common" / name for name in ("agent.py", "chat_server.py", "sandbox.py")]
MODELS = ROOT / "common/models.py"
CORE = [path for path in sorted((ROOT / "common").glob("*.py")) if path not in (*AGENTS, MODELS)]
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}  # tokens that make no line a code line


def code_lines(source: str) -> int:
    """Lines that hold a token which is no comment, minus every string-expression statement (docstrings)."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def own_flags(source: str) -> list[str]:
    """The flags of class Args without the groups that common/ defines (marked OmitArgPrefixes)."""
    classes = {node.name: node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields = [node for node in classes.get("Args", []) if isinstance(node, ast.AnnAssign)]
    return [field.target.id for field in fields if "OmitArgPrefixes" not in ast.unparse(field.annotation)]


def test_the_counters_themselves():
    source = """\
'''Doc.

More.'''

x = 1  # why
# comment


def f():
    'Doc.'
    return (
        x
    )
"""
    assert code_lines(source) == 5
    assert code_lines("text = '''a\nb'''\n") == 2
    flags = "class Args:\n    lr: float = 1.0\n    e: Annotated[E, tyro.conf.OmitArgPrefixes] = field()\n"
    assert own_flags(flags) == ["lr"]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_algorithm_file(path):
    lines, flags = code_lines(path.read_text()), own_flags(path.read_text())
    budget = 520 if path.name == "ppo.py" else 450
    print(f"\n{path.relative_to(ROOT)}: {lines} of {budget} code lines, {len(flags)} of 35 flags")
    assert lines <= budget
    assert len(flags) <= 35


def test_copies_are_close_to_their_parent_and_the_readme_says_how_close():
    spec = importlib.util.spec_from_file_location("diff_sizes", ROOT / "scripts" / "diff_sizes.py")
    diff_sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diff_sizes)
    # b = 2 becomes two lines: one removed, two added; a comment, a blank line or a docstring is none
    assert diff_sizes.diff_size("a = 1\nb = 2\n", "'Doc.'\na = 1\n\n# why\nb = 3\nc = 4\n") == (2, 1)
    readme = (ROOT / "algos/README.md").read_text()
    for name, parent in diff_sizes.PARENTS.items():
        sources = ((ROOT / f"algos/{each}.py").read_text() for each in (parent, name))
        added, removed = diff_sizes.diff_size(*sources)
        assert added + removed <= 120, name
        assert f"| `{name}.py` | `{parent}.py` | +{added} -{removed} |" in readme, (
            "run python scripts/diff_sizes.py"
        )


# With an algorithm file on top, a reader has some 3,000 lines.
@pytest.mark.parametrize("name, paths, budget", [("core", CORE, 2814), ("agents", AGENTS, 900)])
def test_common(name, paths, budget):
    counts = {path.name: code_lines(path.read_text()) for path in paths if path.exists()}
    print(f"\ncommon/ {name}: {sum(counts.values())} of {budget} code lines: {counts}")
    assert sum(counts.values()) <= budget


def test_line_length():
    paths = [*ALGORITHMS, *(ROOT / "common").rglob("*.py")]
    long = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 110
    ]
    assert not long
