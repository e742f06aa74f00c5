"""`tests/test_speculative.py` on a GPU, where vLLM has another sampler, decode graphs and, but
for ngram, asynchronous scheduling.

python -m pytest -q tests/gpu/test_speculative.py        one GPU, in about four minutes
"""

import pytest
import torch

from tests.test_speculative import (
    link,
    test_greedy_answers_are_those_of_an_engine_that_guesses_nothing,
    test_log_probs_are_the_models_at_the_temperature_also_across_refits,
    test_the_report_of_a_refit_has_the_share_of_guesses_that_were_accepted,
    test_tokens_are_distributed_as_the_model_says,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
__all__ = [name for name in dir() if name.startswith("test_")] + ["link"]
