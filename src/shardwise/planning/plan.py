"""A plan: its records, and how recipes become the reads of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from ..catalog.records import Catalog, Chunks, Coded, StoredTensor
from ..dtypes import itemsize
from ..objects import frozen
from ..tensors.boxes import (
    Box,
    Layout,
    LocalBox,
    SourceBox,
    Wanted,
    along_dims,
    contiguous_strides,
    source_box,
)
from ..tensors.tiles import Tile, bounds, cut, is_identity, translate
from .match import Declaration, Grown, HostConversion, Matched, Recipe
from .proof import prove_cover, rounded_in

# ----------------------------------------------------------------------------------------------------
# The records of a plan.

#: Values of ``IOOptions.reads``.
Reads = Literal["auto", "ahead", "plain"]

#: Runs shorter than this are read together with the bytes between them, and picked out in staging.
MIN_RUN_BYTES = 512

#: The smallest staging that a plan accepts.
LEAST_STAGING_BYTES = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class IOOptions:
    """Limits and strategies for reading and writing files."""

    staging_bytes: int = 32 * 1024**2
    """Host memory per rank for casts and strided reads. Copies to a device go through twice as much pinned memory (:attr:`ring_bytes`)."""

    timeout_s: float = 300.0
    """A rank that makes no progress for this long counts as missing: the other ranks raise a :class:`RankError` that names it.

    This limits the time without progress, not the duration of an operation. Every byte that arrives is progress. A single
    system call on a file (a slow fsync, close, rename or unlink) may take ten times as long."""

    page_cache: Literal["keep", "release", "auto"] = "auto"
    """Whether files stay in the kernel's page cache after they are read. ``"release"`` frees pages during the read, including pages that were
    cached before. ``"auto"`` releases them if the tensors go to a device that shares memory with the host (MPS, integrated GPUs), and
    otherwise keeps them. Exports and conversions of stored tensors keep them."""

    pages: Literal["auto", "huge", "small"] = "auto"
    """Page size of the memory that a load allocates on the CPU. Huge pages (2 MiB, Linux) can make filling it up to three times as fast.
    ``"auto"`` measures both during the load, and uses whichever takes less CPU time."""

    reads: Reads = "auto"
    """How files are read. ``"plain"``: one range after the other. ``"ahead"``: while one range is read, the kernel is asked to prefetch the next
    ones, at most 32 MiB ahead (Linux). ``"auto"``: plain while the bytes are in the page cache; at the first miss, both are timed, and the
    faster one is used from then on. The load report gives the choice and the reason."""

    read_threads: int | None = None
    """Number of threads that this rank reads with. With ``reads="auto"``, each thread reads one tensor (at most 16 MiB; 8 MiB for a device) at a
    time if its bytes are in the page cache and go to a device, or to CPU memory unchanged; any other read of 2 MiB or more is split among all
    threads. None: the host's cores divided by its ranks, at most 4, or 8 if the tensors go to a device."""

    strategy: Literal["auto", "own", "node", "once"] = "auto"
    """Who reads a source from storage. ``"own"``: each rank reads its own shards. ``"node"``: each range is read once per host, and the
    ranks of that host share it in memory. ``"once"``: each range is read once, and each rank receives its shards through the process
    group's backend. ``"auto"`` chooses ``"once"`` if some ranks can't see the files, or if they are on a network file system and several hosts need
    the same bytes; ``"node"`` if shards are stored in pieces smaller than 16 KiB (sharded along dim 1), or if the files are on a network file
    system and ranks of one host need the same bytes; otherwise ``"own"``. For object stores it chooses ``"node"`` on one host and ``"once"`` on several.
    The report gives the choice and the reason."""

    @property
    def ring_bytes(self) -> int:
        """Pinned host memory per rank for copies to a device, freed at the end.

        Twice ``staging_bytes``: eight threads that fill parts of 4 MiB read half as fast as threads that fill 8 MiB, because each part takes
        the GIL a few times (``docs/notes/measurements.md``).
        """
        return 2 * self.staging_bytes

    @property
    def parts_bytes(self) -> int:
        """Bytes of the parts of quantized tensors that a rank reads at a time; a rule that turns them holds them twice.

        At least 4 MiB: with less, transposed codes would be read in pieces that are too small for any storage.
        """
        return min(16 * 1024**2, max(4 * 1024**2, self.staging_bytes * 3 // 16))

    def __post_init__(self) -> None:
        if self.staging_bytes < LEAST_STAGING_BYTES:
            raise ValueError(f"staging_bytes must be at least 1 MiB, got {self.staging_bytes}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.page_cache not in ("keep", "release", "auto"):
            raise ValueError(f"page_cache must be 'keep', 'release' or 'auto', got {self.page_cache!r}")
        if self.pages not in ("auto", "huge", "small"):
            raise ValueError(f"pages must be 'auto', 'huge' or 'small', got {self.pages!r}")
        if self.reads not in ("auto", "ahead", "plain"):
            raise ValueError(f"reads must be 'auto', 'ahead' or 'plain', got {self.reads!r}")
        if self.read_threads is not None and self.read_threads < 1:
            raise ValueError(f"read_threads must be at least 1, got {self.read_threads}")
        if self.strategy not in ("auto", "own", "node", "once"):
            raise ValueError(f"strategy must be 'auto', 'own', 'node' or 'once', got {self.strategy!r}")


@frozen
class StridedLoop:
    """``size`` steps, with strides in elements, through the stored chunk and the local tensor."""

    size: int
    source_stride: int
    target_stride: int


@frozen
class Transfer:
    """One strided copy from a file into this rank's part of a wanted tensor.

    ``stored`` names the tensor in the file. ``offset_bytes`` locates the first element there; ``target_offset`` is
    its place in the local tensor, in elements. Loops go by falling source stride, with contiguous ones merged.
    """

    wanted: str
    stored: str
    path: str
    offset_bytes: int
    source_dtype: str
    target_dtype: str
    target_offset: int
    loops: tuple[StridedLoop, ...]

    @property
    def numel(self) -> int:
        return math.prod([loop.size for loop in self.loops])

    def along_dims(self, shape: tuple[int, ...]) -> Transfer:
        """The transfer with loops that go along one dim each of a tensor of this shape, which is stored as for :meth:`box_in`.

        A cut of these loops has a box of its own; a cut of one that goes through whole rows may have none.
        """
        sources = [(loop.size, loop.source_stride) for loop in self.loops]
        first = self.offset_bytes // itemsize(self.source_dtype)
        loops: list[StridedLoop] = []
        for loop, split in zip(self.loops, along_dims(first, sources, shape), strict=True):
            inner = 1
            found = []
            for size, stride in reversed(split):
                found.append(StridedLoop(size, stride, loop.target_stride * inner))
                inner *= size
            loops += reversed(found)
        return replace(self, loops=tuple(loops))

    def box_in(self, shape: tuple[int, ...]) -> SourceBox:
        """The box of a tensor of this shape, stored whole at the start of a file, that holds the elements."""
        loops = [(loop.size, loop.source_stride) for loop in self.loops]
        return source_box(self.offset_bytes // itemsize(self.source_dtype), loops, shape)

    @property
    def run_numel(self) -> int:
        """Number of elements that are contiguous in the file."""
        run = 1
        for loop in reversed(self.loops):
            if loop.source_stride != run:
                break
            run *= loop.size
        return run

    @property
    def span_numel(self) -> int:
        """Number of elements from the first to the last in the file, gaps included."""
        return 1 + sum(loop.source_stride * (loop.size - 1) for loop in self.loops)

    @property
    def reads_whole_span(self) -> bool:
        """Whether runs are too short to be read one by one."""
        return self.run_numel < self.numel and self.run_numel * itemsize(self.source_dtype) < MIN_RUN_BYTES

    @property
    def bytes_to_read(self) -> int:
        numel = self.span_numel if self.reads_whole_span else self.numel
        return numel * itemsize(self.source_dtype)

    @property
    def is_direct(self) -> bool:
        """Whether bytes can go from the file straight into (CPU) local memory."""
        if self.source_dtype != self.target_dtype:
            return False
        if not self.loops:
            return True
        inner = self.loops[-1]
        if not inner.target_stride == 1 == inner.source_stride:
            return False
        if len(self.loops) == 1:  # most are one run
            return True
        return not self.reads_whole_span and inner.size * itemsize(self.source_dtype) >= MIN_RUN_BYTES


@frozen
class Plan:
    """The reads of one rank, proved to cover everything that it wants.

    ``transfers`` fill the wanted tensors; ``checks`` are second stored copies of tied tensors, read
    through staging and compared. ``recipes`` are global and the same on every rank.
    """

    wanted: tuple[Wanted, ...]
    recipes: dict[str, Recipe]
    transfers: Sequence[Transfer]
    checks: Sequence[Transfer]
    unused: tuple[Declaration, ...]
    initialized: tuple[Declaration, ...]
    ignored_files: tuple[str, ...]
    staging_bytes: int
    source_bytes: int
    conversions: dict[str, HostConversion]
    """Whole-tensor conversions, by the path that transfers of their results name. The same on every rank."""
    coded: Mapping[str, Coded] = field(default_factory=dict)
    """Tensors that the source stores in parts, by the path that transfers of them name. The same on every rank."""
    kept: tuple[Coded, ...] = ()
    """Tensors whose parts the ranks hold as they are stored. The same on every rank."""
    grown: tuple[Grown, ...] = ()
    """Tensors of which some rows aren't stored. The same on every rank."""
    rounded: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Tensors whose dtype can't hold the stored values exactly, by dtype before and after. The same on every rank."""

    @property
    def bytes_to_read(self) -> int:
        """Bytes that this rank reads from the source."""
        reads = (*self.transfers, *self.checks)
        hosts = {self.conversions[t.path] for t in reads if t.path in self.conversions}
        stored = sum(self._stored_bytes(t) for t in reads if t.path not in self.conversions)
        return stored + sum(host.source_bytes for host in hosts)

    def _stored_bytes(self, transfer: Transfer) -> int:
        one = self.coded.get(transfer.path)
        return transfer.bytes_to_read if one is None else one.bytes_of(transfer.box_in(one.tensor.shape).box)

    @property
    def init_staging_bytes(self) -> int:
        """Host memory for initializing: the new tensors of the largest module, whole. Modules take turns."""
        new = {d.name for d in self.initialized} | {g.name for g in self.grown if g.rule == "init"}
        by_module: dict[str, int] = {}
        for w in self.wanted:
            if w.name in new:
                module = w.name.rpartition(".")[0]
                by_module[module] = by_module.get(module, 0) + w.nbytes
        return max(by_module.values(), default=0)

    @property
    def local_nbytes(self) -> int:
        """Bytes of this rank's shards."""
        numels = {id(w.boxes): w.boxes for w in self.wanted}  # tensors of one shape and placement share them
        held = {key: sum(one.box.numel for one in boxes) for key, boxes in numels.items()}
        return sum(held[id(w.boxes)] * itemsize(w.dtype) for w in self.wanted)


# ----------------------------------------------------------------------------------------------------
# Cuts tiles into one rank's transfers: strided copies from stored chunks into local boxes.


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


# ----------------------------------------------------------------------------------------------------
# The transfers of a plan, in the order of the files.
#
# From a checkpoint of 1,024 ranks a rank reads a few slices of each of 60,000 tensors, and nearly every tensor is cut
# like thousands more. Their transfers differ only in names and offset: columns hold them, and execution makes them one
# by one. Tensors stored in other ways have single transfers from the start.


class Transfers(Sequence[Transfer]):
    """Transfers by path and offset. Each differs from the example of its kind in ``kinds`` only in names and offset.

    ``kind``, ``offset_bytes`` and ``names`` (an index into the list of names) are columns.
    """

    def __init__(
        self,
        kinds: Sequence[Transfer],
        names: Sequence[tuple[str, str]],
        kind: NDArray[np.int64],
        name: NDArray[np.int64],
        offset_bytes: NDArray[np.int64],
    ) -> None:
        paths = sorted({t.path for t in kinds})
        place = {path: k for k, path in enumerate(paths)}
        path = np.array([place[t.path] for t in kinds], np.int64)[kind]
        order = np.lexsort((offset_bytes, path))
        self.kinds, self._names = kinds, names
        self._kind, self._name, self._offset = kind[order], name[order], offset_bytes[order]

    def __len__(self) -> int:
        return len(self._kind)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(index, slice):
            return tuple([self[k] for k in range(*index.indices(len(self)))])
        return self._make(int(self._kind[index]), int(self._name[index]), int(self._offset[index]))

    def __iter__(self) -> Iterator[Transfer]:
        return map(self._make, self._kind.tolist(), self._name.tolist(), self._offset.tolist())

    def counts(self) -> list[int]:
        """The number of transfers of each kind."""
        found: list[int] = np.bincount(self._kind, minlength=len(self.kinds)).tolist()
        return found

    def _make(self, kind: int, name: int, offset_bytes: int) -> Transfer:
        like, (wanted, stored) = self.kinds[kind], self._names[name]
        return Transfer(
            wanted,
            stored,
            like.path,
            offset_bytes,
            like.source_dtype,
            like.target_dtype,
            like.target_offset,
            like.loops,
        )


@dataclass(slots=True)
class _Alike:
    """Tensors wanted in the same boxes and stored in chunks that are cut alike."""

    first: Wanted
    source: StoredTensor
    chunks: Chunks
    names: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


#: A transfer without names: its offset in the chunk, its offset in the local tensor, its loops.
_Cut = tuple[int, int, tuple[StridedLoop, ...]]


class Collector:
    """Collects this rank's transfers of tiles."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._single: list[Transfer] = []
        self._alike: dict[tuple[object, ...], _Alike] = {}
        self._names: list[tuple[str, str]] = []
        self._cuts: dict[tuple[object, ...], tuple[list[_Cut], object]] = {}

    def add(self, tile: Tile, wanted: Wanted) -> None:
        """Add the part of a tile that lies on this rank."""
        source = self._stored[tile.source]
        chunks = source.chunks
        if not (
            isinstance(chunks, Chunks) and source.shape == wanted.shape and is_identity(tile, wanted.shape)
        ):
            self._single += self._cut(tile, wanted, source)
            return
        # By identity: tensors that are spread alike share one object for equal boxes and strides, and hashing those
        # would take longer than the rest of this function. The group keeps them alive.
        key = (id(chunks.cut), id(wanted.boxes), id(wanted.local_strides), wanted.dtype)
        group = self._alike.get(key)
        if group is None:
            group = self._alike[key] = _Alike(wanted, source, chunks)
        group.names.append(len(self._names))
        group.positions.append(chunks.position)
        self._names.append((wanted.name, source.name))

    def _cut(self, tile: Tile, wanted: Wanted, source: StoredTensor) -> Iterable[Transfer]:
        """The transfers of one tile. Tiles that are cut alike, as those of all layers are, are cut once."""
        if len(source.chunks) != 1:
            return transfers_of(tile, wanted, self._stored)
        (chunk,) = source.chunks
        # By identity, as above: these objects are shared, and hashing them would take longer than cutting the tile.
        key = (
            *(id(tile.loops), id(tile.source_start), id(tile.target_start), id(source.shape), id(chunk.box)),
            *(id(wanted.boxes), id(wanted.local_strides), source.dtype, wanted.dtype, wanted.shape),
        )
        found = self._cuts.get(key)
        if found is None:
            transfers = list(transfers_of(tile, wanted, self._stored))
            parts = [(t.offset_bytes - chunk.offset_bytes, t.target_offset, t.loops) for t in transfers]
            self._cuts[key] = (
                parts,
                (tile, source, chunk, wanted),
            )  # which keeps the objects, and so their ids
            return transfers
        name, stored, path, start = wanted.name, source.name, chunk.path, chunk.offset_bytes
        dtypes = source.dtype, wanted.dtype
        return [
            Transfer(name, stored, path, start + begin, *dtypes, target, loops)
            for begin, target, loops in found[0]
        ]

    def in_order(self) -> tuple[Sequence[Transfer], Sequence[Transfer]]:
        """All transfers by path and offset, and one of each kind."""
        if not self._alike:
            self._single.sort(key=lambda t: (t.path, t.offset_bytes))
            return tuple(self._single), self._single
        kinds: list[Transfer] = []
        columns: list[tuple[int, list[int], NDArray[np.int64]]] = []
        for group in self._alike.values():
            for like, offsets in _kinds_of(group):
                columns.append((len(kinds), group.names, offsets))
                kinds.append(like)
        for transfer in self._single:
            columns.append((len(kinds), [len(self._names)], np.array([transfer.offset_bytes])))
            kinds.append(transfer)
            self._names.append((transfer.wanted, transfer.stored))
        if not columns:
            return (), ()
        transfers = Transfers(
            kinds,
            self._names,
            np.repeat([kind for kind, _, _ in columns], [len(names) for _, names, _ in columns]),
            np.concatenate([np.array(names, np.int64) for _, names, _ in columns]),
            np.concatenate([offsets for _, _, offsets in columns]),
        )
        return transfers, kinds


def _kinds_of(group: _Alike) -> Iterator[tuple[Transfer, NDArray[np.int64]]]:
    """The transfers of a group's first tensor, each with its offsets for all tensors of the group."""
    first, source = group.first, group.source
    size = itemsize(source.dtype)
    for local in first.boxes:
        for shared in group.chunks.cut.touching(local.box):
            copy = common_part(local, shared.box, first.local_strides)
            if copy is not None:
                begin, target, loops = copy
                offsets = shared.offsets_bytes[group.positions] + begin * size
                yield (
                    Transfer(
                        wanted=first.name,
                        stored=source.name,
                        path=shared.path,
                        offset_bytes=int(offsets[0]),
                        source_dtype=source.dtype,
                        target_dtype=first.dtype,
                        target_offset=target,
                        loops=loops,
                    ),
                    offsets,
                )


# ----------------------------------------------------------------------------------------------------
# Builds the plan of one rank from catalog, layout and recipes.


def build_plan(catalog: Catalog, layout: Layout, matched: Matched, io: IOOptions) -> Plan:
    """The reads that fill one rank's boxes. Pure and rank-local.

    Raises :class:`PlanError` with every problem at once (missing, unused, of the wrong shape, not castable,
    duplicated, not covered) before anything is read; the text is the same on every rank.
    """
    catalog, source_bytes = with_results(catalog, matched), catalog.nbytes
    matched.problems += _oversized(matched, io)
    prove_cover(catalog, layout, matched)
    reads, copies = Collector(catalog.tensors), Collector(catalog.tensors)
    for wanted in layout.wanted:
        recipe = matched.recipes.get(wanted.name)
        if recipe is None:
            continue
        for tile in recipe.tiles:
            reads.add(tile, wanted)
        for tile in (t for copy in recipe.copies for t in copy):
            copies.add(tile, wanted)
    (transfers, kinds), (checks, kinds_of_checks) = reads.in_order(), copies.in_order()
    return Plan(
        wanted=layout.wanted,
        recipes=dict(matched.recipes),
        transfers=transfers,
        checks=checks,
        unused=tuple(matched.unused),
        initialized=tuple(matched.initialized),
        ignored_files=catalog.ignored_files,
        staging_bytes=_staging(kinds, kinds_of_checks, matched, io),
        source_bytes=source_bytes,
        conversions=dict(matched.conversions),
        coded=catalog.coded,
        kept=catalog.kept,
        grown=tuple(matched.grown.values()),
        rounded=rounded_in(catalog.tensors, layout.wanted, matched.recipes),
    )


def with_results(catalog: Catalog, matched: Matched) -> Catalog:
    """The catalog, plus the results of host conversions as if they were stored."""
    if not matched.conversions:
        return catalog
    results = {t.name: t for host in matched.conversions.values() for t in host.outputs.values()}
    return replace(catalog, tensors={**catalog.tensors, **results})


def _oversized(matched: Matched, io: IOOptions) -> Iterator[str]:
    """Host conversions that don't fit into the staging budget beside the minimum for copying."""
    room = io.staging_bytes - LEAST_STAGING_BYTES
    for host in dict.fromkeys(matched.conversions.values()):
        if host.staging_bytes > room:
            yield (
                f"too large: {host.name} can't be compiled to byte ranges ({host.reason}) and must be converted in full, "
                f"which takes {host.staging_bytes} bytes of staging; {room} are left of io.staging_bytes. "
                f"Give io=IOOptions(staging_bytes={host.staging_bytes + LEAST_STAGING_BYTES}) or more"
            )


def _staging(
    transfers: Sequence[Transfer], checks: Sequence[Transfer], matched: Matched, io: IOOptions
) -> int:
    """Staging for the reads of a CPU target: the largest indirect read, up to the limit, plus the largest host
    conversion."""
    largest = max((t.bytes_to_read for t in transfers if not t.is_direct), default=0)
    largest = max(largest, max((t.bytes_to_read for t in checks), default=0))
    converted = max((host.staging_bytes for host in matched.conversions.values()), default=0)
    return min(largest + converted, io.staging_bytes)
