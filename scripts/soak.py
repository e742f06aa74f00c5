"""A long run under faults: 1% of the episodes fail, an engine dies again and again, and nothing may pile up.

    python scripts/soak.py runs/soak --out docs/soak.json
    python scripts/soak.py runs/soak --steps 100 --kill-every 40      a short one

Watches the run from outside. Memory (MiB) and descriptors of all its processes are told at each step at which
they were looked at; in the end nothing of the run may be left: no process, no shared memory.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common.env import Step  # noqa: E402
from common.envs.reverse import Reverse  # noqa: E402

FLAGS = ("--save-every", "20", "--eval-every", "100", "--samples-per-step", "1", "--fault-budget", "1000")


class Flaky(Reverse):
    """The built-in task whose grading raises, dies or hangs for 1% of the answers."""

    def step(self, action: str) -> Step:
        luck = random.Random(os.urandom(8)).random()
        if luck < 0.005:
            raise ConnectionError("the grader is not there")
        if luck < 0.0095:
            os._exit(3)
        if luck < 0.010:
            time.sleep(3600)
        return super().step(action)


def below(process: psutil.Process) -> list[tuple[str, psutil.Process]]:
    """Every process below this one with its title."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((" ".join(each.cmdline()), each))
    return found


def mapped(process: psutil.Process) -> set[int]:
    """The inodes of the shared memory that the process and those below it have mapped."""
    found = set()
    for each in [process, *(child for _, child in below(process))]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each.pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return found


def left_of(inodes: set[int]) -> list[str]:
    """The files of these inodes."""
    names = []
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names += [file.name] if file.stat().st_ino in inodes else []
    return sorted(names)


def look(process: psutil.Process) -> dict:
    """What the run holds now, by kind of process."""
    mib = dict.fromkeys(("driver", "trainer", "worker", "engine", "queue", "rest"), 0.0)
    kinds = {"ray::Trainer": "trainer", "ray::RolloutWorker": "worker", "VLLM::EngineCore": "engine"}
    kinds["ray::SampleQueue"] = "queue"
    descriptors = 0
    for title, each in [("driver", process), *below(process)]:
        kind = next((kind for part, kind in kinds.items() if part in title), "rest")
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            mib["driver" if each == process else kind] += each.memory_info().rss / 2**20
            descriptors += each.num_fds()
    counts = {"descriptors": descriptors, "processes": len(below(process))}
    return {kind: round(value) for kind, value in mib.items()} | counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kill-every", type=int, default=200, help="steps between two deaths of an engine")
    parser.add_argument("--look-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--out", type=Path)
    args, flags = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows, shared = args.folder / "run/metrics.jsonl", set()
    command = [
        sys.executable,
        "-m",
        "algos.grpo",
        "--model",
        "tiny",
        "--env",
        f"{Path(__file__).resolve()}:Flaky",
    ]
    command += ["--max-steps", str(args.steps), "--env-timeout-s", "5", *FLAGS, *flags]
    start, seen, looks, kills = time.monotonic(), set(), [], []
    with open(args.folder / "output.txt", "wb") as output:
        command += ["--output-dir", str(args.folder / "run")]
        run = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    due, looked = args.kill_every, 0.0
    while run.poll() is None:
        time.sleep(0.5)
        with contextlib.suppress(psutil.NoSuchProcess):
            children = below(run)
            seen |= {process for _, process in children}
            step = rows.read_text().count("\n") if rows.exists() else 0
            engines = [process for title, process in children if "VLLM::EngineCore" in title]
            if due <= step < args.steps and engines:
                engines[0].kill()
                kills.append({"step": step, "at_s": round(time.monotonic() - start, 1)})
                due += args.kill_every
            if time.monotonic() > looked + args.look_every:
                looked = time.monotonic()
                looks.append({"step": step, "at_s": round(looked - start, 1)} | look(run))
                shared |= mapped(run)
    time.sleep(10)
    left = [process.pid for process in seen if process.is_running()]
    metrics = [json.loads(line) for line in rows.read_text().splitlines()]
    dropped = {key for row in metrics for key in row if key.startswith("rollout/dropped/")}
    trains = [each for before, each in pairwise(looks) if each["step"] > max(before["step"], args.kill_every)]
    trains = [look for look in trains if look["engine"] and look["trainer"]]
    saves = [row["time/save"] for row in metrics[:-1] if row["step"] % 20 == 19 and "time/save" in row]
    result = {
        "command": "python scripts/soak.py " + " ".join(sys.argv[1:]),
        "exit_code": run.returncode,
        "steps": len(metrics),
        "seconds": round(time.monotonic() - start),
        "kills": kills,
        "dropped": {key: sum(row.get(key, 0) for row in metrics) for key in sorted(dropped)},
        "invalid_frac": statistics.mean(row["reward/invalid_frac"] for row in metrics if len(row) > 1),
        "blocking_save_s": {"median": statistics.median(saves or [0]), "max": max(saves, default=0)},
        "processes_left": left,
        "shared_memory_left": left_of(shared),
        "after_the_first_death_and_at_the_end": trains[:: max(len(trains) - 1, 1)],
        "looks": looks,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
