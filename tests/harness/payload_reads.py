"""What a load reads of local files, noted or refused before it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shardwise.engine.engine import CachedFiles
from shardwise.engine.files import FileReader

__all__ = ["before_each_read"]


@contextmanager
def before_each_read(call: Callable[[str, int, int], None]) -> Iterator[None]:
    """Call ``call(path, offset_bytes, nbytes)`` before each read of payload in this process; what it raises, the read raises."""
    with ExitStack() as stack:
        for kind in (FileReader, CachedFiles):
            stack.enter_context(patch.object(kind, "read_into", _after(call, kind.read_into)))
        yield


def _after(call: Callable[[str, int, int], None], read_into: Any) -> Any:
    def read(self: Any, path: str, offset_bytes: int, view: memoryview) -> None:
        call(path, offset_bytes, view.nbytes)
        read_into(self, path, offset_bytes, view)

    return read
