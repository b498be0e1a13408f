"""The integration of Trainer and TRL can't be imported with a transformers that lacks what it overrides."""

from __future__ import annotations

import importlib
import sys

import pytest

from shardwise import gates
from shardwise.errors import ShardError


@pytest.mark.parametrize("version", ["5.2.0", "5.3.0"])
def test_an_import(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_version", {"transformers": version}.get)
    monkeypatch.delitem(sys.modules, "shardwise.integrations.trainer", raising=False)
    if version == "5.3.0":
        importlib.import_module("shardwise.integrations.trainer")
        return
    words = (
        r"the Trainer and TRL integrations: this needs transformers 5\.3 or newer, but 5\.2\.0 is installed"
    )
    with pytest.raises(ShardError, match=words):
        importlib.import_module("shardwise.integrations.trainer")
