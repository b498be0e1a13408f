"""The manifest of a save: rank 0 makes it from what each rank tells of its files and of its copies of the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..catalog.checkpoint import packed_name
from ..digests.digest import finish
from ..digests.replicas import ReplicaTotals, added_sums
from ..errors import StateError
from ..format.manifest import FileEntry, Manifest, Packed, StateEntry, TensorEntry
from ..format.states import StateKey
from ..layout.placements import Geometry
from ..ranks.ranks import Ranks
from ..state.gradients import GRADIENT
from ..state.optimizer import Drained
from .collect import Collected
from .snapshot import Live, ModelPart, OptimizerPart, Snapshot, plain_tensors

__all__ = ["file_records", "manifest_of", "merged_records", "outline_of"]

#: Digests by kind and name of the part, and stored name.
Digests = Mapping[tuple[str, str, str], int]


def file_records(
    collected: Collected, rank: int, files: Mapping[str, FileEntry], sums: Sequence[int]
) -> dict[str, Any]:
    """A rank's record for rank 0: entries of its files, and its share of the digest sums of all tensors."""
    entries = {name: {**asdict(entry), "blocks": list(entry.blocks)} for name, entry in files.items()}
    share = _totals(collected.snapshot).share(np.array(sums, dtype=np.uint64), rank)
    return {"files": entries, "sums": share}


def merged_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of several ranks as one: all entries, and the sums of shares."""
    files = {name: entry for one in records for name, entry in one["files"].items()}
    return {"files": files, "sums": added_sums([one["sums"] for one in records])}


def manifest_of(collected: Collected, ranks: Ranks, records: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote. ``records``: the :func:`merged_records` of all ranks.

    Raises :class:`StateError` naming tensors whose replicas differ between ranks.
    """
    _refuse_unequal(collected.snapshot, records["sums"])
    return manifest_of_written(collected, ranks, records)


def manifest_of_written(collected: Collected, ranks: Ranks, records: Mapping[str, Any]) -> Manifest:
    """As :func:`manifest_of`, where each rank has summed only what it wrote: replicas are not compared."""
    files = {n: FileEntry(**{**e, "blocks": tuple(e["blocks"])}) for n, e in records["files"].items()}
    return _with_digests(collected, ranks, _digests(collected.snapshot, records["sums"]), files)


def outline_of(collected: Collected, ranks: Ranks) -> Manifest:
    """What the check of documents takes from a manifest, before anything is written: it has no files, no digests, and only the
    tensors that documents name, which are buffers and those with states of few bits."""
    snapshot = collected.snapshot
    named = {name for o in snapshot.optimizers for name in o.drained.low_bit}
    named |= {t.name for m in snapshot.models for t in m.named if t.kind == "buffer"}
    models = [replace(m, live=tuple([v for v in m.live if v.stored.name in named])) for m in snapshot.models]
    optimizers = [replace(o, drained=_only(o.drained, named)) for o in snapshot.optimizers]
    spoken_of = replace(snapshot, models=tuple(models), optimizers=tuple(optimizers))
    return _with_digests(replace(collected, snapshot=spoken_of), ranks, defaultdict(int), {})


def _only(drained: Drained, names: Set[str]) -> Drained:
    """The states of some parameters that are stored as tensors."""
    tensors, packed = drained.tensors, drained.packed_index
    return replace(
        drained,
        tensors={n: states for n, states in tensors.items() if n in names},
        packed_index={n: states for n, states in packed.items() if n in names},
    )


def _with_digests(
    collected: Collected, ranks: Ranks, digests: Digests, files: Mapping[str, FileEntry]
) -> Manifest:
    snapshot = collected.snapshot
    geometries: dict[Geometry, int] = {}
    models = {m.name: _model_entries(m, snapshot, digests, geometries) for m in snapshot.models}
    return Manifest(
        step=collected.step,
        run_id=collected.lineage.run_id,
        parent_step=collected.lineage.parent_step,
        world_size=ranks.world_size,
        seed=collected.seed,
        geometries=tuple(geometries),
        models=models,
        packed={o.name: _packed_entries(o, digests) for o in snapshot.optimizers},
        files=dict(sorted(files.items())),
        software=collected.software,
        hub_tensors=collected.hub_tensors,
        local_documents=tuple(sorted(collected.local)),
    )


def _model_entries(
    model: ModelPart, snapshot: Snapshot, digests: Digests, geometries: dict[Geometry, int]
) -> dict[str, TensorEntry]:
    named = {t.name: t for t in model.named}
    shapes = {v.stored.name: v.stored.shape for v in model.live}
    states = {
        o.name: _state_entries(o, shapes, digests) for o in snapshot.optimizers if o.model == model.name
    }
    entries = {}
    for live in model.live:
        if not live.counted:
            continue
        t = live.stored
        entries[t.name] = TensorEntry(
            dtype=t.dtype,
            shape=t.shape,
            geometry=geometries.setdefault(t.geometry, len(geometries)),
            digest=digests["model", model.name, t.name],
            owner=t.owner,
            kind=named[t.name].kind,
            aliases=named[t.name].aliases,
            stored_aliases=model.stored_aliases.get(t.name, ()),
            refers=live.refers,
            states={o: found[t.name] for o, found in states.items() if t.name in found},
        )
    return entries


def _counted(snapshot: Snapshot) -> list[tuple[ModelPart | OptimizerPart, Live]]:
    """The tensors that have a digest, in the order of a rank's sums."""
    return [(part, v) for part in snapshot.parts for v in part.live if v.counted]


def _totals(snapshot: Snapshot) -> ReplicaTotals:
    stored = [v.stored for _, v in _counted(snapshot)]
    return ReplicaTotals([t.geometry for t in stored], [t.owner for t in stored])


def _refuse_unequal(snapshot: Snapshot, added: Any) -> None:
    """Raises :class:`StateError` naming tensors whose replicas differ, except plain buffers."""
    counted = _counted(snapshot)
    _, differ = _totals(snapshot).read(added)
    buffers = plain_tensors(snapshot, kind="buffer")
    unequal = [
        v.stored.name
        for part, v in map(counted.__getitem__, differ.tolist())
        if not (part.kind == "model" and f"{part.name}:{v.stored.name}" in buffers)
    ]
    if unequal:
        raise StateError(
            f"replicas of {len(unequal)} tensors differ between ranks: {', '.join(unequal[:10])}; they have drifted "
            f"apart, and a checkpoint can hold only one of them{_hint(unequal)}"
        )


def _digests(snapshot: Snapshot, added: Any) -> Digests:
    """Digest of every tensor from the shares of all ranks."""
    counted = _counted(snapshot)
    totals, _ = _totals(snapshot).read(added)
    return {
        (part.kind, part.name, v.stored.name): finish(total, v.stored.dtype, v.stored.shape)
        for (part, v), total in zip(counted, totals.tolist(), strict=True)
    }


def _hint(unequal: Sequence[str]) -> str:
    if not any(name.endswith(f".{GRADIENT}") for name in unequal):
        return ""
    return (
        ". Gradients that wait for an optimizer step were not reduced (DDP's no_sync?): save after the step, or reduce in "
        "every backward"
    )


def _state_entries(
    part: OptimizerPart, shapes: Mapping[str, tuple[int, ...]], digests: Digests
) -> dict[str, dict[str, StateEntry]]:
    stored = {v.stored.name: v.stored for v in part.live}
    found: dict[str, dict[str, StateEntry]] = {}
    for name, states in part.drained.tensors.items():
        for key in states:
            t = stored[StateKey(name, key).name]
            digest = digests["optimizer", part.name, t.name]
            own = t.shape if t.shape != shapes[name] else None
            found.setdefault(name, {})[key] = StateEntry(t.dtype, digest, t.owner, shape=own)
    for name, packed in part.drained.packed_index.items():
        for key, (pack, index) in packed.items():
            dtype = pack.rsplit(".", 1)[1]
            found.setdefault(name, {})[key] = StateEntry(dtype, packed=pack, index=index)
    return found


def _packed_entries(part: OptimizerPart, digests: Digests) -> dict[str, Packed]:
    stored = {v.stored.name: v.stored for v in part.live}
    found = {}
    for key, tensor in part.drained.packed.items():
        t = stored[packed_name(key)]
        found[key] = Packed(t.dtype, tensor.numel(), digests["optimizer", part.name, t.name], t.owner)
    return found
