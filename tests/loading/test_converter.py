"""load(converter=): state dicts as another library's own function makes them, read shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import PlanError, UnsupportedConversionError
from tests.harness.on_ranks import on_ranks
from tests.loading._load_fns import assert_same_whole

Tensors = Mapping[str, torch.Tensor]
HEADS, DIM = 4, 24


class Attention(nn.Module):
    """Queries in the order of neighboring pairs, keys and values in one tensor, and no buffer of the stored model."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.kv = nn.Linear(DIM, 2 * DIM, bias=False)
        self.norm = nn.Parameter(torch.empty(DIM))


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    found = {f"attn.{one}_proj.weight": torch.randn(DIM, DIM) for one in "qkv"}
    return found | {"attn.norm.weight": torch.randn(DIM), "attn.rotary_emb.inv_freq": torch.randn(3)}


def convert(state: Tensors) -> dict[str, torch.Tensor]:
    """As torchtune's ``hf_to_tune`` orders the rows of queries."""
    query = state["attn.q_proj.weight"]
    return {
        "q.weight": query.view(HEADS, 2, DIM // HEADS // 2, DIM).transpose(1, 2).reshape(DIM, DIM),
        "kv.weight": torch.cat([state["attn.k_proj.weight"], state["attn.v_proj.weight"]]),
        "norm": state["attn.norm.weight"],
    }


@on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_as_the_function_makes_it_in_one_process(tmp_path: Path, dim: int) -> None:
    file = tmp_path / "model.safetensors"
    if dist.get_rank() == 0:
        save_file(stored(), file)
    dist.barrier()
    theirs = Attention()
    theirs.load_state_dict(convert(load_file(file)))
    with sw.meta_init():
        model = Attention()
    policy = sw.ShardPolicy(placement=lambda p: torch.distributed.tensor.Shard(dim if p.ndim > 1 else 0))
    sw.shard(model, init_device_mesh("cpu", (2,)), policy)
    report = sw.load(model, file, converter=convert)
    assert_same_whole(model, theirs)
    assert [str(dropped) for dropped in report.unused] == ["attn.rotary_emb.inv_freq (says converter)"]
    if dim == 0:  # parts of such short rows are read together
        assert report.bytes_read <= 1.02 * sum(p.to_local().nbytes for p in model.parameters())


def without_norm(state: Tensors) -> Tensors:
    return {name: t for name, t in convert(state).items() if name != "norm"}


def misspelled(state: Tensors) -> Tensors:
    return without_norm(state) | {"nrom": state["attn.norm.weight"]}


def scaled(state: Tensors) -> Tensors:
    return convert(state) | {"q.weight": convert(state)["q.weight"] * 0.5}


def filled(state: Tensors) -> Tensors:
    return convert(state) | {"norm": torch.ones(DIM)}


def looked_at(state: Tensors) -> Tensors:
    return convert(state) if state["attn.norm.weight"][0] > 0 else {}


def lost(state: Tensors) -> Tensors:
    return {"q.weight": state["no.such.name"]}


@pytest.mark.parametrize(
    ("converter", "error", "text"),
    [
        (without_norm, PlanError, r"missing: parameter 'norm'"),
        (misspelled, PlanError, r"missing: parameter 'norm'(.|\n)*unused: .*'attn.norm.weight'"),
        (scaled, UnsupportedConversionError, "converter= failed with Untraceable: .*may only rename, split"),
        (filled, UnsupportedConversionError, "didn't make from stored tensors: norm. Leave them out"),
        (looked_at, UnsupportedConversionError, "converter= failed with .*shapes but no data"),
        (lost, UnsupportedConversionError, "converter= failed with KeyError: 'no.such.name'"),
    ],
)
def test_what_a_converter_must_not_do_is_named(
    tmp_path: Path, converter: Callable[[Tensors], Tensors], error: type[Exception], text: str
) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    model = Attention()
    before = {name: p.clone() for name, p in model.named_parameters() if name != "norm"}
    with pytest.raises(error, match=text):
        sw.load(model, tmp_path, converter=converter)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters() if name != "norm")


def test_only_one_way_of_renaming(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="names= and converter= all rename stored tensors"):
        sw.load(Attention(), tmp_path, converter=convert, names={})
