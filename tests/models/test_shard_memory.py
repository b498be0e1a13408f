"""FSDP2's shards on meta get memory as by ``Module._apply``: identity, ties, padding, attributes, FSDP2's own references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.internals.fsdp import allocate_dtensors
from shardwise.internals.torch import bare_tree
from tests.harness.on_ranks import on_ranks


class Tied(nn.Module):
    """A tie, rows that two and three ranks can't share evenly, a frozen parameter, and a buffer that is real."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4, bias=False))
        self.first = nn.Linear(4, 7, bias=False)
        self.second = nn.Linear(4, 7, bias=False)
        self.second.weight = self.first.weight
        self.inner[1].weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.first(x) + self.second(self.inner(x))) * self.scale
        return found


class OfItsOwn(Tied):
    """Its class has an ``_apply``, as ``nn.RNN`` does."""

    called = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.called += 1
        return super()._apply(fn, recurse)


def _sharded(kind: type[Tied]) -> Tied:
    with torch.device("meta"):
        model = kind()
    model.scale = torch.full((1,), 2.0)
    for part in (model.inner, model):
        fully_shard(part)
    model.first.weight.note = "kept"  # type: ignore[attr-defined]
    return model


def _plain() -> Tied:
    model = Tied()
    model.scale.fill_(2.0)
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(_values(k, parameter.shape))
    return model


def _values(k: int, shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel()).reshape(shape) / (10.0 + k)


def _allocate(model: nn.Module, empty_like: Callable[[torch.Tensor], torch.Tensor]) -> None:
    waiting = [p for p in model.parameters() if isinstance(p, DTensor) and p.is_meta]
    allocate_dtensors([*model.modules()], waiting, empty_like)


@pytest.mark.parametrize("kind", [Tied, OfItsOwn])
@on_ranks(2, 3)
def test_shards_get_memory_where_they_are(kind: type[Tied]) -> None:
    model = _sharded(kind)
    before = dict(model.named_parameters(remove_duplicate=False))
    wants = {name: p.requires_grad for name, p in before.items()}
    _allocate(model, lambda local: torch.empty_like(local, device="cpu"))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "the optimizer may have them already"
    assert model.first.weight is model.second.weight
    # Where a class has an _apply of its own, torch's drops attributes.
    assert getattr(model.first.weight, "note", "") == ("kept" if kind is Tied else "")
    assert {name: p.requires_grad for name, p in after.items()} == wants
    assert all(
        isinstance(p, DTensor) and not p.is_meta and isinstance(p, nn.Parameter) for p in after.values()
    )
    assert float(model.scale) == 2.0
    assert getattr(model, "called", 1) == 1, "a class's own _apply is asked"

    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            whole, shard = _values(k, parameter.shape), parameter.to_local()  # type: ignore[attr-defined]
            rows = -(-parameter.shape[0] // parameter.device_mesh.size())  # type: ignore[attr-defined]
            start = min(rows * parameter.device_mesh.get_local_rank(), len(whole))  # type: ignore[attr-defined]
            shard.copy_(whole[start : start + len(shard)])
    x, plain = torch.linspace(-1, 1, 12).reshape(3, 4), _plain()
    found, expected = model(x), plain(x)
    assert torch.equal(found, expected), "FSDP2 gathers what lies in the new memory"
    found.sum().backward()
    expected.sum().backward()
    for name, parameter in plain.named_parameters():
        gradient = after[name].grad
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad)  # type: ignore[attr-defined]


@on_ranks(2)
def test_what_is_real_stays() -> None:
    model = _sharded(Tied)
    _allocate(model, lambda local: torch.empty_like(local, device="cpu").fill_(1))
    asked: list[torch.Tensor] = []

    def more(local: torch.Tensor) -> torch.Tensor:
        asked.append(local)
        return torch.empty_like(local, device="cpu")

    _allocate(model, more)
    assert not asked
    assert all(float(p.detach().full_tensor().sum()) == p.numel() for p in model.parameters())  # type: ignore[attr-defined]


def test_hooks_put_on_a_bare_copy_stay_off_the_model() -> None:
    """Rules of initial values run the program's own methods on a copy; one may register a hook."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    copied = bare_tree(model)
    copied[0].register_forward_hook(lambda *_: None)
    assert not model[0]._forward_hooks
    model[1].register_forward_hook(lambda *_: None)
    assert not copied[1]._forward_hooks
    assert copied[0].weight is model[0].weight
