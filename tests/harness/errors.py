"""What a call raises, as values that a rank can hand back."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ShardwiseError

__all__ = ["error_of"]


def error_of(call: Any) -> tuple[str, str]:
    """The type and text of the package's error; empty for none."""
    try:
        call()
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""
