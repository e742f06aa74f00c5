"""README.md is short, its table has every algorithm as long as it is, and every command in it is executed.

A run that would take minutes is executed with smaller sizes after it, or up to the point where it would start
(--dry-run: flags, environment, tasks, prompts). What is executed elsewhere is listed with where.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import checks
from tests.test_budgets import ALGORITHMS, code_lines

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SHELL = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
COMMANDS = [" ".join(line.split()) for line in SHELL.splitlines() if line.strip()]
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", README, re.DOTALL))

ELSEWHERE = {
    # the set-up, which scripts/test.sh calls, and the run of tests/test_run.py: see the test below
    "bash scripts/quickstart.sh": "scripts/test.sh and tests/test_run.py",
    "bash scripts/test.sh": "it runs this test",
}
# What the shell executes as it stands, in this order, with what is written behind it.
TINY = "--max-steps 2 --save-every 1 --prompts-per-step 4 --group-size 4 --max-in-flight 4 --eval-every 9"
EXECUTED = {
    "cp algos/grpo.py algos/mine.py": "",
    "--dump-rollouts": TINY,
    "--resume": "--dry-run",  # tests/test_first_hour.py goes on with a run
    "--replay-rollouts": "--max-steps 2",
    "scripts/show_tokens.py": "--step 1",
    "scripts/report.py": "",
    "scripts/plan.py": "",
}
STARTED = [command for command in COMMANDS if not any(part in command for part in [*EXECUTED, *ELSEWHERE])]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder like a fresh clone, with the files that a reader would have written."""
    place = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "algos", place / "algos", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("common", "scripts", "docs"):
        (place / name).symlink_to(ROOT / name)
    (place / ".venv").symlink_to(sys.prefix)
    for name, text in BLOCKS.items():
        if not name.startswith("algos/"):
            (place / name).write_text(text)
    lines = [json.dumps({"prompt": f"{n} + 1 = ?", "answer": f"{n + 1}"}) for n in range(40)]
    (place / "data.jsonl").write_text("\n".join(lines))
    return place


def shell(command: str, place: Path) -> str:
    path = os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]])
    environ = {"INSTAR_CACHE": str(ROOT / ".cache/instar")} | os.environ  # the models are made already
    environ |= {"PATH": path, "PYTHONPATH": str(place)}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=place, env=environ, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_is_short():
    assert len(README.splitlines()) <= 250


def test_its_table_has_every_algorithm_with_its_length():
    rows = dict(re.findall(r"^\| \[(\w+\.py)\]\(algos/\1\) \| (\d+) \|", README, re.MULTILINE))
    counts = {path.name: code_lines(path.read_text()) for path in ALGORITHMS}
    assert rows.keys() == counts.keys()
    assert [name for name in counts if abs(int(rows[name]) - counts[name]) > 10] == []


def test_the_collectors_themselves():
    assert len(COMMANDS) > 12 and all("```" not in command for command in COMMANDS)
    assert BLOCKS.keys() == {"algos/mine.py", "largest.py", "guess.py"}
    for part in [*EXECUTED, *ELSEWHERE]:
        assert sum(part in command for command in COMMANDS) == 1, part


def test_the_quickstart_is_the_set_up_and_a_run():
    script = (ROOT / "scripts/quickstart.sh").read_text().splitlines()
    setup, run = "bash scripts/setup.sh", ".venv/bin/python -m algos.grpo --model tiny --env reverse"
    assert script[-2:] == [setup, f'exec {run} "$@"']
    assert setup in (ROOT / "scripts/test.sh").read_text().splitlines()
    assert '"algos.grpo", "--model", "tiny", "--env", "reverse"' in (ROOT / "tests/test_run.py").read_text()


def test_the_commands_that_are_quick_or_made_so(place):
    for part, smaller in EXECUTED.items():
        (command,) = [command for command in COMMANDS if part in command]
        output = shell(f"{command} {smaller}", place)
        if part == "--dump-rollouts":
            assert [json.loads(line)["step"] for line in open(place / "runs/a/metrics.jsonl")] == [0, 1]
        if part == "--replay-rollouts":
            runs = [(place / f"runs/{run}/metrics.jsonl").read_text().splitlines() for run in "ab"]
            rewards = [[json.loads(line)["reward/mean"] for line in run] for run in runs]
            assert rewards[0] == rewards[1]
        if part == "scripts/show_tokens.py":
            assert "trained in step 1" in output and "advantage" in output
        if part == "scripts/plan.py":
            assert "a step" in output and "trainer rank" in output
    page = (place / "report.html").read_text()
    assert "runs/a" in page and "runs/b" in page


@pytest.mark.parametrize("command", STARTED)
def test_a_command_gets_as_far_as_starting(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = shlex.split(command)
    assert words[:2] == [".venv/bin/python", "-m"]
    if words[2] == "algos.mine":
        (place / "algos/mine.py").write_text(changed())
        spec = importlib.util.spec_from_file_location("mine", place / "algos/mine.py")
        module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(words[2])
    more = [] if shutil.which("bwrap") else ["--unsafe-sandbox"]  # no code runs before a rollout
    module.main(checks.parse(module.Args, [*words[3:], *more, "--dry-run"]))
    assert "a step: " in capsys.readouterr().out


def changed() -> str:
    """grpo.py with the README's function in the place of its own."""
    source, (block,) = (ROOT / "algos/grpo.py").read_text(), ast.parse(BLOCKS["algos/mine.py"]).body
    (old,) = [each for each in ast.parse(source).body if getattr(each, "name", "") == block.name]
    lines = source.splitlines(True)
    return "".join([*lines[: old.lineno - 1], BLOCKS["algos/mine.py"], *lines[old.end_lineno :]])


def test_the_change_of_the_algorithm_does_what_it_says():
    space = {"torch": torch}
    exec(BLOCKS["algos/mine.py"], space)
    # of four, 1 beats none and three beat it; the two 2s beat one and are beaten by one; 50 beats three
    assert space["group_advantages"]([2.0, 1.0, 50.0, 2.0]) == [0.0, -1.0, 1.0, 0.0]
    assert space["group_advantages"]([3.0]) == [0.0] and space["group_advantages"]([1.0, 1.0]) == [0.0, 0.0]
    assert len(BLOCKS["algos/mine.py"].splitlines()) <= 12
