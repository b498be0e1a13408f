"""A training run at one instant, as named tensors and documents. References, not copies."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from ..catalog.checkpoint import packed_name, replicated
from ..catalog.slices import SliceTensor, assign_owners
from ..dtypes import code_of
from ..errors import StateError
from ..layout.model import geometries_of, local_tensor, reshard, world_size
from ..layout.placements import Geometry
from ..names import NamedTensor, canonical_name, named_tensors, unwrap
from ..proof.digest import partial_sum
from ..recipe.transformers import is_transformers_model
from .optimizer import Drained, drain, parameter_names
from .rng import capture_rng
from .train_state import TrainState
from .typed_json import Encoded, encode

__all__ = ["COMPARED_ONLY", "Live", "Snapshot", "take_snapshot"]

#: A document that is compared between ranks but stored elsewhere (as tensors of ``optimizer/``).
COMPARED_ONLY = "optimizer.packed"


@dataclass(frozen=True, slots=True)
class Live:
    """A stored tensor and the live one behind it. ``counted=False`` for a second copy under a tied name."""

    stored: SliceTensor
    tensor: torch.Tensor
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank contributes to a checkpoint.

    ``pieces`` are documents by name (``scheduler``, ``rng``, …); which of them are the same on all ranks
    is found out when saving. ``always_local`` are kept per rank even if they happen to be equal.
    """

    named: tuple[NamedTensor, ...]
    model: tuple[Live, ...]
    optimizer: tuple[Live, ...]
    drained: Drained
    pieces: Mapping[str, Encoded]
    always_local: frozenset[str]
    stored_aliases: Mapping[str, tuple[str, ...]]
    not_stored: tuple[str, ...]


def take_snapshot(state: TrainState, step: int) -> Snapshot:
    """Collect everything of a training state on this rank; nothing is copied but 0-d optimizer states.

    Raises :class:`StateError` naming what can't be expressed, before anything is written.
    """
    step = operator.index(step)
    if step < 0:
        raise StateError(f"step must not be negative, got {step}")
    reshard(state.model)
    named = tuple(named_tensors(state.model))
    persistent = [t for t in named if t.persistent]
    geometries = geometries_of(state.model, persistent)
    aliases = {
        t.name: t.aliases for t in persistent if t.aliases and is_transformers_model(unwrap(state.model))
    }
    model = assign_owners(
        [
            SliceTensor(t.name, code_of(t.tensor.dtype), tuple(t.tensor.shape), geometries[t.name])
            for t in persistent
        ]
    )
    live = []
    for t, stored in zip(persistent, model, strict=True):
        live.append(Live(stored, t.tensor))
        for alias in aliases.get(t.name, ()):
            copy = SliceTensor(alias, stored.dtype, stored.shape, stored.geometry, stored.owner)
            live.append(Live(copy, t.tensor, counted=False))
    drained = Drained()
    if state.optimizer is not None:
        drained = drain(state.optimizer, parameter_names(state.optimizer, named))
    pieces = {name: encode(value, where=name) for name, value in _pieces(state, drained, step).items()}
    return Snapshot(
        named=named,
        model=tuple(live),
        optimizer=tuple(_optimizer_live(drained, model)),
        drained=drained,
        pieces=pieces,
        always_local=frozenset({"rng", "optimizer.opaque"}),
        stored_aliases=aliases,
        not_stored=tuple(path for piece in pieces.values() for path in piece.not_stored),
    )


def _optimizer_live(drained: Drained, model: list[SliceTensor]) -> list[Live]:
    geometries = {t.name: t.geometry for t in model}
    tensors: dict[str, torch.Tensor] = {}
    stored = []
    for name, states in drained.tensors.items():
        for key, tensor in states.items():
            full = f"{name}.{key}"
            tensors[full] = tensor
            stored.append(SliceTensor(full, code_of(tensor.dtype), tuple(tensor.shape), geometries[name]))
    for key, tensor in drained.packed.items():
        full = packed_name(key)
        tensors[full] = tensor
        stored.append(SliceTensor(full, code_of(tensor.dtype), tuple(tensor.shape), replicated(world_size())))
    return [Live(t, tensors[t.name]) for t in assign_owners(stored)]


def _pieces(state: TrainState, drained: Drained, step: int) -> dict[str, Any]:
    pieces: dict[str, Any] = {"step": step, "rng": capture_rng()}
    if state.optimizer is not None:
        pieces["optimizer"] = {
            "class": type(state.optimizer).__qualname__,
            "groups": drained.groups,
            "values": drained.values,
        }
        pieces[COMPARED_ONLY] = drained.packed
        if drained.opaque:
            pieces["optimizer.opaque"] = drained.opaque
    for name in ("scheduler", "scaler", "dataloader"):
        value = getattr(state, name)
        if value is not None:
            pieces[name] = _state_of(value, name)
    for name, value in state.extra.items():
        has_state = hasattr(value, "state_dict") or hasattr(value, "load_state_dict")
        pieces[f"extra.{name}"] = _state_of(value, f"extra.{name}") if has_state else value
    modules = {path: m.get_extra_state() for path, m in modules_with_state(state.model)}
    if modules:
        pieces["modules"] = modules
    return pieces


def modules_with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that keep state beside tensors (``get_extra_state``), by canonical name, once each."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield canonical_name(path), module


def _state_of(value: Any, name: str) -> Any:
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        hint = ""
        if name == "dataloader":
            hint = "; wrap a plain DataLoader: shardwise.ResumableLoader(loader)"
        raise StateError(f"{name} of type {type(value).__name__} has no state_dict and load_state_dict{hint}")
    return value.state_dict()


def piece_hash(piece: Encoded) -> str:
    """Hash of a document and its tensors' bytes."""
    total = xxhash.xxh3_64(json.dumps(piece.document, allow_nan=False).encode())
    for key in sorted(piece.tensors):
        tensor = piece.tensors[key].detach().cpu().contiguous()
        total.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def layout_hash(snapshot: Snapshot) -> str:
    """Hash of which tensors are stored and how they lie on ranks; one manifest can only describe one layout."""
    geometries: dict[Geometry, int] = {}
    total = xxhash.xxh3_64()
    for live in (*snapshot.model, *snapshot.optimizer):
        t = live.stored
        index = geometries.setdefault(t.geometry, len(geometries))
        total.update(repr((t.name, t.dtype, t.shape, index)).encode())
    total.update(repr(list(geometries)).encode())
    return total.hexdigest()


def plain_sums(snapshot: Snapshot) -> dict[str, int]:
    """Digest sums of what every rank holds whole, to find out whether ranks agree."""
    sums = {}
    for t in snapshot.named:
        if t.persistent and local_tensor(t.tensor) is t.tensor:
            sums[t.name] = partial_sum(t.tensor.detach(), (0,) * t.tensor.dim())
    return sums
