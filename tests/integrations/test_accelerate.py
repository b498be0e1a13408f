"""Accelerate with FSDP2: models loaded here as its plugin says, taken by ``prepare``; its state in our checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.integrations import _accelerate_fns as fns

#: As in case 1's YAML; inductor needs a C++ compiler on CPU.
COMPILER = "inductor" if shutil.which("g++") else "eager"


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
        pytest.param(
            2, {"reshard_after_forward": False}, {"dynamo_backend": COMPILER}, marks=pytest.mark.nightly
        ),
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


def test_weights_in_bf16_are_trained_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    reference = build_reference("qwen3").to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    for rank in ranks.run_ranks(2, fns.masters, str(tmp_path), timeout_s=100):
        assert rank["dtypes"] == rank["then"] == ["torch.float32"]
        for name, tensor in reference.state_dict().items():
            assert torch.equal(rank["loaded"][name], tensor.float()), name
        moved = [n for n, t in rank["after"].items() if not torch.equal(t, t.bfloat16().float())]
        assert moved, "steps that bf16 would round away"


def test_accelerate_alone(ranks: RankPool) -> None:
    """What the peer does today; this test may go when they mend it."""
    for text in ranks.run_ranks(2, fns.loaded_whole, False, timeout_s=120):
        assert text.startswith("AttributeError")
        assert "device_mesh" in text, text


def test_prepare_says_why_a_whole_model_fails(ranks: RankPool) -> None:
    for text in ranks.run_ranks(2, fns.loaded_whole, True, timeout_s=120):
        assert text.startswith("ShardError: the model was loaded unsharded"), text
        for words in ("device_mesh", "load_pretrained", "cpu_ram_efficient_loading to false"):
            assert words in text


def test_what_cannot_be_honored_is_named(ranks: RankPool, tmp_path: Path) -> None:
    write_source(tmp_path, torch.float32)
    for found in ranks.run_ranks(2, fns.refused, str(tmp_path), timeout_s=120):
        assert "do not implement forward" in found["containers"]
        assert "\n" not in found["containers"]
        assert "Absent" in found["class"]
        assert found["class"].startswith("ShardError")
        assert "accelerator.prepare" in found["unprepared"]


@pytest.mark.needs("accelerate>=1.13", "can't load an optimizer's state that it has saved in shards")
def test_hooks_of_save_state(ranks: RankPool, tmp_path: Path) -> None:
    """They're given what Accelerate gives them. Their files are a part of the checkpoint, and what they draw changes nothing."""
    write_source(tmp_path / "source", torch.float32)
    for found in ranks.run_ranks(2, fns.hooks, str(tmp_path / "source"), str(tmp_path), timeout_s=120):
        assert found["shardwise saved"] == found["accelerate saved"]
        assert found["shardwise loaded"] == (0, bytes(range(256)), "shardwise")
        assert found["from accelerate"] == found["accelerate loaded"] == (0, bytes(range(256)), "accelerate")
        assert found["exact"]
        assert torch.equal(found["draws"], torch.rand(3, generator=torch.Generator().manual_seed(3)))
    assert sw.verify(tmp_path / "shardwise").ok
    assert (tmp_path / "shardwise" / "accelerate_hooks" / "ema" / "note.bin").read_bytes() == bytes(
        range(256)
    )
    assert sorted(path.name for path in (tmp_path / "shardwise").iterdir()) == [
        "accelerate_hooks",
        "manifest.json",
        "model",
        "optimizer",
        "rank",
        "state.json",
    ]


def test_adapters_alone(ranks: RankPool, tmp_path: Path) -> None:
    """A checkpoint of a LoRA run has its adapters and their optimizer; the base only if it's asked for."""
    build_reference("qwen3").save_pretrained(tmp_path / "base")

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())

    for found in ranks.run_ranks(2, fns.adapters_alone, str(tmp_path / "base"), str(tmp_path), timeout_s=120):
        assert found["exact"]
        for name in found["on"]:
            assert torch.equal(found["loaded"][name], found["saved"][name]), name
            assert torch.equal(found["resumed"][name], found["on"][name]), name
        trained = [
            name for name in found["on"] if any(f".{fns.ADAPTERS[k % 8]}." in name for k in range(10, 13))
        ]
        assert trained
        assert not any(torch.equal(found["on"][name], found["saved"][name]) for name in trained)
        assert found["another base"].startswith("StateError")
        assert "embed_tokens.weight: digest" in found["another base"]
        assert "frozen tensors have changed since the step before" in found["changed base"]
        assert found["merged"]
        assert size("alone") <= 1.05 * (found["bytes"] + 2**20)
    weights = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors"))
    assert min(size("whole/model"), size("merged/model")) > size("alone/model") + 0.9 * weights
    (alone,) = ranks.run_ranks(1, fns.adapters_on_one_rank, str(tmp_path / "base"), str(tmp_path))
    for name, tensor in found["saved"].items():
        assert torch.equal(alone[name], tensor), name
    for file in fns.ADAPTERS:
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            live = (tmp_path / "live" / file / name).read_bytes()
            assert (tmp_path / "stored" / file / name).read_bytes() == live


@pytest.mark.needs("added-adapters")
def test_adapters_added_to_a_loaded_model(ranks: RankPool, tmp_path: Path) -> None:
    build_reference("qwen3").save_pretrained(tmp_path)
    for found in ranks.run_ranks(2, fns.added_later, str(tmp_path), timeout_s=120):
        assert found["sharded"]
        assert found["optimized"]
        assert found["after"].keys() == found["alone"].keys()
        for name, tensor in found["alone"].items():
            torch.testing.assert_close(found["after"][name], tensor, atol=1e-5, rtol=1e-4)


def test_added_adapters_that_cannot_be_sharded(ranks: RankPool, tmp_path: Path) -> None:
    build_reference("qwen3").save_pretrained(tmp_path)
    for found in ranks.run_ranks(2, fns.added_wrongly, str(tmp_path), timeout_s=120):
        assert found["inner"].startswith("ShardError: the PeftModel was wrapped around a sharded model")
        assert found["late"].startswith("ShardError")
        assert "after its first forward pass" in found["late"]
        assert found["cut"].startswith("ShardError: model.layers.0.self_attn.q_proj: ")
        assert "the sizes of this rank's shard" in found["cut"]
        assert "Load the model with adapter=" in found["cut"]


@pytest.mark.parametrize(
    ("world_size", "shard_size", "plugin"),
    [
        pytest.param(
            4,
            2,
            {"transformer_cls_names_to_wrap": None, "cpu_ram_efficient_loading": True},
            marks=pytest.mark.nightly,
        ),
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
        assert rank["groups"] >= 3, "the root and each block"
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


def test_size_based_wrapping(ranks: RankPool, tmp_path: Path) -> None:
    lines = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in ((8, 64), (64, 8), (8, 2))))
    save_file(lines.state_dict(), tmp_path / "model.safetensors")
    for ours, theirs in ranks.run_ranks(2, fns.wrapped_by_size, str(tmp_path), timeout_s=100):
        assert ours == theirs == ["", "0", "1"], "the last one is too small"


def test_parameters_with_fewer_rows_than_ranks(ranks: RankPool, tmp_path: Path) -> None:
    save_file(
        {n: torch.ones_like(t) for n, t in fns.Small().state_dict().items()}, tmp_path / "model.safetensors"
    )
    for ours in (True, False):
        found = ranks.run_ranks(
            2, fns.empty_shards, str(tmp_path), str(tmp_path / f"saved-{ours}"), ours, timeout_s=100
        )
        assert found == [{"same": True, "error": "", "exact": True}] * 2


@pytest.mark.needs("plans")
def test_tensor_parallel(ranks: RankPool, tmp_path: Path) -> None:
    """As one process computes it, and bitwise after a resume."""
    reference = build_reference("qwen3-tied")
    path = tmp_path / "hub"
    reference.save_pretrained(path)
    found = ranks.run_ranks(2, fns.tensor_parallel, str(path), str(tmp_path / "state"), timeout_s=150)

    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    expected = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    alone = []
    for step in range(3):
        tokens = torch.randint(0, 101, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = reference(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(float(loss.detach()))
    nbytes = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    for rank in found:
        assert rank["cut"] > 10
        assert rank["read"] < 0.8 * nbytes
        assert rank["tied"]
        assert all(torch.equal(rank["loaded"][name], tensor) for name, tensor in expected.items())
        assert rank["first"] == pytest.approx(alone, rel=1e-5)
        assert rank["exact"]
        assert rank["resumed"] == rank["on"]
        assert all(torch.equal(rank["resumed after"][name], tensor) for name, tensor in rank["after"].items())
    exported = type(reference).from_pretrained(tmp_path / "state-export").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found[0]["resumed after"].items())
    assert "distributed_config" not in json.loads((tmp_path / "state-export/config.json").read_text())


@pytest.mark.needs("transformers>=5.1", "still has ReplicateParallel")
def test_tensor_parallel_beside_fsdp_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Accelerate's own ``prepare`` can't do it with these transformers; this test may go when it can."""
    with pytest.raises(ImportError):
        from transformers.integrations.tensor_parallel import ReplicateParallel  # noqa: F401
    build_reference("qwen3-tied").save_pretrained(tmp_path)
    for error in ranks.run_ranks(4, fns.tensor_parallel_beside_fsdp, str(tmp_path), timeout_s=120):
        assert error.startswith("RankError") or error.startswith("ShardError")
        assert "ReplicateParallel" in error
