"""File systems that are soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["small_disk_at"]


@contextmanager
def small_disk_at(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` (as mount writes it: ``1m``), mounted at a new directory. Skips the test where mounting needs root."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
