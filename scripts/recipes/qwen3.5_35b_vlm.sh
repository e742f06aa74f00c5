#!/usr/bin/env bash
# A vision-language model: Qwen3.5-35B-A3B, two nodes of eight H200s, its experts over the eight that train.
# Not run. On a CPU the trainer's half of a tiny one was tested (tests/test_vision_experts.py: gradients with
# EP and images, names of refits); its engine, which needs torchvision, was not. A tiny Qwen3-VL-MoE ran whole
# on one H200 (tests/gpu/test_families.py): MODEL=Qwen/Qwen3-VL-30B-A3B-Instruct. Data: docs/images.md.
#   LAUNCH="python scripts/plan.py" bash scripts/recipes/qwen3.5_35b_vlm.sh  memory and time
#   MODEL=folder bash scripts/recipes/qwen3.5_35b_vlm.sh --dry-run           flags, shards, names
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --dry-run "* ]] && LAUNCH=${LAUNCH:-.venv/bin/python scripts/sharding.py}
# shellcheck disable=SC2086  # LAUNCH is a command with its arguments
exec ${LAUNCH:-.venv/bin/python -m algos.grpo} \
  --model "${MODEL:-Qwen/Qwen3.5-35B-A3B}" --env "jsonl:${DATA:-data.jsonl}" \
  --output-dir "${OUT:-runs/qwen3.5_35b_vlm}" --num-trainers 8 --trainer-ep 8 --num-engines 4 --engine-tp 2 \
  --prompts-per-step 64 --group-size 8 --max-new-tokens 2048 --max-model-len 8192 --max-in-flight 32 \
  --micro-batch-tokens 8192 --activation-checkpointing --zero 3 --refit-timeout-s 300 --save-every 25 "$@"
