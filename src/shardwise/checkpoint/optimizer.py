"""Restores optimizer state: groups, tensors by parameter name, digests, scalars and other values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..catalog import Catalog
from ..catalog.checkpoint import catalog_of_slices, optimizer_tensors, packed_name
from ..digests.digest import tensor_digest
from ..digests.live import live_digests
from ..dtypes import code_of, torch_dtype
from ..errors import FormatError, IntegrityError, StateError
from ..format.manifest import Manifest, TensorEntry
from ..gc_paused import gc_paused
from ..layout.live import LiveModel
from ..layout.model import local_tensor, wanted_states
from ..layout.placements import Geometry
from ..layout.wanted import Layout, Wanted, whole_tensor
from ..limits import brief
from ..planning import IOOptions, Plan, build_plan
from ..ranks.ranks import Ranks
from ..recipe.match import Rules, match_rules, renamed
from ..state.gradients import GRADIENT, place_gradients
from ..state.optimizer import (
    check_groups,
    check_stored,
    fill_groups,
    parameter_names,
    place_scalars,
    place_states,
    place_values,
)
from ..state.places import Places
from ..state.train_state import document_of
from ..transfer import FileReader
from ..transfer.copy import Destination, Staging, execute
from ..transfer.page_cache import page_cache_for

__all__ = ["RestoredOptimizer", "TrainedBy", "check_optimizer", "restore_optimizer", "same_place"]


@dataclass(frozen=True, slots=True)
class TrainedBy:
    """An optimizer of this run, and the model whose parameters it holds."""

    name: str
    optimizer: Optimizer
    model_name: str
    live: LiveModel

    @property
    def document(self) -> str:
        return document_of("optimizer", self.name)

    @property
    def opaque(self) -> str:
        return document_of("optimizer", self.name, "opaque")


@dataclass(frozen=True, slots=True)
class RestoredOptimizer:
    """The result of restoring an optimizer on this rank."""

    bytes_read: int
    tensors: int
    """Number of stored tensors, gradients included."""
    gradients: int
    """Number of gradients that wait for a step."""
    differences: tuple[str, ...]
    """Gradients whose dtype changed."""


def check_optimizer(part: TrainedBy, manifest: Manifest, documents: Mapping[str, Any]) -> None:
    """Raise :class:`StateError` or :class:`FormatError` for state that an optimizer of this run can't take.

    Uses the documents and the manifest, with the model's names; changes nothing.
    """
    entries = manifest.models[part.model_name]
    names = parameter_names(part.optimizer, part.live.tensors)
    document = documents[part.document]
    check_groups(part.optimizer, names, document["groups"])
    check_stored(part.optimizer, names, (n for n, e in entries.items() if e.states.get(part.name)))
    check_stored(part.optimizer, names, document["values"])
    _check_opaque(documents.get(part.opaque, {}), entries, manifest, part.live.geometries)


def restore_optimizer(
    part: TrainedBy,
    manifest: Manifest,
    stored: Manifest,
    path: str,
    documents: dict[str, Any],
    places: Places,
    ranks: Ranks,
    io: IOOptions,
) -> RestoredOptimizer:
    """Fill an optimizer and the gradients that wait for its step; drop all other gradients of its parameters.

    ``manifest`` has the model's names, ``stored`` the names that order slice files.
    """
    entries = manifest.models[part.model_name]
    with ranks.agree("plan optimizer state"):
        names = parameter_names(part.optimizer, part.live.tensors)
        document = documents[part.document]
        _place_documents(part, names, documents, places)
        fill_groups(part.optimizer, names, document["groups"])
        spread = {n: _spread_states(t, part.name) for n, t in entries.items() if t.states.get(part.name)}
        tensors, scalars_before = place_states(part.optimizer, names, spread)
        packed = {
            k: torch.empty(p.count, dtype=torch_dtype(p.dtype)) for k, p in manifest.packed[part.name].items()
        }
        geometries = part.live.geometries
        _check_opaque(documents.get(part.opaque, {}), entries, manifest, geometries)
        slices = optimizer_tensors(stored, part.name, part.model_name)
        catalog = catalog_of_slices(path, stored, "optimizer", part.name, slices)
        live = {alias: t.name for t in part.live.tensors for alias in t.names}
        plan = _plan_states(catalog, tensors, packed, geometries, live, io)
    local = {n: local_tensor(t) for n, t in tensors.items()} | {packed_name(k): t for k, t in packed.items()}
    page_cache = page_cache_for(io, (t.device for t in local.values()))
    with ranks.agree("read optimizer state"), FileReader(ranks.tick, page_cache=page_cache) as reader:
        execute(plan.transfers, reader, Destination(local), Staging(io, plan.staging_bytes))
    _check_state_digests(part, manifest, tensors, packed, geometries, path, ranks)
    with ranks.agree("place optimizer state"):
        scalars: dict[str, dict[str, torch.Tensor]] = {}
        for name, entry in entries.items():
            for key, e in entry.states.get(part.name, {}).items():
                if e.packed is not None:
                    scalars.setdefault(name, {})[key] = packed[e.packed][e.index]
        gradients = {n.rsplit(".", 1)[0]: t for n, t in tensors.items() if n.endswith(f".{GRADIENT}")}
        gradients |= {n: states.pop(GRADIENT) for n, states in scalars.items() if GRADIENT in states}
        differences = place_gradients(part.optimizer, names, gradients)
        place_scalars(part.optimizer, names, scalars, scalars_before)
        place_values(part.optimizer, names, document["values"])
        if part.opaque in documents:
            place_values(part.optimizer, names, documents[part.opaque])
    return RestoredOptimizer(reader.bytes_read, len(tensors) + len(packed), len(gradients), differences)


def _place_documents(
    part: TrainedBy, names: Mapping[int, str], documents: Mapping[str, Any], places: Places
) -> None:
    """Move the documents' tensors: hyper-parameters to the devices of the live ones, states to their parameter's."""
    groups = part.optimizer.param_groups
    parameters = {names[id(p)]: p for group in groups for p in group["params"]}
    places.put(documents[part.document]["groups"], lambda: [{"options": group} for group in groups])
    for states in (documents[part.document]["values"], documents.get(part.opaque, {})):
        for name, of_one in states.items():
            places.put(of_one, lambda o=of_one, n=name: dict.fromkeys(o, parameters.get(n)))  # type: ignore[misc]


def _check_opaque(
    opaque: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    manifest: Manifest,
    geometries: Mapping[str, Geometry],
) -> None:
    """Refuse rank-local state of a parameter that is now cut differently."""
    lost = [n for n in opaque if n not in entries or n not in geometries]
    if lost:
        raise FormatError(
            f"the checkpoint holds optimizer state of {brief(lost[0])}, which is not a tensor of its model"
        )
    moved = [n for n in opaque if not same_place(manifest.geometries[entries[n].geometry], geometries[n])]
    if moved:
        raise StateError(
            f"optimizer state of {', '.join(moved[:5])} has another shape than its parameter and was stored per rank; "
            f"the parameter is now spread over ranks otherwise, so it can't be carried over"
        )


def same_place(a: Geometry, b: Geometry) -> bool:
    """Whether two geometries put the same elements on the same ranks; names of axes do not matter."""
    return (a.axis_sizes, a.cuts, a.ranks, a.fsdp_order) == (b.axis_sizes, b.cuts, b.ranks, b.fsdp_order)


def _spread_states(entry: TensorEntry, optimizer: str) -> dict[str, str]:
    return {key: e.dtype for key, e in entry.states[optimizer].items() if e.packed is None}


@gc_paused()
def _plan_states(
    catalog: Catalog,
    tensors: Mapping[str, torch.Tensor],
    packed: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    live: Mapping[str, str],
    io: IOOptions,
) -> Plan:
    wanted: list[Wanted] = wanted_states(tensors, {n: geometries[n.rsplit(".", 1)[0]] for n in tensors})
    wanted += [whole_tensor(packed_name(k), code_of(t.dtype), tuple(t.shape)) for k, t in packed.items()]

    def rename(stored: Sequence[str]) -> dict[str, str]:
        parts = {n: n.rsplit(".", 1) for n in stored}
        return {n: f"{live[p[0]]}.{p[1]}" if p[0] in live else n for n, p in parts.items()}

    matched = match_rules(catalog, wanted, Rules(renamed(rename)))
    return build_plan(catalog, Layout(tuple(wanted)), matched, io)


def _check_state_digests(
    part: TrainedBy,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    packed: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    path: str,
    ranks: Ranks,
) -> None:
    found = live_digests(tensors, {n: geometries[n.rsplit(".", 1)[0]] for n in tensors}, ranks)
    with ranks.agree("compare optimizer digests"):
        wrong = []
        for name, digest in found.items():
            parameter, key = name.rsplit(".", 1)
            if digest != manifest.models[part.model_name][parameter].states[part.name][key].digest:
                wrong.append(name)
        wrong += [k for k, t in packed.items() if tensor_digest(t) != manifest.packed[part.name][k].digest]
        if wrong:
            raise IntegrityError(
                f"optimizer state differs from what was saved: {', '.join(wrong[:20])}", path=path
            )
