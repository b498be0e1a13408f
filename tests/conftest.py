"""Fixtures and settings for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

# Before anything imports torch or transformers; workers get the same from the harness.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if (
    "HF_MODULES_CACHE" not in os.environ
):  # where transformers copies the code of models; not into the home directory
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="modules-")
    atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

# What imports make stays: it is not looked through again and again, neither now nor once the tests run.
gc.disable()

from hypothesis import settings

from tests.harness.pool import RankPool
from tests.harness.process import start_fork_servers, use_fork_servers
from tests.harness.tiers import share_of
from tests.harness.versions import lacking

# Small machines share their cores with the ranks: how long one example takes says nothing.
settings.register_profile(
    "shardwise", settings.default, deadline=None, print_blob=True, max_examples=share_of(100)
)
settings.load_profile("shardwise")

_FORK_SERVERS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Lanes share the fork servers, which their controller starts; without lanes they start with the first rank."""
    if (lane := getattr(config, "workerinput", None)) is not None:
        use_fork_servers(lane["fork_servers"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """In the controller, before it starts the lanes."""
    config.stash[_FORK_SERVERS] = start_fork_servers()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller, for each lane."""
    node.workerinput["fork_servers"] = node.config.stash[_FORK_SERVERS]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Real gloo ranks: ``ranks.run_ranks(2, function, argument)`` gives the results by rank."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for ranks, so that ``-m "not ranks"`` leaves those of one process.

    Files that start processes come first: those often wait, and ranks of the other lane can use the cores. Then files
    with ranks, which take longest; then the others, large ones first: lanes that end with short files end together.
    """
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: -sizes[item.path])
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if "server" in getattr(item, "fixturenames", ()):  # of tests/storage
            item.add_marker(pytest.mark.processes)
        for needs in item.iter_markers("needs"):
            if reason := lacking(*needs.args):
                item.add_marker(pytest.mark.skip(reason=reason))
    for marker in ("ranks", "processes"):
        marked = {item.path for item in items if item.get_closest_marker(marker)}
        items.sort(key=lambda item, marked=marked: item.path not in marked)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
