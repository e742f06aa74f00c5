#!/usr/bin/env bash
# From a fresh clone to a trained policy: sets up .venv if needed, then trains the tiny model to reverse digits.
# Further arguments go to the run: bash scripts/quickstart.sh --max-staleness 0
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python -m algos.grpo --model tiny --env reverse "$@"
