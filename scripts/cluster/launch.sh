#!/usr/bin/env bash
# One node of a Ray cluster: joins the head, or is the head and runs the command once all nodes are there.
#   launch.sh HEAD_ADDRESS NODES COMMAND...    on every node, with the same arguments
# Repository, .venv, model and --output-dir lie on a file system that all nodes share, at the same path.
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ $# -ge 3 ]] || { echo "usage: launch.sh HEAD_ADDRESS NODES COMMAND..." >&2 && exit 2; }
head=$1 nodes=$2 port=${RAY_PORT:-6379}
shift 2
# PACK: Ray fills a node before it takes the next (docs/cluster.md)
export RAY_scheduler_spread_threshold=${RAY_scheduler_spread_threshold:-1}
# without the mode in its environment a driver sends no token, and `ray start`'s cluster refuses it
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} PATH=$PWD/.venv/bin:$PATH

if [[ " $(hostname -I) $(hostname) 127.0.0.2 " != *" $head "* ]]; then # 127.0.0.2: a trial on one machine
  for _ in {1..60}; do # until the head is there
    ray start --address "$head:$port" --block && exit 0
    sleep 5
  done
  echo "launch: no Ray head at $head:$port" >&2 && exit 1
fi
ray start --head --node-ip-address "$head" --port "$port" --include-dashboard=false --block &
ray=$!
trap 'kill $ray; wait $ray || true' EXIT # with --block its processes end with it, and the other nodes
count='import ray, sys; ray.init(sys.argv[1], logging_level="ERROR"); print(len(ray.nodes()))'
for _ in {1..60}; do
  there=$(python -c "$count" "$head:$port" 2>/dev/null || echo 0)
  [[ $there -ge $nodes ]] && break
  sleep 5
done
[[ $there -ge $nodes ]] || { echo "launch: $there of $nodes nodes after 5 minutes" >&2 && exit 1; }
RAY_ADDRESS="$head:$port" "$@"
