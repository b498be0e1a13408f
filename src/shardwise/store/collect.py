"""Collecting a training state: everything by reference, compared between ranks, before anything is written."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..dist import Ranks
from ..errors import StateError
from ..recipe.record import recall
from ..state.snapshot import COMPARED_ONLY, Snapshot, layout_hash, piece_hash, plain_sums, take_snapshot
from ..state.train_state import TrainState
from ..state.typed_json import Encoded, encode
from .companions import companion_files

__all__ = ["Collected", "Lineage", "collect", "software_versions"]

#: Compared between ranks beside the documents: how the tensors lie on ranks.
_LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which run writes, and the step that it last saved or resumed from."""

    run_id: str
    parent_step: int | None


@dataclass(frozen=True, slots=True)
class Collected:
    """A training state at one instant, as the ranks agreed to store it: what writing needs, and nothing live else.

    Tensors are references to the live ones, until :mod:`.stage` puts copies in their place.
    """

    snapshot: Snapshot
    shared: Mapping[str, Encoded]
    """Documents that are equal on all ranks."""
    local: Mapping[str, Encoded]
    """Documents of this rank."""
    companions: Mapping[str, bytes]
    """Small files beside the model's tensors; on rank 0."""
    step: int
    lineage: Lineage
    seed: int
    software: Mapping[str, str]
    hub_tensors: Mapping[str, Mapping[str, tuple[int, ...]]]


def collect(state: TrainState, step: int, lineage: Lineage, ranks: Ranks) -> Collected:
    """Everything of a training state, by reference, compared between ranks. Collective; writes nothing.

    Raises :class:`StateError` or :class:`RankError` on every rank.
    """
    with ranks.agree("collect state"):
        snapshot = take_snapshot(state, step)
        companions = companion_files(state.model) if ranks.rank == 0 else {}
    shared, local = _split_pieces(snapshot, ranks)
    return Collected(
        snapshot,
        shared,
        local,
        companions,
        step,
        lineage,
        torch.initial_seed() % 2**63,
        software_versions(state),
        _hub_tensors(state),
    )


def _split_pieces(snapshot: Snapshot, ranks: Ranks) -> tuple[dict[str, Encoded], dict[str, Encoded]]:
    """Documents that are equal on all ranks, and those that differ. Plain buffers that differ become a document.

    Raises :class:`StateError` if a plain *parameter* differs between ranks: its gradients were not reduced.
    """
    with ranks.agree("compare state"):
        hashes = {name: piece_hash(piece) for name, piece in snapshot.pieces.items()}
        hashes[_LAYOUT] = layout_hash(snapshot)
        sums = plain_sums(snapshot) if ranks.world_size > 1 else {}
    gathered = ranks.gather("state hashes", json.dumps([hashes, sums]).encode())
    verdict = ranks.share("state that differs", _differing(gathered) if gathered is not None else None)
    documents, tensors = (set(names) for names in json.loads(verdict))
    local_names = snapshot.always_local | (documents & set(snapshot.pieces))
    buffers = {t.name: t.tensor for t in snapshot.named if t.name in tensors and t.kind == "buffer"}
    with ranks.agree("compare state"):
        _refuse_differing(snapshot, documents, tensors)
        local = {n: p for n, p in snapshot.pieces.items() if n in local_names}
        if buffers:
            local["buffers"] = encode(buffers, where="buffers")
    shared = {n: p for n, p in snapshot.pieces.items() if n not in local_names and n != COMPARED_ONLY}
    return shared, local


def _differing(gathered: Sequence[bytes]) -> bytes:
    """Names of the documents, and of the plain tensors, that are not the same on every rank."""
    found = []
    for per_rank in zip(*(json.loads(g) for g in gathered), strict=True):
        names = {name for values in per_rank for name in values}
        found.append(sorted(n for n in names if len({values.get(n) for values in per_rank}) > 1))
    return json.dumps(found).encode()


def _refuse_differing(snapshot: Snapshot, documents: set[str], tensors: set[str]) -> None:
    if _LAYOUT in documents:
        every = max(len(v.stored.geometry.ranks) for v in snapshot.model)
        parts = [v.stored.name for v in snapshot.model if len(v.stored.geometry.ranks) < every]
        raise StateError(
            "ranks do not describe the same tensors: their names, shapes, dtypes, meshes or optimizer states "
            "differ between ranks"
            + (f"; on meshes of some of the ranks lie {', '.join(parts[:10])}" if parts else "")
            + ". Every rank must hold the same model, and a tensor's mesh must be the same one on every rank "
            "(say Replicate() on its further axes instead of slicing the mesh)"
        )
    parameters = {t.name for t in snapshot.named if t.kind == "parameter"}
    bad = sorted(tensors & parameters) + sorted(documents & {"step", "optimizer", COMPARED_ONLY})
    if bad:
        raise StateError(
            f"ranks hold different values of {', '.join(bad[:10])}, which must be equal on all: were the gradients "
            f"of unsharded parameters reduced, and does every rank save the same step?"
        )


def _hub_tensors(state: TrainState) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the model was loaded from, where they differ from its own."""
    origin = recall(state.model)
    return {} if origin is None or origin.is_plain else {"model": dict(origin.shapes)}


def software_versions(state: TrainState) -> dict[str, str]:
    """What must be the same for a resume to be exact: versions, threads, devices."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    for package in ("shardwise", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    device = next((p.device.type for p in state.model.parameters()), "cpu")
    found["device"] = (
        torch.get_device_module(device).get_device_name() if device not in ("cpu", "meta") else device
    )
    found["threads"] = str(torch.get_num_threads())
    return found
