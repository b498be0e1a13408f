"""What ranks tell each other comes back as it was, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.ranks.protocol import packed_message as pack
from shardwise.ranks.protocol import unpack

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(_PLAIN | st.binary() | st.dictionaries(st.text(), st.binary(), min_size=1))
def test_values_come_back_equal_and_of_one_type(value: Any) -> None:
    found = unpack(pack(value))
    assert (type(found), found) == (type(value), value)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_arrays_of_numbers_come_back(numbers: list[int]) -> None:
    array = np.array(numbers, dtype=np.uint64)
    for found in (unpack(pack(array)), unpack(pack({"files": {"a": [1]}, "sums": array}))["sums"]):
        assert found.dtype == np.uint64
        assert found.tolist() == numbers


def test_nothing_takes_no_bytes() -> None:
    assert pack(None) == b""


@pytest.mark.parametrize("value", [(1, 2), [(1,)], {1: "a"}, {"a": [b"x"]}, {1, 2}, float("nan"), object()])
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        pack(value)
