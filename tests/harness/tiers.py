"""What runs in ``make nightly`` alone: parameters where each change runs another one of the same code, and most examples of
random searches.

A test has one of three tiers. Unmarked tests run in ``make test``. Tests marked ``slow`` cover a path that no unmarked test covers,
and take about half a minute or more: ``make long``, which CI runs on each change. Tests marked ``nightly`` vary something that the
other two tiers already cover once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "nightly", "nightly_but", "nightly_rows", "share_of"]

#: Random searches of ``make test`` try this many times fewer examples than those of ``make nightly``.
_FEWER = 5


def nightly(*values: Any) -> list[Any]:
    """``values`` as parameters that run nightly."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def nightly_rows(*rows: tuple[Any, ...]) -> list[Any]:
    """``rows`` as parameters of tests with several arguments, all of which run nightly."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def nightly_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All of ``values`` as parameters; those that are not ``kept`` run nightly. Raises ValueError if one kept is none of them."""
    values = list(values)
    if missing := [value for value in kept if value not in values]:
        raise ValueError(f"no parameters: {missing}")
    return [value if value in kept else nightly(value)[0] for value in values]


def share_of(examples: int) -> int:
    """How many examples of a random search run: all of them in ``make nightly``, which sets ``EVERY_EXAMPLE``."""
    return examples if os.environ.get("EVERY_EXAMPLE") else max(10, examples // _FEWER)


def examples(count: int, **options: Any) -> settings:
    """Settings of a random search over ``count`` examples, or over its share of them in ``make test``."""
    return settings(max_examples=share_of(count), **options)
