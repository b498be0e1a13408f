"""The command line in the process of a test."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner

__all__ = ["runner"]


def runner() -> CliRunner:
    """A runner whose results have stdout and stderr apart. click before 8.2 puts both into stdout unless told otherwise."""
    is_old = "mix_stderr" in inspect.signature(CliRunner).parameters
    options: dict[str, Any] = {"mix_stderr": False} if is_old else {}
    return CliRunner(**options)
