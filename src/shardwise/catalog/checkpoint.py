"""Catalog of a shardwise checkpoint, from its manifest alone: no slice file is opened."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..errors import CheckpointError, FormatError, IntegrityError, SourceError
from ..format.manifest import Manifest, read_manifest, refuse_part
from ..format.slices import CutKind, SliceAt, SliceTensor, Spread, StateKey, by_name, file_name
from ..limits import MAX_COUNT, brief, inside
from ..objects import gc_paused
from ..storage import files_in, stat_of_expected
from ..storage.records import is_url
from ..tensors.boxes import Box
from ..tensors.placements import replicated
from .records import Catalog, Chunks, SharedChunk, StoredFile, StoredTensor


def packed_name(key: str) -> str:
    """Stored name of a packed tensor. No parameter's name starts like it."""
    return f"__packed__.{key}"


def directory(kind: str, name: str) -> str:
    """Directory of a model's or optimizer's slice files: ``model`` or ``models/<name>``."""
    return kind if name == kind else f"{kind}s/{name}"


def model_tensors(manifest: Manifest, model: str = "model") -> list[SliceTensor]:
    """The tensors in ``model/``, stored aliases included; without those that the checkpoint only refers to."""
    found = []
    for name, t in manifest.models[model].items():
        if t.refers:
            continue
        for stored in (name, *t.stored_aliases):
            found.append(SliceTensor(stored, t.dtype, t.shape, manifest.geometries[t.geometry], t.owner))
    return found


def optimizer_tensors(
    manifest: Manifest, optimizer: str = "optimizer", model: str = "model"
) -> list[SliceTensor]:
    """The tensors in ``optimizer/``: one per state, named ``<parameter>.<state>``, and the packed ones."""
    found = []
    for name, t in manifest.models[model].items():
        for state, e in t.states.get(optimizer, {}).items():
            if e.packed is None:
                geometry = manifest.geometries[t.geometry]
                stored = StateKey(name, state).name
                found.append(SliceTensor(stored, e.dtype, t.shape_of(e), geometry, e.owner))
    for key, p in manifest.packed.get(optimizer, {}).items():
        found.append(
            SliceTensor(packed_name(key), p.dtype, (p.count,), replicated(manifest.world_size), p.owner)
        )
    return found


def optimizer_digests(
    manifest: Manifest, optimizer: str = "optimizer", model: str = "model"
) -> dict[str, int]:
    """The recorded digest of each of :func:`optimizer_tensors`, by its name."""
    states = {
        name: {s: e.digest for s, e in t.states.get(optimizer, {}).items() if e.packed is None}
        for name, t in manifest.models[model].items()
    }
    packed = manifest.packed.get(optimizer, {})
    return by_name(states) | {packed_name(key): p.digest for key, p in packed.items()}


class _SliceCut:
    """The slices of the tensors of one kind, in the files of all ranks."""

    def __init__(self, kind: CutKind, files: _SliceFiles) -> None:
        self.shape = kind.tensor.shape
        self._kind = kind
        self._files = files

    def touching(self, box: Box) -> list[SharedChunk]:
        return [SharedChunk(p.box, *self._files.find(p)) for p in self._kind.touching(box)]


class _SliceFiles:
    """The slice files of one directory, by rank and number."""

    def __init__(self, spread: Spread, entries: Mapping[tuple[int, int], tuple[str, int]]) -> None:
        self._spread = spread
        self._entries = entries
        self._offsets: dict[tuple[int, int], NDArray[np.int64]] = {}

    def find(self, place: SliceAt) -> tuple[str, NDArray[np.int64]]:
        """The file that holds a slice, and the offsets of all tensors in it, by position."""
        key = (place.rank, place.file)
        path, header_bytes = self._entries[key]
        if key not in self._offsets:
            self._offsets[key] = header_bytes + self._spread.offsets_bytes(*key)
        return path, self._offsets[key]


def check_size(path: str, nbytes: int) -> None:
    """Compare the size of a file with the manifest's, before memory is allocated for it.

    Raises :class:`IntegrityError` (lost, another size, not a regular file), :class:`SourceError`.
    """
    if is_url(path):
        found = stat_of_expected(path)
        problem = None if found is None else size_differs(found.nbytes, nbytes)
        if found is None or problem:
            raise IntegrityError(problem or "lost: no such object", path=path)
        return
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IntegrityError("lost: no such file", path=path) from error
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=path) from error
    problem = size_problem(status, nbytes)
    if problem is not None:
        raise IntegrityError(problem, path=path)


def size_problem(status: os.stat_result, nbytes: int) -> str | None:
    """Why a path that can be looked at is not a file of the size in the manifest; None if it is one."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return size_differs(status.st_size, nbytes)


def size_differs(found: int, expected: int) -> str | None:
    """Why a file of that size is not the one of the manifest; None if it may be."""
    return None if found == expected else f"{found} bytes, expected {expected}: truncated or overwritten"


@gc_paused()
def catalog_of_slices(
    root: str, manifest: Manifest, kind: str, name: str, tensors: Sequence[SliceTensor]
) -> Catalog:
    """Catalog of the slice files in one directory of a checkpoint.

    Costs O(tensors + files): single slices are located when a plan asks for them.
    """
    folder = directory(kind, name)
    nbytes = sum(math.prod(t.shape) * itemsize(t.dtype) for t in tensors)
    if nbytes >= MAX_COUNT:
        raise FormatError(f"{folder}: its tensors have more bytes than a file can hold", path=root)
    if len({t.name for t in tensors}) < len(tensors):
        raise FormatError(f"{folder}: two tensors have one name", path=root)
    spread = Spread(tensors)
    count = max(spread.held.values(), default=0)
    files: dict[tuple[int, int], tuple[str, int]] = {}
    stored_files = []
    versions = _versions_in(inside(root, folder)) if is_url(root) else {}
    for rank, held in spread.held.items():
        for k in range(held):
            relative = f"{folder}/{file_name(kind, rank, k, count)}"
            entry = manifest.files.get(relative)
            if entry is None:
                raise FormatError(f"manifest does not list {relative}, which its tensors need", path=root)
            path = inside(root, relative)
            stored_files.append(StoredFile(path, entry.nbytes, versions.get(os.path.basename(relative))))
            files[rank, k] = path, entry.header_bytes
    held_bytes = sum(f.nbytes for f in stored_files)
    if nbytes > held_bytes:
        raise FormatError(
            f"{folder}: its tensors take {nbytes:,} bytes, but its files hold {held_bytes:,}", path=root
        )
    slice_files = _SliceFiles(spread, files)
    cuts = [None if kind is None else _SliceCut(kind, slice_files) for kind in spread.kinds]
    stored = {}
    for t in tensors:
        position, k = spread.find(t.name)
        cut = cuts[k]
        stored[t.name] = StoredTensor(t.name, t.dtype, t.shape, Chunks(cut, position) if cut else ())
    return Catalog("checkpoint", root, stored, tuple(stored_files))


def _versions_in(url: str) -> dict[str, str | None]:
    """The versions of the objects in a folder of a store, by name."""
    return {name: stat.version for name, stat in files_in(url).items()}


def catalog_of_checkpoint(
    root: str | os.PathLike[str], model: str | None = None, *, manifest: Manifest | None = None
) -> Catalog:
    """Catalog of a model in a checkpoint directory, without aliases (other names of the same tensor).

    ``model`` names one of several; None takes the only one, or the one called ``model``. ``manifest``: the
    directory's, if it was read already. Raises :class:`SourceError`, :class:`FormatError`, :class:`IntegrityError`
    as reading a manifest does; :class:`CheckpointError` for one host's part of a step.
    """
    path = os.fspath(root)
    manifest = manifest or read_manifest(path)
    refuse_part(path, manifest)
    return catalog_of_manifest(path, manifest, model)


def catalog_of_manifest(path: str, manifest: Manifest, model: str | None = None) -> Catalog:
    """As :func:`catalog_of_checkpoint`, also of one host's part of a step, whose other files can't be read here."""
    name = model_named(manifest, model, path)
    catalog = catalog_of_slices(path, manifest, "model", name, model_tensors(manifest, name))
    aliases = {a for t in manifest.models[name].values() for a in t.stored_aliases}
    tensors = {n: t for n, t in catalog.tensors.items() if n not in aliases}
    digests = {n: t.digest for n, t in manifest.models[name].items() if not t.refers}
    referred = {n: t for n, t in manifest.models[name].items() if t.refers}
    return Catalog("checkpoint", path, tensors, catalog.files, digests=digests, referred=referred)


def refuse_referred(catalog: Catalog, what: str) -> None:
    """Raise :class:`CheckpointError` for a checkpoint that only refers to a part of its model. ``what`` needs all of it."""
    if catalog.referred:
        raise CheckpointError(
            f"{catalog.root}: holds only digests of {len(catalog.referred)} frozen tensors, {min(catalog.referred)} among them, and "
            f"{what} needs their content: load the base, sw.restore the checkpoint, and continue with the live model"
        )


def catalog_of_optimizer(
    root: str, manifest: Manifest, optimizer: str = "optimizer", model: str = "model"
) -> Catalog:
    """Catalog of an optimizer's tensors in a checkpoint directory; ``model`` is the one that it trains.

    Raises :class:`FormatError` as :func:`catalog_of_slices`.
    """
    tensors = optimizer_tensors(manifest, optimizer, model)
    catalog = catalog_of_slices(root, manifest, "optimizer", optimizer, tensors)
    return replace(catalog, digests=optimizer_digests(manifest, optimizer, model))


def model_named(manifest: Manifest, model: str | None, path: str) -> str:
    """Pick a model: the named one, the only one, or ``model``. Raises :class:`FormatError`."""
    found = model or ("model" if len(manifest.models) != 1 else next(iter(manifest.models)))
    if found not in manifest.models:
        what = "say which one" if model is None else f"not {model!r}"
        raise FormatError(f"holds models {brief(sorted(manifest.models))}; {what}", path=path)
    return found
