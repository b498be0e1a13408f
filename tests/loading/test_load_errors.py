"""What can't be loaded: one error, the same on every rank, before payload is read, naming all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.loading import _load_fns as fns

SHAPE = (8, 17)  # of blocks.0.down.weight


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per way in which a checkpoint can be wrong."""
    root = tmp_path_factory.mktemp("broken")
    state = models.state_of(fns.mixed_reference())
    name = "blocks.0.down.weight"
    assert state[name].shape == SHAPE
    rest = {n: t for n, t in state.items() if n != name}
    near = {"blocks.0.downn.weight": state[name]}
    models.write_state(rest, root / "missing")
    models.write_state(rest | near, root / "misspelled")
    models.write_state({n: t for n, t in state.items() if n != "steps"}, root / "missing-buffer")
    models.write_state(state | {"left.over": torch.ones(3, 2)}, root / "unused")
    models.write_state(rest | {name: torch.ones(17, 8)}, root / "mis-shaped")
    models.write_state(rest | {name: torch.ones(SHAPE, dtype=torch.int32)}, root / "un-castable")
    _write_parts(root / "twice", {"a": state, "b": {name: state[name]}})
    _write_parts(
        root / "twice-by-index", {"a": state, "b": {name: state[name] + 1, "x": torch.ones(1)}}, name
    )
    models.write_state(state | {f"module.{name}": state[name]}, root / "twice-by-wrapper-name")
    several = {n: t for n, t in rest.items() if n != "head.bias"} | {"head.weight": torch.ones(4, 4)}
    models.write_state(several | {"left.over": torch.ones(3, 2)}, root / "several")
    _truncated(models.write_state(state, root / "truncated"))
    ties = models.state_of(fns.plain_reference())
    tied = {"head.weight": ties["embed.weight"].clone()}
    models.write_state(ties | tied, root / "ties-equal")
    tied["head.weight"][3, 4] += 1
    models.write_state(ties | tied, root / "ties-differ")
    return root


def _write_parts(root: Path, parts: dict[str, dict[str, torch.Tensor]], index: str | None = None) -> None:
    """Several files; with an index that maps everything to the first file that has it."""
    weight_map: dict[str, str] = {}
    for part, state in parts.items():
        models.write_state(state, root, f"{part}.safetensors")
        for name in state:
            weight_map.setdefault(name, f"{part}.safetensors")
    if index is not None:
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _truncated(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)


#: Kind of error, and what its text has to name.
EXPECTED = {
    "missing": ("PlanError", ["missing", "'blocks.0.down.weight'", "[8, 17]", "allow_missing=("]),
    "misspelled": ("PlanError", ["'blocks.0.down.weight'", "nearest stored name: 'blocks.0.downn.weight'"]),
    "missing-buffer": ("PlanError", ["missing", "buffer 'steps'", "[]"]),
    "unused": (
        "PlanError",
        ["unused", "'left.over'", "[3, 2]", "unused/model.safetensors", "allow_unused=("],
    ),
    "mis-shaped": (
        "PlanError",
        ["shape mismatch", "'blocks.0.down.weight'", "[8, 17]", "[17, 8]", "mis-shaped/model.safetensors"],
    ),
    "un-castable": (
        "PlanError",
        ["dtype mismatch", "'blocks.0.down.weight'", "F32", "I32", "model.safetensors"],
    ),
    "twice": ("FormatError", ["'blocks.0.down.weight'", "twice", "a.safetensors", "b.safetensors"]),
    "twice-by-index": ("FormatError", ["'blocks.0.down.weight'", "twice", "a.safetensors", "b.safetensors"]),
    "twice-by-wrapper-name": (
        "PlanError",
        ["duplicated", "'blocks.0.down.weight'", "'module.blocks.0.down.weight'", "model.safetensors"],
    ),
    "several": (
        "PlanError",
        ["4 problems", "'blocks.0.down.weight'", "'head.bias'", "'left.over'", "[3, 8]", "[4, 4]"],
    ),
    "truncated": ("FormatError", ["truncated", "model.safetensors", "bytes"]),
    "names-lost": ("PlanError", ["names=", "no.such", "ties-equal"]),
    "names-twice": (
        "PlanError",
        [
            "duplicated",
            "'blocks.0.up.weight'",
            "'blocks.1.up.weight'",
            "missing: parameter 'blocks.1.up.weight'",
        ],
    ),
    "ties-differ": ("PlanError", ["'embed.weight'", "'head.weight'", "model.safetensors"]),
}


@pytest.mark.parametrize("world_size", [1, 2, *nightly(4)])
def test_broken_checkpoints(ranks: RankPool, broken: Path, world_size: int) -> None:
    outcomes = ranks.run_ranks(world_size, fns.refused, str(broken))
    assert outcomes[0].keys() == EXPECTED.keys()
    for case, (kind, parts) in EXPECTED.items():
        texts = [outcome[case]["text"] for outcome in outcomes]
        assert len(set(texts)) == 1, (case, texts)
        if case != "ties-differ" or world_size == 1:
            assert outcomes[0][case]["kind"] == kind, texts[0]
        for part in parts:
            assert part in texts[0], (case, part, texts[0])


@on_ranks(2)
def test_both_copies_of_a_tie(broken: Path) -> None:
    directory = str(broken / "ties-equal")
    model = fns.build_plain()
    sw.load(model, directory, allow_plain=fns.LEFT_PLAIN)
    fns.assert_same_whole(model, fns.plain_reference())


@pytest.mark.parametrize(("change", "part"), [("layer", "blocks.2.up.weight"), ("dtype", "BF16")])
def test_ranks_that_build_different_models(ranks: RankPool, tmp_path: Path, change: str, part: str) -> None:
    models.write_state(models.state_of(fns.plain_reference()), tmp_path)
    outcomes: list[dict[str, Any]] = ranks.run_ranks(3, fns.different_structure, str(tmp_path), change)
    assert len({(o["kind"], o["text"]) for o in outcomes}) == 1
    assert outcomes[0]["kind"] == "RankError"
    assert "rank 2" in outcomes[0]["text"]
    assert "rank 1:" not in outcomes[0]["text"], "ranks 0 and 1 agree"
    assert part in outcomes[0]["text"], outcomes[0]["text"]


def test_load_pretrained_refuses_alike(ranks: RankPool, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3", tmp_path, torch.float32)
    state = {"model.norm.weight": torch.ones(25), "model.extra": torch.ones(1)}
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    models.write_state(stored | state, tmp_path)
    outcomes = ranks.run_ranks(2, fns.pretrained_refused, str(tmp_path))
    assert len({fns.without_times(o) for o in outcomes}) == 1
    assert outcomes[0]["kind"] == "PlanError"
    for part in (
        "'model.layers.1.mlp.up_proj.weight'",
        "'model.extra'",
        "'model.norm.weight'",
        "[24]",
        "[25]",
    ):
        assert part in outcomes[0]["text"], outcomes[0]["text"]


def test_plain_trainable_parameters(ranks: RankPool, tmp_path: Path) -> None:
    models.write_state(models.state_of(fns.mixed_reference()), tmp_path)
    outcomes = ranks.run_ranks(2, fns.left_plain_unnamed, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert "1 trainable parameters" in outcomes[0]["gate"]
    assert "gate. " in outcomes[0]["gate"]
    assert "gate, head.weight, head.bias" in outcomes[0]["root"]
    assert "allow_plain=" in outcomes[0]["root"]
    assert outcomes[0]["named"] == outcomes[0]["frozen"] == ""
