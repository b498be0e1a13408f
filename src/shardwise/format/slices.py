"""Slice files: which rank writes which boxes of which tensors, into which file, at which offset.

Writer and reader follow one deterministic rule. A manifest therefore needs one entry per tensor, and planning opens no
other rank's header. Pure: integers and strings, no torch, no files. :mod:`.spread` finds single slices in other ranks'
files, instead of all slices of one rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from ..dtypes import itemsize
from ..layout.boxes import Box, LocalBox
from ..layout.placements import Geometry, cut_boxes
from ..objects import frozen

__all__ = [
    "Slice",
    "SliceTensor",
    "assign_owners",
    "boxes_to_write",
    "file_name",
    "header_bytes",
    "in_file_order",
    "owner_ranks",
    "rank_files",
    "replicas",
]


@frozen
class SliceTensor:
    """A tensor as it is stored: spread by ``geometry``, written by the ``owner``-th of its replicas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry
    owner: int = 0


class Slice(NamedTuple):  # made in a third of a dataclass's time, for each tensor of a save
    """A box of a tensor in a slice file; ``offset_bytes`` counts from the start of the payload."""

    tensor: SliceTensor
    held: LocalBox
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.held.box.numel * itemsize(self.tensor.dtype)


def _replicated_axes(geometry: Geometry) -> list[int]:
    return [axis for axis, cut in enumerate(geometry.cuts) if cut.kind == "replicate"]


@lru_cache(maxsize=64)
def _replica_ranks(geometry: Geometry) -> tuple[dict[int, tuple[int, ...]], ...]:
    """For each replica, global rank → mesh coordinate."""
    axes = _replicated_axes(geometry)
    found: list[dict[int, tuple[int, ...]]] = [
        {} for _ in range(math.prod(geometry.axis_sizes[axis] for axis in axes))
    ]
    coordinates = product(*(range(n) for n in geometry.axis_sizes))
    for rank, coordinate in zip(geometry.ranks, coordinates, strict=True):
        index = 0
        for axis in axes:
            index = index * geometry.axis_sizes[axis] + coordinate[axis]
        found[index][rank] = coordinate
    return tuple(found)


def owner_ranks(geometry: Geometry, owner: int) -> Mapping[int, tuple[int, ...]]:
    """Global rank → mesh coordinate in the replica that writes: one rank per shard."""
    return _replica_ranks(geometry)[owner]


def replicas(geometry: Geometry) -> list[list[int]]:
    """The ranks of each replica of a tensor: every inner list holds the whole tensor once."""
    return [list(found) for found in _replica_ranks(geometry)]


def assign_owners(tensors: Sequence[SliceTensor]) -> list[SliceTensor]:
    """Give each tensor an owner. Replicas then share the writing, balanced by bytes.

    Greedy, largest first: a tensor goes to the replica whose ranks have least to write so far.
    Deterministic: the same on every rank.
    """
    geometries = {t.geometry for t in tensors}
    members = {g: np.array(replicas(g), np.int64) for g in geometries}
    if all(len(groups) == 1 for groups in members.values()):
        return [t if t.owner == 0 else replace(t, owner=0) for t in tensors]
    loads = np.zeros(1 + max((max(g.ranks, default=0) for g in geometries), default=0), np.int64)
    # What the one replica of other tensors writes is added up, and counted before the next choice.
    waiting: dict[Geometry, int] = dict.fromkeys(geometries, 0)
    owners: dict[str, int] = {}
    sized = [(-math.prod(t.shape) * itemsize(t.dtype), t.name, t.geometry) for t in tensors]
    for negative_bytes, name, geometry in sorted(sized, key=itemgetter(0, 1)):
        groups = members[geometry]
        each_bytes = -negative_bytes // groups.shape[1]
        if len(groups) == 1:
            waiting[geometry] += each_bytes
            continue
        for other, nbytes in waiting.items():
            if nbytes:
                loads[members[other][0]] += nbytes
                waiting[other] = 0
        owner = owners[name] = int(loads[groups].max(axis=1).argmin())
        loads[groups[owner]] += each_bytes
    return [t if t.owner == (owner := owners.get(t.name, 0)) else replace(t, owner=owner) for t in tensors]


def file_name(kind: str, rank: int, index: int, count: int) -> str:
    """Name of a rank's index-th slice file (from 0), as torch's HuggingFaceStorageWriter names them."""
    return f"shard-{rank + 1:05d}-{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def in_file_order(tensors: Iterable[SliceTensor]) -> list[SliceTensor]:
    """Tensors in the order of a file: by falling item size, which aligns them all, then by name."""
    return sorted(sorted(tensors, key=attrgetter("name")), key=lambda t: -itemsize(t.dtype))


def rank_files(tensors: Sequence[SliceTensor], rank: int) -> list[list[Slice]]:
    """The slice files of one rank: the k-th holds the k-th box of every tensor that has one there.

    Empty shards are left out; a tensor that is empty everywhere is stored once, by its first owner.
    """
    files: list[list[Slice]] = []
    ends: list[int] = []
    # Tensors of one kind have the same boxes, and kinds are far fewer than tensors.
    known: dict[tuple[object, ...], list[tuple[int, LocalBox, int]]] = {}
    for tensor in in_file_order(tensors):
        kind = (tensor.shape, tensor.geometry, tensor.owner, tensor.dtype)
        held = known.get(kind)
        if held is None:
            size, boxes = itemsize(tensor.dtype), boxes_to_write(tensor, rank)
            held = known[kind] = [(k, b, b.box.numel * size) for k, b in enumerate(boxes)]
        for k, local, nbytes in held:
            if k == len(files):
                files.append([])
                ends.append(0)
            files[k].append(Slice(tensor, local, ends[k]))
            ends[k] += nbytes
    return files


def boxes_to_write(tensor: SliceTensor, rank: int) -> tuple[LocalBox, ...]:
    """The boxes of a tensor that a rank writes: all that it holds if its replica is the owner, otherwise none."""
    owners = owner_ranks(tensor.geometry, tensor.owner)
    coordinate = owners.get(rank)
    if coordinate is None:
        return ()
    if math.prod(tensor.shape) == 0:
        zero = (0,) * len(tensor.shape)
        return (LocalBox(Box(zero, tensor.shape), zero),) if rank == next(iter(owners)) else ()
    return cut_boxes(tensor.shape, tensor.geometry, coordinate)


def header_bytes(slices: Sequence[Slice]) -> bytes:
    """Length prefix and header of a slice file, padded to start the payload at a multiple of 8.

    Carries ``DCP_SHARDING_INFO`` with ``saved_offsets`` per tensor, as torch's HuggingFaceStorageReader
    expects (torch 2.9-2.14, ``distributed/checkpoint/_hf_utils.py``).
    """
    # Tensors of one kind share a box (rank_files) and most of their text, and kinds are far fewer than tensors.
    kinds: dict[tuple[int, str], _KindText] = {}
    quoted = json.JSONEncoder().encode
    offsets, entries = [], []
    for s in slices:
        key = id(s.held), s.tensor.dtype
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _KindText.of(s)
        name, end = quoted(s.tensor.name), s.offset_bytes + kind.nbytes
        offsets.append(f"{name}:{kind.offsets}")
        entries.append(f"{name}:{kind.entry}[{s.offset_bytes},{end}]}}")
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": "{" + ",".join(offsets) + "}"}
    text = ("{" + ",".join([f'"__metadata__":{_json(metadata)}', *entries]) + "}").encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _KindText(NamedTuple):
    """The JSON text that slices of one kind have in common."""

    offsets: str
    entry: str
    """Up to the place in the payload."""
    nbytes: int

    @classmethod
    def of(cls, one: Slice) -> _KindText:
        box, dtype = one.held.box, one.tensor.dtype
        entry = f'{{"dtype":"{dtype}","shape":{_json(box.sizes)},"data_offsets":'
        return cls(f'{{"saved_offsets":{_json(box.start)}}}', entry, one.nbytes)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
