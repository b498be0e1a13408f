"""What runs in ``make long`` alone: parameters, where ``make test`` has another one for the same code, and most examples of
random searches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "long", "long_but", "long_rows", "share_of"]

#: Slow random searches of ``make test`` try so many times fewer examples than those of ``make long``.
_FEWER = 5


def long(*values: Any) -> list[Any]:
    """``values`` as parameters of tests that are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def long_rows(*rows: tuple[Any, ...]) -> list[Any]:
    """``rows`` as parameters of tests with several arguments, all of them slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All of ``values`` as parameters; those that are not ``kept`` are slow. Raises ValueError if one kept is none of them."""
    values = list(values)
    if missing := [value for value in kept if value not in values]:
        raise ValueError(f"no parameters: {missing}")
    return [value if value in kept else long(value)[0] for value in values]


def share_of(examples: int) -> int:
    """How many examples of a random search run: all of them in ``make long``, which sets ``EVERY_EXAMPLE``."""
    return examples if os.environ.get("EVERY_EXAMPLE") else max(10, examples // _FEWER)


def examples(count: int, **options: Any) -> settings:
    """Settings of a random search over ``count`` examples, or over its share of them in ``make test``."""
    return settings(max_examples=share_of(count), **options)
