"""Which files this process has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["open_below"]


def open_below(directory: Path) -> list[str]:
    """The open files below a directory, one entry per descriptor. Other threads of the process may open and close theirs meanwhile."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(name for name in found if Path(name).is_relative_to(directory))
