"""Which elements of the hub's tensors a rank holds, and where they are in its snapshot: boxes, each contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..catalog.records import Chunk, StoredTensor, assemble
from ..dtypes import itemsize, torch_dtype
from ..errors import FormatError
from ..export.live import owned_by
from ..export.write import HubTensors, by_hub
from ..objects import frozen
from ..planning.match import castable
from ..planning.plan import Transfer, transfers_of
from ..tensors.boxes import Box, whole
from ..tensors.live import LiveModel, wanted_of
from ..tensors.tiles import Tile, bounds, cut, is_dense, iterations

#: Boxes begin at multiples of this, so that a snapshot can be seen as elements of any dtype.
_ALIGN = 64


@frozen
class Held:
    """One rank's part of the hub's tensors: for each box its tensor, its place in the snapshot, and the copies that fill it."""

    boxes: Sequence[tuple[str, Box, int]]
    copies: Sequence[Transfer]
    nbytes: int


def held_by(
    live: LiveModel, contents: HubTensors, dtype: str | None, rank: int
) -> tuple[Held, dict[str, str]]:
    """What ``rank`` brings of a model's tensors, and the dtype in which each is handed over. Among replicas one rank brings them,
    chosen as in an export. Rank-local."""
    named = {t.name: t for t in live.stored if t.name in contents.tiles}
    owned = owned_by(rank, live, {n: t.tensor for n, t in named.items()})
    shares = by_hub(
        (wanted_of(t.name, named[t.name].tensor, t.geometry), contents.tiles[t.name]) for t in owned
    )
    dtypes, boxes, copies, end = dict[str, str](), [], list[Transfer](), 0
    for name, (code, shape) in contents.hub.items():
        given = dtypes[name] = dtype if dtype is not None and castable(code, dtype) else code
        for wanted, tile in shares.get(name, ()):
            for local in wanted.boxes:
                for piece in cut(tile, "target", local.box):
                    for dense in _dense(piece):
                        box = bounds(dense, "source")
                        stored = StoredTensor(name, given, shape, (Chunk(box, "", end),))
                        copies += transfers_of(dense, wanted, {name: stored})
                        boxes.append((name, box, end))
                        end += -(-box.numel * itemsize(given) // _ALIGN) * _ALIGN
    return Held(boxes, copies, end), dtypes


def _dense(tile: Tile) -> Iterator[Tile]:
    """A tile as tiles that fill a box of the hub's tensor each."""
    if is_dense(tile, "source"):
        yield tile
        return
    k = max(range(len(tile.loops)), key=lambda k: tile.loops[k].source_step)
    for i in range(tile.loops[k].size):
        yield from _dense(iterations(tile, k, i, i + 1))


def tensors_from(
    contents: dict[str, tuple[str, tuple[int, ...]]], held: Sequence[Sequence[Any]]
) -> dict[str, StoredTensor]:
    """The hub's tensors, each with its boxes on the sender's ranks; the path of a chunk is the number of its rank.

    ``contents``: dtype and shape by name. ``held``: of each rank, name, start, sizes and offset of its boxes. Raises
    :class:`FormatError` if ranks together hold a tensor only partly, or twice.
    """
    chunks: dict[str, list[Chunk]] = {name: [] for name in contents}
    for rank, boxes in enumerate(held):
        for name, start, sizes, offset in boxes:
            box = Box(tuple(start), tuple(a + n for a, n in zip(start, sizes, strict=True)))
            chunks[name].append(Chunk(box, str(rank), offset))
    found = {}
    for name, (code, shape) in contents.items():
        if not math.prod(shape):
            found[name] = StoredTensor(name, code, tuple(shape), (Chunk(whole(tuple(shape)), "0", 0),))
            continue
        if not chunks[name]:
            raise FormatError(f"no rank of the sender holds any part of tensor {name!r}")
        found[name] = assemble(name, code, chunks[name])
        if found[name].shape != tuple(shape):
            raise FormatError(
                f"the sender's ranks hold {name!r} only up to {found[name].shape} of {tuple(shape)}"
            )
    return found


# ----------------------------------------------------------------------------------------------------
# Elements of a snapshot, in the order in which they travel.


#: A strided read from a snapshot: dtype, offset in bytes, and sizes and strides of loops.
Read = tuple[str, int, Sequence[tuple[int, int]]]


def read_of(transfer: Transfer) -> Read:
    """What a transfer takes from a snapshot, or puts into it."""
    loops = [(loop.size, loop.source_stride) for loop in transfer.loops]
    return transfer.source_dtype, transfer.offset_bytes, loops


class Snapshot:
    """Memory that holds the boxes of one rank, as elements of any dtype."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed: dict[str, torch.Tensor] = {}

    def strided(self, dtype: str, offset_bytes: int, loops: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Elements from an offset on, with sizes and strides of loops. Raises :class:`FormatError` if they leave the memory."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._memory.view(torch_dtype(dtype))
        first, rest = divmod(offset_bytes, itemsize(dtype))
        span = 1 + sum(stride * (size - 1) for size, stride in loops)
        is_inside = not rest and first >= 0 and first + span <= typed.numel()
        if not is_inside or any(n < 1 or s < 1 for n, s in loops) or math.prod(n for n, _ in loops) > span:
            raise FormatError(
                f"a read at byte {offset_bytes} leaves the snapshot of {self._memory.numel()} bytes"
            )
        return torch.as_strided(typed, [n for n, _ in loops], [s for _, s in loops], first)


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a plan of strided copies takes for granted of a local tensor."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def bytes_of(elements: torch.Tensor) -> torch.Tensor:
    """The bytes of elements on the CPU in row-major order, flat; a copy unless they are contiguous."""
    return elements.contiguous().reshape(-1).view(torch.uint8)
