"""The documentation says what the code does: flags, metric glossary, commands."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

from tests.ranks import run_program

ROOT = Path(__file__).parents[1]
ALGORITHMS = [path for path in sorted((ROOT / "algos").glob("*.py")) if path.name != "__init__.py"]
COMMON = sorted((ROOT / "common").glob("*.py"))
GLOSSARY = ROOT / "algos" / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [path for path in (*PAGES, GLOSSARY) if path.exists()]
GROUPS = "reward eval eval_end loss advantage ratio mismatch is gate staleness rollout time perf value moe tool env"
KEY = re.compile(rf"({'|'.join(GROUPS.split())})(/[\w@*]+)+")
BARE_KEYS = {"step", "grad_norm", "lr"}  # the metrics without a group


def class_bodies(path: Path) -> dict[str, list[ast.stmt]]:
    statements = ast.parse(path.read_text()).body
    return {node.name: node.body for node in statements if isinstance(node, ast.ClassDef)}


def flag_groups(path: Path) -> set[str]:
    """The dataclasses whose flags `Args` takes in: e: Annotated[EngineFlags, tyro.conf.OmitArgPrefixes]."""
    fields = [node for node in class_bodies(path).get("Args", []) if isinstance(node, ast.AnnAssign)]
    marked = [field for field in fields if "OmitArgPrefixes" in ast.unparse(field.annotation)]
    return {name for field in marked for name in re.findall(r"\w+", ast.unparse(field.annotation))}


def undocumented(body: list[ast.stmt]) -> list[str]:
    """Fields without a docstring line under them; a flag group is documented where it is defined."""
    missing = []
    for node, below in zip(body, [*body[1:], None]):
        if isinstance(node, ast.AnnAssign) and "OmitArgPrefixes" not in ast.unparse(node.annotation):
            documented = isinstance(below, ast.Expr) and isinstance(getattr(below.value, "value", None), str)
            if not documented:
                missing.append(node.target.id)
    return missing


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.name)
def test_every_flag_has_a_docstring(path):
    assert undocumented(class_bodies(path).get("Args", [])) == []
    groups = {name: body for module in COMMON for name, body in class_bodies(module).items()}
    for name in flag_groups(path) & set(groups):
        assert undocumented(groups[name]) == [], name


def metric_keys(source: str) -> set[str]:
    """The metric names in a file: literals "group/name" and f-strings, where {...} becomes *."""
    keys = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            keys.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
            keys.add("".join(parts))
    return {key for key in keys if KEY.fullmatch(key) or key in BARE_KEYS}


def glossary_keys(text: str) -> set[str]:
    """The names in the first cell of the table rows "| `reward/mean` | ... |"; <env> becomes *."""
    cells = re.findall(r"^\|([^|]*`[^|]*)\|", text, flags=re.MULTILINE)
    names = {re.sub(r"<\w+>", "*", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return {name for name in names if KEY.fullmatch(name) or name in BARE_KEYS}


def test_the_collectors_themselves():
    source = 'row = {"time/step": 1, f"eval/{env}/mean": 2, "lr": 3}\nprint(f"time/step {x} s", "a/b")'
    assert metric_keys(source) == {"time/step", "eval/*/mean", "lr"}
    text = "| `a/b` | no |\n| `eval/<env>/mean` | yes, not `time/step` |\n| `lr`, `is/ess` | both |\n"
    assert glossary_keys(text) == {"eval/*/mean", "lr", "is/ess"}
    body = ast.parse('class A:\n    a: int = 1\n    """Doc."""\n    b: int = 2\n').body[0].body
    assert undocumented(body) == ["b"]


@pytest.mark.skipif(not GLOSSARY.exists(), reason="algos/README.md is not written yet")
def test_logged_keys_and_glossary_agree():
    logged = set().union(*(metric_keys(path.read_text()) for path in [*ALGORITHMS, *COMMON]))
    scored = {"eval/*", "eval_end/*"}  # the prefixes that `score_metrics` gets
    endings = re.findall(r'f"\{prefix\}(/[\w@]+)', (ROOT / "common/evaluate.py").read_text())
    assert scored <= logged and len(endings) >= 2
    logged = logged - scored | {f"{name}{end.rstrip('@')}" for name in scored for end in endings}
    explained = glossary_keys(GLOSSARY.read_text())
    assert logged - explained == set(), "logged, but not in the glossary of algos/README.md"
    assert explained - logged == set(), "in the glossary of algos/README.md, but logged nowhere"


def commands() -> list[tuple[str, str, list[str]]]:
    """(where, module, arguments) of each `python -m algos.X` in bash blocks and algorithms' docstrings."""
    blocks = re.compile(r"```bash\n(.*?)```", re.DOTALL)
    texts = [(path, "\n".join(blocks.findall(path.read_text()))) for path in DOCUMENTS]
    texts += [(path, ast.get_docstring(ast.parse(path.read_text())) or "") for path in ALGORITHMS]
    found = []
    for path, text in texts:
        for module, rest in re.findall(r"python -m (algos\.\w+)([^\n`&|;(]*)", text.replace("\\\n", " ")):
            arguments = [word for word in shlex.split(rest, comments=True) if word != "..."]
            found.append((path.name, module, arguments))
    return [
        each for each in found if each[1] != "algos.mine"
    ]  # a reader's copy: tests/test_readme.py makes it


@pytest.mark.parametrize("where, module, arguments", commands())
def test_documented_command_parses(where, module, arguments):
    # Not by --help: that exits with 0 before tyro has looked at the other flags.
    tyro.cli(importlib.import_module(module).Args, args=arguments)


MODULES = sorted({module for _, module, _ in commands()})


@pytest.mark.parametrize("module", MODULES)
def test_help(module, tmp_path):
    told = tmp_path / "told"
    code = run_program(f"{ROOT}/{module.replace('.', '/')}.py", ["--help"], str(told))
    assert code == 0 and "--model" in told.read_text(), told.read_text()


def test_documented_scripts_exist():
    texts = [path.read_text() for path in DOCUMENTS]
    named = {name for text in texts for name in re.findall(r"bash ([\w./-]+/[\w.-]+)", text)}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")  # ](path#fragment)


def symbols(source: str) -> set[str]:
    """Classes, functions and names of a module, and Class.method."""
    found = set()
    for node in ast.parse(source).body:
        names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        inside = [each.name for each in getattr(node, "body", []) if hasattr(each, "name")]
        found |= {*names, *(f"{name}.{each}" for name in names for each in inside)}
    return found


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links to files, to classes and functions in them, and to headings, that lead nowhere."""
    broken = []
    for target, fragment in LINK.findall(text):
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(target)
        elif fragment:
            there = symbols(path.read_text()) if path.suffix == ".py" else anchors(path.read_text())
            broken += [f"{target}#{fragment}"] if fragment not in there else []
    return broken


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


NAMED = re.compile(r"`((?:algos|common|scripts|tests|docs|docker)/[\w./-]*\w)(?::([\w.]+)| [^`]*)?`")


def missing_names(text: str) -> list[str]:
    """Files in backticks that are not there, and `name` in `file.py` or `file.py:name` where it has no such."""
    wrong = [path for path, _ in NAMED.findall(text) if "NAME" not in path and not (ROOT / path).exists()]
    inside = re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)
    inside += [(name, path) for path, name in NAMED.findall(text)]
    for name, path in inside:
        if name[:1].isalpha() and path.endswith(".py") and (ROOT / path).is_file():  # not an environment's
            known = symbols((ROOT / path).read_text())
            wrong += [f"{path}:{name}"] if name not in known else []
    return wrong


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_in_backticks_are_there(page):
    assert missing_names(page.read_text()) == []


def test_the_checker_of_backticks_itself():
    text = "`main` in `algos/grpo.py`, `algos/grpo.py:Trainer.train_step`, `scripts/test.sh -k x`, `tests/faults`"
    assert missing_names(text) == []
    text = "`gone` in `algos/grpo.py`, `algos/grpo.py:Trainer.gone`, `scripts/gone.sh -k x`"
    assert missing_names(text) == ["scripts/gone.sh", "algos/grpo.py:gone", "algos/grpo.py:Trainer.gone"]


def test_the_link_checker_itself():
    text = (
        "[a](algos/grpo.py#main) [b](algos/grpo.py#Trainer.train_step) [c](README.md#two-commands) [d](docs)"
    )
    assert broken_links(ROOT / "README.md", text + " [e](https://x.y/z#w)") == []
    text = "[a](algos/grpo.py#gone) [b](algos/grpo.py#Trainer.gone) [c](README.md#gone) [d](gone.py) ![e](gone.png)"
    gone = "algos/grpo.py#gone algos/grpo.py#Trainer.gone README.md#gone gone.py gone.png"
    assert broken_links(ROOT / "README.md", text) == gone.split()


def test_the_repository_stands_alone():
    """No file points at somebody's machine, at a tracker or at a package registry."""
    folders = ("algos", "common", "scripts", "tests", "docs", ".ci", ".github")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    hosts = r"pypi\.org|pythonhosted\.org|anaconda\.org|pypi\.nvidia\.com|download\.pytorch\.org|/simple/"
    forbidden = re.compile(rf"/work/|\.\./shared|\bISSUE\b|{hosts}")
    found = []
    for path in [path for path in paths if path.is_file() and path.suffix != ".pyc"]:
        text = path.read_text(errors="ignore") if path != Path(__file__) else ""
        if path == ROOT / "scripts" / "setup.sh":  # the one place that may name PyTorch's own index
            text = text.replace("download.pytorch.org", "")
        found += [f"{path.relative_to(ROOT)}: {match}" for match in forbidden.findall(text)]
    assert found == []
