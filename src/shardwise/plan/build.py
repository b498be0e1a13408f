"""From catalog, layout and recipes to the reads of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..catalog.records import Catalog, StoredTensor
from ..dtypes import itemsize
from ..layout.boxes import Box, LocalBox
from ..layout.wanted import Layout, Wanted, contiguous_strides
from ..recipe.match import Matched
from ..recipe.tiles import Tile, bounds, cut, is_identity, translate
from .cover import prove_cover
from .records import LEAST_STAGING_BYTES, IOOptions, Plan, StridedLoop, Transfer

__all__ = ["build_plan", "transfers_of"]


def build_plan(catalog: Catalog, layout: Layout, matched: Matched, io: IOOptions) -> Plan:
    """The reads that fill one rank's boxes. Pure and rank-local.

    Raises :class:`PlanError` with every problem at once (missing, unused, mis-shaped, un-castable,
    duplicated, not covered) before anything is read; the text is the same on every rank.
    """
    catalog, source_bytes = _with_results(catalog, matched), catalog.nbytes
    matched.problems += _oversized(matched, io)
    prove_cover(catalog, layout, matched)
    transfers: list[Transfer] = []
    checks: list[Transfer] = []
    common = _Common()
    for wanted in layout.wanted:
        recipe = matched.recipes.get(wanted.name)
        if recipe is None:
            continue
        for tile in recipe.tiles:
            transfers += transfers_of(tile, wanted, catalog.tensors, common)
        for tile in (t for copy in recipe.copies for t in copy):
            checks += transfers_of(tile, wanted, catalog.tensors, common)
    transfers.sort(key=lambda t: (t.path, t.offset_bytes))
    checks.sort(key=lambda t: (t.path, t.offset_bytes))
    return Plan(
        wanted=layout.wanted,
        recipes=dict(matched.recipes),
        transfers=tuple(transfers),
        checks=tuple(checks),
        unused=tuple(matched.unused),
        initialized=tuple(matched.initialized),
        ignored_files=catalog.ignored_files,
        staging_bytes=_staging(transfers, checks, matched, io),
        source_bytes=source_bytes,
        conversions=dict(matched.conversions),
    )


def _with_results(catalog: Catalog, matched: Matched) -> Catalog:
    """The catalog with the results of host conversions as if they were stored."""
    if not matched.conversions:
        return catalog
    results = {t.name: t for host in matched.conversions.values() for t in host.outputs.values()}
    return replace(catalog, tensors={**catalog.tensors, **results})


def _oversized(matched: Matched, io: IOOptions) -> Iterator[str]:
    """Host conversions that don't fit into the staging budget beside the least that copying takes."""
    room = io.staging_bytes - LEAST_STAGING_BYTES
    for host in dict.fromkeys(matched.conversions.values()):
        if host.staging_bytes > room:
            yield (
                f"too large: {host.name} can't be compiled to byte ranges ({host.reason}) and must be converted whole, "
                f"which takes {host.staging_bytes} bytes of staging; {room} are left of io.staging_bytes. "
                f"Give io=IOOptions(staging_bytes={host.staging_bytes + LEAST_STAGING_BYTES}) or more"
            )


def _staging(transfers: list[Transfer], checks: list[Transfer], matched: Matched, io: IOOptions) -> int:
    """Staging that the reads of a CPU target take: the largest that does not go straight, up to the limit, and
    the largest host conversion beside it."""
    # Most transfers share their loops with others.
    alike = {(id(t.loops), t.source_dtype, t.target_dtype): t for t in transfers}
    largest = max((t.bytes_to_read for t in alike.values() if not t.is_direct), default=0)
    largest = max(largest, max((t.bytes_to_read for t in checks), default=0))
    converted = max((host.staging_bytes for host in matched.conversions.values()), default=0)
    return min(largest + converted, io.staging_bytes)


def transfers_of(
    tile: Tile, wanted: Wanted, stored: Mapping[str, StoredTensor], common: _Common | None = None
) -> Iterable[Transfer]:
    """A tile cut by this rank's boxes and by the stored chunks, as strided copies.

    Tensors that are cut alike on both sides share the work through ``common``.
    """
    source = stored[tile.source]
    if source.shape == wanted.shape and is_identity(tile, wanted.shape):
        return _identical(wanted, source, common or _Common())
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


def _identical(wanted: Wanted, source: StoredTensor, common: _Common) -> list[Transfer]:
    """What cutting an identity tile comes to, without the tiles: most tensors are stored as they are wanted."""
    size, found = itemsize(source.dtype), []
    for local in wanted.boxes:
        for chunk in source.chunks_touching(local.box):
            copy = common.of(local, chunk.box, wanted.local_strides)
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


_Copy = tuple[int, int, tuple[StridedLoop, ...]]


class _Common:
    """What local boxes and chunks have in common, found once for those that many tensors share."""

    def __init__(self) -> None:
        # By identity: hashing boxes costs as much as looking what they share. The values keep their keys alive.
        self._known: dict[tuple[int, int, int], tuple[object, _Copy | None]] = {}

    def of(self, local: LocalBox, chunk: Box, local_strides: tuple[int, ...]) -> _Copy | None:
        """:func:`_common` of them."""
        key = (id(local), id(chunk), id(local_strides))
        found = self._known.get(key)
        if found is None:
            copy = _common(local, chunk, local_strides)
            found = self._known[key] = (local, chunk, local_strides), copy
        return found[1]


def _common(local: LocalBox, chunk: Box, local_strides: tuple[int, ...]) -> _Copy | None:
    """The elements that a local box and a chunk share: the first one's place in the chunk and in the local tensor, and
    the loops over all of them; None if there are none."""
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
    """Loops by falling source stride, with neighbours merged that are one run on both sides."""
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
