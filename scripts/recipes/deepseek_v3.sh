#!/usr/bin/env bash
# DeepSeek-V3 (671B): 256 GPUs that train, with one expert of each layer on each (EP 256), engines of 8 GPUs.
# Not run. A tiny model of the kind (MLA, its router) trained and was refitted on one H200; at this size:
#   - bf16 needs 1.34 TB for an engine: 8 B300s, not 8 H200s, and an engine has one node at most here;
#   - AutoModel's plain dispatcher gives every rank the tokens of all: micro-batches stay small, and nearly
#     all of a step is that traffic (scripts/plan.py); DeepEP would be needed;
#   - a refit gathers a layer's stacked experts, 30 GB in fp32, on every rank.
# The checkpoint on the Hub is fp8: give the folder of a bf16 one as MODEL.
#   LAUNCH="python scripts/plan.py" bash scripts/recipes/deepseek_v3.sh --gpu b300  memory and time
#   LAUNCH="python scripts/sharding.py" bash scripts/recipes/deepseek_v3.sh         shards and names
#   MODEL=folder bash scripts/recipes/deepseek_v3.sh --dry-run                      the same, and the flags
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --dry-run "* ]] && LAUNCH=${LAUNCH:-.venv/bin/python scripts/sharding.py}
# shellcheck disable=SC2086  # LAUNCH is a command with its arguments
exec ${LAUNCH:-.venv/bin/python -m algos.grpo} \
  --model "${MODEL:-deepseek-ai/DeepSeek-V3}" --env "jsonl:${DATA:-data.jsonl}" --grader math \
  --output-dir "${OUT:-runs/deepseek_v3}" --num-trainers 256 --trainer-ep 256 --num-engines 4 --engine-tp 8 \
  --prompts-per-step 64 --group-size 8 --max-new-tokens 2048 --max-model-len 4096 --max-in-flight 32 \
  --micro-batch-tokens 1024 --activation-checkpointing --zero 3 --start-timeout-s 3600 \
  --step-timeout-s 36000 --refit-timeout-s 1800 --save-every 10 "$@"
