#!/usr/bin/env bash
# A recipe as a Slurm job. Not run: no Slurm here.
#   sbatch --nodes 2 scripts/cluster/slurm.sh scripts/recipes/qwen3_30b_a3b.sh --max-steps 500
# A run that ends early, or is taken away, goes on with --resume: sbatch ... RECIPE --resume
#SBATCH --job-name=instar
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=runs/slurm-%j.log
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch, in the root of the repository}"
head_name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(srun --nodes 1 --ntasks 1 --nodelist "$head_name" hostname -I | awk '{print $1}')
export RAY_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on a node would meet otherwise
# --kill-on-bad-exit: the driver's end, good or bad, ends the workers' `ray start --block`
srun --kill-on-bad-exit=1 bash scripts/cluster/launch.sh "$head" "$SLURM_JOB_NUM_NODES" bash "$@"
