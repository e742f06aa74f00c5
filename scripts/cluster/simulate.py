"""A run on simulated nodes: Ray's own processes of each node, all on this machine and without a GPU.

    python scripts/cluster/simulate.py                             8 nodes, 2 engines, 4 trainers, 2 steps of tiny
    python scripts/cluster/simulate.py --nodes 3 -- --max-steps 3  flags of algos/grpo.py behind --

Shows that start, rendezvous, queue, refit and shutdown work where actors live on different nodes: it prints the
node of every actor and fails unless they are on several. Not shown: a network between nodes, NCCL, GPUs.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
ADDRESS = "127.0.0.2"  # Ray takes 127.0.0.1 for a request to find the machine's outside address
FLAGS = "--model tiny --env reverse --max-steps 2 --eval-every 99 --num-engines 2 --num-trainers 4"


@dataclass
class Args:
    nodes: int = 8
    """Simulated nodes, each with a CPU."""
    strategy: str = "SPREAD"
    """SPREAD over the nodes, or PACK as many actors on a node as it has room for."""


def environment(strategy: str) -> dict[str, str]:
    """How Ray's scheduler fills nodes: the share of a node up to which it prefers the one before."""
    return {"RAY_scheduler_spread_threshold": {"PACK": "1.0", "SPREAD": "0.0"}[strategy]}


def start_nodes(resources: list[dict], strategy: str):
    """A Ray cluster of one node for each dict of `ray start`'s arguments. Returns it; the caller shuts it down."""
    os.environ |= environment(strategy)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for node in resources:
        cluster.add_node(node_ip_address=ADDRESS, include_dashboard=False, **node)
    return cluster


def actor_nodes() -> dict[str, str]:
    """The node of each living actor, by its class and id."""
    from ray.util.state import list_actors

    return {f"{a.class_name} {a.actor_id[:6]}": a.node_id for a in list_actors(filters=[("state", "=", "ALIVE")])}


def main(args: Args, flags: list[str]) -> None:
    start = time.monotonic()
    cluster = start_nodes([{"num_cpus": 1, "object_store_memory": 80 << 20}] * args.nodes, args.strategy)
    print(f"{args.nodes} nodes after {time.monotonic() - start:.0f} s", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "algos.grpo", *FLAGS.split(), "--output-dir", f"{folder}/run", *flags]
            environ = os.environ | {"RAY_ADDRESS": cluster.address, "GLOO_SOCKET_IFNAME": "lo"}
            run = subprocess.Popen(command, cwd=ROOT, env=environ)
            rows = Path(folder, "run", "metrics.jsonl")
            code = run.wait(timeout=900)
            print(f"exit code {code}, {len(rows.read_text().splitlines())} steps, {time.monotonic() - start:.0f} s")
            sys.exit(code)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    own, _, rest = " ".join(sys.argv[1:]).partition("--  ")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:split]), sys.argv[split + 1 :])
