"""Changes that researchers make, each a patch of one algorithm file, applied to a copy and run for three steps.

`edits/NAME.md` is the task, `edits/NAME.patch` what a reader of nothing but that text and the file wrote. Ten of
them train from rollouts that one real run recorded; the others, which change what is sampled or when the run
ends, have an engine of their own. What a run should have logged is worked out here, from the recorded rollouts.
"""

import ast
import concurrent.futures
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ranks import run_program

ROOT = Path(__file__).parents[1]
EDITS = ROOT / "tests" / "edits"
ENVS = f"{EDITS}/envs.py"
FLAGS = "--model tiny --prompts-per-step 8 --group-size 4 --max-in-flight 4 --max-steps 3 --lr 1e-3".split()
FLAGS += ["--no-tensorboard", "--lr-warmup-steps", "0"]
STEPS, UNCORRECTED = range(3), ("--correction", "none")
WITH_AN_ENGINE = {  # edits that change what is sampled, or when a run ends, and the flags of their runs
    "two_environments": ["--env", f"{ENVS}:Graded", "--env2", f"{ENVS}:Letters"],
    "early_stopping": ["--env", "reverse", "--eval-every", "1", "--stop-at", "0.2"],
    "curriculum": [
        "--env",
        f"{ENVS}:Halves",
        "--max-steps",
        "9",
        "--max-in-flight",
        "2",
        "--max-staleness",
        "0",
    ],
    "replay_failures": [
        "--env",
        f"{ENVS}:Halves",
        "--no-shuffle",
        "--max-in-flight",
        "1",
        "--max-staleness",
        "0",
    ],
}


def copy_of(name: str, folder: Path) -> Path:
    """A patched copy of the algorithm file that the task names. Raises CalledProcessError if it does not fit."""
    path = re.search(r"File: `(.*)`", (EDITS / f"{name}.md").read_text())[1]
    target = folder / path
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / path, target)
    subprocess.run(["git", "apply", str(EDITS / f"{name}.patch")], cwd=folder, check=True)
    return target


def load(path: Path):
    """The file at `path` as a module."""
    spec = importlib.util.spec_from_file_location(f"edited_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(path: Path, out: Path, *flags: str) -> list[dict]:
    """The rows of a run of the file at `path`."""
    argv = [*FLAGS, "--output-dir", str(out), *flags]
    if "--replay-rollouts" in flags:
        told = out.with_suffix(".out")
        assert run_program(str(path), argv, str(told)) == 0, told.read_text()[-3000:]
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(out)}
    done = subprocess.run(
        [sys.executable, str(path), *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """The rollouts of a run of the file as it is."""
    folder = tmp_path_factory.mktemp("recorded")
    run(
        ROOT / "algos/grpo.py", folder / "run", "--env", f"{ENVS}:Graded", "--dump-rollouts", f"{folder}/dump"
    )
    return folder / "dump"


@pytest.fixture(scope="module")
def plain(recorded, tmp_path_factory):
    """What the file as it is makes of them."""
    out = tmp_path_factory.mktemp("plain")
    return run(ROOT / "algos/grpo.py", out, "--replay-rollouts", str(recorded))


@pytest.fixture(scope="module")
def sampling(recorded, tmp_path_factory):
    """The runs with an engine of their own, one after the other beside the tests before them."""

    def start(name: str):
        folder = tmp_path_factory.mktemp(name)
        flags = [*WITH_AN_ENGINE[name], "--dump-rollouts", str(folder / "dump")]
        return run(copy_of(name, folder), folder / "run", *flags), folder

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield {name: pool.submit(start, name) for name in WITH_AN_ENGINE}


@pytest.fixture
def edited(request, recorded, sampling, tmp_path):
    """Rows of the patched file, NAME of the test's, trained from the recorded rollouts with further flags."""
    name = request.node.name.removeprefix("test_")
    path = copy_of(name, tmp_path)

    def rows(*flags: str, source: Path = recorded) -> list[dict]:
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return run(path, out, "--replay-rollouts", str(source), *flags)

    rows.path = path
    return rows


@pytest.fixture
def sampled(request, sampling):
    """(rows, folder) of the run that the test is about."""
    return sampling[request.node.name.removeprefix("test_")].result(900)


def groups(folder: Path, step: int) -> list[list[dict]]:
    """The valid rollouts of a step by group, with `reward` and `tokens` (sampled ones)."""
    found: dict[str, list[dict]] = {}
    for line in (folder / f"step_{step:06}.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["reward"] = sum(record["rewards"])
        record["tokens"] = sum(sum(segment["action_mask"]) for segment in record["segments"])
        if not record["invalid"]:
            found.setdefault(record["group_id"], []).append(record)
    return list(found.values())


def advantages(group: list[float]) -> list[float]:
    spread = np.std(group, ddof=1)
    return [(value - np.mean(group)) / spread if spread > 1e-12 else 0.0 for value in group]


def test_the_recorded_rollouts_differ_in_what_the_edits_need(recorded):
    all_of_it = [rollout for step in STEPS for group in groups(recorded, step) for rollout in group]
    assert {-3, -2, 2, 3} <= {rollout["reward"] for rollout in all_of_it}
    assert len({rollout["tokens"] for rollout in all_of_it}) > 4
    assert {len(segment["turn_ends"]) for rollout in all_of_it for segment in rollout["segments"]} == {1, 2}
    assert len(all_of_it) < 3 * 32  # some are invalid


# --- Trained from what was recorded


def test_length_normalised_reward(edited, recorded, plain):
    for step, row in enumerate(edited()):
        rewards = [[r["reward"] / r["tokens"] ** 0.5 for r in group] for group in groups(recorded, step)]
        assert row["reward/normalised_mean"] == pytest.approx(np.mean(np.concatenate(rewards)))
        assert row["advantage/abs_mean"] == pytest.approx(
            np.mean(np.abs(np.concatenate([advantages(group) for group in rewards])))
        )
        assert row["reward/mean"] == plain[step]["reward/mean"]


def test_running_mean_baseline(edited, recorded):
    baseline = None
    for step, row in enumerate(edited()):
        rewards = [rollout["reward"] for group in groups(recorded, step) for rollout in group]
        baseline = np.mean(rewards) if baseline is None else baseline
        assert row["reward/baseline"] == pytest.approx(baseline)
        assert row["advantage/abs_mean"] == pytest.approx(np.mean(np.abs(np.array(rewards) - baseline)))
        baseline = 0.9 * baseline + 0.1 * np.mean(rewards)


def test_second_kl(edited, recorded, plain, tmp_path):
    off = edited()
    assert [row["grad_norm"] for row in off] == [row["grad_norm"] for row in plain]
    assert "loss/rollout_kl" not in off[0]
    # the engine's log-probs of step 0 are the trainer's: lowered by 0.1, k2 is 0.1^2 / 2 for every token
    lowered = tmp_path / "lowered"
    lowered.mkdir()
    for step in STEPS:
        records = [json.loads(line) for line in (recorded / f"step_{step:06}.jsonl").read_text().splitlines()]
        for segment in (segment for record in records for segment in record["segments"]):
            pairs = zip(segment["logprobs"], segment["action_mask"], strict=True)
            segment["logprobs"] = [logprob - 0.1 if sampled else 0.0 for logprob, sampled in pairs]
        (lowered / f"step_{step:06}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    on = edited("--rollout-kl-coef", "5", source=lowered)
    assert on[0]["loss/rollout_kl"] == pytest.approx(0.005, rel=1e-3)
    assert on[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)


def test_drop_longest(edited, recorded, plain):
    for step, row in enumerate(edited()):
        valid = [rollout for group in groups(recorded, step) for rollout in group]
        assert row["train/dropped_long"] == max(len(valid) // 20, 1) == 1
        # they count for their group: the advantages are the same, the gradient is not
        assert row["advantage/abs_mean"] == plain[step]["advantage/abs_mean"]
        assert row["grad_norm"] != plain[step]["grad_norm"]


def test_new_metric(edited, recorded, plain):
    for step, row in enumerate(edited()):
        best = [max(rollout["reward"] for rollout in group) for group in groups(recorded, step)]
        assert row["reward/best_of_group_mean"] == pytest.approx(np.mean(best))
        assert row["grad_norm"] == plain[step]["grad_norm"]


def test_sequence_clip(edited, recorded, tmp_path):
    # before the first update all ratios are 1, and a rollout's ratio has the gradients of its tokens' ratios
    plain = run(ROOT / "algos/grpo.py", tmp_path / "plain", "--replay-rollouts", str(recorded), *UNCORRECTED)
    for row, other in zip(edited(*UNCORRECTED), plain, strict=True):
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    # two tokens each: mean log-ratios 0.1 and -0.2, so ratios 1.105 and 0.819; A = 1 with a clip at 1.05
    grpo, old = load(edited.path), torch.zeros(2, 3)
    logprobs = torch.tensor([[0.3, -0.1, 9.0], [-0.5, 0.1, 9.0]], requires_grad=True)
    mask, weights = torch.tensor([[True, True, False]] * 2), torch.full((2, 3), 2.0)
    loss, _ = grpo.policy_loss(logprobs, old, weights, torch.ones(2), mask, 0.2, 0.05)
    assert loss.item() == pytest.approx(-2 * 2 * 1.05 - 2 * 2 * np.exp(-0.2))
    loss.backward()
    assert logprobs.grad[0].tolist() == [0, 0, 0]
    assert logprobs.grad[1].tolist() == pytest.approx([-2 * np.exp(-0.2), -2 * np.exp(-0.2), 0])


def test_reward_clipping(edited, recorded, plain):
    for step, row in enumerate(edited("--reward-max", "2")):
        rewards = [[rollout["reward"] for rollout in group] for group in groups(recorded, step)]
        flat = np.concatenate(rewards)
        assert row["reward/clipped_frac"] == pytest.approx(np.mean((flat < -1) | (flat > 2)))
        clipped = [advantages(np.clip(group, -1, 2)) for group in rewards]
        assert row["advantage/abs_mean"] == pytest.approx(np.mean(np.abs(np.concatenate(clipped))))
        assert row["reward/mean"] == plain[step]["reward/mean"]
    with pytest.raises(AssertionError, match="--reward-min 1.0 is above --reward-max 0.0"):
        edited("--reward-min", "1", "--reward-max", "0")


def test_entropy_bonus(edited, plain):
    off, on = edited(), edited("--entropy-coef", "1")
    assert [row["grad_norm"] for row in off] == [row["grad_norm"] for row in plain]
    assert on[0]["loss/entropy"] == off[0]["loss/entropy"]
    assert on[2]["loss/entropy"] > off[2]["loss/entropy"] + 0.1


def test_per_turn_discount(edited, recorded, tmp_path):
    flags = ["--prompts-per-step", "32", "--group-size", "1"]
    same = run(
        ROOT / "algos/ppo.py", tmp_path / "plain", "--replay-rollouts", str(recorded), *flags, "--gamma", "1"
    )
    for row, other in zip(edited(*flags, "--turn-gamma", "1"), same, strict=True):
        assert row["advantage/abs_mean"] == pytest.approx(other["advantage/abs_mean"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    ppo = load(edited.path)
    # two turns of two tokens, 4 earned at the end and 2 by the first: 2 + 4/2, twice, and 4
    mask = torch.tensor([[False, True, True, False, True, True]])
    rewards = torch.tensor([[0.0, 0, 2, 0, 0, 4]])
    _, returns = ppo.gae(rewards, torch.zeros(1, 6), mask, torch.zeros(1), 0.5, 1.0)
    assert returns.tolist() == [[0, 4, 4, 0, 4, 4]]


# --- With an engine


def tasks_by_ticket(folder: Path) -> dict[int, str]:
    """The prompt of each ticket that was trained, and in order of tickets."""
    found = {}
    for path in sorted(folder.glob("step_*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[record["ticket"]] = record["prompt_id"]
    return dict(sorted(found.items()))


def test_two_environments(sampled):
    rows, folder = sampled
    for step, row in enumerate(rows):
        rollouts = [rollout for group in groups(folder / "dump", step) for rollout in group]
        second = [rollout["reward"] for rollout in rollouts if rollout["ticket"] % 4 == 3]
        first = [rollout["reward"] for rollout in rollouts if rollout["ticket"] % 4 != 3]
        assert max(first) < 10 <= min(second)
        assert row["reward/env2_mean"] == pytest.approx(np.mean(second))
    assert "eval/Graded/mean" in rows[0]


def test_early_stopping(sampled):
    rows, folder = sampled
    assert rows[0]["eval/reverse/mean"] >= 0.2  # so the first step is the last
    assert len(rows) == 1 and "eval_end/reverse/mean" in rows[0]
    assert json.loads((folder / "run/summary.json").read_text())["checkpoint"].endswith("step_1")


def test_curriculum(sampled):
    _, folder = sampled
    found = [rollout for step in range(9) for group in groups(folder / "dump", step) for rollout in group]
    solved = {rollout["ticket"]: rollout["reward"] == 1 for rollout in found}
    later = [
        solved[ticket] for ticket in sorted(solved) if ticket >= 24
    ]  # after two passes over twelve tasks
    assert len(later) == 48
    assert 0 < np.mean(later) < 0.4  # 0.25 / 1.25 is expected, half without the change


def test_replay_failures(sampled):
    _, folder = sampled
    found = [rollout for step in STEPS for group in groups(folder / "dump", step) for rollout in group]
    prompts = {rollout["ticket"]: rollout["prompt_id"] for rollout in found}
    # tasks 0 to 11 in order, failing at 1, 3, 5 ...; each fourth group is one of these again, oldest first
    waiting, expected = [], []
    for ticket in range(24):
        again = ticket % 4 == 3 and len(waiting) > 0
        expected.append(waiting.pop(0) if again else ticket % 12)
        waiting += [expected[-1]] if not again and expected[-1] % 2 else []
    assert [int(prompts[ticket]) for ticket in range(24)] == expected


# --- The maps that lead to such places


def names_of(source: str) -> set[str]:
    """Functions, classes and methods (Class.method) of a file."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [
                each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "algos").glob("[!_]*.py")), ids=lambda path: path.name)
def test_the_map_of_a_header_leads_to_what_is_there(path):
    source = path.read_text()
    header = ast.get_docstring(ast.parse(source))
    places = [place for place in re.split(r" \| |\n", header[header.index("Edit here:") :]) if "->" in place]
    names = {name for place in places for name in place.split(" -> ")[1].split(", ")}
    assert len(names) >= 4 and "main" in names
    assert {name for name in names - names_of(source) if not (ROOT / name).is_file()} == set()


def test_each_recipe_has_a_drill_and_names_what_is_there():
    text = (ROOT / "AGENTS.md").read_text()
    section = text[text.index("## Recipes") :].split("\n## ")[0]
    recipes = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert len(recipes) >= 5
    known = names_of((ROOT / "algos/grpo.py").read_text()) | names_of((ROOT / "common/env.py").read_text())
    drilled = set()
    for line in recipes:
        what, where, drills = line.strip("| ").split(" | ")
        assert all(
            name in known for name in re.findall(r"`(\w[\w.]*)`", where) if not name.endswith(".py")
        ), where
        drilled |= set(re.findall(r"`(\w+)`", drills))
    assert drilled <= {path.stem for path in EDITS.glob("*.patch")} | {"Graded"}


def test_the_table_of_changes_is_what_the_patches_take():
    from scripts.edit_sizes import ours, table

    assert "\n".join(table()) in (ROOT / "docs/editing.md").read_text(), "run python scripts/edit_sizes.py"
    for path in EDITS.glob("*.patch"):
        files, lines, _ = ours(path.stem)
        assert files == 1 and 0 < lines <= 30, path
