"""The records that describe every kind of source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..errors import FormatError
from ..layout.boxes import Box, find_overlap, whole
from ..objects import frozen

if TYPE_CHECKING:
    import torch

__all__ = [
    "Catalog",
    "Chunk",
    "Chunks",
    "Coded",
    "ColumnsRule",
    "OpeningRule",
    "Quantization",
    "Rule",
    "SharedChunk",
    "SharedCut",
    "StoredFile",
    "StoredTensor",
    "assemble",
]


@frozen
class Chunk:
    """A box of a stored tensor: row-major bytes at ``offset_bytes`` of the file at ``path``."""

    box: Box
    path: str
    offset_bytes: int


@frozen
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


@frozen
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


@frozen
class StoredFile:
    """A file of a source, or an object of a store: its path and size in bytes."""

    path: str
    nbytes: int
    version: str | None = None
    """As :attr:`.Stat.version`, when the catalog was made: a load reads no other."""


class Rule(Protocol):
    """How elements of one tensor are made from its parts. Pure, and the same for every element, however boxes are cut."""

    @property
    def format(self) -> str:
        """In words, for reports: "FP8 (E4M3) in blocks of 128 x 128"."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        """The box of each part (by its role) that a box of the tensor is made from."""

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The elements of ``box``, with its sizes, in the dtype of :attr:`Coded.tensor`, or in F32 if that dtype holds them exactly.

        ``parts``: the elements of :meth:`boxes`, each of its box's sizes and of its stored dtype. They may be overwritten by the
        next read. Memory: a few times the elements. Raises :class:`IntegrityError` for scales that are NaN or infinite.
        """


@runtime_checkable
class OpeningRule(Rule, Protocol):
    """A rule with work to do once per read, like transposing codes, before it decodes smaller boxes of what was read."""

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """A function that decodes any box within ``box``, as :meth:`decode` does.

        ``parts``: as for :meth:`decode`, of ``box``. The function may keep them, so they must not change while it is used. Memory: as
        much as the parts. Raises :class:`IntegrityError` for scales that are NaN or infinite, at once.
        """


@runtime_checkable
class ColumnsRule(OpeningRule, Protocol):
    """A rule of a matrix whose parts are stored transposed: those of some columns are contiguous in the file, those of rows aren't."""

    @property
    def columns_together(self) -> int:
        """Columns that share words of codes and a group; a box should begin and end at a multiple of it."""


@frozen(eq=False)
class Coded:
    """A tensor that a source stores in parts: codes, scales, maybe zero points, an index of groups, a code book.

    A plan sees :attr:`tensor`, an ordinary stored tensor in a file that does not exist, so every recipe, mesh and strategy takes it
    as any other; a read of it reads boxes of its parts, and decodes them.
    """

    tensor: StoredTensor
    """The tensor that the parts stand for, as if it were stored: its one chunk names :attr:`path`."""
    parts: Mapping[str, StoredTensor]
    """The stored tensors by their roles: ``codes``, ``scales``, ``zeros``, …"""
    rule: Rule

    @property
    def path(self) -> str:
        """A file that does not exist, which orders like the file and place of the codes."""
        return self.tensor.chunks[0].path

    @property
    def stored_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    def bytes_of(self, box: Box) -> int:
        """Bytes of the parts that a box is made from."""
        boxes = self.rule.boxes(box)
        return sum(part.numel * itemsize(self.parts[role].dtype) for role, part in boxes.items())


@frozen
class Quantization:
    """What a source says of its own quantization, beside the tensors."""

    settings: Mapping[str, Any]
    """``quantization_config`` of its config.json; empty if there is none."""
    content: Mapping[str, bytes]
    """The small tensors that describe others, by name: bitsandbytes' ``quant_state``, compressed-tensors' ``weight_shape``."""


@frozen
class Catalog:
    """Everything that planning knows of a source.

    ``ignored_files`` look like payload but do not belong to the source (they are outside its index); ``ignored_entries`` are stored in
    its file next to the model.
    ``digests`` are content digests by stored name, if the source records them.
    """

    kind: str
    root: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    ignored_files: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)
    quantization: Quantization = field(default_factory=lambda: Quantization({}, {}))
    coded: Mapping[str, Coded] = field(default_factory=dict)
    """Tensors that the source stores in parts, by the path of their chunk."""
    kept: tuple[Coded, ...] = ()
    """Tensors that the source stores in parts, and whose parts the model holds as they are stored."""
    referred: frozenset[str] = frozenset()
    """Names of tensors of which a checkpoint holds only digests; they are not among ``tensors``."""
    passed_over: tuple[str, ...] = ()
    """Files among ``ignored_files`` that are another model, or another part of this one."""
    unheld: Mapping[str, str] = field(default_factory=dict)
    """Entries of the index, tensor and file, that none of the files holds."""
    ignored_entries: tuple[str, ...] = ()

    @property
    def has_module_names(self) -> bool:
        """Whether tensors have module names, as in a training checkpoint, and not hub names."""
        return self.kind in ("checkpoint", "dcp", "full state", "slices")

    @property
    def nbytes(self) -> int:
        """Payload bytes of all stored tensors."""
        whole = sum(t.nbytes for t in self.tensors.values())
        return whole + sum(one.stored_bytes - one.tensor.nbytes for one in self.coded.values())


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
