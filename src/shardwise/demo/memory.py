"""Anonymous memory of this process: its allocations, without pages of mapped files."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

__all__ = ["AnonymousPeak", "anonymous_bytes"]

_PERIOD_S = 0.002


def anonymous_bytes() -> int | None:
    """Resident anonymous memory; None if the system does not report it (only Linux does)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
            for line in stream:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class AnonymousPeak:
    """Samples anonymous memory every 2 ms while the block runs."""

    def __init__(self) -> None:
        self.before = anonymous_bytes()
        self.after = self.before
        self._peak = self.before or 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="anonymous-memory", daemon=True)

    @property
    def added(self) -> int | None:
        """Bytes by which the highest sample exceeds the first; None if memory can't be measured."""
        return None if self.before is None else max(0, self._peak - self.before)

    @property
    def kept(self) -> int | None:
        """Bytes by which the last sample exceeds the first."""
        return None if self.before is None or self.after is None else self.after - self.before

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.after = anonymous_bytes()
        self._peak = max(self._peak, self.after or 0)

    def _sample(self) -> None:
        while not self._done.wait(_PERIOD_S):
            self._peak = max(self._peak, anonymous_bytes() or 0)
