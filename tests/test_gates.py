"""The table of features that need newer packages: what its errors say, and when they are raised."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from packaging.specifiers import SpecifierSet

import shardwise as sw
from shardwise import gates
from shardwise.errors import ShardError, ShardwiseError
from shardwise.gates import GATES, require
from tests.harness.versions import is_open
from tests.matrix.imports import ELSEWHERE

REFUSED = sorted(name for name, gate in GATES.items() if gate.error)


@pytest.mark.parametrize("name", REFUSED)
def test_an_older_release_is_named_with_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = GATES[name]
    assert gate.error is not None
    monkeypatch.setattr(gates, "_version", {gate.package: "0.0.1"}.get)
    with pytest.raises(gate.error) as refused:
        require(name, where="here")
    lowest = next(iter(SpecifierSet(gate.needs))).version
    said = str(refused.value)
    for part in (
        f"here: {gate.feature}",
        f"{gate.package} {lowest} or newer, but 0.0.1 is installed",
        gate.why,
    ):
        assert part in said
    assert gate.instead in said
    assert f"pip install '{gate.package}{gate.needs}'" in said
    for open_to in (lowest, f"{lowest}+cu128", "99.0.dev1"):
        monkeypatch.setattr(gates, "_version", {gate.package: open_to}.get)
        require(name)


def test_a_plan_of_parallelism_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(gates, "_version", {"transformers": "5.21.0"}.get)
    with pytest.raises(ShardError, match=r"transformers 5\.22 or newer, but 5\.21\.0 is installed"):
        sw.plan(
            tmp_path, ranks=2, tp=2, training=sw.TrainingSpec(batch_size=1, sequence_length=8, device="cpu")
        )


@pytest.mark.filterwarnings("ignore")  # what other packages say when they are imported
def test_every_module_can_be_imported() -> None:
    """Or says which gate is closed. The modules of kept FP8 are imported behind theirs."""
    names = {found.name for found in pkgutil.walk_packages(sw.__path__, "shardwise.")}
    assert len(names) > 160
    if not is_open("kept-fp8"):
        names.remove("shardwise.models.kept_fp8")
    names -= {name for name, package in ELSEWHERE.items() if find_spec(package) is None}
    refused = {}
    for name in sorted(names):
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ShardwiseError as error:
                refused[name] = str(error)
    closed = [gate.feature for name, gate in GATES.items() if not is_open(name)]
    assert {name: text for name, text in refused.items() if not text.startswith(tuple(closed))} == {}
