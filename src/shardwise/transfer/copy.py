"""Executes transfers from files into local tensors: directly if the bytes fit, otherwise through staging."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import TracebackType
from typing import Any, Protocol

import torch

from ..devices import copies_late
from ..dtypes import itemsize, torch_dtype
from ..errors import CheckpointError, PlanError
from ..models.host_memory import HostMemory
from ..planning.buckets import Span
from ..planning.records import IOOptions, StridedLoop, Transfer
from ..ranks.patience import PIECE_BYTES, patiently, write_behind
from .ahead import GAP_BYTES
from .converted import Reader
from .to_device import DeviceRings

__all__ = [
    "Destination",
    "FileFiller",
    "Filler",
    "Staging",
    "compare",
    "execute",
    "fill",
    "holds",
    "parts_of",
    "put",
    "read_direct",
    "spans_of",
    "write_back",
]


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
    if memory is None:
        for start, at in _offsets(transfer.loops[:-1]):
            at = (transfer.target_offset + at) * size
            reader.read_into(transfer.path, transfer.offset_bytes + start * size, view[at : at + run_bytes])
        return
    for start, at in _offsets(transfer.loops[:-1]):
        start, at = transfer.offset_bytes + start * size, (transfer.target_offset + at) * size
        stop = at + run_bytes
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


class FileFiller:
    """Writes byte ranges into existing files of a directory, and syncs them when the block is left without error.

    Bytes go to disk on the way, which leaves little for fsync. Rank-local; several ranks may fill disjoint ranges of
    one file. Raises :class:`CheckpointError`.
    """

    def __init__(self, root: str, on_progress: Callable[[int], object] | None = None) -> None:
        self.bytes_written = 0
        self._root = root
        self._fds: dict[str, int] = {}
        self._cached_bytes: dict[str, int] = {}  # by file, since the kernel was last told to write
        self._on_progress = on_progress

    def __enter__(self) -> FileFiller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for name, fd in self._fds.items():
                if kind is None:
                    try:
                        patiently(os.fsync, fd)
                    except OSError as failure:
                        raise CheckpointError(
                            f"{self._root}/{name}: fsync failed: {failure.strerror}"
                        ) from failure
        finally:
            while self._fds:
                patiently(os.close, self._fds.popitem()[1])

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        """Write bytes at an offset of a file."""
        try:
            if name not in self._fds:
                path = os.path.join(self._root, name)
                self._fds[name] = patiently(os.open, path, os.O_WRONLY | os.O_CLOEXEC)
            fd, done = self._fds[name], 0
            while done < view.nbytes:
                count = patiently(os.pwrite, fd, view[done : done + _WRITE_BYTES], offset_bytes + done)
                done += count
                self.bytes_written += count
                self._cached_bytes[name] = self._cached_bytes.get(name, 0) + count
                if self._cached_bytes[name] >= PIECE_BYTES:
                    self._cached_bytes[name] = 0
                    patiently(write_behind, fd)
                if self._on_progress is not None:
                    self._on_progress(count)
        except OSError as error:
            raise CheckpointError(f"{self._root}/{name}: writing failed: {error.strerror}") from error


_WRITE_BYTES = 16 * 1024**2


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
