"""The same job on Instar, on TRL's GRPOTrainer and, where there are two GPUs, on Molt.

    .venv/bin/python scripts/bench/race.py setup              TRL into an environment of its own; setup molt
    .venv/bin/python scripts/bench/race.py run                `tiny`, both workloads, three seeds, in turns
    .venv/bin/python scripts/bench/race.py report             docs/race.{json,png}, and the tables of race.md
    python scripts/bench/race.py run --model smollm2 --workloads uneven --device cuda --trl-python python3 \
        --trl-pythonpath FOLDER                             on a GPU

What all are told is JOBS, what each is told besides is SETTINGS; docs/race.md explains both. Runs that are
done are not repeated (runs/race/results). Times are those at which this program sees a step's line in the
contender's metrics.jsonl, so all are measured alike, with evaluation and logging as each does them.
"""

import argparse
import ast
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench" / "race")]
FOLDER = ROOT / "runs" / "race"
TASKS = "scripts/bench/race/tasks.py"

# P prompts x G answers a step; lr: warm-up, then linear to 0; threshold: of the greedy score, held-out tasks
JOBS = {
    "tiny even": dict(
        env="reverse", prompts=16, group_size=8, max_new_tokens=16, lr=1e-3, lr_warmup_steps=10,
        steps=100, eval_every=10, threshold=0.9,
    ),
    "tiny uneven": dict(
        env=f"{TASKS}:Uneven", prompts=16, group_size=8, max_new_tokens=16, lr=5e-4, lr_warmup_steps=10,
        steps=100, eval_every=10, threshold=0.62,
    ),
    "smollm2 uneven": dict(
        env=f"{TASKS}:Sums", prompts=32, group_size=8, max_new_tokens=64, lr=1e-5, lr_warmup_steps=5,
        steps=60, eval_every=10, threshold=0.5,
    ),
}  # fmt: skip
SAME = dict(temperature=1.0, clip_low=0.2, clip_high=0.28, max_grad_norm=1.0)

# How each may be tuned. TRL's `ahead`: rollouts of so many steps more are made at once, then trained step by
# step, so the last of them is as many versions stale; it is TRL's way to wait for a slow reward less often.
# `micro`: backward passes of a step.
QUIET = "--no-tensorboard --samples-per-step 0"
SETTINGS = {
    "tiny even": {
        "instar": f"--max-staleness 2 --max-in-flight 16 {QUIET}",
        "trl": dict(engine="generate", ahead=0, micro=1),
        "trl-ahead": dict(engine="generate", ahead=3, micro=1),
    },
    "tiny uneven": {
        "instar": f"--max-staleness 4 --max-in-flight 80 --env-workers 256 {QUIET}",
        "instar-near": f"--max-staleness 2 --max-in-flight 48 --env-workers 256 {QUIET}",
        "trl": dict(engine="generate", ahead=0, micro=1),
        "trl-ahead": dict(engine="generate", ahead=3, micro=1),
    },
    "smollm2 uneven": {
        "instar": f"--max-staleness 4 --max-in-flight 160 --env-workers 512 --kv-cache-gb 8 {QUIET}",
        "trl-vllm": dict(engine="vllm", ahead=0, micro=1),
        "trl-vllm-ahead": dict(engine="vllm", ahead=3, micro=1),
        "trl": dict(engine="generate", ahead=0, micro=1),
        "trl-ahead": dict(engine="generate", ahead=3, micro=1),
    },
}
STARTED = {"instar": "refit gate passed", "trl": "ready"}  # what a contender prints when training begins
LIMIT_S = 600  # of a run
SKIP = 20  # steps before the steady state; a multiple of 1 + ahead, as the window's other end is

# --- Environments


def setup(names: list[str]) -> None:
    """Makes runs/race/venvs/NAME. On a CPU Molt needs vLLM's CPU build, and is then installed beside it."""
    for name in names:
        home = FOLDER / "venvs" / name
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        wanted = (ROOT / "scripts" / "bench" / "race" / f"requirements-{name}.txt").read_text().split("\n\n")
        for part, extra in zip(wanted, ([], ["--no-deps"])):
            lines = [line.split("#")[0].strip() for line in part.splitlines()]
            with tempfile.TemporaryDirectory() as scratch:
                packages = [absent(line, scratch) if "+absent" in line else line for line in lines if line]
                subprocess.run([*pip, *extra, *packages], check=True)


def absent(requirement: str, scratch: str) -> str:
    """An empty distribution, as scripts/setup.sh makes them: text models need none of these packages."""
    name, version = requirement.split("==")
    Path(scratch, name).mkdir()
    Path(scratch, name, "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n[tool.setuptools]\npackages = []\n'
    )
    return str(Path(scratch, name))


# --- A run


def model_path(job: str) -> str:
    """The folder of the model that all contenders start from; made once."""
    from common.models import cached, resolve_model

    if job == "tiny uneven":
        import tasks

        return cached("tiny-uneven", [tasks.make_model, tasks.Uneven], tasks.make_model)
    return resolve_model(job.split()[0])


def command(job: str, contender: str, seed: int, folder: Path, args) -> list[str]:
    """What starts a contender. All numbers of the job reach each contender from JOBS and SAME."""
    told, own = JOBS[job] | SAME, SETTINGS[job][contender]
    flags = {name: told[name] for name in ("env", "lr", "lr_warmup_steps", "group_size", "max_new_tokens")}
    flags |= SAME | {"model": model_path(job), "seed": seed, "eval_every": told["eval_every"]}
    steps = args.steps or told["steps"]
    if contender.startswith("instar"):
        flags |= {"prompts_per_step": told["prompts"], "max_steps": steps, "output_dir": folder}
        start, rest = [sys.executable, "-m", "algos.grpo"], (args.instar_flags or own).split()
    else:
        flags |= own | {"prompts": told["prompts"], "steps": steps, "output": folder}
        flags |= {"threads": args.trl_threads, "device": args.device}
        start, rest = [args.trl_python, str(ROOT / "scripts" / "bench" / "race" / "trl_grpo.py")], []
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items()]
    return [*start, *(word for pair in pairs for word in pair), *rest]


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


class Memory(threading.Thread):
    """Peaks of a process tree in GB: resident memory, and the same with shared pages counted once (looked at
    less often, as it costs the tree more); of a GPU what nvidia-smi says."""

    def __init__(self, pid: int, device: str):
        super().__init__(daemon=True)
        self.pid, self.device, self.done = pid, device, threading.Event()
        self.peaks = {"rss_gb": 0.0, "pss_gb": 0.0} | ({"gpu_gb": 0.0} if device == "cuda" else {})

    def run(self) -> None:
        for tick in range(10**9):
            now, page = dict.fromkeys(self.peaks, 0.0), os.sysconf("SC_PAGE_SIZE")
            for pid in family(self.pid):
                try:
                    now["rss_gb"] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 1e9
                    if tick % 8 == 4:
                        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                        now["pss_gb"] += int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1]) * 1024 / 1e9
                except (OSError, TypeError):  # it has just ended
                    continue
            if self.device == "cuda":
                seen = os.environ.get("CUDA_VISIBLE_DEVICES")  # another run may have the others
                query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
                query += [f"--id={seen}"] if seen else []
                used = subprocess.run(query, capture_output=True, text=True).stdout.split()
                now["gpu_gb"] = sum(map(float, used)) / 1e3
            self.peaks = {key: max(self.peaks[key], value) for key, value in now.items()}
            if self.done.wait(2.0):
                return


def watch(process, folder: Path, marker: str) -> tuple[float, list[tuple[float, dict]]]:
    """When training began, and (time, row) of each step, as they are seen. Raises RuntimeError on failure."""
    log, rows, began, deadline = folder / "output.log", [], None, time.time() + LIMIT_S
    metrics, read = folder / "metrics.jsonl", 0
    while True:
        over = process.poll() is not None
        if began is None and marker in log.read_text():
            began = time.time()
        if metrics.exists():
            with metrics.open() as file:
                file.seek(read)
                for line in iter(file.readline, ""):
                    if not line.endswith("\n"):
                        break
                    rows.append((time.time(), json.loads(line)))
                    read += len(line.encode())
        if over and process.returncode == 0:
            return began, rows
        if over or time.time() > deadline:
            raise RuntimeError(f"{'failed' if over else 'too slow'}: {log.read_text()[-3000:]}")
        time.sleep(0.05)


def run(job: str, contender: str, seed: int, args) -> dict:
    """One run from its start to its end, measured."""
    folder = Path(tempfile.mkdtemp(prefix=f"{contender}-", dir=FOLDER))
    kind, told = contender.split("-")[0], JOBS[job]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if kind == "trl":
        environment |= {"OMP_NUM_THREADS": str(args.trl_threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if args.trl_pythonpath:
            parts = [args.trl_pythonpath, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(parts)
    asked, load, launched = command(job, contender, seed, folder, args), os.getloadavg()[0], time.time()
    with open(folder / "output.log", "w") as log:
        process = subprocess.Popen(
            asked, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    memory = Memory(process.pid, args.device)
    memory.start()
    try:
        began, rows = watch(process, folder, STARTED[kind])
    finally:
        members = family(process.pid)
        memory.done.set()
        if process.poll() is None:
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
    return measure(began - launched, [(at - launched, row) for at, row in rows], told) | {
        "job": job, "contender": contender, "seed": seed, "load": load, "memory": memory.peaks,
        "command": " ".join(asked).replace(f"{ROOT}/", "").replace(str(args.trl_python), "python"),
    }  # fmt: skip


def measure(start_s: float, rows: list[tuple[float, dict]], told: dict) -> dict:
    """Rates, times and scores of a run from the seconds since its launch at which its rows were seen."""
    per_step, seconds, points = told["prompts"] * told["group_size"], [at for at, _ in rows], []
    for at, row in rows:
        points += [
            (round(at, 2), row["step"], v) for k, v in row.items() if re.fullmatch(r"eval/(\w+/)?mean", k)
        ]
    final = next(v for k, v in rows[-1][1].items() if re.fullmatch(r"eval_end/(\w+/)?mean", k))
    points.append((round(seconds[-1], 2), len(rows), final))
    hit = next((at for at, _, score in points if score >= told["threshold"]), None)
    first, last = (SKIP, len(rows) - 4) if len(rows) > 2 * SKIP else (4, len(rows) - 4)
    made = [row for _, row in rows if "reward/mean" in row]  # with `ahead`, the steps that make rollouts
    return {
        "start_s": start_s,
        "samples_per_s": per_step * (last - first) / (seconds[last - 1] - seconds[first - 1]),
        "samples_per_s_with_start": per_step * len(rows) / seconds[-1],
        "threshold_s": hit and hit - start_s,
        "threshold_s_with_start": hit,
        "reward": statistics.mean(row["reward/mean"] for row in made if row["step"] >= len(rows) - 10),
        "score_start": points[0][2],
        "score": final,
        "len_mean": statistics.mean(row["rollout/len_mean"] for row in made),
        "points": points,
        "total_s": seconds[-1],
    }


def race(args) -> None:
    """All runs, contenders in turns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the contender that runs ends with this
    args.results.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for workload in args.workloads:
            job = f"{args.model} {workload}"
            contenders = [name for name in SETTINGS[job] if not args.contenders or name in args.contenders]
            turn = seed % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                path = args.results / f"{job.replace(' ', '-')}-{contender}-{seed}.json"
                if path.exists():
                    continue
                try:
                    found = run(job, contender, seed, args)
                except RuntimeError as error:
                    print(f"{job} {contender} {seed}: {error}", flush=True)
                    continue
                path.write_text(json.dumps(found, indent=1) + "\n")
                shown = ("start_s", "samples_per_s", "threshold_s", "total_s", "reward", "score", "load")
                print(
                    job,
                    contender,
                    seed,
                    {key: found[key] and round(found[key], 2) for key in shown},
                    flush=True,
                )


# --- What a user reads


def code_lines(source: str) -> int:
    """Lines that are no blank, comment or docstring, as the budgets count them."""
    from tests.test_budgets import code_lines

    return code_lines(source)


def closure(entry: Path, home: Path, packages: set[str]) -> list[Path]:
    """The modules of `packages`, which lie in `home`, that `entry` imports, and those that they do."""
    found = [entry]
    for path in found:
        package = path.relative_to(home).with_suffix("").parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = [*package[: len(package) - node.level + 1]] if node.level else []
                base += node.module.split(".") if node.module else []
                names = [base, *([*base, alias.name] for alias in node.names)]
            for name in names:
                target = home.joinpath(*name)
                target = target / "__init__.py" if target.is_dir() else target.with_suffix(".py")
                if name and name[0] in packages and target.is_file() and target not in found:
                    found.append(target)
    return found


def reading() -> dict:
    """Code lines of the file that holds the algorithm, and of all the package's modules that it imports."""
    homes = {"instar": (ROOT, "algos/grpo.py")}
    for name, entry in (("trl", "trl/trainer/grpo_trainer.py"), ("molt", "molt/cli/train_rl_ray.py")):
        homes |= {name: (site, entry) for site in FOLDER.glob(f"venvs/{name}/lib/python3.*/site-packages")}
    lines = {}
    for name, (home, entry) in homes.items():
        files = closure(home / entry, home, {"algos", "common", "trl", "molt"})
        counts = [code_lines(path.read_text()) for path in files]
        lines[name] = {"file": entry, "lines": counts[0], "files": len(files), "all_lines": sum(counts)}
    return lines


# --- The report


def spread(values: list) -> str:
    """Median and range. What was not reached (None) counts as longer than anything; how many did is said."""
    there = [value for value in values if value is not None]
    if not there:
        return "not reached"
    digits = 0 if max(there) >= 100 else 1 if max(there) >= 10 else 2
    missing = f"; {len(there)} of {len(values)} did" if len(there) < len(values) else ""
    middle = middle_of(values)
    shown = "not reached" if middle == math.inf else f"{middle:.{digits}f}"
    return f"{shown} ({min(there):.{digits}f} to {max(there):.{digits}f}{missing})"


def middle_of(values: list) -> float:
    return statistics.median(math.inf if value is None else value for value in values)


def group(results: list[dict], job: str) -> dict[str, list[dict]]:
    names = [
        name for name in SETTINGS[job] if any((r["job"], r["contender"]) == (job, name) for r in results)
    ]
    return {n: [r for r in results if (r["job"], r["contender"]) == (job, n)] for n in names}


COLUMNS = {
    "samples/s": "samples_per_s",
    "with start-up": "samples_per_s_with_start",
    "s to threshold": "threshold_s",
    "with start-up ": "threshold_s_with_start",
    "start-up, s": "start_s",
    "final reward": "reward",
    "final score": "score",
}


def tables(record: dict) -> str:
    """The tables of docs/race.md, from docs/race.json."""
    parts = []
    for job in JOBS:
        runs = group(record["runs"], job)
        if not runs:
            continue
        memory = list(next(iter(runs.values()))[0]["memory"])
        heads = ["contender", *COLUMNS, *(f"peak {key.removesuffix('_gb')}, GB" for key in memory)]
        parts += [
            f"**{job}** (threshold {JOBS[job]['threshold']})\n",
            "| " + " | ".join(map(str.strip, heads)) + " |",
        ]
        parts += ["|" + "---|" * len(heads)]
        for name, found in runs.items():
            cells = [spread([r[key] for r in found]) for key in COLUMNS.values()]
            cells += [spread([r["memory"][key] for r in found]) for key in memory]
            parts.append("| " + " | ".join([f"{name}, {len(found)} x", *cells]) + " |")
        parts.append("\n" + verdict(runs) + "\n")
    parts += [
        "| | the file to start from | its code lines | with what it imports of its own package |",
        "|---|---|---|---|",
    ]
    for name, found in record["reading"].items():
        whole = f"{found['all_lines']:,} lines in {found['files']} files"
        parts.append(f"| {name} | `{found['file']}` | {found['lines']:,} | {whole} |")
    return "\n".join(parts) + "\n"


def verdict(runs: dict[str, list[dict]]) -> str:
    """Instar's better setting beside the best peer's, by medians: the rate, and the time to the threshold."""
    most = max(map(len, runs.values()))  # a setting that was only tried has fewer runs
    runs = {name: found for name, found in runs.items() if len(found) == most}
    rates = {n: statistics.median(r["samples_per_s"] for r in found) for n, found in runs.items()}
    ours, best = (max(names, key=rates.get) for names in sides(rates))
    text = f"Samples/s: {ours} has {rates[ours] / rates[best]:.2f} x those of the best peer with {most} runs ({best})"
    times = {n: middle_of([r["threshold_s"] for r in found]) for n, found in runs.items()}
    ours, first = (min(names, key=times.get) for names in sides(times))
    if math.inf in (times[ours], times[first]):
        return text + ". Of a side, most runs did not reach the threshold."
    return (
        text
        + f". Seconds to the threshold: {ours} takes {times[ours] / times[first]:.2f} x those of {first}."
    )


def sides(values: dict) -> tuple[list[str], list[str]]:
    return [n for n in values if n.startswith("instar")], [n for n in values if not n.startswith("instar")]


def report(args) -> None:
    record_path = ROOT / "docs" / "race.json"
    record = json.loads(record_path.read_text()) if record_path.exists() else {"runs": [], "reading": {}}
    fresh = [json.loads(path.read_text()) for path in sorted(args.results.glob("*.json"))]
    key = lambda r: (r["job"], r["contender"], r["seed"])  # noqa: E731
    record["runs"] = list(({key(r): r for r in record["runs"]} | {key(r): r for r in fresh}).values())
    record["reading"] |= reading()
    record_path.write_text(json.dumps(record, indent=1) + "\n")
    draw(record)
    page, shown = ROOT / "docs" / "race.md", tables(record)
    head, rest = page.read_text().split("<!-- tables -->\n")
    page.write_text(f"{head}<!-- tables -->\n{shown}<!-- /tables -->{rest.split('<!-- /tables -->')[1]}")
    print(shown)


def draw(record: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    jobs = [job for job in JOBS if group(record["runs"], job)]
    figure, axes = plt.subplots(1, len(jobs), figsize=(5.2 * len(jobs), 3.6), dpi=120, squeeze=False)
    for job, axis in zip(jobs, axes[0]):
        for number, (name, found) in enumerate(group(record["runs"], job).items()):
            for place, each in enumerate(found):
                seconds, _, scores = zip(*each["points"])
                axis.plot(
                    seconds,
                    scores,
                    marker="o",
                    markersize=3,
                    color=f"C{number}",
                    label=None if place else name,
                )
        axis.axhline(JOBS[job]["threshold"], color="0.7", linewidth=0.8)
        axis.set(title=job, xlabel="seconds since the launch", ylabel="greedy score, 128 held-out tasks")
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "race.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["setup", "run", "report"])
    parser.add_argument("names", nargs="*", help="setup: trl, molt")
    parser.add_argument("--model", default="tiny", choices=["tiny", "smollm2"])
    parser.add_argument("--workloads", nargs="+", default=["even", "uneven"], choices=["even", "uneven"])
    parser.add_argument("--contenders", nargs="+", help="default: all that have settings")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, help="instead of the job's, to try something")
    parser.add_argument("--instar-flags", help="instead of those in SETTINGS, to try something")
    parser.add_argument("--trl-python", default=str(FOLDER / "venvs" / "trl" / "bin" / "python"))
    parser.add_argument("--trl-pythonpath", help="a folder with TRL, where its Python has none")
    parser.add_argument("--trl-threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    if arguments.what == "setup":
        setup(arguments.names or ["trl"])
    else:
        {"run": race, "report": report}[arguments.what](arguments)
