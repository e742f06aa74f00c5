#!/usr/bin/env bash
# GRPO on Qwen3-30B-A3B, two nodes of eight H200s: eight GPUs train with the experts spread over them (EP 8),
# eight sample. Not run: more than two GPUs have not been seen. Start it with scripts/cluster/: with
# RAY_scheduler_spread_threshold=1, which those set, the trainers share a node, and NVLink carries EP.
#   LAUNCH="python scripts/plan.py" bash scripts/recipes/qwen3_30b_a3b.sh  memory and time
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --dry-run "* ]] && LAUNCH=${LAUNCH:-.venv/bin/python scripts/sharding.py}
# shellcheck disable=SC2086  # LAUNCH is a command with its arguments
exec ${LAUNCH:-.venv/bin/python -m algos.grpo} \
  --model "${MODEL:-Qwen/Qwen3-30B-A3B}" --env "jsonl:${DATA:-data.jsonl}" --grader math \
  --output-dir "${OUT:-runs/qwen3_30b_a3b}" --num-trainers 8 --trainer-ep 8 --num-engines 8 \
  --prompts-per-step 64 --group-size 8 --max-new-tokens 4096 --max-model-len 6144 --max-in-flight 32 \
  --micro-batch-tokens 8192 --activation-checkpointing --zero 3 --refit-timeout-s 300 --save-every 25 "$@"
