"""Stored names are sorted as transformers sorts them, by keys of their parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import dot_natural_key


@given(st.text(alphabet="ab.12_", max_size=12))
def test_the_key_of_a_name_is_that_of_its_parts(name: str) -> None:
    assert [key for part in name.split(".") for key in dot_natural_key(part)] == dot_natural_key(name)
