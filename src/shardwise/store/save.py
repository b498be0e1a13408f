"""Writing one checkpoint: snapshot → write → agree → commit. The function below is the pipeline."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..catalog.checkpoint import directory
from ..catalog.manifest import FileEntry, Manifest, Packed, StateEntry, TensorEntry
from ..catalog.slices import Slice, file_name, owner_ranks, rank_files
from ..dist import Ranks
from ..errors import CheckpointError, StateError
from ..layout.model import local_tensor
from ..layout.placements import Geometry
from ..proof.digest import finish, partial_sum
from ..proof.model import local_sum, replica_totals
from ..recipe.record import recall
from ..state.snapshot import (
    COMPARED_ONLY,
    Live,
    Snapshot,
    layout_hash,
    piece_hash,
    plain_sums,
    take_snapshot,
)
from ..state.train_state import TrainState
from ..state.typed_json import Encoded, encode
from .companions import write_companions
from .publish import commit, make_temporary
from .write import write_file, write_slices

__all__ = ["Lineage", "SaveReport", "software_versions", "write_checkpoint"]


#: Compared between ranks beside the documents: how the tensors lie on ranks.
_LAYOUT = "layout"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which run writes, and the step that it last saved or resumed from."""

    run_id: str
    parent_step: int | None


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The outcome of a save on this rank."""

    path: str
    step: int
    bytes_written: int
    """Payload and headers that this rank wrote."""
    seconds: float
    not_stored: tuple[str, ...]
    """Functions in the state, by path, which can't be stored."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def write_checkpoint(state: TrainState, final: str, step: int, lineage: Lineage, ranks: Ranks) -> SaveReport:
    """Publish ``state`` as the directory ``final``. Collective; on failure nothing is published on any rank."""
    started = time.perf_counter()
    with ranks.agree("collect state"):
        snapshot = take_snapshot(state, step)
    shared, local = _split_pieces(snapshot, ranks)
    temporary = _make_temporary(final, ranks)
    try:
        with ranks.agree("write checkpoint"):
            files, sums = _write_rank(temporary, state, snapshot, shared, local, ranks)
        gathered = ranks.gather("file records", _pack(files, sums))
        with ranks.agree("publish checkpoint"):
            if gathered is not None:
                manifest = _manifest(state, snapshot, step, lineage, ranks, gathered, tuple(sorted(local)))
                commit(temporary, final, manifest)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    written = sum(f.nbytes for f in files.values())
    return SaveReport(final, step, written, time.perf_counter() - started, snapshot.not_stored)


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


def _make_temporary(final: str, ranks: Ranks) -> str:
    def make() -> bytes:
        if os.path.lexists(final):
            raise CheckpointError(f"{final}: is there already; a published checkpoint is never written again")
        return make_temporary(final, ("model", "optimizer", "rank")).encode()

    return ranks.on_first("make temporary directory", make).decode()


def _write_rank(
    root: str,
    state: TrainState,
    snapshot: Snapshot,
    shared: dict[str, Encoded],
    local: dict[str, Encoded],
    ranks: Ranks,
) -> tuple[dict[str, FileEntry], list[int]]:
    """Write and sync this rank's files. Returns their entries and the digest sums of its copies of all tensors."""
    files: dict[str, FileEntry] = {}
    sums: list[int] = []
    for kind, live in (("model", snapshot.model), ("optimizer", snapshot.optimizer)):
        sums += _write_tensors(root, kind, live, files, ranks)
    _write_pieces(root, f"rank/{ranks.rank:05d}", local, files)
    if ranks.rank == 0:
        _write_pieces(root, "state", shared, files)
        write_companions(os.path.join(root, "model"), state.model, files)
    return files, sums


def _write_tensors(
    root: str, kind: str, live: Sequence[Live], files: dict[str, FileEntry], ranks: Ranks
) -> list[int]:
    by_name = {v.stored.name: v for v in live}
    sums = dict.fromkeys((v.stored.name for v in live if v.counted), 0)
    stored = [v.stored for v in live]
    count = max((len(rank_files(stored, r)) for r in _shape_ranks(stored)), default=0)

    def piece_of(one: Slice) -> torch.Tensor:
        held = by_name[one.tensor.name]
        piece = local_tensor(held.tensor).detach()
        for dim, (start, size) in enumerate(zip(one.held.local_start, one.held.box.sizes, strict=True)):
            piece = piece.narrow(dim, start, size)
        if held.counted:
            sums[one.tensor.name] += partial_sum(piece, one.held.box.start)
        return piece

    for k, slices in enumerate(rank_files(stored, ranks.rank)):
        name = f"{directory(kind, kind)}/{file_name(kind, ranks.rank, k, count)}"
        files[name] = write_slices(os.path.join(root, name), slices, piece_of, ranks.tick)
    for v in live:
        t = v.stored
        if v.counted and ranks.rank not in owner_ranks(t.geometry, t.owner):  # another replica writes it
            sums[t.name] = local_sum(v.tensor, t.shape, t.geometry, ranks.rank)
            ranks.tick()
    return [total % 2**64 for total in sums.values()]


def _shape_ranks(stored: Sequence[Any]) -> list[int]:
    return sorted({r for t in stored for r in t.geometry.ranks})


def _write_pieces(root: str, stem: str, pieces: dict[str, Encoded], files: dict[str, FileEntry]) -> None:
    """``<stem>.json`` with the documents and, if they refer to tensors, ``<stem>.safetensors`` with those."""
    from safetensors.torch import save

    tensors = {f"{n}/{k}": t.detach().cpu() for n, p in pieces.items() for k, t in p.tensors.items()}
    document = {name: piece.document for name, piece in pieces.items()}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    files[f"{stem}.json"] = write_file(os.path.join(root, f"{stem}.json"), text)
    if tensors:
        owned = {k: t.clone() for k, t in tensors.items()}  # save() refuses tensors that share storage
        files[f"{stem}.safetensors"] = write_file(os.path.join(root, f"{stem}.safetensors"), save(owned))


def _pack(files: dict[str, FileEntry], sums: list[int]) -> bytes:
    head = json.dumps({name: asdict(entry) for name, entry in files.items()}).encode()
    return len(head).to_bytes(8, "little") + head + np.array(sums, dtype=np.uint64).tobytes()


def _unpack(payload: bytes) -> tuple[dict[str, FileEntry], Any]:
    length = int.from_bytes(payload[:8], "little")
    files = {
        n: FileEntry(**{**e, "blocks": tuple(e["blocks"])})
        for n, e in json.loads(payload[8 : 8 + length]).items()
    }
    return files, np.frombuffer(payload[8 + length :], dtype=np.uint64)


def _manifest(
    state: TrainState,
    snapshot: Snapshot,
    step: int,
    lineage: Lineage,
    ranks: Ranks,
    gathered: Sequence[bytes],
    local_documents: tuple[str, ...],
) -> Manifest:
    parts = [_unpack(g) for g in gathered]
    files = {name: entry for found, _ in parts for name, entry in found.items()}
    digests = _digests(snapshot, np.stack([sums for _, sums in parts]))
    geometries: dict[Geometry, int] = {}
    entries: dict[str, TensorEntry] = {}
    named = {t.name: t for t in snapshot.named}
    states = _state_entries(snapshot, digests)
    for live in snapshot.model:
        if not live.counted:
            continue
        t = live.stored
        entries[t.name] = TensorEntry(
            dtype=t.dtype,
            shape=t.shape,
            geometry=geometries.setdefault(t.geometry, len(geometries)),
            digest=digests[t.name],
            owner=t.owner,
            kind=named[t.name].kind,
            aliases=named[t.name].aliases,
            stored_aliases=snapshot.stored_aliases.get(t.name, ()),
            states={"optimizer": states[t.name]} if t.name in states else {},
        )
    return Manifest(
        step=step,
        run_id=lineage.run_id,
        parent_step=lineage.parent_step,
        world_size=ranks.world_size,
        seed=torch.initial_seed() % 2**63,
        geometries=tuple(geometries),
        models={"model": entries},
        packed={"optimizer": _packed_entries(snapshot, digests)} if state.optimizer is not None else {},
        files=dict(sorted(files.items())),
        software=software_versions(state),
        hub_tensors=_hub_tensors(state),
        local_documents=local_documents,
    )


def _digests(snapshot: Snapshot, sums: Any) -> dict[str, int]:
    """Digest of every tensor from all ranks' sums, [rank, tensor]. Replicas must be equal, but for plain buffers.

    Raises :class:`StateError` naming tensors whose replicas differ.
    """
    counted = [v for v in (*snapshot.model, *snapshot.optimizer) if v.counted]
    totals = replica_totals(sums, [v.stored.geometry for v in counted])
    buffers = {t.name for t in snapshot.named if t.kind == "buffer" and local_tensor(t.tensor) is t.tensor}
    unequal = [
        v.stored.name
        for v, found in zip(counted, totals, strict=True)
        if len(set(found)) > 1 and v.stored.name not in buffers
    ]
    if unequal:
        raise StateError(
            f"replicas of {len(unequal)} tensors differ between ranks: {', '.join(unequal[:10])}; they have drifted "
            f"apart, and a checkpoint can hold only one of them"
        )
    return {
        v.stored.name: finish(found[v.stored.owner], v.stored.dtype, v.stored.shape)
        for v, found in zip(counted, totals, strict=True)
    }


def _state_entries(snapshot: Snapshot, digests: dict[str, int]) -> dict[str, dict[str, StateEntry]]:
    stored = {v.stored.name: v.stored for v in snapshot.optimizer}
    found: dict[str, dict[str, StateEntry]] = {}
    for name, states in snapshot.drained.tensors.items():
        for key in states:
            t = stored[f"{name}.{key}"]
            found.setdefault(name, {})[key] = StateEntry(t.dtype, digests[t.name], t.owner)
    for name, packed in snapshot.drained.packed_index.items():
        for key, (pack, index) in packed.items():
            dtype = pack.rsplit(".", 1)[1]
            found.setdefault(name, {})[key] = StateEntry(dtype, packed=pack, index=index)
    return found


def _packed_entries(snapshot: Snapshot, digests: dict[str, int]) -> dict[str, Packed]:
    from ..catalog.checkpoint import packed_name

    stored = {v.stored.name: v.stored for v in snapshot.optimizer}
    found = {}
    for key, tensor in snapshot.drained.packed.items():
        t = stored[packed_name(key)]
        found[key] = Packed(t.dtype, tensor.numel(), digests[t.name], t.owner)
    return found


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
