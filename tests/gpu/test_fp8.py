"""`tests/test_fp8.py` on a GPU, where trainer and engine share it, and mixtures of experts are among the models.

python -m pytest -q tests/gpu/test_fp8.py        one GPU that computes in FP8 (Ada, Hopper), in about six minutes
"""

import pytest
import torch

from tests.test_fp8 import (
    test_a_weight_that_is_not_sent_ends_the_run_at_the_gate,
    test_after_refits_an_fp8_engine_equals_a_fresh_one_on_the_new_weights,
    test_a_run_rounds_guesses_and_tells,
    test_the_probe_tells_right_weights_from_wrong_ones,
)

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not FP8, reason="needs a GPU that computes in FP8")
__all__ = [name for name in dir() if name.startswith("test_")]
