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
    """How far one operation is on this rank: bytes done, of the bytes to do."""

    operation: OperationName
    """Kind of the operation. A resume is one operation, with the loads in it, and with the steps that it skips because they are damaged."""
    path: str
    """Path or URL that is read or, by a save, a conversion, a copy and an export, written. For a resume, those of the step."""
    state: Literal["running", "done", "failed"]
    """``done`` and ``failed`` come once, last."""
    done_bytes: int
    """Read, written, or compared, by this rank. Never falls."""
    total_bytes: int
    """Bytes that this rank will have done, by plan; an estimate of a resume or an export until it is done. Never less than
    ``done_bytes``: it grows if more is read or written than planned."""
    seconds: float
    """Since its bytes to do were known: a load's plan is made before."""
    number: int
    """Counts the operations of this process: operations at the same time have different ones."""
    is_background: bool
    """Whether the caller continues meanwhile: an async save, a copy to a mirror."""
    error: str = ""
    """Type and text of the error, if the operation failed."""
    report: Any = None
    """The report of a finished operation, as its call returns it: a :class:`SaveReport`, a :class:`ResumeReport`, … ``None`` until then."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes in a second, since the operation began."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end at this rate; None before the first byte."""
        left, rate = max(0, self.total_bytes - self.done_bytes), self.bytes_per_s
        if left == 0:
            return 0.0
        return left / rate if rate > 0 else None

    def metrics(self) -> dict[str, float]:
        """Numbers for a metrics logger, once the operation has ended; empty until then.

        Names begin with ``shardwise/`` and the operation: ``shardwise/save/seconds``, ``shardwise/save/bytes``, ``shardwise/save/failed``
        (0 or 1), and each number and each yes or no of the report, such as ``shardwise/save/stall_seconds`` or ``shardwise/resume/exact``.
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
