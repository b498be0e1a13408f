"""kill -9 in the middle of a save: this process ends with half of its files written."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..format.head import stored_step
from ..storage import files_below, is_url, join, names_in, stat_of
from ..store.in_store import ObjectWriter
from ..store.line import line_of

__all__ = ["die_in_next_save", "published", "unpublished_bytes"]

_PERIOD_S = 0.0005


def die_in_next_save(checkpoints: str, rank: int, expected_bytes: int) -> None:
    """Make this process kill itself, by SIGKILL, in the next save. Its part is incomplete then, and the step can't be published.

    In a directory it dies when half of ``expected_bytes`` (the bytes that this rank writes in a save) lie there unpublished or,
    if the disk is faster than the watching thread, when it opens its last file. In a store, where an object appears whole, it
    dies when it has written its model and begins with its optimizer.
    """
    if is_url(checkpoints):
        sys.setprofile(_die_at_objects((f"/optimizer/shard-{rank + 1:05d}-", f"/rank/{rank:05d}.json")))
        return
    last_file = f"rank/{rank:05d}.json"

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).replace(os.sep, "/").endswith(last_file):
            _die()

    def watch() -> None:
        while _own_unpublished_bytes(Path(checkpoints), rank) < expected_bytes / 2:
            time.sleep(_PERIOD_S)
        _die()

    sys.addaudithook(on_event)
    threading.Thread(target=watch, name="die-in-next-save", daemon=True).start()


def _die_at_objects(parts: tuple[str, ...]) -> Callable[[FrameType, str, Any], None]:
    """A profiling function that kills this process when it begins an object with one of these in its URL."""
    code = ObjectWriter.__init__.__code__

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code and any(p in frame.f_locals["path"] for p in parts):
            _die()

    return on_call


def _own_unpublished_bytes(checkpoints: Path, rank: int) -> int:
    """Bytes of this rank's files in directories that are not published yet."""
    total = 0
    for file in checkpoints.glob(f".tmp-step-*/*/shard-{rank + 1:05d}-*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def published(checkpoints: str) -> dict[int, str]:
    """The published steps and the names of their directories, oldest first."""
    return dict(sorted(line_of(checkpoints).steps().items()))


def unpublished_bytes(checkpoints: str) -> int:
    """Bytes of files and objects that a save has left behind without publishing them."""
    stats = [stat_of(join(path, name)) for path in _unpublished(checkpoints) for name in files_below(path)]
    return sum(stat.nbytes for stat in stats if stat is not None)


def _unpublished(checkpoints: str) -> Iterator[str]:
    steps = published(checkpoints).values()
    for name in names_in(checkpoints):
        is_step = stored_step(name) is not None if is_url(checkpoints) else name.startswith(".tmp-step-")
        if is_step and name not in steps:
            yield join(checkpoints, name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
