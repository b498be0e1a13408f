"""Canonical names: the same whatever wraps the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.errors import LayoutError
from shardwise.names import canonical_name, named_tensors, unwrap


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", ""),
        ("weight", "weight"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight", "layers.0.mlp.weight"),
        ("module._orig_mod.a.module.b", "a.b"),
        ("_fsdp_wrapped_module.a", "a"),
        ("submodule.modules.module_a", "submodule.modules.module_a"),
    ],
)
def test_wrapper_parts_are_left_out_wherever_they_stand(path: str, name: str) -> None:
    assert canonical_name(path) == name


def test_wrappers_do_not_change_names() -> None:
    def names(model: nn.Module) -> list[str]:
        return [t.name for t in named_tensors(model)]

    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    wrapped = plain()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    compiled = torch.compile(wrapped, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert names(compiled) == names(plain())
    outer = nn.Module()
    outer.module = compiled  # as DistributedDataParallel does
    assert names(outer) == names(plain())


def test_ties_list_all_names_and_owners() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
    model.head.weight = model.embed.weight
    model.again = model.embed
    model.register_buffer("kept", torch.zeros(1), persistent=False)
    model.head.register_buffer("kept", model.kept, persistent=True)
    model.last = nn.Module()
    model.last.register_buffer("kept", model.kept, persistent=False)
    weight, buffer = sorted(named_tensors(model), key=lambda t: t.kind, reverse=True)
    assert (weight.name, weight.aliases) == ("embed.weight", ("head.weight", "again.weight"))
    assert weight.owners == ((model.embed, "weight"), (model.head, "weight"))
    assert (weight.kind, weight.persistent) == ("parameter", True)
    assert weight.tensor is model.embed.weight
    assert (buffer.name, buffer.persistent) == ("kept", True), "state_dict has it under one of its names"
    assert buffer.aliases == ("head.kept", "last.kept")


def test_two_parameters_with_one_name_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    model.module = nn.Module()
    model.module.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(LayoutError, match=r"weight: held at weight, module\.weight"):
        named_tensors(model)


def test_unwrap_takes_off_what_is_around_the_root() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    assert unwrap(inner) is inner, "a child's name decides, not that there is only one"
    assert unwrap(torch.compile(nn.DataParallel(inner), backend="eager")) is inner
    own = nn.Module()
    own.module, own.scale = inner, nn.Parameter(torch.ones(1))
    assert unwrap(own) is own, "it has a tensor of its own"
