#!/usr/bin/env bash
# GRPO on Qwen3-4B, eight H200s of one node: four train, four sample. Layers of this layout ran on two GPUs
# (docs/performance.md); eight were not run.
#   DATA=data.jsonl bash scripts/recipes/qwen3_4b.sh                  train; lines as in README.md
#   LAUNCH="python scripts/plan.py" bash scripts/recipes/qwen3_4b.sh  memory and time
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --dry-run "* ]] && LAUNCH=${LAUNCH:-.venv/bin/python scripts/sharding.py}
# shellcheck disable=SC2086  # LAUNCH is a command with its arguments
exec ${LAUNCH:-.venv/bin/python -m algos.grpo} \
  --model "${MODEL:-Qwen/Qwen3-4B}" --env "jsonl:${DATA:-data.jsonl}" --grader math \
  --output-dir "${OUT:-runs/qwen3_4b}" --num-trainers 4 --num-engines 4 \
  --prompts-per-step 64 --group-size 8 --max-new-tokens 4096 --max-model-len 6144 --max-in-flight 32 \
  --micro-batch-tokens 8192 --compile --save-every 25 "$@"
