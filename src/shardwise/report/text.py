"""Numbers and names as readers see them."""

from __future__ import annotations

from datetime import UTC, datetime

from ..operations.records import size

__all__ = ["counted", "plain", "seconds_text", "size", "time_text"]


def counted(number: object, what: str) -> str:
    """``1 rank``, ``3 ranks``; a number from a file may be no number."""
    return f"{plain(str(number), 20)} {what}{'' if number == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """``0.42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_text(unix_s: float) -> str:
    """``2026-01-31 12:00:00 UTC``."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def plain(text: str, most: int = 200) -> str:
    """A name from a file, without what moves a cursor or changes the direction of text, and cut."""
    shown = "".join(c if c.isprintable() else "�" for c in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
