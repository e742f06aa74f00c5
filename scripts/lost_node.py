"""Removes a node of a Ray cluster while a run trains on it. The nodes are simulated, all on this machine.

    python scripts/lost_node.py runs/lost_node

The cluster has a head, where the driver is, and two more nodes. One that has a process of the run (not the
head) is killed; with --fault-budget the run goes on with what is left. Exit code 0 if it ends well.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[1]
ACTORS = ("ray::RolloutWorker", "ray::Trainer", "ray::SampleQueue")


def actors_by_node(cluster: Cluster) -> dict:
    """The titles of a run's processes on each node: those below its raylet."""
    found = {}
    for node in cluster.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        found[node] = []
        for process in raylet.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                found[node] += [actor for actor in ACTORS if actor in title]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    args, flags = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    rows, removed = args.folder / "run/metrics.jsonl", None
    command = [
        sys.executable,
        "-m",
        "algos.grpo",
        "--model",
        "tiny",
        "--env",
        "reverse",
        "--num-engines",
        "2",
    ]
    command += ["--max-steps", str(args.steps), "--eval-every", "1000", "--save-every", "5", *flags]
    command += ["--fault-budget", "2", "--output-dir", str(args.folder / "run")]
    try:
        with open(args.folder / "output.txt", "wb") as output:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=environment)
        while run.poll() is None:
            time.sleep(0.2)
            step = rows.read_text().count("\n") if rows.exists() else 0
            if removed is None and step >= 7:
                by_node = actors_by_node(cluster)
                others = [node for node in by_node if node != cluster.head_node]
                node = max(others, key=lambda node: len(by_node[node]))
                removed = {"at_step": step, "had": by_node[node], "others": [by_node[n] for n in by_node]}
                print(json.dumps(removed), flush=True)
                if not by_node[node]:
                    sys.exit("Ray put every process on the head: try again")
                cluster.remove_node(node, allow_graceful=False)
        print(f"exit code {run.returncode}, {rows.read_text().count(chr(10))} of {args.steps} steps")
        sys.exit(run.returncode)
    finally:
        if run.poll() is None:
            run.kill()
        cluster.shutdown()


if __name__ == "__main__":
    main()
