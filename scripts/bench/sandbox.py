"""How fast model-written code runs in its box: latency of a call, calls a second on all cores, and of what.

    .venv/bin/python scripts/bench/sandbox.py               writes docs/sandbox.json

`waiting` are calls with a pause between them, as an agent has it while its model thinks: the box is up by then.
`in a row` are calls back to back, where each waits for a box. Bare is `python -I` without a box, the floor.
"""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from common.sandbox import Sandbox

CODE, CALLS, PAUSE_S = "print(sum(range(1000)))", 100, 0.2


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def milliseconds(call, calls: int = CALLS, pause_s: float = 0.0) -> dict[str, float]:
    """Percentiles of a call's time, and its CPU time, which says more on a loaded machine."""
    took, before = [], cpu_s()
    for _ in range(calls):
        time.sleep(pause_s)
        start = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - start))
    points = {"p50": 50, "p90": 90, "p99": 99}
    shares = {name: round(float(np.percentile(took, at)), 1) for name, at in points.items()}
    return shares | {"cpu": round(1e3 * (cpu_s() - before) / calls, 1)}


def in_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.run(CODE).text == "499500"


def bare() -> None:
    python = os.path.realpath(sys.executable)
    done = subprocess.run([python, "-I", "-c", CODE], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"499500\n"


def worker(calls: int, ready, go, results) -> None:
    sandbox = Sandbox()
    ready.release()
    go.wait()
    for _ in range(calls):
        in_sandbox(sandbox)
    results.put(calls)


def rate(processes: int, calls: int = CALLS) -> float:
    """Calls a second of several processes, each with a sandbox, as the workers of environments are."""
    ready, go, results = multiprocessing.Semaphore(0), multiprocessing.Event(), multiprocessing.Queue()
    arguments = (calls // processes, ready, go, results)
    workers = [multiprocessing.Process(target=worker, args=arguments) for _ in range(processes)]
    for each in workers:
        each.start()
    for _ in workers:
        ready.acquire()
    start = time.perf_counter()
    go.set()
    done = sum(results.get(timeout=300) for _ in workers)
    took = time.perf_counter() - start
    for each in workers:
        each.join()
    return round(done / took, 1)


def main() -> None:
    sandbox, cold = Sandbox(warm=1), Sandbox(warm=0)
    result = {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "ms": {
            "waiting, a box made ahead": milliseconds(lambda: in_sandbox(sandbox), pause_s=PAUSE_S),
            "waiting, none made ahead": milliseconds(lambda: in_sandbox(cold), pause_s=PAUSE_S),
            "in a row, a box made ahead": milliseconds(lambda: in_sandbox(sandbox)),
            "bare": milliseconds(bare),
        },
        "calls_per_s": {f"{processes} processes": rate(processes) for processes in (1, 2, 4)},
    }
    (ROOT / "docs" / "sandbox.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
