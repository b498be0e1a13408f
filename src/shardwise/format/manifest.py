"""The manifest: the JSON that makes a directory a checkpoint. Its records, its documents, and how it is read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, Literal, TypeVar

import xxhash

from ..dtypes import ITEMSIZE
from ..errors import CheckpointError, FormatError, IntegrityError, SourceError, VersionError
from ..limits import (
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARS,
    MAX_TEXT_CHARS,
    brief,
    cause,
    fits,
    inside,
    is_inside,
    is_text,
    is_word,
    parse_json,
    read_small,
)
from ..objects import frozen, gc_paused
from ..storage import exists, is_directory
from ..storage.records import is_url
from ..tensors.placements import RULE_VERSION, Cut, Geometry, blocks_of, one_of_equals
from .header import describe_steps

# ----------------------------------------------------------------------------------------------------
# The records of a manifest, and its JSON text. O(tensors); planning reads nothing else. :mod:`.manifest` checks it.
#
# Format version 1, see docs/format.md.

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


class Checksums:
    """The checksums of a file from its bytes as they come: of the first ``header_bytes``, and of each block after them."""

    def __init__(self, header_bytes: int) -> None:
        self._header_bytes = self._room = header_bytes
        self._nbytes = 0
        self._found: list[str] = []
        self._hash = xxhash.xxh3_64()

    def add(self, view: memoryview | bytes) -> None:
        """The next bytes."""
        view, done = memoryview(view), 0
        while done < view.nbytes:
            if self._room == 0:
                self._found.append(self._hash.hexdigest())
                self._hash.reset()
                self._room = BLOCK_BYTES
            piece = view[done : done + self._room]
            self._hash.update(piece)
            done += piece.nbytes
            self._room -= piece.nbytes
        self._nbytes += done

    def entry(self) -> FileEntry:
        """The manifest's entry of a file of these bytes."""
        head, *blocks = (*self._found, self._hash.hexdigest())
        return FileEntry(self._nbytes, self._header_bytes, head, tuple(blocks))


@frozen
class Unit:
    """Consecutive bytes of a file that prove themselves: its header, or a block, with their checksum in the manifest. Without a checksum: any bytes."""

    start: int
    nbytes: int
    xxh3: str | None

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def units_of(entry: FileEntry, *, path: str | None = None) -> list[Unit]:
    """The units of a file, in order. Raises :class:`FormatError` if the manifest has more or fewer checksums than it has blocks."""
    starts = range(entry.header_bytes, entry.nbytes, BLOCK_BYTES)
    if len(starts) != len(entry.blocks):
        raise FormatError(
            f"the manifest has {len(entry.blocks)} block checksums, expected {len(starts)}", path=path
        )
    found = [Unit(0, entry.header_bytes, entry.header_xxh3)]
    for start, checksum in zip(starts, entry.blocks, strict=True):
        found.append(Unit(start, min(BLOCK_BYTES, entry.nbytes - start), checksum))
    return found


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


# ----------------------------------------------------------------------------------------------------
# Reading a manifest: the JSON that makes a directory a checkpoint. Written last, checksummed by its own xxh3.
#
# This module checks everything in it once: names, numbers, and the time and memory that they cost a reader.

#: Key in ``software`` of a checkpoint that a conversion wrote. Such a checkpoint has no documents per rank.
CONVERTED = "converted from"


@gc_paused()
def read_manifest(root: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a checkpoint directory.

    Raises :class:`SourceError` (missing), :class:`FormatError` (not a manifest), :class:`VersionError` (another
    format version), :class:`IntegrityError` (its checksum does not match).
    """
    path = os.path.join(os.fspath(root), MANIFEST_NAME)
    try:
        raw = read_small(path, "manifest")
    except FormatError:
        raise
    except SourceError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            raise SourceError(_no_manifest(os.fspath(root)), path=os.fspath(root)) from error
        raise
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: str) -> Manifest:
    """Parse the text of a manifest and check everything in it. Raises as :func:`read_manifest`, naming ``path``."""
    document = _intact_document(raw, path)
    try:
        return _from_document(document)
    except _WRONG as error:
        raise FormatError(f"malformed manifest: {_said(error)}", path=path) from error


def step_of_manifest(raw: bytes, path: str) -> int:
    """The step in the text of a manifest that is intact; its form is not checked, which takes most of the time of :func:`parse_manifest`.

    Raises as :func:`read_manifest`, naming ``path``.
    """
    try:
        return _count(_intact_document(raw, path)["step"])
    except _WRONG as error:
        raise FormatError(f"malformed manifest: {_said(error)}", path=path) from error


def _intact_document(raw: bytes, path: str) -> dict[str, Any]:
    """The document of a manifest of a version that this release reads, with the checksum of its content."""
    document = parse_json(raw, path, "not a checkpoint manifest: it")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise FormatError(
            f"not a checkpoint manifest: format is {brief(found)}, expected {FORMAT!r}", path=path
        )
    try:
        checksum = checksum_of(document)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a checkpoint manifest ({cause(error)})", path=path) from error
    if checksum != document.get("xxh3"):
        raise IntegrityError("its checksum does not match its content: damaged", path=path)
    if document.get("version") not in (VERSION, VERSION_OF_PLACES):
        raise VersionError(
            f"format version {brief(document.get('version'))}, this release reads {VERSION} and {VERSION_OF_PLACES}; "
            f"update shardwise",
            path=path,
        )
    return document


def _no_manifest(root: str) -> str:
    if is_directory(root):
        return describe_steps(root) or "not a checkpoint: no manifest.json"
    if exists(root):
        return "is a file, not a directory; give the directory of a checkpoint"
    return "no such directory"


# The code below trusts no value: a correct checksum excludes accidents, not attacks. Names of models and optimizers
# become folders, names of files become paths: none that leaves the directory passes.


def _from_document(d: dict[str, Any]) -> Manifest:
    files = _each(d["files"], _file_name, _file)
    world_size = _count(d["world_size"], 1, _MAX_RANKS)
    for rank in range(world_size):
        if f"rank/{rank:05d}.json" not in files:
            raise ValueError(f"the world size is {world_size}, but rank {rank} has no file")
    geometries = tuple([_geometry(g, world_size) for g in d["geometries"]])
    spreads = [_spread(g) for g in geometries]
    packed = _each(d["packed"], _word, lambda ps: _each(ps, _name, lambda p: _packed(p, world_size)))
    models = _each(d["models"], _word, lambda ts: _each(ts, _name, lambda t: _tensor(t, spreads, packed)))
    _check_packs(models, packed)
    _check_work(models, spreads, len(files))
    return Manifest(
        step=_count(d["step"]),
        run_id=_text(d["run_id"]),
        parent_step=None if d["parent_step"] is None else _count(d["parent_step"]),
        world_size=world_size,
        seed=_count(d["seed"], 0, 2**64),
        geometries=geometries,
        models=models,
        packed=packed,
        files=files,
        software={_text(k): _text(v) for k, v in d["software"].items()},
        local_documents=_texts(d["local_documents"]),
        places=_places(d["places"], world_size) if d["version"] == VERSION_OF_PLACES else (),
        hub_tensors={
            _known(m, models): {_text(n): _shape(s) for n, s in ts.items()}
            for m, ts in d["hub_tensors"].items()
        },
    )


_Of = TypeVar("_Of")
_WRONG = (ValueError, LookupError, TypeError, AttributeError)


def _each(
    values: Mapping[str, Any], check: Callable[[Any], str], make: Callable[[Any], _Of]
) -> dict[str, _Of]:
    """The checked names and values of a mapping. An error begins with the name of its entry."""
    found = {}
    for name, value in values.items():
        try:
            found[check(name)] = make(value)
        except _WRONG as error:
            raise ValueError(f"{brief(name)}: {_said(error)}") from error
    return found


def _said(error: Exception) -> str:
    return str(error)[:MAX_TEXT_CHARS] if type(error) is ValueError else cause(error)


_MAX_RANKS = 2**20
#: Places (ranks × blocks) over which shapes may be spread: a base number, plus a number per listed tensor and file.
_MIN_PLACES, _PLACES_EACH = 2**20, 64


def _count(value: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    if type(value) is not int or not low <= value <= high:  # True is none
        raise ValueError(f"{brief(value)} is not a number from {low} to {high}")
    return value


def _counts(value: Any, low: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        raise ValueError(f"{brief(value)} is not a list of numbers")
    return tuple([_count(n, low) for n in value])


def _shape(value: Any, itemsize: int = 1) -> tuple[int, ...]:
    shape = _counts(value)
    if not fits(shape, itemsize):
        raise ValueError(f"shape {brief(shape)} has more than {MAX_DIMS} dims, or more bytes than 2^62")
    return shape


def _text(value: Any) -> str:
    if not is_text(value):
        raise ValueError(f"{brief(value)} is not text")
    return value


def _name(value: Any) -> str:
    """The name of a tensor, no longer than readers of slice files take."""
    if len(_text(value)) > MAX_NAME_CHARS:
        raise ValueError(f"a name has {len(value)} characters, the limit is {MAX_NAME_CHARS}")
    return str(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{brief(value)} is not a list of text")
    return tuple([_text(v) for v in value])


def _word(value: Any) -> str:
    """The name of a model or an optimizer, by the rule of ``TrainState``."""
    if not is_word(value):
        raise ValueError(
            f"the name {brief(value)} of a model or an optimizer is not a word (letters, digits, '_', '-')"
        )
    return value


def _known(name: Any, held: Mapping[str, Any]) -> str:
    if name not in held:
        raise ValueError(f"{brief(name)} is not one of {brief(sorted(held))}")
    return str(name)


_DIGEST = re.compile("[0-9a-f]{16}").fullmatch


def _digest(value: Any) -> int:
    if not isinstance(value, str) or not _DIGEST(value):
        raise ValueError(f"{brief(value)} is not a digest of 16 hexadecimal digits")
    return int(value, 16)


def _dtype(value: Any) -> str:
    if _text(value) not in ITEMSIZE:
        raise ValueError(f"unknown stored dtype {brief(value)}")
    return str(value)


def _geometry(g: dict[str, Any], world_size: int) -> Geometry:
    if g["rule"] != RULE_VERSION:
        raise ValueError(f"cutting rule {brief(g['rule'])}, this release knows {RULE_VERSION}")
    sizes, names, ranks = _counts(g["axis_sizes"], 1), _texts(g["axis_names"]), _counts(g["ranks"])
    cuts = tuple([_cut(kind, dim, factor) for kind, dim, factor in g["cuts"]])
    if not len(sizes) == len(names) == len(cuts) <= MAX_DIMS:
        raise ValueError(f"a geometry of {len(sizes)} sizes, {len(names)} names and {len(cuts)} cuts")
    if math.prod(sizes) != len(ranks) or len(set(ranks)) != len(ranks) or max(ranks) >= world_size:
        raise ValueError(f"axes of sizes {brief(sizes)} do not fit ranks {brief(ranks)} of {world_size}")
    if not isinstance(g["fsdp_order"], bool):
        raise ValueError(f"fsdp_order is {brief(g['fsdp_order'])}")
    return one_of_equals(Geometry(sizes, names, cuts, ranks, g["fsdp_order"]))


def _cut(kind: Any, dim: Any, factor: Any) -> Cut:
    if kind not in ("replicate", "shard", "strided"):
        raise ValueError(f"unknown kind of cut {brief(kind)}")
    return Cut(kind, _count(dim, 0, MAX_DIMS), _count(factor, 1, MAX_BLOCKS))


@frozen
class _Spread:
    """The bounds that a geometry sets to its tensors, and the number of places over which it spreads them."""

    replicas: int
    least_dims: int
    places: int


def _spread(g: Geometry) -> _Spread:
    axes = zip(g.axis_sizes, g.cuts, strict=True)
    replicas = math.prod(n for n, c in axes if c.kind == "replicate")
    blocks = blocks_of(g)
    if blocks > MAX_BLOCKS:
        raise ValueError(f"strided cuts make {blocks} blocks, the limit is {MAX_BLOCKS}")
    least_dims = max((c.dim + 1 for c in g.cuts if c.kind != "replicate"), default=0)
    return _Spread(replicas, least_dims, len(g.ranks) * blocks)


def _tensor(
    t: dict[str, Any], spreads: Sequence[_Spread], packed: Mapping[str, Mapping[str, Packed]]
) -> TensorEntry:
    dtype = _dtype(t["dtype"])
    shape, index = _shape(t["shape"], ITEMSIZE[dtype]), _count(t["geometry"], 0, len(spreads) - 1)
    spread = spreads[index]
    _check_dims(shape, spread)
    refers = t.get("refers", False)
    if not isinstance(refers, bool) or (refers and (t.get("states") or t.get("stored_aliases"))):
        raise ValueError(
            f"refers is {brief(refers)}, of a tensor that has optimizer states or stored aliases"
        )
    return TensorEntry(
        dtype=dtype,
        shape=shape,
        geometry=index,
        digest=_digest(t["digest"]),
        owner=_count(t.get("owner", 0), 0, spread.replicas - 1),
        kind=_text(t.get("kind", "parameter")),
        aliases=_texts(t.get("aliases", [])),
        stored_aliases=_texts(t.get("stored_aliases", [])),
        refers=refers,
        states={
            _known(o, packed): {s: _state(s, e, shape, spread, packed[o]) for s, e in states.items()}
            for o, states in t.get("states", {}).items()
        },
    )


def _check_dims(shape: tuple[int, ...], spread: _Spread) -> None:
    if spread.least_dims > len(shape):
        raise ValueError(f"shape {brief(shape)} lacks dims that its geometry cuts")


def _state(
    name: Any, e: dict[str, Any], shape: tuple[int, ...], spread: _Spread, packed: Mapping[str, Packed]
) -> StateEntry:
    dtype = _dtype(e["dtype"])
    if e.get("packed") is not None:
        if _text(name) == GRADIENT and shape:
            raise ValueError(f"a gradient has one element, but its parameter has shape {brief(shape)}")
        index = _count(e["index"], 0, packed[_text(e["packed"])].count - 1)
        return StateEntry(dtype, packed=e["packed"], index=index)
    if "." in _text(name):  # slice files name a state <parameter>.<state>
        raise ValueError(f"the optimizer state {brief(name)} has a dot in its name")
    own = _shape(e["shape"]) if "shape" in e else None
    held = shape if own is None else own
    _check_dims(held, spread)
    if not fits(held, ITEMSIZE[dtype]):
        raise ValueError(f"{brief(name)}: {dtype} of shape {brief(held)} has more than 2^62 bytes")
    owner = _count(e.get("owner", 0), 0, spread.replicas - 1)
    return StateEntry(dtype, _digest(e["digest"]), owner, shape=own)


def _packed(p: dict[str, Any], world_size: int) -> Packed:
    owner = _count(p.get("owner", 0), 0, world_size - 1)
    return Packed(_dtype(p["dtype"]), _count(p["count"]), _digest(p["digest"]), owner)


def _check_packs(
    models: Mapping[str, Mapping[str, TensorEntry]], packed: Mapping[str, Mapping[str, Packed]]
) -> None:
    """Check that each element of a pack is the state of one parameter, and each optimizer's states are of one model."""
    if not models:
        raise ValueError("no model")
    used: dict[tuple[str, str], set[int]] = {}
    trained: dict[str, str] = {}
    for model, entries in models.items():
        for t in entries.values():
            for optimizer, states in t.states.items():
                if trained.setdefault(optimizer, model) != model:
                    raise ValueError(
                        f"{optimizer} has states of two models, {trained[optimizer]} and {model}"
                    )
                for e in states.values():
                    if e.packed is None:
                        continue
                    places = used.setdefault((optimizer, e.packed), set())
                    if e.index in places:
                        raise ValueError(f"two states are element {e.index} of the pack {brief(e.packed)}")
                    places.add(e.index)
    for optimizer, packs in packed.items():
        for name, p in packs.items():
            found = len(used.get((optimizer, name), ()))
            if p.count != found:
                raise ValueError(
                    f"the pack {brief(name)} has {p.count} elements, but {found} states refer to it"
                )


def _check_work(
    models: Mapping[str, Mapping[str, TensorEntry]], spreads: Sequence[_Spread], files: int
) -> None:
    """Refuse too many places for the listed tensors and files: readers compute slices per shape, geometry and place."""
    tensors = [t for entries in models.values() for t in entries.values()]
    kinds = {(t.shape, t.geometry) for t in tensors}
    for t in tensors:
        for states in t.states.values():
            kinds |= {(e.shape, t.geometry) for e in states.values() if e.shape is not None}
    places = sum(spreads[geometry].places for _, geometry in kinds)
    listed = files + len(tensors)
    if places > _MIN_PLACES + _PLACES_EACH * listed:
        raise ValueError(
            f"{len(kinds)} shapes are spread over {places} places, too many for {listed} tensors and files"
        )


def _places(value: Any, world_size: int) -> tuple[Place, ...]:
    """Each rank has one place, and a place is named once."""
    found = tuple([Place(_word(p["id"]), _text(p["host"]), _counts(p["ranks"])) for p in value])
    if sorted(rank for place in found for rank in place.ranks) != list(range(world_size)):
        raise ValueError(f"places hold other ranks than 0 to {world_size - 1}")
    if len({place.id for place in found}) < len(found):
        raise ValueError("two places have one id")
    return found


def _file_name(name: str) -> str:
    if not is_inside(name) or name == MANIFEST_NAME:
        raise ValueError(f"file name {brief(name)} leaves the checkpoint directory, or is the manifest's own")
    return name


def _file(f: dict[str, Any]) -> FileEntry:
    nbytes = _count(f["nbytes"])
    header = _count(f["header_bytes"], 0, nbytes)
    if header > MAX_HEADER_BYTES:
        raise ValueError(f"header_bytes is {header}, the limit is {MAX_HEADER_BYTES}")
    return FileEntry(nbytes, header, _text(f["header_xxh3"]), _texts(f.get("blocks", [])))


# ----------------------------------------------------------------------------------------------------
# The names of the documents that a checkpoint may hold: a closed list. Pure; content is checked elsewhere.
#
# Reading a checkpoint refuses any other name. A name from a file therefore never chooses which object gets its content.

DocumentKind = Literal[
    "step",
    "rng",
    "classes",
    "scheduler",
    "scaler",
    "dataloader",
    "extra",
    "optimizer",
    "opaque",
    "low_bit",
    "buffers",
    "modules",
    "own",
    "not_stored",
    "settings",
    "data_settings",
]
_OF_A_RUN: tuple[DocumentKind, ...] = (
    "step",
    "rng",
    "classes",
    "scheduler",
    "scaler",
    "dataloader",
    "not_stored",
    "settings",
    "data_settings",
)
_OF_AN_OPTIMIZER: tuple[DocumentKind, ...] = ("opaque", "low_bit", "own")
_OF_A_MODEL: tuple[DocumentKind, ...] = ("buffers", "modules", "own")
_EXTRA = "extra."


@frozen
class Document:
    """A document's kind and owner (a model, optimizer or extra), parsed from its name. An empty owner means the run itself."""

    kind: DocumentKind
    owner: str = ""


def document_of(kind: str, name: str, what: str = "") -> str:
    """Name of a model's or optimizer's document: ``optimizer``, ``optimizers.critic``, ``optimizers.critic.opaque``.

    For a single model, called ``model``, only ``what``.
    """
    stem = kind if name == kind else f"{kind}s.{name}"
    if not what:
        return stem
    return what if stem == "model" else f"{stem}.{what}"


def document_named(name: str, manifest: Manifest) -> Document | None:
    """The document that a name in a checkpoint stands for; None if this release does not know the name."""
    if name in _OF_A_RUN:
        return Document(name)
    if name.startswith(_EXTRA):
        return Document("extra", name.removeprefix(_EXTRA))
    for optimizer in manifest.packed:
        if name == document_of("optimizer", optimizer):
            return Document("optimizer", optimizer)
        for kind in _OF_AN_OPTIMIZER:
            if name == document_of("optimizer", optimizer, kind):
                return Document(kind, optimizer)
    for model in manifest.models:
        for kind in _OF_A_MODEL:
            if name == document_of("model", model, kind):
                return Document(kind, model)
    return None


def refuse_unknown(names: Iterable[str], manifest: Manifest, path: str) -> None:
    """Raise :class:`VersionError` for a name that this release does not know."""
    for name in names:
        if document_named(name, manifest) is None:
            raise VersionError(
                f"holds a document {brief(name)}, which this release does not know: a later release wrote it, or the file "
                f"was changed. Update shardwise, or take another checkpoint",
                path=path,
            )


def parse_documents(content: bytes, manifest: Manifest, path: str) -> dict[str, Any]:
    """The documents in a JSON file of a checkpoint, still encoded, by name.

    Raises :class:`FormatError` if the file is not a JSON object, :class:`VersionError` for an unknown name.
    """
    found = parse_json(content, path)
    if not isinstance(found, dict):
        raise FormatError(f"expected a JSON object of documents, got {brief(found)}", path=path)
    refuse_unknown(found, manifest, path)
    return found


# ----------------------------------------------------------------------------------------------------
# Steps in parts: each host's own directory holds the manifest, and the files of its ranks; those of no rank lie with rank 0's.
#
# The parts under one directory, as ``rsync`` or ``cp`` puts them there, are an ordinary checkpoint.

#: Hosts that a text names.
_SHOWN = 5
_OF_RANK = re.compile(r"rank/([0-9]{5,})\.(json|safetensors)")
_SLICES = re.compile(
    r"(models?|optimizers?)/(.*/)?shard-([0-9]{5,})-(model|optimizer)-[0-9]+-of-[0-9]+\.safetensors"
)


def rank_of_file(name: str) -> int:
    """The rank that writes a file of a checkpoint. Rank 0 writes the files whose names hold no rank."""
    if found := _OF_RANK.fullmatch(name):
        return int(found[1])
    found = _SLICES.fullmatch(name)
    return int(found[3]) - 1 if found else 0


def files_by_place(manifest: Manifest) -> list[list[str]]:
    """The names of the files that each of the manifest's places holds; one list of all files if it has no places."""
    if not manifest.places:
        return [list(manifest.files)]
    place_of = {rank: number for number, place in enumerate(manifest.places) for rank in place.ranks}
    found: list[list[str]] = [[] for _ in manifest.places]
    for name in manifest.files:
        found[place_of.get(rank_of_file(name), 0)].append(name)
    return found


def absent_places(path: str, manifest: Manifest) -> list[int]:
    """The numbers of the manifest's places none of whose files is at ``path``: parts that lie elsewhere. Rank-local."""
    if not manifest.places or is_url(path):
        return []
    return [
        number
        for number, names in enumerate(files_by_place(manifest))
        if not any(os.path.lexists(inside(path, name)) for name in names)
    ]


def refuse_part(path: str, manifest: Manifest) -> None:
    """Raise :class:`CheckpointError` if parts of a step lie elsewhere: it is not damaged. Rank-local."""
    if part := describe_part(path, manifest):
        raise CheckpointError(f"{path}: {part}")


def describe_part(path: str, manifest: Manifest) -> str | None:
    """What :func:`describe_absent` says of the directory of a step; None if no part of it lies elsewhere. Rank-local."""
    absent = absent_places(path, manifest)
    return describe_absent(path, manifest.places, absent) if absent else None


def describe_absent(
    path: str, places: Sequence[Place], absent: Collection[int], *, holder: str = "contains"
) -> str:
    """Which parts of a step are at ``path`` and which hosts have the others, with the lines that merge them.

    ``holder``: the words before what is there.
    """
    step = os.path.basename(os.path.abspath(path))
    lost = [places[number] for number in sorted(absent)]
    here = [number for number in range(len(places)) if number not in absent]
    numbers = f"part{'s' * (len(here) > 1)} {ranks_text([n + 1 for n in here])}" if here else "none"
    of = f" ({', '.join([f'host {places[n].host}' for n in here[:_SHOWN]])}{_more(here)})" if here else ""
    hosts = ", ".join(
        [f"host {p.host} (place {p.id}) has the files of ranks {ranks_text(p.ranks)}" for p in lost[:_SHOWN]]
    )
    merge = " && ".join(f"rsync -a {p.host}:DIRECTORY/{step}/ {path}/" for p in lost[:_SHOWN])
    return (
        f"{holder} {numbers} of {len(places)} of the step{of}; {hosts}{_more(lost)}. Start with local=True on all hosts that saved "
        f"it, or merge the parts into one directory: {merge}{_more(lost)}"
    )


def _more(hosts: Sequence[object]) -> str:
    return f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Numbers as people write them: ``0 to 7``, or ``0, 2, 5``."""
    whole = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if whole else ", ".join(map(str, ranks))
