"""Which file system holds a path. Source: proc_pid_mountinfo(5)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .facts import Mount

__all__ = ["mount_of"]

_ESCAPED = re.compile(r"\\(\d{3})")


def mount_of(path: str, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount of an absolute path; None where the system has no such table."""
    real = os.path.realpath(path)
    found = None
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:  # of two at one point the later one lies on top
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        inside = point == "/" or real == point or real.startswith(f"{point}/")
        if inside and (found is None or len(point) >= len(found.point)):
            options = tuple(dict.fromkeys((*fields[5].split(","), *rest[2].split(","))))
            found = Mount(kind=rest[0], point=point, source=_unescaped(rest[1]), options=options)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
