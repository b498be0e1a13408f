"""What ranks run in test_bad_storage.py: saves on a file system that fails for two steps, and then works again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.harness.logged import warnings_logged

WIDTH = 100_000


def _state(step: int) -> Any:
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.constant_(model.weight, float(step))
    return sw.TrainState(model=model, extra={"own": _Own(dist.get_rank(), step)})


class _Own:
    """What each rank has for itself, so that each writes a file."""

    def __init__(self, rank: int, step: int) -> None:
        self.state = {"rank": rank, "step": step, "more": list(range(500))}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """The kernel has made the file system read-only, as after an error in its journal. For good."""
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True)
    dist.barrier()
    yield


@contextlib.contextmanager
def shut_down(disk: Path) -> Iterator[None]:
    """Every call says EIO, as if the device were gone. For good."""
    if dist.get_rank() == 0:
        folder = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(folder, _EXT4_IOC_SHUTDOWN, struct.pack("I", 2))
        os.close(folder)
    dist.barrier()
    yield


@contextlib.contextmanager
def no_inodes(disk: Path) -> Iterator[None]:
    """There is room for bytes, and none for another file: no look at free bytes sees it."""
    ballast = disk / "ballast"
    if dist.get_rank() == 0:
        ballast.mkdir()
        for k in range(os.statvfs(disk).f_favail - 6):
            (ballast / str(k)).touch()
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        for file in ballast.iterdir():
            file.unlink()
        ballast.rmdir()


@contextlib.contextmanager
def backing_full(disk: Path) -> Iterator[None]:
    """The device below the file system has no room: writes into the page cache succeed, and fsync fails."""
    ballast = disk.parent / "backing" / "ballast"
    if dist.get_rank() == 0:
        os.sync()
        state = os.statvfs(ballast.parent)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize)
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        ballast.unlink()


@contextlib.contextmanager
def size_limit(disk: Path) -> Iterator[None]:
    """Rank 1 may write no file of more than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FAULTS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "no inodes": no_inodes,
    "full device": backing_full,
    "size limit": size_limit,
    "read-only": read_only,
    "shut down": shut_down,
}
FOR_GOOD = ("read-only", "shut down")
_EXT4_IOC_SHUTDOWN = 0x8004587D


def saves(disk: str, kind: str, way: str) -> dict[str, Any]:
    """Step 1 is saved, 2 and 3 fail, 4 is saved if storage is back. What each call said, and what a resume finds."""
    place, root = Path(disk), Path(disk) / f"run-{way}"
    found: dict[str, Any] = {"said": {}}

    def save(step: int) -> None:
        try:
            found["said"][step] = checkpoints.save(_state(step), step).failure
        except ShardwiseError as error:
            found["said"][step] = type(error).__name__, str(error)

    with warnings_logged() as warned:
        checkpoints = sw.Checkpointer(root, failures=sw.FailurePolicy() if way == "warn" else None)
        save(1)
        with FAULTS[kind](place):
            save(2)
            save(3)
        if kind not in FOR_GOOD:
            found["steps"] = sorted(path.name for path in root.glob("step-*"))
            save(4)
        checkpoints.close()
    found["warned"] = [text for text in warned if "was not saved" in text]
    if kind in FOR_GOOD:
        return found
    dist.barrier()
    with sw.Checkpointer(root) as again:
        state = _state(0)
        report = again.resume(state)
        assert report is not None
        found["resumed"] = report.step
        assert bool(torch.all(state.model.weight == float(report.step)))
        found["left"] = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
        found["problems"] = sw.verify(report.path).problems
    dist.barrier()
    return found
