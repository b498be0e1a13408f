"""Pages of the page cache that a reader gives back, and which devices ask for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise import IOOptions
from shardwise.engine import files as page_cache
from shardwise.engine.files import FileReader, page_cache_for, shares_memory
from tests.harness.page_cache import cached_bytes, drop, drops_pages

MIB = 1024**2


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """32 MiB that are not cached, to be read with a small window."""
    if not drops_pages(tmp_path):
        pytest.skip("files in the temporary directory can't leave the page cache")
    monkeypatch.setattr(page_cache, "WINDOW_BYTES", MIB)
    monkeypatch.setattr(page_cache, "_STEP_BYTES", MIB)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(32 * MIB))
    drop(path)
    assert cached_bytes(path) == 0
    return path


def read_all(path: Path, reader: FileReader, run_bytes: int, stride: int) -> None:
    """Runs of the file, a stride from start to start."""
    view = memoryview(bytearray(run_bytes))
    for at in range(0, path.stat().st_size - run_bytes + 1, stride):
        reader.read_into(str(path), at, view)


@pytest.mark.parametrize(
    ("run_bytes", "stride"), [(MIB, MIB), (12345, 12345), (1000, 8192), (MIB, 4 * MIB)], ids=str
)
def test_pages_are_given_back_on_the_way_and_at_the_end(file: Path, run_bytes: int, stride: int) -> None:
    """While reading, the window, a step and what the kernel has read ahead are there; at the end, nothing."""
    with FileReader(page_cache="release") as reader:
        read_all(file, reader, run_bytes, stride)
        assert cached_bytes(file) <= 10 * MIB
    assert cached_bytes(file) == 0


def test_pages_of_held_files_and_of_files_closed_on_the_way(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.engine.files._MOST_OPEN", 1)
    other = file.with_name("other")
    other.write_bytes(bytes(2 * MIB))
    drop(other)
    with FileReader(page_cache="release") as reader:
        reader.hold([str(file)])
        for at in range(4):
            reader.read_into(str(file), at * 4 * MIB, memoryview(bytearray(4096)))
            reader.read_into(str(other), at * MIB // 2, memoryview(bytearray(4096)))
    assert cached_bytes(file, other) == 0


def test_pages_are_kept(file: Path) -> None:
    """What is measured is there: the files fit into the cache."""
    with FileReader() as reader:
        read_all(file, reader, MIB, MIB)
    assert cached_bytes(file) == 32 * MIB


def test_content_is_the_same(file: Path) -> None:
    expected = file.read_bytes()
    found = bytearray(len(expected))
    with FileReader(page_cache="release") as reader:
        for at in range(0, len(found), 100_003):
            view = memoryview(found)[at : at + 100_003]
            reader.read_into(str(file), at, view)
            reader.read_into(str(file), at, view)  # again, from pages that may be gone
    assert found == expected


def test_options() -> None:
    with pytest.raises(ValueError, match="page_cache must be 'keep', 'release' or 'auto', got 'drop'"):
        IOOptions(page_cache="drop")  # type: ignore[arg-type]
    cpu, gpu = torch.device("cpu"), torch.device("mps")
    assert page_cache_for(IOOptions(), [cpu]) == "keep"
    assert page_cache_for(IOOptions(), []) == "keep"
    assert page_cache_for(IOOptions(), [cpu, gpu]) == "release"
    assert page_cache_for(IOOptions(page_cache="keep"), [gpu]) == "keep"
    assert page_cache_for(IOOptions(page_cache="release"), [cpu]) == "release"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"is_integrated": 1}, True),
        ({"is_integrated": 0}, False),
        ({"is_integrated_gpu": True}, True),
        ({"is_integrated_gpu": False}, False),
        ({}, False),
    ],
)
def test_what_a_gpu_says(monkeypatch: pytest.MonkeyPatch, said: dict[str, int], expected: bool) -> None:
    """As the properties of CUDA and of XPU do; a backend may have none."""
    properties = SimpleNamespace(**said)
    asked = []

    def get_device_properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    device = torch.device("cuda", 1)
    assert shares_memory(device) is expected
    assert asked == [device]


def test_no_driver_is_no_shared_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not shares_memory(torch.device("cuda", 0))
    assert not shares_memory(torch.device("cpu"))
    assert not shares_memory(torch.device("meta"))
