"""The manifest: the JSON that makes a directory a checkpoint. O(tensors), and all that planning reads.

Format version 1, see docs/format.md. Written last, checksummed by its own xxh3 over the canonical text
of everything else in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from ..errors import FormatError, IntegrityError, SourceError
from ..layout.placements import RULE_VERSION, Cut, Geometry

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

    def to_text(self) -> str:
        """The manifest's JSON text, its own checksum included."""
        document = self._document()
        document["xxh3"] = _checksum(document)
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    def _document(self) -> dict[str, Any]:
        geometries = []
        for g in self.geometries:
            one = asdict(g)
            one["cuts"] = [[c.kind, c.dim, c.split_factor] for c in g.cuts]
            one["rule"] = RULE_VERSION
            geometries.append(one)
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "run_id": self.run_id,
            "parent_step": self.parent_step,
            "world_size": self.world_size,
            "seed": self.seed,
            "software": dict(self.software),
            "geometries": geometries,
            "models": {m: {n: _tensor_json(t) for n, t in ts.items()} for m, ts in self.models.items()},
            "packed": {
                o: {n: {**asdict(p), "digest": f"{p.digest:016x}"} for n, p in ps.items()}
                for o, ps in self.packed.items()
            },
            "hub_tensors": {m: dict(shapes) for m, shapes in self.hub_tensors.items()},
            "files": {n: _sparse(asdict(f)) for n, f in self.files.items()},
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


def read_manifest(root: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint directory.

    Raises :class:`SourceError` (not there), :class:`FormatError` (not a manifest, or of a later
    version), :class:`IntegrityError` (its own checksum does not match).
    """
    path = os.path.join(os.fspath(root), MANIFEST_NAME)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            what = "not a checkpoint: no manifest.json" if os.path.isdir(root) else "no such directory"
            raise SourceError(what, path=os.fspath(root)) from error
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise FormatError(f"format is {document['format']!r}, expected {FORMAT!r}", path=path)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"not a checkpoint manifest ({error!r})", path=path) from error
    if document.get("version") != VERSION:
        raise FormatError(
            f"format version {document.get('version')!r}, this release reads {VERSION}; update shardwise",
            path=path,
        )
    if _checksum(document) != document.get("xxh3"):
        raise IntegrityError("its checksum does not match its content: damaged", path=path)
    try:
        return _from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"malformed manifest ({error!r})", path=path) from error


def _from_document(d: dict[str, Any]) -> Manifest:
    return Manifest(
        step=int(d["step"]),
        run_id=str(d["run_id"]),
        parent_step=d["parent_step"],
        world_size=int(d["world_size"]),
        seed=int(d["seed"]),
        geometries=tuple(_geometry(g) for g in d["geometries"]),
        models={m: {n: _tensor(t) for n, t in ts.items()} for m, ts in d["models"].items()},
        packed={
            o: {
                n: Packed(p["dtype"], p["count"], int(p["digest"], 16), p.get("owner", 0))
                for n, p in ps.items()
            }
            for o, ps in d["packed"].items()
        },
        files={n: _file(n, f) for n, f in d["files"].items()},
        software=d["software"],
        hub_tensors={m: {n: tuple(s) for n, s in ts.items()} for m, ts in d["hub_tensors"].items()},
    )


def _geometry(g: dict[str, Any]) -> Geometry:
    if g["rule"] != RULE_VERSION:
        raise ValueError(f"cutting rule {g['rule']}, this release knows {RULE_VERSION}")
    cuts = tuple(Cut(kind, dim, factor) for kind, dim, factor in g["cuts"])
    return Geometry(tuple(g["axis_sizes"]), tuple(g["axis_names"]), cuts, tuple(g["ranks"]), g["fsdp_order"])


def _tensor(t: dict[str, Any]) -> TensorEntry:
    return TensorEntry(
        dtype=t["dtype"],
        shape=tuple(t["shape"]),
        geometry=t["geometry"],
        digest=int(t["digest"], 16),
        owner=t.get("owner", 0),
        kind=t.get("kind", "parameter"),
        aliases=tuple(t.get("aliases", ())),
        stored_aliases=tuple(t.get("stored_aliases", ())),
        states={o: {s: _state(e) for s, e in states.items()} for o, states in t.get("states", {}).items()},
    )


def _state(e: dict[str, Any]) -> StateEntry:
    return StateEntry(
        e["dtype"], int(e.get("digest", "0"), 16), e.get("owner", 0), e.get("packed"), e.get("index", 0)
    )


def _file(name: str, f: dict[str, Any]) -> FileEntry:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "" in parts or "\\" in name:
        raise ValueError(f"file name {name!r} leaves the checkpoint directory")
    return FileEntry(f["nbytes"], f["header_bytes"], f["header_xxh3"], tuple(f.get("blocks", ())))
