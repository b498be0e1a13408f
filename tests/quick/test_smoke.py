"""Each entry point once, on two ranks, in one launch. `make quick` runs this beside the fast unit tests."""

from __future__ import annotations

import socket

import pytest

from shardwise.gates import GATES
from tests.harness.launch import Launch
from tests.quick._smoke_fns import CHECKS, smoke


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """By rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Launch(2, smoke, str(tmp_path_factory.mktemp("smoke")), port) as job:
        assert job.wait(150) == [0, 0]
        return [job.result(rank) for rank in range(2)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs(name)) if name in GATES else name for name in CHECKS],
)
def test_entry_point(results: list[dict[str, str | None]], name: str) -> None:
    for rank, found in enumerate(results):
        assert found[name] is None, f"rank {rank}: {found[name]}"
