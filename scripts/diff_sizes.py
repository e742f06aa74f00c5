"""How far each copy is from the algorithm that it was copied from, in lines added and removed.

    python scripts/diff_sizes.py

Lines of code, as the budgets count them: no blank lines, comments and docstrings. A replaced line is one
added and one removed. The table in algos/README.md has these numbers.
"""

import ast
import difflib
import io
import tokenize
from pathlib import Path

ALGOS = Path(__file__).parents[1] / "algos"
PARENTS = dict.fromkeys(("dr_grpo", "rloo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline"), "grpo")
PARENTS |= {"dapo": "grpo", "distill": "grpo", "distill_topk": "cispo"}
LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def code_lines(source: str) -> list[str]:
    """The lines with a token that is neither layout, nor a comment, nor a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(t.start[0], t.end[0]) for t in tokens if tokenize.tok_name[t.type] not in LAYOUT]
    numbers = {number for start, end in spans for number in range(start, end + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            numbers.difference_update(range(node.lineno, node.end_lineno + 1))
    lines = source.splitlines()
    return [lines[number - 1] for number in sorted(numbers)]


def diff_size(parent: str, copy: str) -> tuple[int, int]:
    """(added, removed) lines of code from one source to the other."""
    found = list(difflib.unified_diff(code_lines(parent), code_lines(copy), n=0))[2:]
    return sum(line.startswith("+") for line in found), sum(line.startswith("-") for line in found)


if __name__ == "__main__":
    for name, parent in PARENTS.items():
        added, removed = diff_size(*((ALGOS / f"{each}.py").read_text() for each in (parent, name)))
        print(f"| `{name}.py` | `{parent}.py` | +{added} -{removed} |")
