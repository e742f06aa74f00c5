#!/usr/bin/env bash
# Sets up .venv if needed and runs the CPU tests. Further arguments go to pytest: bash scripts/test.sh -k queue
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q tests --ignore=tests/gpu "$@"
