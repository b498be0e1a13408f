"""The records of a manifest, and its JSON text. O(tensors); planning reads nothing else. :mod:`.manifest` checks it.

Format version 1, see docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

import xxhash

from ..layout.placements import RULE_VERSION, Geometry
from ..objects import frozen

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "GRADIENT",
    "MANIFEST_NAME",
    "VERSION",
    "VERSION_OF_PLACES",
    "FileEntry",
    "Manifest",
    "Packed",
    "Place",
    "StateEntry",
    "TensorEntry",
    "checksum_of",
]

MANIFEST_NAME = "manifest.json"
FORMAT = "shardwise-checkpoint"
VERSION = 1
#: Of a manifest with places. A reader of version 1 would take a part for a damaged checkpoint.
VERSION_OF_PLACES = 2
#: Payload is checksummed in blocks of this many bytes.
BLOCK_BYTES = 16 * 1024**2
#: The key of a gradient beside the optimizer states of its parameter.
GRADIENT = "__grad__"


@frozen
class FileEntry:
    """A file of a checkpoint: its size, the checksum of its header (of the whole file if it is small), and the
    checksums of its payload's 16 MiB blocks."""

    nbytes: int
    header_bytes: int
    header_xxh3: str
    blocks: tuple[str, ...] = ()


@frozen
class StateEntry:
    """An optimizer state of a parameter: a tensor spread like it, or an element of a packed tensor."""

    dtype: str
    digest: int = 0
    owner: int = 0
    packed: str | None = None
    index: int = 0
    shape: tuple[int, ...] | None = None
    """Where it is not its parameter's: of scales and packed codes, which are cut as their parameter."""


@frozen
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
    refers: bool = False
    """Whether the checkpoint holds only its digest: a frozen tensor of a base that the run loads from elsewhere."""
    states: Mapping[str, Mapping[str, StateEntry]] = field(default_factory=dict)

    def shape_of(self, state: StateEntry) -> tuple[int, ...]:
        """The global shape of one of its states that is not packed."""
        return self.shape if state.shape is None else state.shape


@frozen
class Packed:
    """0-d optimizer states of many parameters, stored as one 1-D tensor."""

    dtype: str
    count: int
    digest: int
    owner: int = 0


@frozen
class Place:
    """A directory that holds a part of each step, on the disk of one host: the files of some ranks. See :mod:`.places`."""

    id: str
    """Drawn when the directory was first used."""
    host: str
    """The host's name, for people."""
    ranks: tuple[int, ...]


@frozen(kw_only=True)
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
    places: tuple[Place, ...] = ()
    """Where the save put the parts, if hosts have directories of their own; empty for one directory."""

    def to_text(self) -> str:
        """The manifest's JSON text, its own checksum included."""
        document = self._document()
        document["xxh3"] = checksum_of(document)
        return json.dumps(document, separators=(",", ":"), allow_nan=False)

    def _document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION_OF_PLACES if self.places else VERSION,
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
            **({"places": [asdict(place) for place in self.places]} if self.places else {}),
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
    """``value`` without empty and zero optional fields, which reading fills in as defaults."""
    keep = {"nbytes", "header_bytes", "dtype", "shape", "geometry", "digest"}
    return {k: v for k, v in value.items() if k in keep or (v not in (0, None) and v != () and v != {})}


def _tensor_json(t: TensorEntry) -> dict[str, Any]:
    one = {
        f: getattr(t, f)
        for f in ("dtype", "shape", "geometry", "owner", "aliases", "stored_aliases", "refers")
    }
    one["digest"] = f"{t.digest:016x}"
    if t.kind != "parameter":
        one["kind"] = t.kind
    one["states"] = {o: {s: _state_json(e) for s, e in states.items()} for o, states in t.states.items()}
    return _sparse(one)


def _state_json(e: StateEntry) -> dict[str, Any]:
    if e.packed is not None:
        return {"dtype": e.dtype, "packed": e.packed, "index": e.index}
    one = _sparse({"dtype": e.dtype, "digest": f"{e.digest:016x}", "owner": e.owner})
    return one if e.shape is None else {**one, "shape": e.shape}


def checksum_of(document: Mapping[str, Any]) -> str:
    """xxh3 of the canonical text of a manifest without its checksum."""
    text = json.dumps(
        {k: v for k, v in document.items() if k != "xxh3"}, separators=(",", ":"), sort_keys=True
    )
    return xxhash.xxh3_64_hexdigest(text.encode())
