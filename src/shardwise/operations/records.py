"""What a listener is told of an operation, and its words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from ..objects import frozen

__all__ = ["OperationName", "Progress", "State", "size"]

OperationName = Literal["load", "save", "resume", "restore", "verify", "diff", "convert", "copy", "export"]
State = Literal["running", "done", "failed"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@frozen(kw_only=True)
class Progress:
    """How far an operation has come on this rank."""

    operation: OperationName
    """Kind of operation. A resume is one operation, including its loads and the damaged steps that it skips."""
    path: str
    """The path or URL that is read, or that a save, conversion, copy or export writes. For a resume, that of the step."""
    state: Literal["running", "done", "failed"]
    """``done`` or ``failed`` comes exactly once, as the last call."""
    done_bytes: int
    """Bytes that this rank has read, written or compared so far. Never decreases."""
    total_bytes: int
    """Bytes that this rank will process according to the plan; an estimate for a resume or an export until it is done. Never less than
    ``done_bytes``: it grows if more is read or written than planned."""
    seconds: float
    """Time since ``total_bytes`` was known, so without the planning of a load."""
    number: int
    """Number of the operation in this process. Concurrent operations have different numbers."""
    is_background: bool
    """Whether the caller continues in the meantime, as with an async save or a copy to a mirror."""
    error: str = ""
    """Type and text of the error, if the operation failed."""
    report: Any = None
    """The report of a finished operation, as its call returns it (a :class:`SaveReport`, a :class:`ResumeReport`, …). ``None`` until then."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second since the operation began."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the end at the current rate; None before the first byte."""
        left, rate = max(0, self.total_bytes - self.done_bytes), self.bytes_per_s
        if left == 0:
            return 0.0
        return left / rate if rate > 0 else None

    def metrics(self) -> dict[str, float]:
        """Numbers for a metrics logger. Empty until the operation has ended.

        Names start with ``shardwise/`` and the operation: ``shardwise/save/seconds``, ``shardwise/save/bytes``, ``shardwise/save/failed``
        (0 or 1), and one for each number or boolean in the report, such as ``shardwise/save/stall_seconds`` or ``shardwise/resume/exact``.
        """
        if self.state == "running":
            return {}
        found: dict[str, Any] = {
            "seconds": self.seconds,
            "bytes": self.done_bytes,
            "failed": self.state == "failed",
        }
        if self.report is not None:
            found |= {one.name: getattr(self.report, one.name) for one in fields(self.report)}
        return {
            f"shardwise/{self.operation}/{name}": float(value)
            for name, value in found.items()
            if isinstance(value, (int, float))
        }


def size(nbytes: int) -> str:
    """Bytes for people: ``512 B``, ``1.50 MiB``, ``13.5 GiB``."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{nbytes} B"
    value = nbytes / 1024**power
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {_UNITS[power]}"
