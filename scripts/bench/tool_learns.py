"""An agent that learns to call its tool: `tiny` on products of two-digit numbers, which it cannot compute.

    .venv/bin/python scripts/bench/tool_learns.py                    as an Env and as a ChatAgent, three seeds each
    .venv/bin/python scripts/bench/tool_learns.py PythonEnv ppo 1    one of them, by PPO, with one seed
    .venv/bin/python scripts/bench/tool_learns.py PythonEnv control  the learning rate at 0
    python scripts/bench/tool_learns.py PythonEnv smollm2 1          a GPU; docs/tool_learns_smollm2.{json,png}

The start is `tiny` after SFT on demonstrations of which one in seven calls the tool; the others answer at once,
rightly, which so small a model cannot learn to do. From there on only the reward says that calling is better.
Resumable: runs that are done are not repeated (runs/tool_learns/), and those in docs/tool_learns.json stay there.
Writes that file and a picture.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.examples.python_tool import PythonEnv

FOLDER, KINDS, ROLLOUTS, SHARE = ROOT / "runs" / "tool_learns", ("PythonEnv", "PythonAgent"), 64, 1 / 7
SFT = {
    "tiny": "--model tiny --max-steps 600 --batch-size 64 --eval-every 200 --lr 2e-3",
    "smollm2": "--model smollm2 --max-steps 40 --batch-size 32 --eval-every 40 --lr 1e-4",
}
FLAGS = "--max-steps 60 --eval-every 20 --max-model-len 256 --lr-end-ratio 0.3"
RATES = {"tiny": "4e-4", "smollm2": "1e-5"}
ALGORITHMS = {
    "grpo": ["--prompts-per-step", "8", "--group-size", "8", "--max-in-flight", "8"],
    "ppo": ["--prompts-per-step", "64", "--max-in-flight", "64"],
    "control": ["--prompts-per-step", "8", "--group-size", "8", "--max-in-flight", "8"],
}
SUFFIX = {"tiny": "", "smollm2": "_smollm2"}  # of names
FILES = {"PythonEnv": "python_tool.py", "PythonAgent": "python_agent.py"}
# how the policy asks for code to be run: max_new_tokens, and the text around the code
CALLS = {
    "PythonEnv": (32, "```python\n{}\n```"),
    "PythonAgent": (96, '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>'),
}


def run(algorithm: str, folder: Path, flags: list[str]) -> Path:
    if not (folder / "summary.json").exists():
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        name = "grpo" if algorithm == "control" else algorithm
        command = [sys.executable, "-m", f"algos.{name}", *flags, "--output-dir", str(folder)]
        subprocess.run([*command, "--no-tensorboard"], cwd=ROOT, check=True, timeout=3600)
    return folder


def demonstration(kind: str, task: dict, calls: bool) -> dict:
    """A conversation as the run of `kind` has it, with the tool's answer where it `calls`."""
    env = PythonEnv()
    prompt = env.reset(task)
    messages = [{"role": "user", "content": prompt}]
    if kind == "PythonAgent":
        messages = [{"role": "system", "content": "Tools: python"}, {"role": "user", "content": env.question}]
    if calls:
        code = f"print({env.question.removesuffix('=?')})"
        messages.append({"role": "assistant", "content": CALLS[kind][1].format(code)})
        messages.append({"role": {"PythonEnv": "user", "PythonAgent": "tool"}[kind], "content": env.answer})
    return {"messages": [*messages, {"role": "assistant", "content": env.answer}]}


def start(kind: str, model: str) -> str:
    """The checkpoint that all runs of `kind` and `model` start from."""
    dice, tasks = random.Random(0), PythonEnv().tasks("train")
    lines = [json.dumps(demonstration(kind, task, dice.random() < SHARE)) for task in tasks]
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = FOLDER / f"demonstrations-{kind}.jsonl"
    data.write_text("\n".join(lines) + "\n")
    folder = run("sft", FOLDER / f"start-{kind}{SUFFIX[model]}", [*SFT[model].split(), "--data", str(data)])
    return str(max((folder / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime))


def curve(algorithm: str, kind: str, seed: int, model: str) -> dict:
    """By step: mean reward, share of rollouts that call, calls and failed calls of one; greedy scores by step."""
    flags = ["--model", start(kind, model), *FLAGS.split(), *ALGORITHMS[algorithm], "--seed", str(seed)]
    flags += ["--env", f"scripts/examples/{FILES[kind]}:{kind}", "--max-new-tokens", str(CALLS[kind][0])]
    flags += ["--lr", "0" if algorithm == "control" else RATES[model]]
    folder = run(algorithm, FOLDER / f"{algorithm}-{kind}-{seed}{SUFFIX[model]}", flags)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row[f"eval/{kind}/mean"] for row in rows if f"eval/{kind}/mean" in row}
    scores[len(rows)] = rows[-1][f"eval_end/{kind}/mean"]
    names = {"reward": "reward/mean", "used": "tool/used", "calls": "tool/calls", "errors": "tool/errors"}
    return {"score": scores, "seconds": sum(row["time/step"] for row in rows)} | {
        short: [round(row[name], 4) for row in rows] for short, name in names.items()
    }


def smooth(values: list[float]) -> np.ndarray:
    """Means over five steps."""
    return np.convolve(np.pad(values, 2, "edge"), np.ones(5) / 5, "valid")


def draw(results: dict[str, list[dict]], model: str) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), dpi=130, layout="constrained")
    for color, (name, runs) in enumerate(results.items()):
        for each in runs:
            style = {"color": f"C{color}", "lw": 1, "label": name if each is runs[0] else None}
            rollouts = ROLLOUTS * np.arange(len(each["used"]))
            axes[0].plot(rollouts, smooth(each["used"]), **style)
            axes[1].plot(rollouts, smooth(each["reward"]), **style)
            scores = [(ROLLOUTS * int(step), score) for step, score in each["score"].items()]
            axes[2].plot(*zip(*scores), marker="o", ms=3, **style)
    for axis, title in zip(axes, ("rollouts that call the tool", "mean reward", "greedy: right answers")):
        axis.set(title=title, xlabel="rollouts", ylim=(-0.05, 1.05))
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs" / f"tool_learns{SUFFIX[model]}.png")


def main(kinds: list[str], algorithms: list[str], seeds: list[int], model: str) -> None:
    out = ROOT / "docs" / f"tool_learns{SUFFIX[model]}.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    for algorithm, kind, seed in itertools.product(algorithms, kinds, seeds):
        got, name = curve(algorithm, kind, seed, model), f"{algorithm} {kind}"
        others = [each for each in results.get(name, []) if each["seed"] != seed]
        results[name] = sorted([*others, {"seed": seed} | got], key=lambda each: each["seed"])
        spans = {"first": slice(5), "last": slice(-5, None)}
        for when, span in spans.items():
            means = {name: float(np.mean(got[name][span]).round(3)) for name in ("used", "reward", "errors")}
            print(f"{algorithm} {kind} {seed}, {when} five steps: {means}", flush=True)
        print(f"  greedy: {got['score']}", flush=True)
        out.write_text(json.dumps(results) + "\n")
    draw(results, model)


if __name__ == "__main__":
    main(
        [name for name in sys.argv[1:] if name in KINDS] or list(KINDS),
        [name for name in sys.argv[1:] if name in ALGORITHMS] or ["grpo"],
        [int(seed) for seed in sys.argv[1:] if seed.isdigit()] or [1, 2, 3],
        "smollm2" if "smollm2" in sys.argv else "tiny",
    )
