"""kill -9 in the middle of a save: this process ends with half of its files written."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

__all__ = ["die_in_next_save"]

_PERIOD_S = 0.0005


def die_in_next_save(checkpoints: Path, rank: int, expected_bytes: int) -> None:
    """Make this process kill itself, by SIGKILL, in the next save.

    It dies when half of ``expected_bytes`` (the bytes that this rank writes in a save) lie in the unpublished
    directory or, if the disk is faster than the watching thread, when it opens its last file. Either way its part is
    incomplete, and the step can't be published.
    """
    last_file = f"rank/{rank:05d}.json"

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).replace(os.sep, "/").endswith(last_file):
            _die()

    def watch() -> None:
        while _unpublished_bytes(checkpoints, rank) < expected_bytes / 2:
            time.sleep(_PERIOD_S)
        _die()

    sys.addaudithook(on_event)
    threading.Thread(target=watch, name="die-in-next-save", daemon=True).start()


def _unpublished_bytes(checkpoints: Path, rank: int) -> int:
    """Bytes of this rank's files in directories that are not published yet."""
    total = 0
    for file in checkpoints.glob(f".tmp-step-*/*/shard-{rank:05d}-*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
