"""Collects a training state by reference and compares it between ranks, before anything is written."""

from __future__ import annotations

import platform
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cache
from typing import Any

import torch

from ..catalog.checkpoint import directory
from ..errors import StateError
from ..format.manifest import Manifest
from ..limits import MAX_NAME_CHARS, brief
from ..models.assets import asset_files
from ..objects import frozen, gc_paused
from ..ranks.ranks import Ranks
from ..recipe.origin import recall
from ..state.optimizer import AgreedForm
from ..state.storable import refuse_meta
from ..state.train_state import TrainState, document_of
from ..state.typed_json import Encoded, encode
from .compare import LAYOUT, PLAIN, comparable, differing_in, differing_tensors, merged
from .low_bit_save import agree_on_forms
from .own_files import OwnPart, own_parts
from .snapshot import Snapshot, on_host, plain_sums, plain_tensors, take_snapshot

__all__ = ["Collected", "Lineage", "Taken", "collect", "compare", "software_versions", "take"]

#: Files that every checkpoint may have.
_OWN_NAMES = ("manifest.json", "state.json", "state.safetensors")


@frozen
class Lineage:
    """The run that writes, and the step that it last saved or resumed from."""

    run_id: str
    parent_step: int | None
    base: dict[tuple[str, str], int] = field(default_factory=dict)
    """Digests of the tensors that the steps before only refer to, by model and name. On rank 0, of this process."""

    def at(self, step: int) -> Lineage:
        """The same run after it saved ``step``."""
        return replace(self, parent_step=step)

    def refuse_changed_base(self, manifest: Manifest) -> None:
        """Raise :class:`StateError` for a frozen tensor that has changed since the step before: no file holds its content."""
        found = {(m, n): t.digest for m, ts in manifest.models.items() for n, t in ts.items() if t.refers}
        changed = [n for (m, n), digest in found.items() if self.base.get((m, n), digest) != digest]
        if changed:
            raise StateError(
                f"{len(changed)} frozen tensors have changed since the step before: {', '.join(changed[:10])}; a checkpoint "
                f"that only refers to them would lose that: give TrainState(frozen='hold')"
            )
        self.base.update(found)


@frozen
class Taken:
    """What one rank has at one instant; not yet compared with what the other ranks have.

    Tensors are references to the live ones, until :mod:`.stage` replaces them by copies.
    """

    snapshot: Snapshot
    assets: Mapping[str, bytes]
    """Small files beside the models' tensors, by path in the checkpoint; on rank 0."""
    step: int
    lineage: Lineage
    seed: int
    software: Mapping[str, str]
    hub_tensors: Mapping[str, Mapping[str, tuple[int, ...]]]
    own: Sequence[OwnPart]
    """What this rank writes, for each part of the snapshot."""


@frozen
class Collected(Taken):
    """The same, compared between ranks and ready to be written; holds no other live objects."""

    shared: Mapping[str, Encoded]
    """Documents that are equal on all ranks."""
    local: Mapping[str, Encoded]
    """Documents that only this rank has."""


@gc_paused()
def take(
    state: TrainState, step: int, lineage: Lineage, forms: Mapping[int, Mapping[str, AgreedForm]], rank: int
) -> Taken:
    """Take a training state by reference. Rank-local. ``forms``: as :func:`.low_bit_save.agree_on_forms` gives them.

    Raises :class:`StateError`.
    """
    snapshot = take_snapshot(state, step, forms)
    for live in (live for part in snapshot.parts for live in part.live):
        refuse_meta(live.stored.name, live.tensor)
    _check_names(snapshot)
    assets = _assets(state) if rank == 0 else {}
    seed, own = torch.initial_seed() % 2**63, own_parts(snapshot, rank)
    return Taken(snapshot, assets, step, lineage, seed, software_versions(state), _hub_tensors(state), own)


def compare(taken_by: Callable[[], Taken | None], ranks: Ranks) -> Collected | None:
    """Compare what all ranks have taken; None if a rank has taken nothing. Collective; writes nothing. The caller may not change the
    state before it returns.

    Raises :class:`StateError` or :class:`RankError` on every rank, also for what ``taken_by`` raises on any of them.
    """
    taken: Taken | None = None
    sums: dict[str, int] = {}

    def told() -> dict[str, Any] | None:
        nonlocal taken, sums
        taken = taken_by()
        if taken is None:
            return None
        if ranks.world_size > 1:
            sums = plain_sums(taken.snapshot)
        return comparable(taken.snapshot, sums, ranks)

    found = ranks.reduce("collect state", told, merged, differing_in)
    if taken is None or found is None:
        return None
    differing, held = found
    snapshot = taken.snapshot
    _refuse_other_modules(held)
    _refuse_other_layouts(snapshot, differing)
    tensors = differing_tensors(sums, ranks) if PLAIN in differing else set()
    shared, local = _split_documents(snapshot, set(differing), tensors, ranks)
    return Collected(**{f.name: getattr(taken, f.name) for f in fields(taken)}, shared=shared, local=local)


def collect(state: TrainState, step: int, lineage: Lineage, ranks: Ranks) -> Collected:
    """Collect a training state by reference and compare it between ranks. Collective; writes nothing.

    Raises :class:`StateError` or :class:`RankError` on every rank.
    """
    forms = agree_on_forms(state, ranks)
    found = compare(lambda: take(state, step, lineage, forms, ranks.rank), ranks)
    assert found is not None
    return found


def _check_names(snapshot: Snapshot) -> None:
    """Raise :class:`StateError` for a tensor's name that readers of slice files refuse."""
    for part in snapshot.models:
        for v in part.live:
            if len(v.stored.name) > MAX_NAME_CHARS:
                raise StateError(
                    f"{part.name}: the tensor {brief(v.stored.name)} has a name of {len(v.stored.name)} characters, the limit "
                    f"is {MAX_NAME_CHARS}; give the module or the parameter a shorter name"
                )
            if v.stored.name == "__metadata__":
                raise StateError(
                    f"{part.name}: safetensors keeps the name '__metadata__' for itself; give the parameter or the buffer another one"
                )


def _split_documents(
    snapshot: Snapshot, documents: set[str], tensors: set[str], ranks: Ranks
) -> tuple[dict[str, Encoded], dict[str, Encoded]]:
    """Documents that are equal on all ranks, and those that differ. Plain buffers that differ become a document.

    ``documents`` and ``tensors``: names of those that differ.
    Raises :class:`StateError` if a plain *parameter* differs between ranks: its gradients were not reduced.
    """
    local_names = snapshot.always_local | (documents & set(snapshot.documents))
    buffers: dict[str, dict[str, torch.Tensor]] = {}
    for key, (part, t) in plain_tensors(snapshot, kind="buffer").items():
        if key in tensors:
            buffers.setdefault(document_of("model", part.name, "buffers"), {})[t.name] = t.tensor
    _refuse_differing(snapshot, documents, tensors)  # alike on every rank
    local = {n: p for n, p in snapshot.documents.items() if n in local_names}
    if tensors:  # on every rank, or on none
        with ranks.agree("compare state"):
            local |= on_host({name: encode(values, where=name) for name, values in buffers.items()})
    left_out = local_names | snapshot.compared_only
    shared = {n: p for n, p in snapshot.documents.items() if n not in left_out}
    return shared, {n: p for n, p in local.items() if n not in snapshot.compared_only}


def _assets(state: TrainState) -> dict[str, bytes]:
    found = {
        f"{directory('model', name)}/{file}": content
        for name, model in state.models.items()
        for file, content in asset_files(model).items()
    }
    folders = {directory("model", n) for n in state.models} | {
        directory("optimizer", n) for n in state.optimizers
    }
    own = [*_OWN_NAMES, "rank", *folders]
    for name in state.files:
        first, *rest = name.split("/")
        is_relative = posixpath.normpath(name) == name and first not in ("", ".", "..")
        is_ours = (
            name in own or first == "rank" or (first in folders and rest and name.endswith(".safetensors"))
        )
        if not is_relative or is_ours:
            raise StateError(
                f"files={{{name!r}: …}}: expected a relative path, but not of a file of the format itself"
            )
    return {**found, **state.files}


def _refuse_other_modules(held: Mapping[str, int]) -> None:
    """Refuse ranks with different models. ``held``: their tensors in words, with the first rank that has these."""
    if len(held) > 1:
        some = "; ".join(f"rank {rank} has {text}" for text, rank in held.items())
        raise StateError(
            f"ranks hold different modules: {some}. Every rank must hold the same model: pipeline stages, and modules that "
            f"are made on some ranks only, are not supported. Use torch.distributed.checkpoint for these"
        )


def _refuse_other_layouts(snapshot: Snapshot, differing: Sequence[str]) -> None:
    if LAYOUT in differing:
        live = [v for part in snapshot.models for v in part.live]
        every = max(len(v.stored.geometry.ranks) for v in live)
        parts = [v.stored.name for v in live if len(v.stored.geometry.ranks) < every]
        raise StateError(
            "ranks do not describe the same tensors: their names, shapes, dtypes, meshes or optimizer states "
            "differ between ranks"
            + (f"; on meshes of only some ranks: {', '.join(parts[:10])}" if parts else "")
            + ". Every rank must hold the same model, and a tensor's mesh must be the same one on every rank "
            "(say Replicate() on its further axes instead of slicing the mesh). Pipeline parallelism, where each rank has "
            "its own stage, is not supported"
        )


def _refuse_differing(snapshot: Snapshot, documents: set[str], tensors: set[str]) -> None:
    parameters = {
        key: t.name if len(snapshot.models) == 1 else f"{part.name} {t.name}"
        for key, (part, t) in plain_tensors(snapshot, kind="parameter").items()
    }
    optimizers = {document_of("optimizer", o.name) for o in snapshot.optimizers}
    bad = sorted(parameters[key] for key in tensors & parameters.keys())
    bad += sorted(documents & ({"step"} | optimizers | snapshot.compared_only))
    if bad:
        raise StateError(
            f"ranks hold different values of {', '.join(bad[:10])}, which must be equal on all: were the gradients "
            f"of unsharded parameters reduced, and does every rank save the same step?"
        )


def _hub_tensors(state: TrainState) -> dict[str, dict[str, tuple[int, ...]]]:
    """For each loaded model, names and shapes of its source tensors; nothing if they are its own."""
    origins = {name: recall(model) for name, model in state.models.items()}
    return {name: {} if o.is_plain else dict(o.shapes) for name, o in origins.items() if o is not None}


def software_versions(state: TrainState) -> dict[str, str]:
    """Versions, threads and devices: an exact resume needs the same."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    for package in ("shardwise", "transformers", "numpy"):
        found[package] = _version(package)
    device = next((p.device.type for m in state.models.values() for p in m.parameters()), "cpu")
    found["device"] = _device_name(device)
    found["threads"] = str(torch.get_num_threads())
    return found


@cache
def _version(package: str) -> str:
    """Of an installed package; it does not change while the process runs, and to read it takes milliseconds."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device_name(kind: str) -> str:
    """The model of this process's current device of a type; the type, if torch has no name for it (CPU, MPS)."""
    module = None if kind == "meta" else torch.get_device_module(kind)
    found: str = getattr(module, "get_device_name", lambda: kind)()
    return found
