"""Executes transfers into local tensors: directly, through staging, through host conversions, in lanes of several threads, and onto
devices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any, Protocol

import torch

from ..catalog.records import StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import PlanError, SourceError
from ..host import copies_late
from ..planning.match import HostConversion, Recipe
from ..planning.plan import IOOptions, StridedLoop, Transfer, transfers_of
from ..planning.proof import Span
from ..ranks.ranks import current_watch, patiently, watched
from ..tensors.boxes import Box, LocalBox, Wanted, contiguous_strides
from ..tensors.live import LEAST_BYTES, HostMemory
from ..tensors.tiles import Tile
from .files import GAP_BYTES, DeviceRings
from .objects import SourceReader

# ----------------------------------------------------------------------------------------------------
# Reads the results of host conversions as if they were files.


class Reader(Protocol):
    """The source of bytes for transfers."""

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``path`` at ``offset_bytes``."""

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """The reads in this block are of these spans, in this order."""

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of a transfer, in parts with their loops as dims, if the reader has or makes them in memory; else None."""


class ConvertingReader:
    """Reads files. A path that names the result of a host conversion runs the conversion, on sources read whole.

    Keeps only the results of the last conversion: transfers come by path, so each conversion runs once. Rank-local:
    every rank that holds a part of a result runs the conversion, and no rank waits for another. Memory:
    :attr:`HostConversion.staging_bytes` of the largest conversion, recorded in ``peak_bytes``.
    """

    def __init__(
        self,
        files: Reader,
        conversions: Mapping[str, HostConversion],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.peak_bytes = 0
        self._files = files
        self._conversions = conversions
        self._stored = stored
        self._last: HostConversion | None = None
        self._results: dict[str, memoryview] = {}

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """As :meth:`FileReader.expecting`. Conversions announce their own sources."""
        return self._files.expecting(span for span in spans if span[0] not in self._conversions)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """As :meth:`FileReader.read_into`. Raises :class:`SourceError` if a conversion fails or its results differ
        from the plan."""
        host = self._conversions.get(path)
        if host is None:
            self._files.read_into(path, offset_bytes, view)
            return
        if self._last is not host:
            self._last, self._results = None, {}  # free before the next conversion
            self._results = self._convert(host)
            self._last = host
            self.peak_bytes = max(self.peak_bytes, host.staging_bytes)
        view[:] = self._results[path][offset_bytes : offset_bytes + view.nbytes]

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """As the reader of the files. Results of conversions are read."""
        return None if transfer.path in self._conversions else self._files.elements(transfer)

    def _convert(self, host: HostConversion) -> dict[str, memoryview]:
        with self._files.expecting(spans_of_tensors(self._stored[name] for name in host.sources)):
            sources = {name: self._read(self._stored[name]) for name in host.sources}
        try:
            made = dict(host.run(sources))
        except Exception as error:  # a caller's operation may raise anything
            raise SourceError(f"{host.name} failed: {type(error).__name__}: {error}") from error
        found = {target: (t.dtype, tuple(t.shape)) for target, t in made.items()}
        planned = {target: (torch_dtype(t.dtype), t.shape) for target, t in host.outputs.items()}
        if found != planned:
            raise SourceError(f"{host.name} made {found}, but {planned} were planned")
        return {
            host.outputs[target].name: t.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for target, t in made.items()
        }

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        """A stored tensor, whole."""
        tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
        for chunk in stored.chunks:
            is_whole = chunk.box.sizes == stored.shape
            part = tensor if is_whole else torch.empty(chunk.box.sizes, dtype=tensor.dtype)
            view = part.reshape(-1).view(torch.uint8).numpy().data
            self._files.read_into(chunk.path, chunk.offset_bytes, view)
            if not is_whole:
                tensor[chunk.box.slices] = part
        return tensor


def spans_of_tensors(tensors: Iterable[StoredTensor]) -> Iterator[Span]:
    """The bytes of whole tensors."""
    for tensor in tensors:
        for chunk in tensor.chunks:
            yield (
                chunk.path,
                chunk.offset_bytes,
                chunk.offset_bytes + chunk.box.numel * itemsize(tensor.dtype),
            )


# ----------------------------------------------------------------------------------------------------
# Executes transfers from files into local tensors: directly if the bytes fit, otherwise through staging.


class Staging:
    """A reusable host buffer, and a ring of pinned memory for each device: made on first use, never larger than their limits."""

    def __init__(self, io: IOOptions, expected_bytes: int = 0) -> None:
        self.limit_bytes, self._ring_bytes = io.staging_bytes, io.ring_bytes
        self._expected_bytes = expected_bytes
        self.peak_bytes = 0
        self._buffer: torch.Tensor | None = None
        self._rings: DeviceRings | None = None

    @contextmanager
    def rings(self) -> Iterator[DeviceRings]:
        """The rings. At the end the copies are done and the memory is given back: at that of the outermost block, if blocks lie in others."""
        if self._rings is not None:
            yield self._rings
            return
        try:
            with DeviceRings(self._ring_bytes) as self._rings:
                yield self._rings
            self.peak_bytes = max(self.peak_bytes, self._rings.pinned_bytes)
        finally:
            self._rings = None

    def take(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` bytes of the buffer, as uint8. Overwrites the content of an earlier take."""
        assert nbytes <= self.limit_bytes, (nbytes, self.limit_bytes)
        if self._buffer is None or self._buffer.numel() < nbytes:
            size = max(nbytes, min(self.limit_bytes, self._expected_bytes))
            self._buffer = None  # free before allocating the next
            self._buffer = torch.empty(size, dtype=torch.uint8)
            self.peak_bytes = max(self.peak_bytes, size)
        return self._buffer[:nbytes]


class Destination:
    """The local tensors of a load by wanted name, and raw views of their memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._views: dict[str, memoryview] = {}

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def view(self, name: str) -> memoryview:
        """The storage of a local CPU tensor as bytes, from the tensor's first element to the end."""
        view = self._views.get(name)
        if view is None:
            tensor = self._tensors[name].detach()
            size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
            # numpy takes five times as long
            raw: Any = (ctypes.c_char * int(size)).from_address(tensor.data_ptr())
            raw.owner = tensor  # lives as long as the view
            view = self._views[name] = memoryview(raw).cast("B")
        return view

    def strided(self, transfer: Transfer) -> torch.Tensor:
        """The elements that a transfer writes, as a view with the transfer's loops as dims."""
        tensor = self._tensors[transfer.wanted].detach()
        sizes = [loop.size for loop in transfer.loops]
        strides = [loop.target_stride for loop in transfer.loops]
        return torch.as_strided(tensor, sizes, strides, tensor.storage_offset() + transfer.target_offset)


def execute(
    transfers: Iterable[Transfer],
    reader: Reader,
    destination: Destination,
    staging: Staging,
    memory: HostMemory | None = None,
) -> None:
    """Carry out transfers on this rank. Memory: the destination, plus at most the staging limit, and a ring for each device.

    ``transfers`` are gone through twice, in step: once to say what is read next. ``memory``: where the destination lies, if
    none of it is written yet.
    """
    filling = nullcontext if memory is None else memory.filling
    with staging.rings() as rings, reader.expecting(spans_of(transfers)):
        for transfer in transfers:
            device = destination.tensor(transfer.wanted).device
            if copies_late(device):
                for part in parts_of(transfer, rings.slot_bytes):
                    put(part, reader, destination, rings)
            elif (elements := reader.elements(transfer)) is not None:
                for part, found in elements:
                    target = destination.strided(part)
                    with filling(target.nbytes):
                        fill(target, found)
            elif transfer.is_direct and device.type == "cpu":
                read_direct(transfer, reader, destination.view(transfer.wanted), memory)
            else:
                for part in parts_of(transfer, staging.limit_bytes):
                    found, target = _stage(part, reader, staging), destination.strided(part)
                    with filling(target.nbytes):
                        fill(target, found)


def put(part: Transfer, reader: ReadsInto, destination: Destination, rings: DeviceRings) -> None:
    """Read a transfer of at most a slot's bytes into the ring of its device, which copies it from there. Several threads may call it."""
    rings.put(destination.strided(part), part.bytes_to_read, partial(_read, part, reader))


#: Elements that are in fp32 between two dtypes at a time.
_CAST_ELEMENTS = 512 * 1024


def fill(target: torch.Tensor, found: torch.Tensor) -> None:
    """Copy elements into a tensor of this rank, cast to its dtype.

    Between fp16 and bf16 by way of fp32, which holds both exactly: torch 2.13 casts between them one element at a time on CPUs, in five
    times the time. NaN go the slow way: the fast one gives them other bits.
    """
    if not target.is_cpu or {found.dtype, target.dtype} != {torch.float16, torch.bfloat16}:
        target.copy_(found)
    elif found.numel() <= _CAST_ELEMENTS:
        wide = found.to(torch.float32)
        target.copy_(found if wide.sum().isnan() else wide)
    else:
        dim = next(d for d, n in enumerate(found.shape) if n > 1)
        step = max(1, _CAST_ELEMENTS * found.shape[dim] // found.numel())
        for some, of in zip(target.split(step, dim), found.split(step, dim), strict=True):
            fill(some, of)


def compare(
    transfers: Iterable[Transfer], reader: Reader, destination: Destination, staging: Staging
) -> None:
    """Check that stored copies equal the loaded tensors. Raises :class:`PlanError` naming both: the bytes are whole,
    but do not fit a model that ties the two."""
    with staging.rings() as rings, reader.expecting(spans_of(transfers)):
        for transfer in transfers:
            if copies_late(destination.tensor(transfer.wanted).device):
                for part in parts_of(transfer, rings.slot_bytes):
                    fill = partial(_read, part, reader)
                    rings.compare(transfer, destination.strided(part), part.bytes_to_read, fill)
                continue
            for part in parts_of(transfer, staging.limit_bytes):
                live = destination.strided(part)
                stored = _stage(part, reader, staging).to(dtype=live.dtype, device=live.device)
                if not torch.equal(_raw(stored), _raw(live)):
                    raise _differs(transfer)
        for transfer in rings.differing():
            raise _differs(transfer)


def holds(transfers: Iterable[Transfer], reader: Reader, destination: Destination, staging: Staging) -> bool:
    """Whether local tensors hold, bit for bit, what these transfers would write. Rank-local; reads up to the first difference.

    Memory: staging, and as much again for a tensor on a device.
    """
    for transfer in transfers:
        for part, stored in _elements(transfer, reader, staging):
            live = destination.strided(part)
            if not torch.equal(_raw(stored.to(live.dtype)), _raw(live.cpu())):
                return False
    return True


def _elements(
    transfer: Transfer, reader: Reader, staging: Staging
) -> Iterator[tuple[Transfer, torch.Tensor]]:
    made = reader.elements(transfer)
    if made is not None:
        yield from made
        return
    for part in parts_of(transfer, staging.limit_bytes):
        yield part, _stage(part, reader, staging)


def _differs(transfer: Transfer) -> PlanError:
    return PlanError(
        f"{transfer.path.partition('#0')[0]}: holds {transfer.stored!r}, a second copy of {transfer.wanted!r} that differs from "
        f"the first; the model ties the two. Untie them (tie_word_embeddings=False) or remove one copy"
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits: as bits NaN equals NaN, and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class ReadsInto(Protocol):
    """The source of bytes for direct transfers."""

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``path`` at ``offset_bytes``."""


def read_direct(transfer: Transfer, reader: ReadsInto, view: memoryview, memory: HostMemory | None) -> None:
    """Read a transfer whose bytes fit as they are into ``view``, the memory of its local tensor: see :func:`execute`."""
    size = itemsize(transfer.source_dtype)
    inner = transfer.loops[-1].size if transfer.loops else 1
    run_bytes = inner * size
    for start, at in _offsets(transfer.loops[:-1]):
        start, at = transfer.offset_bytes + start * size, (transfer.target_offset + at) * size
        stop = at + run_bytes
        if memory is None or run_bytes < LEAST_BYTES:  # too little to measure
            reader.read_into(transfer.path, start, view[at:stop])
            continue
        while at < stop:
            nbytes = memory.first_bytes(stop - at)
            with memory.filling(nbytes):
                reader.read_into(transfer.path, start, view[at : at + nbytes])
            start, at = start + nbytes, at + nbytes


def _offsets(loops: Sequence[StridedLoop]) -> Iterator[tuple[int, int]]:
    """(source, target) element offsets of every iteration of a loop nest, outermost first."""
    if not loops:
        yield 0, 0
        return
    for index in product(*(range(loop.size) for loop in loops)):
        source = sum(i * loop.source_stride for i, loop in zip(index, loops, strict=True))
        target = sum(i * loop.target_stride for i, loop in zip(index, loops, strict=True))
        yield source, target


def spans_of(transfers: Iterable[Transfer]) -> Iterator[Span]:
    """The ranges that transfers read from files, in the order of the reads. Runs with short gaps count as one."""
    for transfer in transfers:
        size, loops = itemsize(transfer.source_dtype), list(transfer.loops)
        nbytes = size
        if transfer.reads_whole_span:
            nbytes, loops = transfer.span_numel * size, []
        while loops and loops[-1].source_stride * size <= nbytes + GAP_BYTES:
            loop = loops.pop()
            nbytes += (loop.size - 1) * loop.source_stride * size
        for source, _ in _offsets(loops):
            start = transfer.offset_bytes + source * size
            yield transfer.path, start, start + nbytes


def parts_of(transfer: Transfer, limit_bytes: int) -> Iterator[Transfer]:
    """The transfer in pieces that fit into staging, cut along its outermost loops."""
    if transfer.bytes_to_read <= limit_bytes:
        yield transfer
        return
    loop, inner = transfer.loops[0], replace(transfer, loops=transfer.loops[1:])
    size = itemsize(transfer.source_dtype)
    steps = max(1, _steps_that_fit(transfer, limit_bytes))
    for begin in range(0, loop.size, steps):
        count = min(steps, loop.size - begin)
        loops = ((replace(loop, size=count),) if count > 1 else ()) + inner.loops
        yield from parts_of(
            replace(
                transfer,
                offset_bytes=transfer.offset_bytes + begin * loop.source_stride * size,
                target_offset=transfer.target_offset + begin * loop.target_stride,
                loops=loops,
            ),
            limit_bytes,
        )


def _steps_that_fit(transfer: Transfer, limit_bytes: int) -> int:
    """Number of iterations of the outermost loop that fit into staging."""
    loop, inner = transfer.loops[0], replace(transfer, loops=transfer.loops[1:])
    size = itemsize(transfer.source_dtype)
    if transfer.reads_whole_span:
        return (limit_bytes // size - inner.span_numel) // loop.source_stride + 1
    return limit_bytes // (inner.numel * size)


def _stage(transfer: Transfer, reader: Reader, staging: Staging) -> torch.Tensor:
    """:func:`_read` into staging, which the transfer must fit into."""
    return _read(transfer, reader, staging.take(transfer.bytes_to_read))


def _read(transfer: Transfer, reader: ReadsInto, buffer: torch.Tensor) -> torch.Tensor:
    """Read a transfer into ``buffer``, which has its bytes; returns it as a view with the transfer's loops as dims."""
    size = itemsize(transfer.source_dtype)
    view = buffer.numpy().data
    sizes = [loop.size for loop in transfer.loops]
    if transfer.reads_whole_span:
        reader.read_into(transfer.path, transfer.offset_bytes, view)
        strides = [loop.source_stride for loop in transfer.loops]
        return torch.as_strided(buffer.view(torch_dtype(transfer.source_dtype)), sizes, strides)
    run = transfer.run_numel
    run_bytes, at, covered, outer = run * size, 0, 1, list(transfer.loops)
    while outer and covered < run:
        covered *= outer.pop().size
    for source, _ in _offsets(outer):
        reader.read_into(transfer.path, transfer.offset_bytes + source * size, view[at : at + run_bytes])
        at += run_bytes
    return buffer.view(torch_dtype(transfer.source_dtype)).view(sizes)


class Filler(Protocol):
    """Takes byte ranges of files, in any order."""

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        """Write bytes at an offset of a file."""


def write_back(
    transfers: Iterable[Transfer], filler: Filler, destination: Destination, staging: Staging
) -> None:
    """Carry out transfers in reverse: from local tensors into files, cast to the stored dtype if it differs.

    Memory: at most half the staging limit, for data that is strided, cast or on a device.
    """
    for transfer in transfers:
        tensor = destination.tensor(transfer.wanted)
        size = itemsize(transfer.source_dtype)
        if transfer.is_direct and tensor.device.type == "cpu":
            view = destination.view(transfer.wanted)
            run_bytes = (transfer.loops[-1].size if transfer.loops else 1) * size
            for source, target in _offsets(transfer.loops[:-1]):
                at = (transfer.target_offset + target) * size
                filler.write_at(
                    transfer.path, transfer.offset_bytes + source * size, view[at : at + run_bytes]
                )
        else:
            for part in parts_of(transfer, staging.limit_bytes // 2):
                _write_part(part, filler, destination)


def _write_part(part: Transfer, filler: Filler, destination: Destination) -> None:
    size = itemsize(part.source_dtype)
    content = destination.strided(part).to(dtype=torch_dtype(part.source_dtype), device="cpu").contiguous()
    view = content.reshape(-1).view(torch.uint8).numpy().data
    run, covered, outer = part.run_numel, 1, list(part.loops)
    while outer and covered < run:
        covered *= outer.pop().size
    for k, (source, _) in enumerate(_offsets(outer)):
        piece = view[k * run * size : (k + 1) * run * size]
        filler.write_at(part.path, part.offset_bytes + source * size, piece)


# ----------------------------------------------------------------------------------------------------
# Makes one box of a tensor from stored tensors, in host memory. Streams from files to files go box by box.


def wanted_box(name: str, dtype: str, shape: tuple[int, ...], box: Box) -> Wanted:
    """A box of a tensor as a wanted tensor of its own, contiguous."""
    held = (LocalBox(box, (0,) * len(box.start)),)
    return Wanted(name, dtype, shape, held, box.sizes, contiguous_strides(box.sizes))


def read_box(
    wanted: Wanted,
    tiles: Iterable[Tile],
    stored: Mapping[str, StoredTensor],
    reader: Reader,
    staging: Staging,
    room: Staging | None = None,
) -> torch.Tensor:
    """The elements of :func:`wanted_box`, made by ``tiles`` from stored tensors. Memory: the box, and staging.

    ``room``: memory for the box, reused for the next one. A fresh allocation for each box left 70 MiB in the
    allocator.
    """
    dtype = torch_dtype(wanted.dtype)
    if room is None:
        piece = torch.empty(wanted.local_shape, dtype=dtype)
    else:
        piece = room.take(wanted.local_nbytes).view(dtype).view(wanted.local_shape)
    transfers = [t for tile in tiles for t in transfers_of(tile, wanted, stored)]
    execute(transfers, reader, Destination({wanted.name: piece}), staging)
    return piece


def read_recipe(
    wanted: Wanted,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    reader: Reader,
    staging: Staging,
    room: Staging | None = None,
) -> torch.Tensor:
    """:func:`read_box` by a recipe. Raises :class:`PlanError` if a second stored copy of a tied tensor differs."""
    found = read_box(wanted, recipe.tiles, stored, reader, staging, room)
    for tiles in recipe.copies:
        if not torch.equal(_bits(found), _bits(read_box(wanted, tiles, stored, reader, staging))):
            raise PlanError(
                f"{wanted.name}: a second stored copy of it differs from the first, and the model ties the two; remove "
                f"one copy"
            )
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# ----------------------------------------------------------------------------------------------------
# Reads cached bytes in lanes: threads of a rank, each of which takes the plan's next read.
#
# One thread keeps one core busy when it copies from the page cache; a host may have more cores than ranks. In lanes the Python between two reads
# overlaps with the reads of other lanes. A read goes into the tensor's own memory, or into a slot of the ring of its device, from which the lane
# has the device copy it. Their reads fail rather than wait for storage (``RWF_NOWAIT``). The first that fails ends the lanes:
# all that is left goes, in the plan's order, to the one reader of the plan. It asks for bytes ahead, tries ways to read, makes the read that
# failed once more, and says what is wrong.

#: Fewer bytes are read in one lane: starting threads would take longer.
LEAST_FOR_THREADS = 32 * 1024**2
#: A larger read is cut, so that all lanes end at about the same time, and to show progress.
MOST_BYTES = 16 * 1024**2
#: Progress is told after so many bytes: telling takes a hundredth of the time of reading them.
_TELL_BYTES = 4 * 1024**2
#: So many transfers are made from the plan at a time: one of 1,024 ranks has hundreds of thousands.
WINDOW = 4096


def execute_own(
    transfers: Sequence[Transfer],
    files: SourceReader,
    reader: Reader,
    destination: Destination,
    staging: Staging,
    memory: HostMemory,
) -> None:
    """Carry out transfers on this rank: in lanes those that go from the page cache onto a device, or straight into CPU memory; then the others.

    ``reader``: the source, of which ``files`` reads the files. Otherwise as :func:`.copy.execute`.
    """
    made = iter(transfers)
    with staging.rings() as rings:
        for start in range(0, len(transfers), WINDOW):
            if not files.lanes():
                execute(_Rest([], transfers, start), reader, destination, staging, memory)
                return
            window = list(islice(made, WINDOW))
            lanes = _Lanes(_fitting(window, files, destination, rings), files, destination, rings, memory)
            lanes.run()
            left = lanes.left_of(window)
            if lanes.has_failed:
                execute(_Rest(left, transfers, start + WINDOW), reader, destination, staging, memory)
                return
            if left:
                execute(left, reader, destination, staging, memory)


class _Rest:
    """Some transfers, and then those of a plan from a place on, made one by one each time they are gone through."""

    def __init__(self, first: Sequence[Transfer], transfers: Sequence[Transfer], start: int) -> None:
        self._first, self._transfers, self._start = first, transfers, start

    def __iter__(self) -> Iterator[Transfer]:
        yield from self._first
        yield from islice(self._transfers, self._start, None)


#: A read of a lane: the place of its transfer in the window, the transfer or a part of it, and the bytes.
_Part = tuple[int, Transfer, int]


def _fitting(
    window: Sequence[Transfer], files: SourceReader, destination: Destination, rings: DeviceRings
) -> list[_Part]:
    """Transfers from a local file, as it is into CPU memory or onto a device in any way; the large ones in parts."""
    found: list[_Part] = []
    for place, transfer in enumerate(window):
        if not files.has_file(transfer.path):
            continue
        tensor = destination.tensor(transfer.wanted)
        if tensor.is_cpu and transfer.is_direct:
            most = MOST_BYTES
        elif not tensor.is_cpu and copies_late(tensor.device):
            rings.prepare(tensor.device)
            most = rings.slot_bytes
        else:
            continue
        nbytes = transfer.bytes_to_read
        if nbytes <= most:
            found.append((place, transfer, nbytes))
        else:
            found += [(place, part, part.bytes_to_read) for part in parts_of(transfer, most)]
    return found


class _Lanes:
    """Reads of one plan, each of which goes to whichever lane is free next."""

    def __init__(
        self,
        parts: Sequence[_Part],
        files: SourceReader,
        destination: Destination,
        rings: DeviceRings,
        memory: HostMemory,
    ) -> None:
        self._parts, self._files, self._destination = parts, files, destination
        self._rings, self._memory = rings, memory
        few = sum(nbytes for _, _, nbytes in parts) < LEAST_FOR_THREADS
        self._count = 1 if few else files.lanes(onto_device=rings.are_used)
        self._next = iter(range(len(parts)))
        self._is_read = bytearray(len(parts))
        self._done = [0] * self._count
        self._told = 0
        self._is_over = False
        self._errors: list[BaseException] = []
        self.has_failed = False

    def run(self) -> None:
        """Read, in the calling thread and others. At the return no thread reads any more.

        The reader of the files counts the bytes of all lanes, in the calling thread.
        """
        watch = current_watch()

        def beside(lane: int) -> None:
            with watched(watch):
                try:
                    self._lane(lane, lambda: None)
                except BaseException as error:
                    self._errors.append(error)

        others: list[threading.Thread] = []
        try:
            with suppress(RuntimeError):  # the system has no thread left
                for lane in range(1, self._count):
                    # An interrupt may come while a thread starts: the thread then finds that all is over, and reads nothing.
                    others.append(threading.Thread(target=beside, args=(lane,), name="shardwise-lane"))
                    others[-1].start()
            self._lane(0, self._tell)
        finally:
            self._is_over = True
            for other in others:
                if other.is_alive():
                    patiently(other.join)
        if self._errors:
            raise self._errors[0]
        self._tell(least=1)

    def left_of(self, window: Sequence[Transfer]) -> list[Transfer]:
        """What the lanes did not read of a window, in its order."""
        taken = {place for place, _, _ in self._parts}
        left = [(place, transfer) for place, transfer in enumerate(window) if place not in taken]
        left += [
            (place, part)
            for (place, part, _), is_read in zip(self._parts, self._is_read, strict=True)
            if not is_read
        ]
        return [transfer for _, transfer in sorted(left, key=lambda one: one[0])]

    def _lane(self, lane: int, tell: Callable[[], None]) -> None:
        files = CachedFiles(self._files)
        try:
            for k in self._next:
                if self._is_over:
                    return
                _, part, nbytes = self._parts[k]
                try:
                    if self._destination.tensor(part.wanted).is_cpu:
                        read_direct(part, files, self._destination.view(part.wanted), self._memory)
                    else:
                        put(part, files, self._destination, self._rings)
                except (OSError, SourceError):  # the plan's reader says what is wrong
                    self.has_failed = True
                    return
                self._is_read[k] = True
                self._done[lane] += nbytes
                tell()
        finally:
            self._is_over = True
            files.close()

    def _tell(self, least: int = _TELL_BYTES) -> None:
        new = sum(self._done) - self._told
        if new >= least:
            self._told += new
            self._files.was_in_cache(new, lanes=sum(map(bool, self._done)))


class CachedFiles:
    """Reads files as long as the page cache holds what is read, from where a reader has opened them; keeps the last one.

    Raises ``OSError``, or as the reader does for a file that can't be opened.
    """

    def __init__(self, files: SourceReader) -> None:
        self._files, self._path, self._fd = files, "", -1

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        if path != self._path:
            self.close()
            self._fd = self._files.descriptor(path)
            self._path = path
        if patiently(os.preadv, self._fd, [view], offset_bytes, os.RWF_NOWAIT) != view.nbytes:
            raise BlockingIOError(errno.EAGAIN, "not all of it is in the page cache")

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._path, self._fd = self._fd, "", -1
            with suppress(OSError):  # it was only read
                patiently(os.close, fd)
