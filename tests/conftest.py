"""One thread a process, as in a run: two cores, several processes, and equal results from run to run."""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from hypothesis import HealthCheck, settings

import common  # noqa: F401  before Ray, whose local clusters it gives a token

# A slow machine is no finding: how long an example takes is never what a test is about.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Longest first, so that two workers end at about the same time. Files that aren't named come behind.
LONG = "test_run served test_edits test_refit_engine test_lora test_faults test_first_hour test_router_replay"
LONG = [*LONG.split(), "test_images", "test_versions", "test_layouts", "test_sft", "test_refusals"]
BOXES = ("test_sandbox", "test_readme")  # make sandboxes, of which another worker's test would see traces


def pytest_collection_modifyitems(items):
    """Tests of a file stay in one worker, and so do all that share the chat server, or make sandboxes."""
    sharing = {item.path for item in items if "served" in item.fixturenames}
    groups = {path: path.stem for path in {item.path for item in items}}
    groups |= {path: "served" for path in groups if path in sharing or path.stem in BOXES}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    items.sort(key=lambda item: LONG.index(name) if (name := groups[item.path]) in LONG else len(LONG))


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A chat server on real vLLM: one engine for all tests that need one."""
    from tests.chat import Served

    served = Served(tmp_path_factory.mktemp("chat"))
    yield served
    served.close()
