"""Files of torch.save as sources: HF's pytorch_model.bin, Accelerate's full state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, ShardwiseError


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=12)
    return AutoModelForCausalLM.from_config(config)


def assert_loads(model: nn.Module, expected: nn.Module, source: Path) -> None:
    report = sw.load(model, source)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert report.bytes_read >= sum(p.numel() * p.element_size() for p in expected.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hub_directory_from_before_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    model = gpt2(0).to(dtype)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found = sw.load_pretrained(tmp_path, dtype=dtype, auto_class=AutoModelForCausalLM)
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, tensor in ordinary.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert found.lm_head.weight is found.transformer.wte.weight


def test_several_files_and_an_index(tmp_path: Path) -> None:
    state = dict(gpt2(0).state_dict())
    names = list(state)
    weight_map = {}
    for k, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"pytorch_model-{k + 1:05d}-of-00002.bin"
        torch.save({n: state[n].clone() for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_loads(gpt2(1), gpt2(0), tmp_path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "lost.weight": file}}))
    assert open_catalog(tmp_path).unheld == {"lost.weight": file}
    assert_loads(gpt2(1), gpt2(0), tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../stolen.bin"}}))
    with pytest.raises(FormatError, match="outside its directory"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("key", [None, "model", "state_dict"])
def test_one_file_by_its_path(tmp_path: Path, key: str | None) -> None:
    state: dict[str, Any] = dict(gpt2(0).state_dict())
    torch.save({key: state, "epoch": 3} if key else state, tmp_path / "pytorch_model_fsdp.bin")
    assert_loads(gpt2(1), gpt2(0), tmp_path / "pytorch_model_fsdp.bin")


def test_views_share_a_storage(tmp_path: Path) -> None:
    """torch.save stores the whole storage once; each tensor is a part of it."""
    whole = torch.arange(40.0).view(10, 4)
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 7, bias=False)})
    torch.save({"a.weight": whole[:3], "b.weight": whole[3:]}, tmp_path / "x.pt")
    sw.load(model, tmp_path / "x.pt")
    assert torch.equal(torch.cat([model["a"].weight, model["b"].weight]), whole)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_hostile_files_are_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for content in (Evil(mark), {"x": Evil(mark)}, {"model": {"weight": Evil(mark)}}):
        torch.save(content, tmp_path / "evil.pt")
        with pytest.raises(FormatError, match="rejected: its pickle asks for"):
            open_catalog(tmp_path / "evil.pt")
    torch.save({"weight": torch.ones(2), "x": Evil(mark)}, tmp_path / "evil.pt")
    catalog = open_catalog(tmp_path / "evil.pt")
    assert (*catalog.tensors, *catalog.ignored_entries) == ("weight", "'x' (__builtin__.getattr)")
    assert not mark.exists()
    torch.save({"weight": torch.randn(3, 5).t()}, tmp_path / "strided.pt")
    with pytest.raises(FormatError, match="row-major"):
        open_catalog(tmp_path / "strided.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"not a torch\.save file"):
        open_catalog(tmp_path / "old.pt")
    content = (tmp_path / "strided.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[:-50])
    with pytest.raises(FormatError):
        open_catalog(tmp_path / "cut.pt")
    with pytest.raises(ShardwiseError):
        open_catalog(tmp_path / "nowhere.pt")


def test_what_a_description_can_hide_is_refused(tmp_path: Path) -> None:
    """A view that is negated, or lies before its storage: read as plain bytes both would be other numbers."""
    negated = torch.view_as_complex(torch.arange(4.0).view(2, 2)).conj().imag
    assert negated.is_neg()
    torch.save({"weight": negated}, tmp_path / "negated.pt")
    with pytest.raises(FormatError, match="negated"):
        open_catalog(tmp_path / "negated.pt")


def test_a_complex_buffer_is_a_tensor_like_others(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "freqs": torch.ones(2, dtype=torch.complex64)}, tmp_path / "x.pt")
    model = nn.Linear(3, 2, bias=False)
    sw.load(model, tmp_path / "x.pt", allow_unused=("freqs",))
    assert torch.equal(model.weight, torch.ones(2, 3))
