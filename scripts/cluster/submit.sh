#!/usr/bin/env bash
# A recipe on a Ray cluster that runs already, through Ray's job server. Not run on more than one machine.
#   RAY_DASHBOARD=http://head:8265 scripts/cluster/submit.sh scripts/recipes/qwen3_4b.sh --max-steps 500
# The cluster's nodes have the repository with its .venv at ROOT (default: this folder's path), on a shared
# file system, and were started with RAY_scheduler_spread_threshold=1 (docs/cluster.md says why).
set -euo pipefail
[[ $# -ge 1 ]] || { echo "usage: submit.sh RECIPE [FLAGS...]" >&2 && exit 2; }
root=${ROOT:-$(cd "$(dirname "$0")/../.." && pwd)}
printf -v command '%q ' bash "$@"
exec "${RAY:-$root/.venv/bin/ray}" job submit --address "${RAY_DASHBOARD:?the head, like http://head:8265}" \
  -- bash -c "cd $root && RAY_AUTH_MODE=token RAY_ADDRESS=auto exec $command"
