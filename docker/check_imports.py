"""Imports what a run imports, so that a broken image fails when it is built. Needs no GPU."""

import importlib
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
NEEDED = ["torch", "vllm", "ray", "transformers", "nemo_automodel", "algos.grpo", "common.refit_worker"]
EXTRAS = ["transformer_engine.pytorch", "deep_ep"]

for name in NEEDED + [name for name in EXTRAS if find_spec(name.partition(".")[0])]:
    importlib.import_module(name)
    package = name.partition(".")[0].replace("_", "-")
    versions = [d.version for d in metadata.distributions() if d.name.replace("_", "-") == package]
    print(name, *versions[:1])
