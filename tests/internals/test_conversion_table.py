"""Conversions that are made one by one are those that transformers makes all at once."""

from __future__ import annotations

import re
from typing import Any

from transformers import conversion_mapping

from shardwise.internals import transformers as conversion_table


def test_every_conversion_of_transformers_is_the_same():
    space = conversion_table._postponing()
    table = conversion_mapping._build_checkpoint_conversion_mapping()
    assert list(space["_build_checkpoint_conversion_mapping"]()) == list(table)
    compared = 0
    for name, expected in table.items():
        found = space["get_checkpoint_conversion_mapping"](name)
        assert [_content(c) for c in found] == [_content(c) for c in expected], name
        compared += len(expected)
    assert compared > 70


def test_each_reader_has_conversions_of_its_own():
    get = conversion_table._postponing()["get_checkpoint_conversion_mapping"]
    (first, *_), (second, *_) = get("qwen2_moe"), get("qwen2_moe")
    assert first is not second
    assert first.source_patterns is not second.source_patterns
    assert first.operations is not second.operations
    assert get("no such model") is None


def test_what_somebody_registered_is_used(monkeypatch):
    registered = {"legacy": [], "mine": [conversion_mapping.WeightRenaming("a", "b")]}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", registered)
    assert [_content(c) for c in conversion_table.get_model_conversion_mapping(_model())] == [
        _content(c) for c in registered["mine"]
    ]


def test_transformers_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    before = dict(vars(conversion_mapping))
    assert conversion_table.get_model_conversion_mapping(_model())
    assert dict(vars(conversion_mapping)) == before


def _model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import shardwise as sw

    config = Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    config.model_type = "mine"
    with sw.meta_init():
        return Qwen3ForCausalLM(config)


def _content(value: Any) -> Any:
    """Class and fields of a conversion, down to numbers and strings."""
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    if isinstance(value, (list, tuple)):
        return [_content(part) for part in value]
    if isinstance(value, dict):
        return {key: _content(part) for key, part in value.items()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= set(getattr(value, "__dict__", {}))
    return type(value), {
        name: _content(getattr(value, name)) for name in sorted(names) if hasattr(value, name)
    }
