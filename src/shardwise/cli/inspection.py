"""Describes a path as records: a source, a checkpoint, or a directory of steps. Reads headers and manifests only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..catalog.checkpoint import catalog_of_manifest
from ..catalog.open import open_catalog
from ..catalog.records import Catalog, StoredTensor
from ..dtypes import itemsize
from ..errors import PlanError, SourceError, UnsupportedConversionError
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..format.places import absent_places, describe_part, files_by_place
from ..layout.placements import Geometry
from ..layout.spec import TensorSpec
from ..limits import inside
from ..objects import frozen
from ..quantized.dequantized import Dequantized, dequantized, described
from ..runs.history import RootContents, StepSummary, is_root, steps_below
from ..storage import Stat, absolute, is_file, is_url, looking_once, stat_of_expected
from .tree import Node, tree_of

__all__ = [
    "CheckpointContents",
    "Inspection",
    "PartOfStep",
    "RootContents",
    "SourceContents",
    "StepSummary",
    "contents_of",
    "is_root",
    "to_json",
]


@frozen(kw_only=True)
class SourceContents:
    """The contents of a source."""

    kind: str
    path: str
    files: int
    file_bytes: int
    ignored_files: tuple[str, ...]
    ignored_entries: tuple[str, ...]
    """What a file has next to the model, and isn't read."""
    tensors: int
    tensor_bytes: int
    dtypes: Mapping[str, int]
    """Bytes by stored dtype, largest first."""
    quantized: tuple[Dequantized, ...]
    """Formats of tensors that are stored as codes and scales. A load dequantizes them."""
    quantized_problems: tuple[str, ...]
    """Why a load would refuse them."""
    tree: tuple[Node, ...]


@frozen(kw_only=True)
class GeometryUse:
    """A way of spreading tensors over ranks, and the number of tensors spread in this way."""

    axis_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    cuts: tuple[str, ...]
    ranks: int
    tensors: int


@frozen(kw_only=True)
class OptimizerState:
    """A kind of optimizer state over all parameters."""

    optimizer: str
    name: str
    dtypes: tuple[str, ...]
    parameters: int
    state_bytes: int


@frozen(kw_only=True)
class PartOfStep:
    """A host's part of a checkpoint that ``Checkpointer(local=True)`` saved."""

    host: str
    place: str
    """The id of the host's directory."""
    ranks: tuple[int, ...]
    files: int
    file_bytes: int
    is_here: bool


@frozen(kw_only=True)
class CheckpointContents:
    """The contents of a checkpoint beyond those of every source."""

    source: SourceContents
    step: int
    run_id: str
    parent_step: int | None
    world_size: int
    geometries: tuple[GeometryUse, ...]
    optimizer_states: tuple[OptimizerState, ...]
    software: Mapping[str, str]
    problems: tuple[str, ...]
    """Files that are lost, or whose size differs from the manifest's."""
    parts: tuple[PartOfStep, ...] = ()
    """Where hosts have saved it to directories of their own."""
    part: str | None = None
    """Of a directory that lacks some of the parts: which are here, and where the others are. It is not damaged."""
    referred: int = 0
    """Frozen tensors of which it holds only digests."""


Inspection = SourceContents | CheckpointContents | RootContents


def contents_of(path: str) -> Inspection:
    """Describe ``path``, or the model with this id in the hub's cache. Raises :class:`SourceError` if it can't be read
    or has no known form.
    """
    path = _local(path)
    with looking_once(path):
        return _contents_of(path)


def _contents_of(path: str) -> Inspection:
    if is_root(path):
        return steps_below(path)
    if is_file(os.path.join(path, MANIFEST_NAME)):
        return _checkpoint(path)
    try:
        catalog = open_catalog(path)
    except SourceError as error:
        if below := _roots_below(path):
            raise SourceError(
                f"holds no model and no checkpoint itself, but directories of checkpoints; give one of them: {', '.join(below)}",
                path=path,
            ) from error
        raise
    return _source(catalog, path, len(catalog.files), sum(f.nbytes for f in catalog.files))


def _roots_below(path: str) -> list[str]:
    """The directories of checkpoints in a local directory, the first few."""
    if is_url(path) or not os.path.isdir(path):
        return []
    below = (os.path.join(path, name) for name in sorted(os.listdir(path))[:1000])
    return list(itertools.islice((one for one in below if os.path.isdir(one) and is_root(one)), 5))


def _local(path: str) -> str:
    """The path itself, or the snapshot in the hub's cache if it can only be an id."""
    if is_url(path):
        return absolute(path)
    if os.path.lexists(path):
        return path
    from ..models.hub import HubOptions, find_model
    from ..ranks.ranks import Ranks

    return find_model(path, HubOptions(local_files_only=True), Ranks())


def to_json(contents: Inspection) -> dict[str, Any]:
    """The contents as plain JSON values; a checkpoint's source fields and its own side by side."""
    document = asdict(contents)
    return {**document.pop("source", {}), **document}


def _source(catalog: Catalog, path: str, files: int, file_bytes: int) -> SourceContents:
    formats, problems = _formats(catalog)
    return SourceContents(
        kind=catalog.kind,
        path=path,
        files=files,
        file_bytes=file_bytes,
        ignored_files=catalog.ignored_files,
        ignored_entries=catalog.ignored_entries,
        tensors=len(catalog.tensors),
        tensor_bytes=catalog.nbytes,
        dtypes=_bytes_by_dtype(catalog.tensors.values()),
        quantized=formats,
        quantized_problems=problems,
        tree=tree_of(catalog.tensors.values()),
    )


def _formats(catalog: Catalog) -> tuple[tuple[Dequantized, ...], tuple[str, ...]]:
    try:
        return described(dequantized(catalog).coded.values()), ()
    except PlanError as error:
        return (), error.problems or (str(error),)
    except UnsupportedConversionError as error:
        return (), (str(error),)


def _bytes_by_dtype(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    held: dict[str, int] = {}
    for tensor in tensors:
        held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.nbytes
    return dict(sorted(held.items(), key=lambda pair: -pair[1]))


# ----------------------------------------------------------------------------------------------------
# Checkpoints


def _checkpoint(path: str) -> CheckpointContents:
    manifest = read_manifest(path)
    parts = tuple(_parts(path, manifest))
    file_bytes = sum(f.nbytes for f in manifest.files.values())
    return CheckpointContents(
        source=_source(_models(path, manifest), path, len(manifest.files), file_bytes),
        step=manifest.step,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        world_size=manifest.world_size,
        geometries=tuple(_geometries(manifest)),
        optimizer_states=tuple(_optimizer_states(manifest)),
        software=dict(manifest.software),
        problems=tuple(_wrong_files(path, manifest)),
        parts=parts,
        part=describe_part(path, manifest),
        referred=sum(t.refers for tensors in manifest.models.values() for t in tensors.values()),
    )


def _models(path: str, manifest: Manifest) -> Catalog:
    """The tensors of every model; with several models, under the model's name."""
    catalogs = {name: catalog_of_manifest(path, manifest, name) for name in manifest.models}
    first, *others = catalogs.values()
    if not others:
        return first
    tensors = {
        f"{model}.{t.name}": replace(t, name=f"{model}.{t.name}")
        for model, catalog in catalogs.items()
        for t in catalog.tensors.values()
    }
    return replace(first, tensors=tensors)


def _parts(path: str, manifest: Manifest) -> Iterable[PartOfStep]:
    absent = absent_places(path, manifest)
    for number, (place, names) in enumerate(zip(manifest.places, files_by_place(manifest), strict=False)):
        yield PartOfStep(
            host=place.host,
            place=place.id,
            ranks=place.ranks,
            files=len(names),
            file_bytes=sum(manifest.files[name].nbytes for name in names),
            is_here=number not in absent,
        )


def _geometries(manifest: Manifest) -> Iterable[GeometryUse]:
    uses = [t.geometry for tensors in manifest.models.values() for t in tensors.values()]
    for index, geometry in enumerate(manifest.geometries):
        yield GeometryUse(
            axis_sizes=geometry.axis_sizes,
            axis_names=geometry.axis_names,
            cuts=_cuts(geometry),
            ranks=len(geometry.ranks),
            tensors=uses.count(index),
        )


def _cuts(geometry: Geometry) -> tuple[str, ...]:
    words = {
        "replicate": "replicate",
        "shard": "shard dim {0.dim}",
        "strided": "shard dim {0.dim} in {0.split_factor}",
    }
    return tuple(words[cut.kind].format(cut) for cut in geometry.cuts)


def _optimizer_states(manifest: Manifest) -> Iterable[OptimizerState]:
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for tensors in manifest.models.values():
        for t in tensors.values():
            for optimizer, states in t.states.items():
                for name, state in states.items():
                    shape = t.shape_of(state) if state.packed is None else ()
                    one = TensorSpec(state.dtype, shape).nbytes
                    found.setdefault((optimizer, name), []).append((state.dtype, one))
    for (optimizer, name), held in sorted(found.items()):
        yield OptimizerState(
            optimizer=optimizer,
            name=name,
            dtypes=tuple(sorted({dtype for dtype, _ in held}, key=lambda d: (-itemsize(d), d))),
            parameters=len(held),
            state_bytes=sum(nbytes for _, nbytes in held),
        )


def _wrong_files(path: str, manifest: Manifest) -> Iterable[str]:
    absent, names_of = set(absent_places(path, manifest)), files_by_place(manifest)
    if len(absent) == len(names_of):
        yield f"no file of it is here; it {describe_part(path, manifest)}"
        return
    for name in [name for number, names in enumerate(names_of) if number not in absent for name in names]:
        entry, file = manifest.files[name], inside(path, name)
        try:
            found = stat_of_expected(file) if is_url(file) else Stat(os.stat(file).st_size)
        except OSError as error:
            yield f"{name}: lost ({error.strerror})"
            continue
        if found is None:
            yield f"{name}: lost"
        elif found.nbytes != entry.nbytes:
            yield f"{name}: {found.nbytes} bytes, expected {entry.nbytes}: truncated or overwritten"
