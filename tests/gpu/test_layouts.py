"""`tests/test_layouts.py` on two GPUs, in fp32: the same gradients, norms and metrics under every split.

python -m pytest -q tests/gpu/test_layouts.py
"""

import pytest
import torch

from tests.test_layouts import (
    CASES,
    SPOILED,
    test_a_gradient_that_is_not_finite_on_one_rank_moves_no_rank_and_is_counted,
    test_replayed_experts_give_another_gradient_and_the_router_is_in_it,
    test_the_gradient_is_that_of_one_rank_with_padded_rows,
    test_the_metrics_do_not_depend_on_the_layout,
    test_the_norm_is_that_of_all_parameters_on_every_rank_and_is_clipped_to,
    train_all,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
__all__ = [name for name in dir() if name.startswith("test_")] + ["CASES", "SPOILED"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    return train_all(tmp_path_factory.mktemp("layouts"), on_gpu=True)
