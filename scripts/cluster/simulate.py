"""A run on simulated nodes: Ray's own processes of each node, all on this machine and without a GPU.

    python scripts/cluster/simulate.py                               8 nodes, 2 engines, 4 trainers
    python scripts/cluster/simulate.py --nodes 3 -- --max-steps 3    flags of algos/grpo.py behind --

Shows that start, rendezvous, queue, refit and shutdown work where actors live on different nodes: prints on
which node each was, and fails unless they were on several. Not shown: a network between nodes, NCCL, GPUs.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.2"  # Ray takes 127.0.0.1 for a request to find the machine's outside address
FLAGS = "--model tiny --env reverse --max-steps 2 --eval-every 99 --num-engines 2 --num-trainers 4"
THRESHOLD = {"PACK": "1.0", "SPREAD": "0.0"}  # how full a node gets before Ray prefers the next


@dataclass
class Args:
    nodes: int = 8
    """Simulated nodes, each with one CPU."""
    strategy: Literal["PACK", "SPREAD"] = "SPREAD"
    """PACK fills a node before the next, as scripts/cluster/launch.sh has it."""


@contextlib.contextmanager
def started(nodes: list[dict], strategy: str):
    """A Ray cluster with a node for each dict of resources. Its files lie in a folder of its own: in the usual
    one Ray notes the address, and every `ray.init()` on this machine would join."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {"RAY_TMPDIR": folder, "RAY_scheduler_spread_threshold": THRESHOLD[strategy]}
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for index, node in enumerate(nodes):
                head = {"include_dashboard": False} if index == 0 else {}
                cluster.add_node(node_ip_address=ADDRESS, object_store_memory=80 << 20, **head, **node)
            yield cluster.address
        finally:
            cluster.shutdown()


def actors_of(address: str) -> list[tuple[str, str]]:
    """(class, node) of every actor that the cluster has had."""
    import ray

    ray.init(address, logging_level="ERROR", log_to_driver=False)
    actors = ray._private.state.actors().values()
    ray.shutdown()
    return sorted((actor["ActorClassName"], actor["Address"]["NodeID"][:6]) for actor in actors)


def main(args: Args, flags: list[str]) -> int:
    start = time.monotonic()
    with (
        started([{"num_cpus": 1}] * args.nodes, args.strategy) as address,
        tempfile.TemporaryDirectory() as folder,
    ):
        print(f"{args.nodes} nodes after {time.monotonic() - start:.0f} s", flush=True)
        command = [sys.executable, "-m", "algos.grpo", *FLAGS.split(), "--output-dir", f"{folder}/run"]
        environ = os.environ | {"RAY_ADDRESS": address, "GLOO_SOCKET_IFNAME": "lo"}
        code = subprocess.run([*command, *flags], cwd=ROOT, env=environ, timeout=900).returncode
        steps = len(Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        actors = actors_of(address)
    for (kind, node), count in sorted(Counter(actors).items()):
        print(f"{count} x {kind} on node {node}")
    used = len({node for _, node in actors})
    print(f"exit code {code}, {steps} steps, {used} nodes used, {time.monotonic() - start:.0f} s in all")
    return code or used < 2


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(main(tyro.cli(Args, args=sys.argv[1:end]), sys.argv[end + 1 :]))
