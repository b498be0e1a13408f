"""Parameters whose tests run in ``make long``; ``make test`` has another parameter for the same code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["long", "long_but"]


def long(*values: Any) -> list[Any]:
    """``values`` as parameters of tests that are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All of ``values`` as parameters; those that are not ``kept`` are slow. Raises ValueError if one kept is none of them."""
    values = list(values)
    if missing := [value for value in kept if value not in values]:
        raise ValueError(f"no parameters: {missing}")
    return [value if value in kept else long(value)[0] for value in values]
