"""Slice files: the rank, file and offset of each box that a save writes."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..objects import frozen
from ..tensors.boxes import Box, LocalBox
from ..tensors.placements import Geometry, cut_boxes, cutting_axes, dim_intervals

# ----------------------------------------------------------------------------------------------------
# Slice files: which rank writes which boxes of which tensors, into which file, at which offset.
#
# Writer and reader follow one deterministic rule. A manifest therefore needs one entry per tensor, and planning opens no
# other rank's header. Pure: integers and strings, no torch, no files. the functions below finds single slices in other ranks'
# files, instead of all slices of one rank.


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


# ----------------------------------------------------------------------------------------------------
# Finds slices in all ranks' files, for one box or one rank at a time.
#
# :func:`.slices.rank_files` lists all slices of one rank. A run at another world size needs a few boxes from each of
# many ranks' files: with 60,000 tensors on 1,024 ranks, a few of 60 million slices. So nothing here is computed for
# all ranks and all tensors. Tensors of equal dtype, shape, geometry and owner (a *kind*) are cut alike and share the
# work; kinds are far fewer than tensors. Pure: no torch, no files.


@frozen
class SliceAt:
    """A box of a tensor, in the ``file``-th slice file (from 0) of a rank."""

    box: Box
    rank: int
    file: int


@frozen
class _Piece:
    """One interval of a dim. Ranks at ``coordinate`` hold ``count`` of them; this is number ``index``, from 0."""

    start: int
    stop: int
    coordinate: tuple[int, ...]
    index: int
    count: int


class _Dim:
    """How a dim of some length is cut into intervals. ``axes``: the mesh axes that cut it; coordinates are on them."""

    def __init__(self, length: int, dim: int, geometry: Geometry) -> None:
        self.axes = tuple(axis for axis, _ in cutting_axes(geometry, dim))
        sizes = [geometry.axis_sizes[axis] for axis in self.axes]
        #: How many intervals each coordinate holds.
        self.counts = np.zeros(sizes, np.int64)
        found = []
        coordinate = [0] * len(geometry.axis_sizes)
        for here in product(*map(range, sizes)):
            for axis, index in zip(self.axes, here, strict=True):
                coordinate[axis] = index
            intervals = dim_intervals(length, dim, geometry, coordinate)
            self.counts[here] = len(intervals)
            found += [_Piece(a, b, here, k, len(intervals)) for k, (a, b) in enumerate(intervals)]
        self._pieces = sorted(found, key=lambda p: p.start)
        self._starts = [p.start for p in self._pieces]

    def overlapping(self, low: int, high: int) -> list[_Piece]:
        """The intervals that hold an index from low to high-1. Intervals are disjoint and cover the dim."""
        first = max(0, bisect_right(self._starts, low) - 1)
        last = bisect_right(self._starts, high - 1)
        return self._pieces[first:last]


@lru_cache(maxsize=256)  # weights and optimizer states are cut alike
def _dim(length: int, dim: int, geometry: Geometry) -> _Dim:
    return _Dim(length, dim, geometry)


class CutKind:
    """Tensors, not empty, that are cut alike."""

    def __init__(self, tensor: SliceTensor) -> None:
        geometry = tensor.geometry
        self.tensor = tensor
        self._dims = [_dim(length, dim, geometry) for dim, length in enumerate(tensor.shape)]
        first = next(iter(owner_ranks(geometry, tensor.owner).values()))
        replicated = {axis for axis, cut in enumerate(geometry.cuts) if cut.kind == "replicate"}
        self._base = [c if axis in replicated else 0 for axis, c in enumerate(first)]
        self._owned = tuple(c if axis in replicated else slice(None) for axis, c in enumerate(first))
        self._known: dict[Box, tuple[SliceAt, ...]] = {}

    def boxes_by_rank(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks of the owning replica, and how many boxes each holds."""
        sizes = self.tensor.geometry.axis_sizes
        boxes = np.ones(sizes, np.int64)
        for dim in self._dims:
            boxes *= dim.counts.reshape([n if axis in dim.axes else 1 for axis, n in enumerate(sizes)])
        ranks = np.array(self.tensor.geometry.ranks, np.int64).reshape(sizes)
        return ranks[self._owned].reshape(-1), boxes[self._owned].reshape(-1)

    def touching(self, box: Box) -> tuple[SliceAt, ...]:
        """The slices that share an element with a box."""
        found = self._known.get(box)
        if found is None:
            found = self._known[box] = tuple(self._find(box))
        return found

    def _find(self, box: Box) -> Iterator[SliceAt]:
        geometry = self.tensor.geometry
        per_dim = [d.overlapping(a, b) for d, a, b in zip(self._dims, box.start, box.stop, strict=True)]
        for pieces in product(*per_dim):
            coordinate, file = list(self._base), 0
            for dim, piece in zip(self._dims, pieces, strict=True):
                file = file * piece.count + piece.index
                for axis, index in zip(dim.axes, piece.coordinate, strict=True):
                    coordinate[axis] = index
            place = 0
            for size, index in zip(geometry.axis_sizes, coordinate, strict=True):
                place = place * size + index
            found = Box(tuple([p.start for p in pieces]), tuple([p.stop for p in pieces]))
            yield SliceAt(found, geometry.ranks[place], file)


class Spread:
    """The slices of the tensors of one directory.

    ``held`` maps each rank that has files to their number. ``kinds`` has None for tensors without elements.
    """

    def __init__(self, tensors: Sequence[SliceTensor]) -> None:
        order = in_file_order(tensors)
        kinds: dict[tuple[object, ...], int] = {}
        self._order = {t.name: position for position, t in enumerate(order)}
        self._kind_at: list[int] = []
        firsts: list[SliceTensor] = []
        for t in order:
            kind = kinds.setdefault((t.shape, t.geometry, t.owner, t.dtype), len(kinds))
            if kind == len(firsts):
                firsts.append(t)
            self._kind_at.append(kind)
        self._kinds_of_all = np.array(self._kind_at, np.int64)
        self._tensors = firsts
        self.kinds = [None if 0 in t.shape else CutKind(t) for t in firsts]
        self.held = self._count_files()

    def _count_files(self) -> dict[int, int]:
        most = max((max(t.geometry.ranks) for t in self._tensors), default=0)
        found = np.zeros(most + 1, np.int64)
        for tensor, kind in zip(self._tensors, self.kinds, strict=True):
            if kind is None:
                rank = next(iter(owner_ranks(tensor.geometry, tensor.owner)))
                found[rank] = max(found[rank], 1)
            else:
                ranks, boxes = kind.boxes_by_rank()
                found[ranks] = np.maximum(found[ranks], boxes)
        return {int(rank): int(found[rank]) for rank in np.flatnonzero(found)}

    def find(self, name: str) -> tuple[int, int]:
        """A tensor's position in the order of a file, and the index of its kind."""
        position = self._order[name]
        return position, self._kind_at[position]

    def offsets_bytes(self, rank: int, file: int) -> NDArray[np.int64]:
        """By position, the offset of each tensor in a file's payload, or where it would begin if it has no box there."""
        sizes = []
        for tensor in self._tensors:
            boxes = boxes_to_write(tensor, rank)
            sizes.append(boxes[file].box.numel * itemsize(tensor.dtype) if file < len(boxes) else 0)
        lengths = np.array(sizes, np.int64)[self._kinds_of_all]
        return np.cumsum(lengths) - lengths


def file_count(tensors: Sequence[SliceTensor]) -> int:
    """The largest number of slice files of any rank. Every slice file's name ends with it."""
    kinds = {(t.shape, t.geometry, t.owner, t.dtype): t for t in tensors}
    return max(Spread([*kinds.values()]).held.values(), default=0)


# ----------------------------------------------------------------------------------------------------
# Names of stored optimizer states: ``<parameter>.<state>``, in our slice files as in DCP and FSDP's full state. Pure.

_T = TypeVar("_T")


class StateKey(NamedTuple):
    """One state of one parameter."""

    parameter: str
    state: str

    @property
    def name(self) -> str:
        """The name of its tensor."""
        return f"{self.parameter}.{self.state}"

    @classmethod
    def of(cls, name: str) -> StateKey:
        """The key that a name stands for. No state has a dot in its own name: a manifest refuses it."""
        parameter, _, state = name.rpartition(".")
        return cls(parameter, state)


def by_name(states: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """The values of a mapping parameter → state → value by the names of their tensors."""
    return {StateKey(p, s).name: value for p, of_one in states.items() for s, value in of_one.items()}
