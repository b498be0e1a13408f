"""A live model's description: what it says, and that it stays true while the model gets memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import LayoutError
from shardwise.models.meta import materialize
from shardwise.tensors.live import describe
from shardwise.tensors.placements import Cut, Geometry, one_of_equals


class Tied(nn.Module):
    """Ties, a persistent buffer that two modules share, and one that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))
        self.norm.register_buffer("seen", self.seen)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_what_it_says() -> None:
    model = Tied()
    live = describe(model)
    assert [t.names for t in live.parameters] == [
        ("embed.weight", "head.weight"),
        ("norm.weight",),
        ("norm.bias",),
    ]
    assert {t.name for t in live.tensors} - {t.name for t in live.stored} == {"scratch"}
    assert live.geometries.keys() == {t.name for t in live.stored}
    assert [w.name for w in live.layout().wanted] == [t.name for t in live.stored]
    assert (live.root, live.unwrapped, live.base, live.kind) == (model, model, model, Tied)
    assert (live.fsdp_modules, live.fsdp1_problem) == ((), None)


def test_it_stays_true_while_a_model_gets_memory() -> None:
    with torch.device("meta"):
        model = Tied()
    live = describe(model)
    geometries = live.geometries
    materialize(describe(model), "cpu")
    before, now, anew = live.tensors, live.refreshed(), describe(model)
    assert [t.tensor is a.tensor for t, a in zip(now.tensors, anew.tensors, strict=True)] == [True] * 8
    assert [(t.names, t.owners) for t in now.tensors] == [(t.names, t.owners) for t in anew.tensors]
    assert now.geometries is geometries
    assert not any(t.is_meta for t in now.local_tensors().values())
    assert {t.name for t, n in zip(before, now.tensors, strict=True) if n is t} == {
        *(t.name for t in live.parameters),
        "scratch",
    }, "parameters keep their identity, buffers are new"


def test_it_looks_through_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = Tied()
    wrapped = Wrapper(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    live = describe(wrapped)
    assert (live.root, live.unwrapped, live.base, live.kind) == (wrapped, model, model, Tied)
    assert [t.names for t in live.tensors] == [t.names for t in describe(model).tensors]


def test_every_look_finds_the_same_geometries() -> None:
    """Not only equal ones: to compare those of thousands of ranks, for each tensor, takes seconds."""
    model = Tied()
    first, second = describe(model).geometries, describe(model).geometries
    assert first
    assert all(found is second[name] for name, found in first.items())
    sharded = [one_of_equals(Geometry((2,), ("dp",), (Cut("shard", 0),), (0, 1))) for _ in range(2)]
    assert sharded[0] is sharded[1]


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "module": nn.ModuleDict({"a": nn.Linear(1, 1)})})
    with pytest.raises(LayoutError, match=r"a\.weight"):
        describe(model)


def test_elements_that_share_memory_are_refused() -> None:
    """The last one that a load writes would count for all of them."""
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    with pytest.raises(LayoutError, match=r"weight: .* stores several elements at the same address"):
        describe(model).layout()
    model.weight = nn.Parameter(torch.zeros(4, 3)[::2])
    assert describe(model).layout().local_nbytes == 24


def test_a_model_whose_own_loading_replaces_tensors_is_described_again(tmp_path: object) -> None:
    """What it replaced is what is filled, compared and reported."""

    class Growing(nn.Module):
        """Takes buffers of any shape, as new objects."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))
            self.register_buffer("seen", torch.full((rows,), float(rows)))

        def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *rest: object) -> None:
            if f"{prefix}seen" in state:
                self.seen = torch.empty_like(state[f"{prefix}seen"])
            super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[arg-type]

    sw.save(sw.TrainState(model=Growing(4)), f"{tmp_path}/step")
    model = Growing(2)
    report = sw.restore(sw.TrainState(model=model), f"{tmp_path}/step")
    assert report.exact, report.differences
    assert torch.equal(model.seen, torch.full((4,), 4.0))
