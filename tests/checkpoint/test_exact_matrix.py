"""Whether ``exact`` means exact: over many kinds, a report says so if and only if ten more steps are bitwise the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.checkpoint import _exact_matrix_fns as fns
from tests.checkpoint import _exact_quantized_fns as quantized
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly

#: One kind for each way in which shards make a difference.
KEPT = ("AdamW", "own state dict", "state dict hooks", "tied", "sharded state outside")
REST = tuple(name for name in fns.SHARDED if name not in KEPT)

_FOUND: dict[tuple[Any, ...], list[dict[str, dict[str, Any]]]] = {}


def found(
    ranks: RankPool, root: Path, names: Iterable[str], *, sharded: bool, of: ModuleType = fns
) -> list[dict[str, dict[str, Any]]]:
    """All of ``names`` in one launch, by rank; the tests below look at one kind each."""
    key = (of, sharded, *names)
    if key not in _FOUND:
        size = 2 if sharded else 1
        _FOUND[key] = ranks.run_ranks(size, of.outcomes, str(root), list(names), sharded, timeout_s=300)
    return _FOUND[key]


SWALR_OF_2_9 = pytest.mark.needs(
    "torch>=2.10", "keeps a function in SWALR's state, which reports name: no exact resume"
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SWALR_OF_2_9) if "SWALR" in name else name for name in fns.KINDS]
)
def test_exact_if_and_only_if_bitwise(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for by_kind in found(ranks, tmp_path, fns.KINDS, sharded=False):
        _check(fns.KINDS[name], by_kind[name])


@pytest.mark.parametrize("name", [*KEPT, *nightly(*REST)])
def test_exact_if_and_only_if_bitwise_on_shards(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for by_kind in found(ranks, tmp_path, KEPT if name in KEPT else REST, sharded=True):
        _check(fns.SHARDED[name], by_kind[name])


@pytest.mark.parametrize("name", quantized.KINDS)
def test_exact_if_and_only_if_bitwise_of_few_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for by_kind in found(ranks, tmp_path, quantized.KINDS, sharded=False, of=quantized):
        _check(quantized.KINDS[name], by_kind[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs("integers")) if "Linear4bit" in name else name
        for name in quantized.SHARDED
    ],
)
def test_exact_if_and_only_if_bitwise_of_few_bits_on_shards(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    for by_kind in found(ranks, tmp_path, quantized.SHARDED, sharded=True, of=quantized):
        _check(quantized.SHARDED[name], by_kind[name])


def test_there_are_kinds_of_every_outcome() -> None:
    expected = [kind.expected for kind in fns.KINDS.values()]
    assert len(expected) - expected.count("refused") >= 40
    assert min(expected.count("named"), expected.count("refused")) >= 4


def _check(kind: fns.Kind, one: dict[str, Any]) -> None:
    assert "raised" not in one, one["raised"]
    if kind.expected == "refused":
        assert kind.says in one.get("refused", ""), one
        assert one["refused"].startswith(("StateError", "RankError"))
        return
    assert one.get("exact") is one.get("bitwise"), one
    assert one["exact"] is (kind.expected == "exact"), one
    assert one["verify"] == ()
    if kind.expected == "exact":
        assert (one["skipped"], one["lines"]) == ((), ()), one
    else:
        assert any(kind.says in line for line in one["lines"]), one
