"""``model/`` of a checkpoint, read by torch's DCP, by transformers, and as plain safetensors files.

The readers run in this process, which has no process group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

import shardwise as sw
from tests.export import _export_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows
from tests.harness.versions import is_open

# torch's DCP reader announces that it works without a group, also below from_pretrained.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

AUTO: dict[str, Any] = {"llama": transformers.LlamaForCausalLM, "gpt2": transformers.GPT2LMHeadModel}


def _read_by_dcp(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    state = {name: torch.full_like(value, -1) for name, value in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, value in expected.items():
        assert fns.same(state[name], value), name


def _read_files(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Every slice where its header says that it belongs."""
    seen = {name: torch.zeros_like(value, dtype=torch.uint8) for name, value in expected.items()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118
                piece, start = opened.get_tensor(name), offsets[name]["saved_offsets"]
                where = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                assert fns.same(piece, expected[name][where]), (file.name, name)
                seen[name][where] += 1
    for name, counts in seen.items():
        assert bool((counts == 1).all()), name


def _for_transformers(path: Path, model: str | None = None) -> Path:
    """A model's folder in a checkpoint; where from_pretrained can't open it, what the gate's row advises: an export."""
    if is_open("model-directory"):
        return path / ("model" if model is None else f"models/{model}")
    sw.export_hf(path, path.parent / f"export of {model}", model_name=model)
    return path.parent / f"export of {model}"


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("llama-tied", 2), ("gpt2", 1), *nightly_rows(("llama-bf16", 3), ("gpt2", 3))],
)
def test_transformers_models(ranks: RankPool, tmp_path: Path, kind: str, world_size: int) -> None:
    source, path = tmp_path / "source", tmp_path / "checkpoint"
    fns.save_source(str(source), kind)
    values = ranks.run_ranks(world_size, fns.save_trained, str(source), str(path))[0]
    assert sw.verify(path).ok
    folder = path / "model"
    _read_files(folder, values)
    _read_by_dcp(folder, values)
    model = AUTO[kind.split("-")[0]].from_pretrained(_for_transformers(path), dtype="auto")
    state = model.state_dict()
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert fns.same(state[name], value), name
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) is (kind != "llama-bf16")
    assert torch.isfinite(model(input_ids=torch.arange(4)[None]).logits).all()


def test_several_models(ranks: RankPool, tmp_path: Path) -> None:
    """``models/<name>/`` of each, also of the one that is no transformers model."""
    for kind in ("llama-tied", "gpt2"):
        fns.save_source(str(tmp_path / kind), kind)
    path = tmp_path / "checkpoint"
    (values, *_) = ranks.run_ranks(2, fns.save_several, str(tmp_path), str(path))
    assert sw.verify(path).ok
    for name, expected in values.items():
        _read_files(path / "models" / name, expected)
        _read_by_dcp(path / "models" / name, expected)
    for name, kind in (("actor", "llama"), ("critic", "gpt2")):
        folder = _for_transformers(path, name)
        state = AUTO[kind].from_pretrained(folder, dtype="auto").state_dict()
        assert state.keys() == values[name].keys()
        for key, value in values[name].items():
            assert fns.same(state[key], value), key


def test_fsdp_and_tp_on_one_dim(ranks: RankPool, tmp_path: Path) -> None:
    """Sizes that divide by neither axis; and a packed weight of which every rank holds two boxes."""
    expected = fns.expected_packed()
    path = tmp_path / "checkpoint"
    saved = ranks.run_ranks(4, fns.save_packed, str(path), (2, 2))
    assert all(found["boxes"]["gate_up"] == 2 for found in saved)
    names = sorted(p.name for p in (path / "model").glob("*.safetensors"))
    assert "shard-00001-model-00002-of-00002.safetensors" in names
    for world_size, shape in ((4, (1, 4)), (3, (3, 1)), (2, (1, 2)), (3, None), (1, None)):
        for found in ranks.run_ranks(world_size, fns.restore_packed, str(path), shape):
            assert found["digests"] == saved[0]["digests"], (world_size, shape)
    _read_files(path / "model", expected)
    _read_by_dcp(path / "model", expected)


def test_mesh_that_differs_between_ranks_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for kind, text in ranks.run_ranks(4, fns.save_with_sliced_mesh, str(tmp_path / "checkpoint")):
        assert kind == "StateError"
        assert "gate_up" in text
