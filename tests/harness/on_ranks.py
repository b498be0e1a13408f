"""``@on_ranks(2, 3)``: the body of a test runs on every rank of a group, once per world size."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.pool import RankPool

__all__ = ["on_ranks"]


def on_ranks(
    *world_sizes: int, timeout_s: float = 120.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on every rank of a gloo group of each of ``world_sizes``.

    The test's arguments are fixtures and parameters as in any test. pytest makes them in its own process; they are
    pickled and handed to each rank. Rank and world size come from ``torch.distributed``. The body makes its meshes and
    models itself, because they belong to a rank. The test passes if the body returns
    None on every rank, and fails with the tracebacks and the output of all ranks if any raises, dies, or is not done
    after ``timeout_s`` (see :meth:`tests.harness.pool.RankPool.run_ranks`).
    """
    if not world_sizes:
        raise ValueError("on_ranks() needs at least one world size: @on_ranks(2)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        arguments = inspect.signature(body).parameters
        if taken := {"ranks", "world_size"} & arguments.keys():
            raise TypeError(f"{body.__name__} runs on ranks: {sorted(taken)} can't be among its arguments")

        @functools.wraps(body)
        def test(ranks: RankPool, world_size: int, **given: Any) -> None:
            results = ranks.run_ranks(world_size, test, timeout_s=timeout_s, **given)
            assert results == [None] * world_size, (
                f"{body.__name__} must return None on every rank: {results}"
            )

        test.on_rank = body  # type: ignore[attr-defined]  # what a worker calls; see process.resolve
        own = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("ranks", "world_size")
        ]
        test.__signature__ = inspect.Signature([*own, *arguments.values()])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate
