"""What a process used: memory, reads, bytes in collectives. Linux."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "CollectiveBytes",
    "anonymous_bytes",
    "charged_bytes",
    "marked",
    "pss_bytes",
    "read_calls",
    "sampled",
    "storage_bytes",
]

#: Seconds between two looks at the memory of a rank.
SAMPLE_S = 0.002
#: Less shared memory is not looked at page by page.
_LEAST_SHARED_BYTES = 256 * 1024


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    return _field("/proc/self/status", "RssAnon") * 1024


def charged_bytes() -> int:
    """Resident memory of this process that is no file's: anonymous, and shared memory, of which n processes with a page count 1/n each.

    A cgroup charges both. Of what the ranks of a load share, a rank counts no more than it made itself, also while it is the last that
    has it: the sum over all processes is what they hold together.
    """
    return _charged()[0]


def _charged() -> tuple[int, int]:
    """:func:`charged_bytes`, and the bytes of shared memory that other processes are counted for."""
    anonymous, shared = _fields("/proc/self/status", "RssAnon", "RssShmem")
    own = shared
    if shared > _LEAST_SHARED_BYTES:  # a look at each page takes 10 ms for each GiB
        own = min(shared, _fields("/proc/self/smaps_rollup", "Pss_Shmem")[0], _made_at_most(shared))
    return anonymous + own, shared - own


def _made_at_most(shared: int) -> int:
    """Of ``shared`` bytes, those that this process may have made: of the slots of the ranks of a load, which are alike, one rank's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "/memfd:shardwise" in line]
    slots = [int(stop, 16) - int(start, 16) for start, stop in ranges]
    return max(slots, default=0) + max(0, shared - sum(slots))


def pss_bytes() -> int:
    """Resident memory of this process; what n processes share counts as 1/n in each."""
    return _field("/proc/self/smaps_rollup", "Pss") * 1024


def storage_bytes() -> int:
    """Bytes that this process caused to be fetched from storage."""
    return _field("/proc/self/io", "read_bytes")


def read_calls() -> int:
    """System calls of this process that read: ``read``, ``pread``, ``preadv``; neither page faults nor io_uring."""
    return _field("/proc/self/io", "syscr")


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {name} in {file}")


def _fields(file: str, *names: str) -> list[int]:
    """Numbers in KiB of one look at a file, in bytes."""
    lines = (line.split() for line in Path(file).read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 for words in lines if words[0].rstrip(":") in names}
    return [found[f"{name}:"] for name in names]


class Peak:
    """The most memory that this process had while it was looked at."""

    nbytes = 0
    elsewhere_bytes = 0
    """The most shared memory for which other processes were counted, in :func:`marked`."""


@contextmanager
def sampled() -> Iterator[Peak]:
    """Look at this process's anonymous memory every 2 ms, in a thread. Slows the process down."""
    with _looking(lambda: (anonymous_bytes(), 0), None) as peak:
        yield peak


@contextmanager
def _looking(held: Callable[[], tuple[int, int]], limit_bytes: int | None) -> Iterator[Peak]:
    """Look every 2 ms, and before buckets that ranks share are given back: they may live for less. ``limit_bytes``: kill the process when
    it holds more."""
    from shardwise.engine.shared import SharedReader

    peak, done, close = Peak(), threading.Event(), SharedReader.close

    def see() -> None:
        nbytes, elsewhere = held()
        peak.nbytes, peak.elsewhere_bytes = max(peak.nbytes, nbytes), max(peak.elsewhere_bytes, elsewhere)

    def see_and_close(reader: SharedReader) -> None:
        see()
        close(reader)

    def look() -> None:
        while not done.wait(SAMPLE_S):
            see()
            if limit_bytes is not None and peak.nbytes > limit_bytes:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=look)
    thread.start()
    SharedReader.close = see_and_close  # type: ignore[method-assign]
    try:
        yield peak
    finally:
        SharedReader.close = close  # type: ignore[method-assign]
        done.set()
        thread.join()
        see()


@contextmanager
def marked(limit_bytes: int | None = None) -> Iterator[Peak]:
    """The most of :func:`charged_bytes`, by looks every 2 ms, and by the kernel's own mark of resident memory for what they missed.

    ``limit_bytes``: kill the process when it holds more. The mark (``VmHWM``) is reset first, for the whole process. It counts pages of
    files, too: as many as there are before or after, the larger number; and pages that n processes share n times, as seen by looks.
    So what is left is not more than the peak. Source: ``proc(5)``, clear_refs.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _file_bytes()
    with _looking(_charged, limit_bytes) as peak:
        yield peak
    mark = _field("/proc/self/status", "VmHWM") * 1024
    peak.nbytes = max(peak.nbytes, mark - max(before, _file_bytes()) - peak.elsewhere_bytes)


def _file_bytes() -> int:
    return _field("/proc/self/status", "RssFile") * 1024


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that collectives of the calling thread give to this rank. Slows it down.

    The results of each collective count once: a broadcast tensor on every rank, the sender's included. Barriers count
    as their one element.
    """

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor goes first; its collectives come here
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.nbytes += _nbytes(args[0] if args else ())  # the results; a sender's tensors
        elif func.namespace == "_c10d_functional" and "wait_tensor" not in func.name():
            self.nbytes += _nbytes(result)
        return result


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
