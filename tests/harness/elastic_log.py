"""What the ranks of examples/elastic.py logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["lives"]


def lives(out: Path, rank: int = 0) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What a rank logged: after each start how it resumed, and the steps that followed."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    path = out / f"rank-{rank}.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            break  # is being written
        entry = json.loads(line)
        if "resumed" in entry:
            found.append((entry, []))
        else:
            found[-1][1].append(entry)
    return found
