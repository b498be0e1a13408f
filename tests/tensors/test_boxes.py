"""Boxes against the sets of elements that they stand for."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.tensors.boxes import Box, find_overlap, whole


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def boxes_of(ndim: int, *, high: int = 6) -> st.SearchStrategy[Box]:
    """Boxes with corners in any order: some are empty, some even inside out."""
    corner = st.tuples(*[st.integers(0, high)] * ndim)
    return st.builds(Box, corner, corner)


pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(boxes_of(n), boxes_of(n)))
many = st.integers(0, 3).flatmap(lambda n: st.lists(boxes_of(n, high=9), max_size=8))


@given(pairs)
def test_intersect(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert common is None or common.numel > 0
    assert common == b.intersect(a)


@given(pairs)
def test_contains(pair: tuple[Box, Box]) -> None:
    a, b = pair
    if b.numel:
        assert a.contains(b) == (elements(b) <= elements(a))
    elif a.contains(b):  # an empty box lies somewhere too: between the corners or not
        assert all(x <= y for x, y in zip(a.start, b.start, strict=True))


@given(many)
def test_find_overlap(boxes: list[Box]) -> None:
    found = find_overlap(boxes)
    meeting = [(a, b) for a, b in combinations(boxes, 2) if elements(a) & elements(b)]
    assert (found is not None) == bool(meeting)
    if found:
        assert elements(found[0]) & elements(found[1])
        assert found in meeting or found[::-1] in meeting


@given(st.integers(0, 3).flatmap(boxes_of))
def test_numel_and_sizes(box: Box) -> None:
    assert box.numel == len(elements(box))
    assert whole(box.stop).numel == len(elements(whole(box.stop)))
    if box.numel:
        assert box.sizes == tuple(len({e[d] for e in elements(box)}) for d in range(len(box.start)))


def test_zero_dims_hold_one_element() -> None:
    scalar = whole(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.contains(scalar)
    assert find_overlap([scalar]) is None
    assert find_overlap([scalar, scalar]) == (scalar, scalar)


def test_empty_boxes_overlap_nothing() -> None:
    empty, full = Box((2, 0), (2, 4)), whole((4, 4))
    assert empty.numel == 0
    assert empty.intersect(full) is None
    assert find_overlap([empty, empty, full]) is None


@pytest.mark.timeout(20)
def test_many_slices_are_compared_in_no_time() -> None:
    slices = [Box((k, 0), (k + 1, 8)) for k in range(50_000)]
    assert find_overlap(slices) is None
    twice = Box((31_000, 3), (31_001, 4))
    assert find_overlap([*slices, twice]) == (slices[31_000], twice)
