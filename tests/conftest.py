"""One thread a process, as in a run: two cores, several processes, and equal results from run to run."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from hypothesis import HealthCheck, settings

import common  # noqa: F401  before Ray, whose local clusters it gives a token

# A slow machine is no finding: how long an example takes is never what a test is about.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A chat server on real vLLM: one engine for all tests that need one."""
    from tests.chat import Served

    served = Served(tmp_path_factory.mktemp("chat"))
    yield served
    served.close()
