"""Tells one object from several by name: schedulers, loaders and scalers may be given either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["is_several"]


def is_several(target: Any) -> bool:
    """Whether a part of a training state is several objects by name: a mapping without a state of its own."""
    has_state = hasattr(target, "state_dict") or hasattr(target, "load_state_dict")
    return isinstance(target, Mapping) and not has_state
