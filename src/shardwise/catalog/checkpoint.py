"""Catalog of a shardwise checkpoint, from its manifest alone: no slice file is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import FormatError
from ..layout.boxes import whole
from ..layout.placements import Cut, Geometry
from .manifest import Manifest, read_manifest
from .records import Catalog, Chunk, StoredFile, StoredTensor, assemble
from .slices import SliceTensor, file_name, rank_files

__all__ = ["catalog_of_checkpoint", "catalog_of_slices", "model_tensors", "optimizer_tensors", "packed_name"]


def packed_name(key: str) -> str:
    """Stored name of a packed tensor; no parameter has a name that starts like this."""
    return f"__packed__.{key}"


def replicated(world_size: int) -> Geometry:
    """The geometry of a plain tensor: the same on every rank."""
    return Geometry((world_size,), ("world",), (Cut("replicate"),), tuple(range(world_size)))


def directory(kind: str, name: str) -> str:
    """Directory of a model's or optimizer's slice files: ``model`` or ``models/<name>``."""
    return kind if name == kind else f"{kind}s/{name}"


def model_tensors(manifest: Manifest, model: str = "model", *, aliases: bool = True) -> list[SliceTensor]:
    """What ``model/`` holds, stored aliases included."""
    found = []
    for name, t in manifest.models[model].items():
        for stored in (name, *(t.stored_aliases if aliases else ())):
            found.append(SliceTensor(stored, t.dtype, t.shape, manifest.geometries[t.geometry], t.owner))
    return found


def optimizer_tensors(
    manifest: Manifest, optimizer: str = "optimizer", model: str = "model"
) -> list[SliceTensor]:
    """What ``optimizer/`` holds: one tensor a state, named ``<parameter>.<state>``, and the packed ones."""
    found = []
    for name, t in manifest.models[model].items():
        for state, e in t.states.get(optimizer, {}).items():
            if e.packed is None:
                geometry = manifest.geometries[t.geometry]
                found.append(SliceTensor(f"{name}.{state}", e.dtype, t.shape, geometry, e.owner))
    for key, p in manifest.packed.get(optimizer, {}).items():
        found.append(
            SliceTensor(packed_name(key), p.dtype, (p.count,), replicated(manifest.world_size), p.owner)
        )
    return found


def catalog_of_slices(
    root: str, manifest: Manifest, kind: str, name: str, tensors: Sequence[SliceTensor]
) -> Catalog:
    """Catalog of the slice files in one directory of a checkpoint."""
    folder = directory(kind, name)
    ranks = sorted({r for t in tensors for r in t.geometry.ranks})
    per_rank = {rank: rank_files(tensors, rank) for rank in ranks}
    count = max((len(files) for files in per_rank.values()), default=0)
    chunks: dict[str, list[Chunk]] = {t.name: [] for t in tensors}
    files = []
    for rank, rank_slices in per_rank.items():
        for k, slices in enumerate(rank_slices):
            relative = f"{folder}/{file_name(kind, rank, k, count)}"
            entry = manifest.files.get(relative)
            if entry is None:
                raise FormatError(f"manifest lists no {relative}, which its tensors need", path=root)
            path = os.path.join(root, relative)
            files.append(StoredFile(path, entry.nbytes))
            for s in slices:
                chunks[s.tensor.name].append(Chunk(s.held.box, path, entry.header_bytes + s.offset_bytes))
    stored = {}
    for t in tensors:
        if whole(t.shape).numel == 0:
            stored[t.name] = StoredTensor(t.name, t.dtype, t.shape, ())
        else:
            stored[t.name] = assemble(t.name, t.dtype, chunks[t.name])
    return Catalog("checkpoint", root, stored, tuple(files))


def catalog_of_checkpoint(root: str | os.PathLike[str], model: str = "model") -> Catalog:
    """Catalog of a model in a checkpoint directory, aliases left out (they are names of the same tensor).

    Raises :class:`SourceError`, :class:`FormatError`, :class:`IntegrityError` as reading a manifest does.
    """
    path = os.fspath(root)
    manifest = read_manifest(path)
    if model not in manifest.models:
        raise FormatError(f"holds models {sorted(manifest.models)}, not {model!r}", path=path)
    catalog = catalog_of_slices(path, manifest, "model", model, model_tensors(manifest, model))
    aliases = {a for t in manifest.models[model].values() for a in t.stored_aliases}
    tensors = {n: t for n, t in catalog.tensors.items() if n not in aliases}
    digests = {n: t.digest for n, t in manifest.models[model].items()}
    return Catalog("checkpoint", path, tensors, catalog.files, digests=digests)
