"""Names, conversions, proof and transfers are worked out once for tensors that are made alike, with the result of one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import WeightRenaming

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import StoredTensor
from shardwise.internals import transformers as private
from shardwise.loading.load import plan_load
from shardwise.loading.pretrained import build_meta
from shardwise.planning import hub_rules as recipes
from shardwise.planning import plan as transfers
from shardwise.planning import proof as cover
from shardwise.planning.match import Made, Rules
from shardwise.planning.plan import IOOptions
from shardwise.tensors.live import describe
from tests.harness.models import fill_with_noise

_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    # more than nine of each, so that a rule for one digit shows
    "num_hidden_layers": 12,
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 11, "num_experts_per_tok": 2}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3Config": _SIZES,
    "Qwen3MoeConfig": {**_SIZES, **_EXPERTS},
    "MixtralConfig": {**_SIZES, "num_local_experts": 11, "num_experts_per_tok": 2},
    "DeepseekV3Config": {
        **{name: value for name, value in _SIZES.items() if name != "head_dim"},
        "moe_intermediate_size": 8,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 4,
        "q_lora_rank": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("alike")
    for name, sizes in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes))
        fill_with_noise(model)
        model.save_pretrained(root / name)
    return {name: root / name for name in CONFIGS}


def resolved(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, one_by_one: bool, key_mapping: Any = None
) -> list[Made]:
    with monkeypatch.context() as patch:
        if one_by_one:
            patch.setattr(private, "_tell_no_numbers_apart", lambda *_: False)
            patch.setattr(recipes._Forms, "made", lambda *_: None)
        stored = open_catalog(str(directory)).tensors
        return recipes.hub_rules(build_meta(directory), key_mapping).resolve(stored)


@pytest.mark.parametrize("name", CONFIGS)
def test_recipes_are_those_of_one_by_one(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    traced: list[str] = []
    run = private.HubGroup.run
    monkeypatch.setattr(
        private.HubGroup, "run", lambda group, given: traced.append(group.target) or run(group, given)
    )
    alike = resolved(directories[name], monkeypatch, one_by_one=False)
    few = len(traced)
    assert alike == resolved(directories[name], monkeypatch, one_by_one=True)
    many = len(traced) - few
    if many:  # conversions of 10 or 12 layers
        assert few * 4 <= many, (few, many)


#: Renames that tell numbers apart (by a number, by its digits, by how many it has), and one that does not.
HOSTILE = {
    "one layer": {r"layers\.3\.mlp\.up_proj": "layers.4.mlp.gate_proj"},
    "one layer, any dot": {r"layers.3.mlp.up_proj": "layers.4.mlp.gate_proj"},
    "one digit": {r"layers\.(\d)\.mlp\.up_proj": r"layers.\1.mlp.gate_proj"},
    "some digits": {r"layers\.([3-5])\.mlp\.up_proj": r"layers.\1.mlp.gate_proj"},
    "any layer": {r"layers\.(\d+)\.mlp\.up_proj": r"layers.\1.mlp.gate_proj"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_renames_that_tell_numbers_apart(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    found = [
        resolved(directories["Qwen3Config"], monkeypatch, one_by_one=o, key_mapping=HOSTILE[case])
        for o in (False, True)
    ]
    assert found[0] == found[1]
    assert any(made.target != made.sources[0] for made in found[0]), "the renames do something"


def test_a_rename_with_a_state_is_asked_name_by_name() -> None:
    class Counting(WeightRenaming):
        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            return source_key, None

    plain = WeightRenaming("a.weight", "b.weight")
    assert private._tell_no_numbers_apart([plain], [])
    assert not private._tell_no_numbers_apart([plain, Counting("a.weight", "b.weight")], [])


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_are_those_of_one_by_one(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = build_meta(directories[name])
    catalog, live = open_catalog(str(directories[name])), describe(model)
    rules = Rules(recipes.hub_rules(model).resolve)

    def plan() -> Any:
        return plan_load(live, catalog, rules, io=IOOptions()).plan

    alike = plan()
    cut: list[StoredTensor] = []
    original = transfers.Collector._cut

    def one_by_one(self: Any, tile: Any, wanted: Any, source: StoredTensor) -> Any:
        self._cuts.clear()
        cut.append(source)
        return original(self, tile, wanted, source)

    monkeypatch.setattr(transfers.Collector, "_cut", one_by_one)
    assert list(plan().transfers) == list(alike.transfers)
    assert cut


def test_tiles_of_one_geometry_are_proved_once(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    proof = cover.cover_problems
    monkeypatch.setattr(
        cover, "cover_problems", lambda w, tiles, catalog: asked.append(w.name) or proof(w, tiles, catalog)
    )
    model = build_meta(directories["Qwen3MoeConfig"])
    sw.load(model, directories["Qwen3MoeConfig"])
    assert 0 < len(asked) < 30, "of 100 tensors"
