"""Accelerate with FSDP2: models loaded here as its plugin says, taken by ``prepare``; its state in our checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.dist import _accelerate_fns as fns
from tests.harness.pool import RankPool
from tests.models import build_reference


def write_source(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A hub-like file of case 1's model; the tied head is stored once."""
    torch.manual_seed(3)
    tensors = {
        name: torch.randn(t.shape).to(dtype if t.is_floating_point() else t.dtype)
        for name, t in fns.Tied().state_dict().items()
        if name != "head.weight"
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("world_size", "plugin", "options"),
    [
        (2, {}, {"mixed_precision": "bf16"}),
        (2, {"activation_checkpointing": True}, {}),
        (3, {"reshard_after_forward": False}, {"dynamo_backend": "eager"}),
    ],
    ids=["bf16", "checkpointing", "compiled"],
)
def test_case_1(
    ranks: RankPool, tmp_path: Path, world_size: int, plugin: dict[str, Any], options: dict[str, Any]
) -> None:
    bf16 = options.get("mixed_precision") == "bf16"
    source = write_source(tmp_path / "source", torch.bfloat16 if bf16 else torch.float32)
    found = ranks.run_ranks(
        world_size,
        fns.case_1,
        str(tmp_path / "source"),
        str(tmp_path / "state"),
        plugin,
        options,
        timeout_s=200,
    )
    written = json.loads((tmp_path / "state/state.json").read_text())
    assert written["optimizer"]["class"] == "AdamW", "an own loop, without Accelerate's wrapper, can go on"
    for rank in found:
        assert rank["tied"]
        assert rank["plain"]
        assert rank["rng untouched"]
        assert rank["efficient loading still set"]
        for name, tensor in source.items():
            assert torch.equal(rank["loaded"][name], tensor.to(rank["loaded"][name].dtype)), name
        assert torch.equal(rank["loaded"]["head.weight"], rank["loaded"]["embed.weight"])
        assert len(rank["first"]) == 5
        assert rank["first"][0] != rank["first"][4]
        assert rank["exact"]
        assert rank["resumed"] == rank["on"], "a resume goes on bitwise"
        for name, tensor in rank["after"].items():
            assert torch.equal(rank["resumed after"][name], tensor), name
        assert rank["dtypes"] == ["torch.float32"], "masters"


def test_accelerate_alone(ranks: RankPool) -> None:
    """What the peer does today; this test may go when they mend it."""
    for text in ranks.run_ranks(2, fns.accelerate_alone, timeout_s=120):
        assert "device_mesh" in text, text


def test_what_cannot_be_honoured_is_named(ranks: RankPool, tmp_path: Path) -> None:
    write_source(tmp_path, torch.float32)
    for found in ranks.run_ranks(2, fns.refused, str(tmp_path), timeout_s=120):
        assert "do not implement forward" in found["containers"]
        assert "\n" not in found["containers"]
        assert "Absent" in found["class"]
        assert found["class"].startswith("ShardError")
        assert "scalar" in found["scalar"]
        assert found["scalar"].startswith("ShardError")
        assert "register_save_state_pre_hook" in found["hook"]
        assert "accelerator.prepare" in found["unprepared"]


@pytest.mark.parametrize(
    ("world_size", "shard_size", "plugin"),
    [
        (4, 2, {"transformer_cls_names_to_wrap": None, "cpu_ram_efficient_loading": True}),
        (
            2,
            2,
            {
                "transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"],
                "cpu_offload": CPUOffloadPolicy(pin_memory=False),
            },
        ),
    ],
    ids=["hsdp", "offload"],
)
def test_a_hub_model(
    ranks: RankPool, tmp_path: Path, world_size: int, shard_size: int, plugin: dict[str, Any]
) -> None:
    reference = build_reference("qwen3-tied")
    path = tmp_path / "hub"
    reference.save_pretrained(path)
    found = ranks.run_ranks(
        world_size, fns.hub_model, str(path), str(tmp_path / "project"), shard_size, plugin, timeout_s=200
    )
    expected = reference.state_dict()
    nbytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    for rank in found:
        assert rank.get("mesh") == ((2, 2) if world_size == 4 else None)
        assert all(torch.equal(rank["loaded"][name], tensor) for name, tensor in expected.items())
        assert rank["groups"] > 3
        assert rank["names"] == ["checkpoint_1", "checkpoint_2"]
        assert rank["exact"]
        assert rank["resumed step"] == rank["step"] == 3
        assert rank["resumed"] == rank["on"]
        for name, tensor in rank["after"].items():
            assert torch.equal(rank["resumed after"][name], tensor), name
    assert len({str([batch for batch, _, _ in rank["on"]]) for rank in found}) == world_size, (
        "each rank its own batches"
    )
    assert sum(rank["read"] for rank in found) <= 1.02 * nbytes * (world_size // shard_size)


def test_parameters_with_fewer_rows_than_ranks(ranks: RankPool, tmp_path: Path) -> None:
    save_file(
        {n: torch.ones_like(t) for n, t in fns.Small().state_dict().items()}, tmp_path / "model.safetensors"
    )
    for found in ranks.run_ranks(
        2, fns.empty_shards, str(tmp_path), str(tmp_path / "ours"), True, timeout_s=100
    ):
        assert found == {"same": True, "error": "", "exact": True}
    mixed_up = ranks.run_ranks(
        2, fns.empty_shards, str(tmp_path), str(tmp_path / "own"), False, timeout_s=100
    )
    assert [found["same"] for found in mixed_up] == [True, False], "this test may go when Accelerate mends it"
    assert all("accelerate.prepare(accelerator" in found["error"] for found in mixed_up)
