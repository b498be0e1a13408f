"""What a process used: memory, reads, bytes in collectives. Linux."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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
    "marked",
    "pss_bytes",
    "read_calls",
    "sampled",
    "storage_bytes",
]

#: Seconds between two looks at the memory of a rank.
SAMPLE_S = 0.002


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    return _field("/proc/self/status", "RssAnon") * 1024


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


class Peak:
    """The most anonymous memory that this process had while it was looked at."""

    nbytes = 0


@contextmanager
def sampled(limit_bytes: int | None = None) -> Iterator[Peak]:
    """Look at this process's anonymous memory every 2 ms, in a thread. Slows the process down.

    ``limit_bytes``: kill the process when it holds more.
    """
    peak, done = Peak(), threading.Event()

    def look() -> None:
        while not done.wait(SAMPLE_S):
            peak.nbytes = max(peak.nbytes, anonymous_bytes())
            if limit_bytes is not None and peak.nbytes > limit_bytes:
                os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.nbytes = max(peak.nbytes, anonymous_bytes())


@contextmanager
def marked(limit_bytes: int | None = None) -> Iterator[Peak]:
    """As :func:`sampled`, and what the kernel's own mark of resident memory says that looks every 2 ms missed.

    The mark (``VmHWM``) is reset first, for the whole process. It counts pages of files, too: as many as there are before or after, the
    larger number, so that what is left is not more than the peak of anonymous memory. Source: ``proc(5)``, clear_refs.
    """
    Path("/proc/self/clear_refs").write_text("5")
    before = _shared_bytes()
    with sampled(limit_bytes) as peak:
        yield peak
    mark = _field("/proc/self/status", "VmHWM") * 1024
    peak.nbytes = max(peak.nbytes, mark - max(before, _shared_bytes()))


def _shared_bytes() -> int:
    return sum(_field("/proc/self/status", name) * 1024 for name in ("RssFile", "RssShmem"))


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
