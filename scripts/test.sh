#!/usr/bin/env bash
# Sets up .venv if needed, checks form and types of the code and runs the CPU tests. Further arguments go to
# pytest: bash scripts/test.sh -k queue
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
.venv/bin/python -m ruff check algos common scripts tests
.venv/bin/python -m ruff format --check algos common scripts tests
.venv/bin/python -m ty check
exec .venv/bin/python -m pytest -q tests --ignore=tests/gpu "$@"
