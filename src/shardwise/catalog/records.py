"""The records that describe every kind of source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..errors import FormatError
from ..layout.boxes import Box, find_overlap, whole

__all__ = ["Catalog", "Chunk", "Chunks", "SharedChunk", "SharedCut", "StoredFile", "StoredTensor", "assemble"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a stored tensor: row-major bytes at ``offset_bytes`` of the file at ``path``."""

    box: Box
    path: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class SharedChunk:
    """The same chunk of many identically sharded tensors: one box, one file, and an offset per tensor by position."""

    box: Box
    path: str
    offsets_bytes: NDArray[np.int64]


class SharedCut(Protocol):
    """The cut that tensors of one shape share."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each of these tensors."""

    def touching(self, box: Box) -> Sequence[SharedChunk]:
        """The chunks that share an element with a box."""


class Chunks(Sequence[Chunk]):
    """The chunks of a tensor with a shared cut, found by box. Iterating over it makes them all."""

    __slots__ = ("_all", "cut", "position")

    def __init__(self, cut: SharedCut, position: int) -> None:
        self.cut = cut
        self.position = position
        self._all: tuple[Chunk, ...] | None = None

    def touching(self, box: Box) -> list[Chunk]:
        """The chunks that share an element with a box."""
        found = self.cut.touching(box)
        return [Chunk(c.box, c.path, int(c.offsets_bytes[self.position])) for c in found]

    def every(self) -> tuple[Chunk, ...]:
        """All chunks, ordered by box."""
        if self._all is None:
            self._all = tuple(sorted(self.touching(whole(self.cut.shape)), key=lambda c: c.box))
        return self._all

    def __len__(self) -> int:
        return len(self.every())

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, index: int | slice) -> Chunk | tuple[Chunk, ...]:
        return self.every()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.every())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a source; its chunks cover it exactly once. A plan asks for :meth:`chunks_touching` a box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    def chunks_touching(self, box: Box) -> Sequence[Chunk]:
        """The chunks that share an element with ``box``."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.touching(box)
        if len(self.chunks) == 1:  # and it is the whole tensor
            return self.chunks
        return [chunk for chunk in self.chunks if chunk.box.intersect(box) is not None]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source, or an object of a store: its path and size in bytes."""

    path: str
    nbytes: int
    version: str | None = None
    """As :attr:`.Stat.version`, when the catalog was made: a load reads no other."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that planning knows of a source.

    ``ignored_files`` look like payload but do not belong to the source (they are outside its index).
    ``digests`` are content digests by stored name, if the source records them.
    """

    kind: str
    root: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    ignored_files: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_module_names(self) -> bool:
        """Whether tensors have module names, as in a training checkpoint, and not hub names."""
        return self.kind in ("checkpoint", "dcp", "full state", "slices")

    @property
    def nbytes(self) -> int:
        """Payload bytes of all stored tensors."""
        return sum(t.nbytes for t in self.tensors.values())


def assemble(name: str, dtype: str, chunks: Iterable[Chunk]) -> StoredTensor:
    """One stored tensor from its chunks. Raises :class:`FormatError` if two overlap or a part is missing."""
    found = tuple(sorted(chunks, key=lambda c: c.box))
    if len(found) == 1 and not any(found[0].box.start):
        return StoredTensor(name, dtype, found[0].box.stop, found)
    ndim = len(found[0].box.start)
    shape = tuple(max(c.box.stop[d] for c in found) for d in range(ndim))
    overlap = find_overlap(c.box for c in found)
    if overlap:
        first, second = (next(c.path for c in found if c.box == box) for box in overlap)
        if overlap[0] == overlap[1]:
            first, second = [c.path for c in found if c.box == overlap[0]][:2]
        raise FormatError(
            f"tensor {name!r} is stored twice: {_describe(overlap[0])} in {first} and {_describe(overlap[1])} "
            f"in {second}; remove one copy (or list the right file in the index)"
        )
    held = sum(c.box.numel for c in found)
    if held != whole(shape).numel:
        raise FormatError(
            f"tensor {name!r} is stored in part: its chunks hold {held} of {whole(shape).numel} elements of "
            f"shape {shape}; a slice file is missing",
            path=found[0].path,
        )
    return StoredTensor(name, dtype, shape, found)


def _describe(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
