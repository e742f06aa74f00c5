"""Simulated nodes: where the actors of a run land on two with eight GPUs each, that Ray is told of, and a run
over eight without one.

In a process of its own, as the driver of a run is.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = """
import json, os, sys
sys.path[:0] = ["scripts/cluster", os.getcwd()]
import simulate

class Actor:
    def node(self):
        import ray
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

strategy, folder = sys.argv[1:]
with simulate.started([{"num_cpus": 1, "num_gpus": 8}] * 2, strategy) as os.environ["RAY_ADDRESS"]:
    import ray
    from common import cluster
    cluster.start(16, folder)
    run = cluster.Run(300)
    _, engines, trainers = cluster.split_gpus(2, 4, 8)
    engines = run.spawn("engine", Actor, [()] * 2, engines)
    trainers = run.spawn("trainer", Actor, [()] * 8, trainers)
    found = {"engines": run.get(run.ask(engines, "node")), "trainers": run.get(run.ask(trainers, "node"))}
    ray.shutdown()
print("FOUND" + json.dumps(found))
"""


def test_a_filled_node_before_the_next_gives_each_role_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLACES, "PACK", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    assert [gpus for _, gpus in found["engines"]] == [4, 4]  # --engine-tp 4: on one node, whole
    assert [gpus for _, gpus in found["trainers"]] == [1] * 8
    nodes = {role: {node for node, _ in places} for role, places in found.items()}
    assert len(nodes["engines"]) == len(nodes["trainers"]) == 1
    assert nodes["engines"] != nodes["trainers"]


def test_a_run_over_eight_nodes_trains():
    """Two engines and four trainers, spread: they meet, refit and end although none is where the driver is."""
    command = [sys.executable, "scripts/cluster/simulate.py", "--", "--max-steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8 nodes after" in done.stdout and "exit code 0, 2 steps, " in done.stdout
    nodes = set(re.findall(r"x (?:Trainer|RolloutWorker) on node (\w+)", done.stdout))
    assert len(nodes) >= 2
