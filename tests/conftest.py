"""One thread a process, as in a run: two cores, several processes, and equal results from run to run."""

import os
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from hypothesis import HealthCheck, settings

import common  # noqa: F401  before Ray, whose local clusters it gives a token

# A slow machine is no finding: how long an example takes is never what a test is about.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# These share the chat server, or make sandboxes, of which another one's test would see traces.
TOGETHER = ("test_chat_agents", "test_chat_security", "test_chat_server", "test_chat_tokens", "test_readme")
TOGETHER += ("test_sandbox", "test_tool_agents")
# Longest first, so that two workers end at about the same time. Files that aren't named come behind.
LONG = [
    "test_run",
    "test_chat_server",
    "test_speculative",
    "test_edits",
    "test_refit_engine",
    "test_fp8",
    "test_lora",
]
LONG += [
    "test_faults",
    "test_stopped",
    "test_first_hour",
    "test_router_replay",
    "test_images",
    "test_versions",
]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_xdist_make_scheduler(config, log):
    """With -n, the tests of a file stay in one worker. (xdist's own groups do nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.split("::")[0]).stem
            return "together" if name in TOGETHER else name

    return Files(config, log)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A chat server on real vLLM: one engine for all tests that need one."""
    from tests.chat import Served

    served = Served(tmp_path_factory.mktemp("chat"))
    yield served
    served.close()
