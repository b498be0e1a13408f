"""The records of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..catalog.records import Coded
from ..dtypes import itemsize
from ..layout.wanted import Wanted
from ..objects import frozen
from ..recipe.host_convert import HostConversion
from ..recipe.match import Declaration, Recipe
from .source_box import SourceBox, along_dims, source_box

__all__ = ["LEAST_STAGING_BYTES", "MIN_RUN_BYTES", "IOOptions", "Plan", "Reads", "StridedLoop", "Transfer"]

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
    """Number of threads with which this rank reads. With ``reads="auto"``, each thread reads a tensor (at most 16 MiB; 8 MiB for a device) at a
    time if its bytes are in the page cache and go to a device, or to CPU memory unchanged; any other read of 2 MiB or more is split among all
    threads. None: the host's cores divided by its ranks, at most 4, or 8 if the tensors go to a device."""

    strategy: Literal["auto", "own", "node", "once"] = "auto"
    """Who reads a source from storage. ``"own"``: each rank reads its own shards. ``"node"``: each range is read once per host, and the
    ranks of that host share it in memory. ``"once"``: each range is read once, and each rank receives its shards through the process
    group's backend. ``"auto"`` chooses ``"once"`` if some ranks can't see the files, or if they are on a network file system and several hosts need
    the same bytes; ``"node"`` if shards are stored in runs shorter than 16 KiB (shards of dim 1), or if the files are on a network file
    system and ranks of one host need the same bytes; otherwise ``"own"``. For object stores it chooses ``"node"`` on one host and ``"once"`` on several.
    The report gives the choice and the reason."""

    @property
    def ring_bytes(self) -> int:
        """Pinned host memory per rank for copies to a device, given back at the end.

        Twice ``staging_bytes``: eight threads that fill parts of 4 MiB read at half the rate of those that fill 8 MiB, since each part takes
        Python's lock a few times (``docs/notes/measurements.md``).
        """
        return 2 * self.staging_bytes

    @property
    def parts_bytes(self) -> int:
        """Bytes of the parts of quantized tensors that a rank reads at a time; an :class:`.OpeningRule` holds them twice.

        At least 4 MiB: with less, transposed codes would be read in runs too short for any storage.
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
        new = {d.name for d in self.initialized}
        by_module: dict[str, int] = {}
        for w in self.wanted:
            if w.name in new:
                module = w.name.rpartition(".")[0]
                by_module[module] = by_module.get(module, 0) + w.nbytes
        return max(by_module.values(), default=0)

    @property
    def local_nbytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(w.local_nbytes for w in self.wanted)
