#!/usr/bin/env bash
# GRPO on Qwen3-0.6B, one H200 that engine and trainer share. The same layout was measured with random weights
# (docs/performance.md); this recipe with the real ones was not run.
#   bash scripts/recipes/qwen3_0.6b.sh                                  train
#   bash scripts/recipes/qwen3_0.6b.sh --dry-run                        flags, bytes of a rank, names
#   LAUNCH="python scripts/plan.py" bash scripts/recipes/qwen3_0.6b.sh  memory and time
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --dry-run "* ]] && LAUNCH=${LAUNCH:-.venv/bin/python scripts/sharding.py}
# shellcheck disable=SC2086  # LAUNCH is a command with its arguments
exec ${LAUNCH:-.venv/bin/python -m algos.grpo} \
  --model "${MODEL:-Qwen/Qwen3-0.6B}" --env gym:chain_sum --output-dir "${OUT:-runs/qwen3_0.6b}" \
  --prompts-per-step 32 --group-size 8 --max-new-tokens 512 --max-model-len 1024 --max-in-flight 32 \
  --micro-batch-tokens 16384 --compile --gpu-memory-utilization 0.35 --save-every 50 "$@"
