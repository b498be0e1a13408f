"""Reading a manifest: the JSON that makes a directory a checkpoint. Written last, checksummed by its own xxh3.

This module checks everything in it once: names, numbers, and the time and memory that they cost a reader.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..dtypes import ITEMSIZE
from ..errors import FormatError, IntegrityError, SourceError, VersionError
from ..layout.placements import RULE_VERSION, Cut, Geometry, blocks_of, one_of_equals
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
    is_inside,
    is_text,
    is_word,
    parse_json,
    read_small,
)
from ..objects import frozen, gc_paused
from ..storage import exists, is_directory
from .manifest_records import (
    BLOCK_BYTES,
    FORMAT,
    GRADIENT,
    MANIFEST_NAME,
    VERSION,
    VERSION_OF_PLACES,
    FileEntry,
    Manifest,
    Packed,
    Place,
    StateEntry,
    TensorEntry,
    checksum_of,
)
from .steps import describe_steps

__all__ = [
    "BLOCK_BYTES",
    "CONVERTED",
    "GRADIENT",
    "MANIFEST_NAME",
    "FileEntry",
    "Manifest",
    "Packed",
    "Place",
    "StateEntry",
    "TensorEntry",
    "parse_manifest",
    "read_manifest",
    "step_of_manifest",
]

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
