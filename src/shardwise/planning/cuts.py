"""Cuts tiles into one rank's transfers: strided copies from stored chunks into local boxes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from ..catalog.records import StoredTensor
from ..dtypes import itemsize
from ..layout.boxes import Box, LocalBox
from ..layout.wanted import Wanted, contiguous_strides
from ..recipe.tiles import Tile, bounds, cut, is_identity, translate
from .records import StridedLoop, Transfer

__all__ = ["common_part", "merge_loops", "transfers_of"]


def transfers_of(tile: Tile, wanted: Wanted, stored: Mapping[str, StoredTensor]) -> Iterable[Transfer]:
    """Cut a tile by this rank's boxes and by the stored chunks, into strided copies."""
    source = stored[tile.source]
    if source.shape == wanted.shape and is_identity(tile, wanted.shape):
        return _identical(wanted, source)
    return _tiled(tile, wanted, source)


def _tiled(tile: Tile, wanted: Wanted, source: StoredTensor) -> Iterator[Transfer]:
    for local in wanted.boxes:
        shift = tuple(a - b for a, b in zip(local.local_start, local.box.start, strict=True))
        for piece in cut(tile, "target", local.box):
            placed = translate(piece, "target", shift)
            reach = bounds(placed, "source")
            for chunk in source.chunks_touching(reach):
                for part in cut(placed, "source", chunk.box):
                    inside = translate(part, "source", tuple(-s for s in chunk.box.start))
                    yield _transfer(inside, wanted, source, chunk.path, chunk.offset_bytes, chunk.box.sizes)


def _identical(wanted: Wanted, source: StoredTensor) -> list[Transfer]:
    """Cut an identity tile directly, without tile arithmetic: most tensors are stored as they are wanted."""
    size, found = itemsize(source.dtype), []
    for local in wanted.boxes:
        for chunk in source.chunks_touching(local.box):
            copy = common_part(local, chunk.box, wanted.local_strides)
            if copy is not None:
                first, target, loops = copy
                offset = chunk.offset_bytes + first * size
                found.append(
                    Transfer(
                        wanted.name,
                        source.name,
                        chunk.path,
                        offset,
                        source.dtype,
                        wanted.dtype,
                        target,
                        loops,
                    )
                )
    return found


@functools.lru_cache(maxsize=256)  # the tensors of all layers are cut alike
def common_part(
    local: LocalBox, chunk: Box, local_strides: tuple[int, ...]
) -> tuple[int, int, tuple[StridedLoop, ...]] | None:
    """The elements that a local box and a chunk share: the offset of the first one in the chunk and in the local
    tensor, and the loops over all of them; None if they share none."""
    common = local.box.intersect(chunk)
    if common is None:
        return None
    strides = contiguous_strides(chunk.sizes)
    first = target = 0
    loops = []
    for d, (a, b) in enumerate(zip(common.start, common.stop, strict=True)):
        first += (a - chunk.start[d]) * strides[d]
        target += (a - local.box.start[d] + local.local_start[d]) * local_strides[d]
        if b - a > 1:
            loops.append(StridedLoop(b - a, strides[d], local_strides[d]))
    return first, target, merge_loops(loops)


def _transfer(
    tile: Tile, wanted: Wanted, source: StoredTensor, path: str, offset_bytes: int, sizes: tuple[int, ...]
) -> Transfer:
    strides = contiguous_strides(sizes)
    first = sum(i * s for i, s in zip(tile.source_start, strides, strict=True))
    target = sum(i * s for i, s in zip(tile.target_start, wanted.local_strides, strict=True))
    loops = [
        StridedLoop(
            loop.size,
            loop.source_step * strides[loop.source_dim],
            loop.target_step * wanted.local_strides[loop.target_dim],
        )
        for loop in tile.loops
        if loop.size > 1
    ]
    return Transfer(
        wanted=wanted.name,
        stored=source.name,
        path=path,
        offset_bytes=offset_bytes + first * itemsize(source.dtype),
        source_dtype=source.dtype,
        target_dtype=wanted.dtype,
        target_offset=target,
        loops=merge_loops(loops),
    )


def merge_loops(loops: list[StridedLoop]) -> tuple[StridedLoop, ...]:
    """Loops by falling source stride. Neighbors that form one run on both sides are merged."""
    merged: list[StridedLoop] = []
    for loop in sorted(loops, key=lambda v: (-v.source_stride, -v.target_stride)):
        outer = merged[-1] if merged else None
        if (
            outer
            and outer.source_stride == loop.source_stride * loop.size
            and outer.target_stride == loop.target_stride * loop.size
        ):
            merged[-1] = StridedLoop(outer.size * loop.size, loop.source_stride, loop.target_stride)
        else:
            merged.append(loop)
    return tuple(merged)
