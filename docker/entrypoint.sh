#!/usr/bin/env bash
# CUDA's forward compatibility, only where the driver is older than CUDA 13's: it works on data-centre GPUs
# alone, and elsewhere breaks what would work.
set -euo pipefail
driver=$(cat /sys/module/nvidia/version 2>/dev/null || echo 0)
if ((${driver%%.*} > 0 && ${driver%%.*} < 580)) && [[ -d /usr/local/cuda-13.0/compat ]]; then
  export LD_LIBRARY_PATH=/usr/local/cuda-13.0/compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
exec "$@"
