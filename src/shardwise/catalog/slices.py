"""Slice files: which rank writes which boxes of which tensors, into which file, at which offset.

One deterministic rule for writer and reader, so that a manifest needs one entry per tensor and nobody
opens another rank's header to plan. Pure: integers and strings, no torch, no files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..dtypes import itemsize
from ..layout.boxes import Box, LocalBox
from ..layout.placements import Geometry, cut_boxes

__all__ = [
    "Slice",
    "SliceTensor",
    "assign_owners",
    "file_name",
    "header_bytes",
    "owner_ranks",
    "rank_files",
    "replicas",
]


@dataclass(frozen=True, slots=True)
class SliceTensor:
    """A tensor as it is stored: spread by ``geometry``, written by the ``owner``-th of its replicas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor in a slice file; ``offset_bytes`` counts from the start of the payload."""

    tensor: SliceTensor
    held: LocalBox
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.held.box.numel * itemsize(self.tensor.dtype)


def _replicated_axes(geometry: Geometry) -> list[int]:
    return [axis for axis, cut in enumerate(geometry.cuts) if cut.kind == "replicate"]


def owner_ranks(geometry: Geometry, owner: int) -> dict[int, tuple[int, ...]]:
    """Global rank → mesh coordinate of the replica that writes, one rank for every shard."""
    axes = _replicated_axes(geometry)
    fixed, rest = {}, owner
    for axis in reversed(axes):
        rest, fixed[axis] = divmod(rest, geometry.axis_sizes[axis])
    found = {}
    coordinates = product(*(range(n) for n in geometry.axis_sizes))
    for rank, coordinate in zip(geometry.ranks, coordinates, strict=True):
        if all(coordinate[axis] == index for axis, index in fixed.items()):
            found[rank] = coordinate
    return found


def replicas(geometry: Geometry) -> list[list[int]]:
    """The ranks of each replica of a tensor: every inner list holds the whole tensor once."""
    count = math.prod(geometry.axis_sizes[a] for a in _replicated_axes(geometry))
    return [list(owner_ranks(geometry, k)) for k in range(count)]


def assign_owners(tensors: Sequence[SliceTensor]) -> list[SliceTensor]:
    """The tensors with an owner each, so that replicas share the writing, balanced by bytes.

    Greedy, largest first: a tensor goes to the replica whose ranks have least to write so far.
    Deterministic: the same on every rank.
    """
    loads: dict[int, int] = {}
    members: dict[Geometry, list[list[int]]] = {}
    owners: dict[str, int] = {}
    order = sorted(tensors, key=lambda t: (-math.prod(t.shape) * itemsize(t.dtype), t.name))
    for tensor in order:
        geometry = tensor.geometry
        if geometry not in members:
            members[geometry] = replicas(geometry)
        groups = members[geometry]
        owner = min(range(len(groups)), key=lambda k: (max(loads.get(r, 0) for r in groups[k]), k))
        owners[tensor.name] = owner
        share = math.prod(tensor.shape) * itemsize(tensor.dtype) // len(groups[owner])
        for rank in groups[owner]:
            loads[rank] = loads.get(rank, 0) + share
    return [SliceTensor(t.name, t.dtype, t.shape, t.geometry, owners[t.name]) for t in tensors]


def file_name(kind: str, rank: int, index: int, count: int) -> str:
    """Name of a rank's index-th slice file (from 0), as torch's HuggingFaceStorageWriter names them."""
    return f"shard-{rank + 1:05d}-{kind}-{index + 1:05d}-of-{count:05d}.safetensors"


def rank_files(tensors: Sequence[SliceTensor], rank: int) -> list[list[Slice]]:
    """The slice files of one rank: the k-th holds the k-th box of every tensor that has one there.

    Order within a file: falling item size, then name, so that everything is aligned. Empty shards are
    left out; a tensor that is empty everywhere is stored once, by its first owner.
    """
    held: list[list[tuple[SliceTensor, LocalBox]]] = []
    for tensor in sorted(tensors, key=lambda t: (-itemsize(t.dtype), t.name)):
        for k, local in enumerate(_boxes_to_write(tensor, rank)):
            while len(held) <= k:
                held.append([])
            held[k].append((tensor, local))
    files = []
    for entries in held:
        offset, slices = 0, []
        for tensor, local in entries:
            slices.append(Slice(tensor, local, offset))
            offset += slices[-1].nbytes
        files.append(slices)
    return files


def _boxes_to_write(tensor: SliceTensor, rank: int) -> tuple[LocalBox, ...]:
    owners = owner_ranks(tensor.geometry, tensor.owner)
    coordinate = owners.get(rank)
    if coordinate is None:
        return ()
    if math.prod(tensor.shape) == 0:
        zero = (0,) * len(tensor.shape)
        return (LocalBox(Box(zero, tensor.shape), zero),) if rank == next(iter(owners)) else ()
    return cut_boxes(tensor.shape, tensor.geometry, coordinate)


def header_bytes(slices: Sequence[Slice]) -> bytes:
    """Length prefix and header of a slice file, padded so that the payload starts at a multiple of 8.

    Carries ``DCP_SHARDING_INFO`` with ``saved_offsets`` per tensor, as torch's HuggingFaceStorageReader
    expects (torch 2.9-2.13, ``distributed/checkpoint/_hf_utils.py``).
    """
    offsets = {s.tensor.name: {"saved_offsets": list(s.held.box.start)} for s in slices}
    document: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")),
        }
    }
    for s in slices:
        document[s.tensor.name] = {
            "dtype": s.tensor.dtype,
            "shape": list(s.held.box.sizes),
            "data_offsets": [s.offset_bytes, s.offset_bytes + s.nbytes],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
