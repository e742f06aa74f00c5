"""One thread a process, as in a run: two cores, several processes, and equal results from run to run."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
