"""The manifest: the JSON that makes a directory a checkpoint. O(tensors), and all that planning reads.

Format version 1, see docs/format.md. Written last, checksummed by its own xxh3 over the canonical text
of everything else in it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from reprlib import repr as brief
from typing import Any

import xxhash

from ..dtypes import ITEMSIZE
from ..errors import FormatError, IntegrityError, SourceError, VersionError
from ..garbage import no_collections
from ..layout.placements import RULE_VERSION, Cut, Geometry
from .header import check_regular
from .steps import of_steps

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST_NAME",
    "FileEntry",
    "Manifest",
    "StateEntry",
    "TensorEntry",
    "read_manifest",
]

MANIFEST_NAME = "manifest.json"
FORMAT = "shardwise-checkpoint"
VERSION = 1
#: Payload is checksummed in blocks of this many bytes.
BLOCK_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: its size, the checksum of its header (or of the whole of a small file), and the
    checksums of its payload's 16 MiB blocks."""

    nbytes: int
    header_bytes: int
    header_xxh3: str
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An optimizer state of a parameter: a tensor spread like it, or an element of a packed tensor."""

    dtype: str
    digest: int = 0
    owner: int = 0
    packed: str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A parameter or persistent buffer. ``aliases`` are its tied names; ``stored_aliases`` have bytes of their own.

    ``states`` maps optimizer name → state name → entry.
    """

    dtype: str
    shape: tuple[int, ...]
    geometry: int
    digest: int
    owner: int = 0
    kind: str = "parameter"
    aliases: tuple[str, ...] = ()
    stored_aliases: tuple[str, ...] = ()
    states: Mapping[str, Mapping[str, StateEntry]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """0-d optimizer states of many parameters, stored as one 1-D tensor."""

    dtype: str
    count: int
    digest: int
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its payload."""

    step: int
    run_id: str
    parent_step: int | None
    world_size: int
    seed: int
    geometries: tuple[Geometry, ...]
    models: Mapping[str, Mapping[str, TensorEntry]]
    packed: Mapping[str, Mapping[str, Packed]]
    files: Mapping[str, FileEntry]
    software: Mapping[str, str]
    hub_tensors: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    local_documents: tuple[str, ...] = ()

    def to_text(self) -> str:
        """The manifest's JSON text, its own checksum included."""
        document = self._document()
        document["xxh3"] = _checksum(document)
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "run_id": self.run_id,
            "parent_step": self.parent_step,
            "world_size": self.world_size,
            "seed": self.seed,
            "software": dict(self.software),
            "geometries": [_geometry_json(g) for g in self.geometries],
            "models": {m: {n: _tensor_json(t) for n, t in ts.items()} for m, ts in self.models.items()},
            "packed": {
                o: {n: {**asdict(p), "digest": f"{p.digest:016x}"} for n, p in ps.items()}
                for o, ps in self.packed.items()
            },
            "local_documents": list(self.local_documents),
            "hub_tensors": {m: dict(shapes) for m, shapes in self.hub_tensors.items()},
            "files": {n: _sparse(asdict(f)) for n, f in self.files.items()},
        }


def _geometry_json(g: Geometry) -> dict[str, Any]:
    return {
        "axis_sizes": g.axis_sizes,
        "axis_names": g.axis_names,
        "cuts": [[c.kind, c.dim, c.split_factor] for c in g.cuts],
        "ranks": g.ranks,
        "fsdp_order": g.fsdp_order,
        "rule": RULE_VERSION,
    }


def _sparse(value: dict[str, Any]) -> dict[str, Any]:
    """Without empty and zero optional fields: they are the defaults that reading fills in."""
    keep = {"nbytes", "header_bytes", "dtype", "shape", "geometry", "digest"}
    return {k: v for k, v in value.items() if k in keep or (v not in (0, None) and v != () and v != {})}


def _tensor_json(t: TensorEntry) -> dict[str, Any]:
    one = {f: getattr(t, f) for f in ("dtype", "shape", "geometry", "owner", "aliases", "stored_aliases")}
    one["digest"] = f"{t.digest:016x}"
    if t.kind != "parameter":
        one["kind"] = t.kind
    one["states"] = {o: {s: _state_json(e) for s, e in states.items()} for o, states in t.states.items()}
    return _sparse(one)


def _state_json(e: StateEntry) -> dict[str, Any]:
    if e.packed is not None:
        return {"dtype": e.dtype, "packed": e.packed, "index": e.index}
    return _sparse({"dtype": e.dtype, "digest": f"{e.digest:016x}", "owner": e.owner})


def _checksum(document: dict[str, Any]) -> str:
    text = json.dumps(
        {k: v for k, v in document.items() if k != "xxh3"}, separators=(",", ":"), sort_keys=True
    )
    return xxhash.xxh3_64_hexdigest(text.encode())


@no_collections()
def read_manifest(root: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint directory.

    Raises :class:`SourceError` (not there), :class:`FormatError` (not a manifest), :class:`VersionError` (of
    another format version), :class:`IntegrityError` (its own checksum does not match).
    """
    path = os.path.join(os.fspath(root), MANIFEST_NAME)
    try:
        check_regular(path)
        with open(path, "rb") as file:
            raw = file.read()
    except IsADirectoryError as error:
        raise FormatError("is a directory, not a file", path=path) from error
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise SourceError(_no_manifest(os.fspath(root)), path=os.fspath(root)) from error
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise FormatError(f"format is {brief(document['format'])}, expected {FORMAT!r}", path=path)
        checksum = _checksum(document)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"not a checkpoint manifest ({error!r})", path=path) from error
    if checksum != document.get("xxh3"):
        raise IntegrityError("its checksum does not match its content: damaged", path=path)
    if document.get("version") != VERSION:
        raise VersionError(
            f"format version {brief(document.get('version'))}, this release reads {VERSION}; update shardwise",
            path=path,
        )
    try:
        return _from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"malformed manifest ({error!r})", path=path) from error


def _no_manifest(root: str) -> str:
    if os.path.isdir(root):
        return of_steps(root) or "not a checkpoint: no manifest.json"
    if os.path.exists(root):
        return "is a file, not a directory; give the directory of a checkpoint"
    return "no such directory"


# What follows trusts no value: a right checksum only says that nobody changed the text by accident.


def _from_document(d: dict[str, Any]) -> Manifest:
    world_size = _count(d["world_size"], 1, _MAX_RANKS)
    geometries = tuple(_geometry(g, world_size) for g in d["geometries"])
    spreads = [_spread(g) for g in geometries]
    packed = {o: {n: _packed(p, world_size) for n, p in ps.items()} for o, ps in d["packed"].items()}
    return Manifest(
        step=_count(d["step"]),
        run_id=_text(d["run_id"]),
        parent_step=None if d["parent_step"] is None else _count(d["parent_step"]),
        world_size=world_size,
        seed=_count(d["seed"], 0, 2**64),
        geometries=geometries,
        models={m: {n: _tensor(t, spreads, packed) for n, t in ts.items()} for m, ts in d["models"].items()},
        packed=packed,
        files={n: _file(n, f) for n, f in d["files"].items()},
        software={_text(k): _text(v) for k, v in d["software"].items()},
        local_documents=_texts(d["local_documents"]),
        hub_tensors={m: {n: _counts(s) for n, s in ts.items()} for m, ts in d["hub_tensors"].items()},
    )


_MAX_RANKS = 2**20
_MAX_DIMS = 64
_MAX_SPLIT_FACTOR = 2**16


def _count(value: Any, low: int = 0, high: int = 2**62) -> int:
    if type(value) is not int or not low <= value <= high:  # True is none
        raise ValueError(f"{brief(value)} is not a number from {low} to {high}")
    return value


def _counts(value: Any, low: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        raise ValueError(f"{brief(value)} is not a list of numbers")
    return tuple([_count(n, low) for n in value])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{brief(value)} is not text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{brief(value)} is not a list of text")
    return tuple(map(_text, value))


def _digest(value: Any) -> int:
    return _count(int(_text(value), 16), 0, 2**64 - 1)


def _dtype(value: Any) -> str:
    if _text(value) not in ITEMSIZE:
        raise ValueError(f"unknown stored dtype {brief(value)}")
    return str(value)


def _geometry(g: dict[str, Any], world_size: int) -> Geometry:
    if g["rule"] != RULE_VERSION:
        raise ValueError(f"cutting rule {brief(g['rule'])}, this release knows {RULE_VERSION}")
    sizes, names, ranks = _counts(g["axis_sizes"], 1), _texts(g["axis_names"]), _counts(g["ranks"])
    cuts = tuple(_cut(kind, dim, factor) for kind, dim, factor in g["cuts"])
    if not len(sizes) == len(names) == len(cuts) <= _MAX_DIMS:
        raise ValueError(f"a geometry of {len(sizes)} sizes, {len(names)} names and {len(cuts)} cuts")
    if math.prod(sizes) != len(ranks) or len(set(ranks)) != len(ranks) or max(ranks) >= world_size:
        raise ValueError(f"axes of {brief(sizes)} do not hold ranks {brief(ranks)} of {world_size}")
    if not isinstance(g["fsdp_order"], bool):
        raise ValueError(f"fsdp_order is {brief(g['fsdp_order'])}")
    return Geometry(sizes, names, cuts, ranks, g["fsdp_order"])


def _cut(kind: Any, dim: Any, factor: Any) -> Cut:
    if kind not in ("replicate", "shard", "strided"):
        raise ValueError(f"unknown kind of cut {brief(kind)}")
    return Cut(kind, _count(dim, 0, _MAX_DIMS), _count(factor, 1, _MAX_SPLIT_FACTOR))


@dataclass(frozen=True, slots=True)
class _Spread:
    """What a tensor must fit that is spread by a geometry."""

    replicas: int
    least_dims: int


def _spread(g: Geometry) -> _Spread:
    axes = zip(g.axis_sizes, g.cuts, strict=True)
    replicas = math.prod(n for n, c in axes if c.kind == "replicate")
    return _Spread(replicas, max((c.dim + 1 for c in g.cuts if c.kind != "replicate"), default=0))


def _tensor(
    t: dict[str, Any], spreads: Sequence[_Spread], packed: Mapping[str, Mapping[str, Packed]]
) -> TensorEntry:
    shape, index = _counts(t["shape"]), _count(t["geometry"], 0, len(spreads) - 1)
    replicas = spreads[index].replicas
    if not spreads[index].least_dims <= len(shape) <= _MAX_DIMS:
        raise ValueError(f"shape {brief(shape)} has not the dims that geometry {index} cuts")
    return TensorEntry(
        dtype=_dtype(t["dtype"]),
        shape=shape,
        geometry=index,
        digest=_digest(t["digest"]),
        owner=_count(t.get("owner", 0), 0, replicas - 1),
        kind=_text(t.get("kind", "parameter")),
        aliases=_texts(t.get("aliases", [])),
        stored_aliases=_texts(t.get("stored_aliases", [])),
        states={
            o: {s: _state(e, replicas, packed.get(o, {})) for s, e in states.items()}
            for o, states in t.get("states", {}).items()
        },
    )


def _state(e: dict[str, Any], replicas: int, packed: Mapping[str, Packed]) -> StateEntry:
    dtype = _dtype(e["dtype"])
    if e.get("packed") is not None:
        index = _count(e["index"], 0, packed[_text(e["packed"])].count - 1)
        return StateEntry(dtype, packed=e["packed"], index=index)
    return StateEntry(dtype, _digest(e["digest"]), _count(e.get("owner", 0), 0, replicas - 1))


def _packed(p: dict[str, Any], world_size: int) -> Packed:
    owner = _count(p.get("owner", 0), 0, world_size - 1)
    return Packed(_dtype(p["dtype"]), _count(p["count"]), _digest(p["digest"]), owner)


def _file(name: str, f: dict[str, Any]) -> FileEntry:
    if {"", ".", ".."} & set(name.split("/")) or "\\" in name or b"\0" in os.fsencode(name):
        raise ValueError(f"file name {name!r} leaves the checkpoint directory")
    nbytes = _count(f["nbytes"])
    header = _count(f["header_bytes"], 0, nbytes)
    return FileEntry(nbytes, header, _text(f["header_xxh3"]), _texts(f.get("blocks", [])))
