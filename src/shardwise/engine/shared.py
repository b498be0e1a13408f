"""Reads that one rank makes for others, and quantized tensors that are decoded while they are read."""

from __future__ import annotations

import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby, islice

import torch
import torch.distributed as dist

from ..catalog.records import Coded, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import RankError, SourceError
from ..objects import frozen
from ..planning.match import HostConversion
from ..planning.plan import IOOptions, StridedLoop, Transfer, transfers_of
from ..planning.proof import Bucket, Buckets, Span
from ..ranks.ranks import Ranks
from ..tensors.boxes import Box, boxes_of_range, contiguous_strides, whole
from ..tensors.tiles import identity
from .engine import Reader, Staging, parts_of, read_box, spans_of, wanted_box

# ----------------------------------------------------------------------------------------------------
# Reads that ranks share: a bucket of the source is read by one rank, and the others take their parts from it.
#
# Rounds go through the buckets in order. In each round some ranks read a bucket each, all ranks agree that every bucket is
# there, and then each rank hands :func:`.copy.execute` its transfers from these buckets, and their bytes. So a rank that fails
# stops all ranks between two rounds, and no rank waits for it in a collective.

#: Buckets of one round of :class:`OnceReader`: so many ranks read at a time.
_AT_ONCE = 4
#: Slots of each rank in :class:`NodeReader`: the ranks copy from one while their owner fills the other.
_SLOTS = 2
_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 5e-3
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bucket_bytes(strategy: str, staging_bytes: int, *, in_store: bool) -> int:
    """Bytes of a bucket. What a rank holds for buckets takes at most seven eighths of ``staging_bytes``.

    Of objects in stores, where each bucket is a request, a rank holds as much as that.
    """
    if strategy == "node":
        return staging_bytes * 7 // 8 // _SLOTS if in_store else staging_bytes // 4
    return staging_bytes // 8


def held_bytes(strategy: str, nbytes: int, *, readers: int) -> int:
    """What a rank holds for buckets of ``nbytes``. With ``node`` its own slots, which the ranks of its host see, too."""
    return {"own": 0, "node": _SLOTS, "once": 3 + min(_AT_ONCE, readers)}[strategy] * nbytes


def spans_in_turn(buckets: Sequence[Bucket], readers: Sequence[int], rank: int) -> Iterator[Span]:
    """What a rank reads if ``readers`` read the buckets in turns, in order. Nothing if it is none of them."""
    for bucket in buckets[readers.index(rank) :: len(readers)] if rank in readers else ():
        for part in bucket.ranges:
            yield part.path, part.offset_bytes, part.offset_bytes + part.nbytes


class SharedReader(ABC):
    """This rank's transfers in rounds, and the bytes that they need. Every rank must go through all rounds."""

    memory_bytes = 0
    """Host memory of this rank for buckets."""
    bytes_sent = 0
    """Bytes of payload that this rank sent to other ranks."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        buckets: Buckets,
        files: Reader,
        ranks: Ranks,
        rounds: int,
        readers: Sequence[int],
    ) -> None:
        """``files``: where this rank's own buckets come from. ``rounds``: the same on every rank. ``readers``: the ranks that read
        the buckets in turns."""
        self._buckets, self._readers = buckets.buckets, readers
        self._by_bucket = {
            Buckets.index_of(path): list(group) for path, group in groupby(transfers, lambda t: t.path)
        }
        self._files, self._ranks, self._rounds = files, ranks, rounds
        self._now: dict[str, torch.Tensor] = {}

    def spans(self) -> Iterator[Span]:
        """What this rank reads, for itself and for others."""
        return spans_in_turn(self._buckets, self._readers, self._ranks.rank)

    def __iter__(self) -> Iterator[Transfer]:
        """The transfers, each while its bytes are here."""
        with self._files.expecting(self.spans()):
            for number in range(self._rounds):
                yield from self._round(number)

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """Does nothing: the reader looks ahead in its own buckets, whatever a rank takes from them."""
        return nullcontext()

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with bytes of the round."""
        view[:] = self._now[path].numpy().data[offset_bytes : offset_bytes + view.nbytes]

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of one of the transfers given last, with its loops as dims; None if they are not aligned."""
        held, size = self._now[transfer.path], itemsize(transfer.source_dtype)
        # What several ranks sent lies end to end: tensors of other dtypes may leave the next off its alignment.
        if transfer.offset_bytes % size or held.storage_offset() % size:
            return None
        sizes = [loop.size for loop in transfer.loops]
        strides = [loop.source_stride for loop in transfer.loops]
        elements = held[: held.numel() // size * size].view(torch_dtype(transfer.source_dtype))
        start = elements.storage_offset() + transfer.offset_bytes // size
        return iter([(transfer, elements.as_strided(sizes, strides, start))])

    def close(self) -> None:
        """Let go of the buckets."""
        self._now.clear()

    @abstractmethod
    def _round(self, number: int) -> Iterator[Transfer]:
        """The transfers of one round."""

    def _fill(self, index: int, memory: torch.Tensor) -> None:
        """Read a bucket, if there is one of this index."""
        if index < len(self._buckets):
            bucket, view = self._buckets[index], memory.numpy().data
            for part in bucket.ranges:
                self._files.read_into(part.path, part.offset_bytes, view[part.at : part.at + part.nbytes])

    def _transfers(self, index: int) -> Sequence[Transfer]:
        return self._by_bucket.get(index, ())


class NotShared(SourceError):
    """Ranks of a host can't open each other's memory. Raised on every rank alike."""


class NodeReader(SharedReader):
    """Ranks of one host read in turns into memory that all of them see: each range is read once per host.

    Memory: two buckets per rank, which the ranks of the host share. Linux (``memfd_create(2)``). Raises
    :class:`NotShared`.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        buckets: Buckets,
        files: Reader,
        ranks: Ranks,
        *,
        peers: Sequence[int],
        nbytes: int,
    ) -> None:
        """``peers``: the ranks of this host. ``nbytes``: of a bucket. Every rank of the group must call it."""
        needed = -(-len(buckets.buckets) // len(peers))
        rounds = ranks.combine("count rounds", lambda: needed, _most)
        super().__init__(transfers, buckets, files, ranks, rounds, peers)
        self._index, self._count, self._nbytes = peers.index(ranks.rank), len(peers), nbytes
        self.memory_bytes = held_bytes("node", nbytes, readers=len(peers))
        self._memory = self._share(peers)

    def close(self) -> None:
        super().close()
        self._memory.clear()

    def _share(self, peers: Sequence[int]) -> list[torch.Tensor]:
        """The slots of each rank of this host."""
        own = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, _SLOTS * self._nbytes)
            addresses = self._ranks.combine("share memory", lambda: [os.getpid(), own], list)
            slots: list[torch.Tensor] = []

            def open_all() -> str:
                try:
                    slots.extend(self._map(*addresses[peer]) for peer in peers)
                except OSError as error:
                    return f"rank {self._ranks.rank}: {error}"
                return ""

            failures = self._ranks.combine("open shared memory", open_all, list)
            if any(failures):
                raise NotShared(next(filter(None, failures)))
            return slots
        finally:
            os.close(own)

    def _map(self, process: int, number: int) -> torch.Tensor:
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(fd, _SLOTS * self._nbytes), dtype=torch.uint8)
        finally:
            os.close(fd)

    def _round(self, number: int) -> Iterator[Transfer]:
        start = number % _SLOTS * self._nbytes
        with self._ranks.agree("read"):
            own = self._memory[self._index][start : start + self._nbytes]
            self._fill(number * self._count + self._index, own)
        for place, memory in enumerate(self._memory):
            index = number * self._count + place
            self._now = {Buckets.path_of(index): memory[start : start + self._nbytes]}
            yield from self._transfers(index)


class OnceReader(SharedReader):
    """Each range is read once per job, by one of the ranks that see the files, and every rank is sent its own shards.

    Travels through the default process group's own backend. Memory: at most seven buckets.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        buckets: Buckets,
        files: Reader,
        ranks: Ranks,
        *,
        readers: Sequence[int],
        device: torch.device,
        nbytes: int,
    ) -> None:
        """``readers``: the ranks that see the files. ``device``: one that the process group has collectives for."""
        self._at_once = min(_AT_ONCE, len(readers))
        rounds = -(-len(buckets.buckets) // self._at_once)
        super().__init__(transfers, buckets, files, ranks, rounds, readers)
        self._device = device
        self.memory_bytes = held_bytes("once", nbytes, readers=len(readers))
        self._bucket = torch.empty(nbytes if ranks.rank in readers else 0, dtype=torch.uint8)

    def close(self) -> None:
        super().close()
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def _round(self, number: int) -> Iterator[Transfer]:
        first = number * self._at_once
        owners = {
            self._readers[index % len(self._readers)]: index for index in range(first, first + self._at_once)
        }
        with self._ranks.agree("read"):
            if self._ranks.rank in owners:
                self._fill(owners[self._ranks.rank], self._bucket)
        asked = {owner: self._transfers(index) for owner, index in owners.items()}
        sent = self._exchange({owner: _request(transfers) for owner, transfers in asked.items()})
        self._now = {str(owner): part for owner, part in sent.items()}
        for owner, transfers in asked.items():
            at = 0
            for transfer in transfers:
                packed = _packed(transfer, str(owner), at)
                yield packed
                at += packed.bytes_to_read

    def _exchange(self, requests: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Ask each owner for parts of its bucket; returns what each one sent."""
        world = range(self._ranks.world_size)
        counts = [len(requests.get(rank, ())) for rank in world]
        lengths = self._all_to_all(counts, [1] * len(world), [1] * len(world))
        flat = [value for rank in world for value in requests.get(rank, ())]
        received = iter(self._all_to_all(flat, counts, lengths))
        wanted = [_parsed(list(islice(received, length))) for length in lengths]
        to_send = [_nbytes_of(parts) for parts in wanted]
        to_take = [_nbytes_of(_parsed(requests.get(rank, []))) for rank in world]
        largest = torch.tensor([sum(to_send)], dtype=torch.int64, device=self._device)
        self._finish(dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True))
        # Tensors that all ranks hold whole are sent to a few ranks at a time.
        some = len(world) if int(largest) <= 2 * self._bucket_bytes() else 2
        taken = torch.empty(0, dtype=torch.uint8)
        for start in range(0, len(world), some):
            turn = range(start, min(start + some, len(world)))
            out = self._pack([wanted[rank] if rank in turn else () for rank in world])
            sizes = [to_send[rank] if rank in turn else 0 for rank in world]
            mine = to_take if self._ranks.rank in turn else [0] * len(world)
            found = torch.empty(sum(mine), dtype=torch.uint8, device=self._device)
            self._finish(dist.all_to_all_single(found, out.to(self._device), mine, sizes, async_op=True))
            self.bytes_sent += sum(sizes) - sizes[self._ranks.rank]
            taken = found.cpu() if sum(mine) else taken
        return {rank: part for rank, part in enumerate(taken.split(to_take)) if rank in requests}

    def _bucket_bytes(self) -> int:
        return max((bucket.nbytes for bucket in self._buckets), default=0)

    def _pack(self, wanted: Sequence[Sequence[_Part]]) -> torch.Tensor:
        """The asked-for elements of this rank's bucket, for one rank after the other."""
        packed = torch.empty(sum(part.nbytes for parts in wanted for part in parts), dtype=torch.uint8)
        at = 0
        for part in (part for parts in wanted for part in parts):
            packed[at : at + part.nbytes] = part.of(self._bucket)
            at += part.nbytes
        return packed

    def _all_to_all(self, values: Sequence[int], out: Sequence[int], into: Sequence[int]) -> list[int]:
        """Send ``out[rank]`` of the numbers to each rank, and take ``into[rank]`` from it."""
        given = torch.tensor(values, dtype=torch.int64, device=self._device)
        taken = torch.empty(sum(into), dtype=torch.int64, device=self._device)
        self._finish(dist.all_to_all_single(taken, given, list(into), list(out), async_op=True))
        return [int(number) for number in taken.tolist()]

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for a collective, as long as a rank may go without progress. Raises :class:`RankError`."""
        assert work is not None
        end, pause_s = time.monotonic() + self._ranks.timeout_s, _PAUSE_S
        try:
            while not work.is_completed():
                if time.monotonic() > end:
                    text = f"waited {self._ranks.timeout_s:g} s in a collective for another rank"
                    raise RankError("read", {self._ranks.rank: text})
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            work.wait()
        except RuntimeError as error:  # of the backend: a rank ended
            raise RankError("read", {self._ranks.rank: f"a collective failed: {error}"}) from error


@frozen
class _Part:
    """Elements of a bucket that a rank asks for."""

    size: int
    """Bytes of an element."""
    offset_bytes: int
    loops: tuple[tuple[int, int], ...]
    """Size and stride, in elements."""

    @property
    def nbytes(self) -> int:
        return self.size * math.prod(size for size, _ in self.loops)

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Their bytes, one after the other."""
        sizes, strides = [size for size, _ in self.loops], [stride for _, stride in self.loops]
        word = _WORDS.get(self.size)
        if word is None or self.offset_bytes % self.size:
            strides = [*(stride * self.size for stride in strides), 1]
            return bucket.as_strided([*sizes, self.size], strides, self.offset_bytes).reshape(-1)
        words = bucket[: bucket.numel() // self.size * self.size].view(word)
        found = words.as_strided(sizes, strides, self.offset_bytes // self.size)
        return found.contiguous().reshape(-1).view(torch.uint8)


def _request(transfers: Sequence[Transfer]) -> list[int]:
    """Transfers as numbers, for :func:`_parsed`."""
    numbers: list[int] = []
    for transfer in transfers:
        numbers += (itemsize(transfer.source_dtype), transfer.offset_bytes, len(transfer.loops))
        for loop in transfer.loops:
            numbers += (loop.size, loop.source_stride)
    return numbers


def _parsed(numbers: Sequence[int]) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    while at < len(numbers):
        size, offset_bytes, count = numbers[at : at + 3]
        rest = numbers[at + 3 : at + 3 + 2 * count]
        parts.append(_Part(size, offset_bytes, tuple(zip(rest[::2], rest[1::2], strict=True))))
        at += 3 + 2 * count
    return parts


def _most(numbers: list[int]) -> int:
    return max(numbers)


def _nbytes_of(parts: Sequence[_Part]) -> int:
    return sum(part.nbytes for part in parts)


def _packed(transfer: Transfer, path: str, at: int) -> Transfer:
    """The transfer as from elements that lie one after the other."""
    strides = contiguous_strides([loop.size for loop in transfer.loops])
    loops = tuple(
        StridedLoop(loop.size, stride, loop.target_stride)
        for loop, stride in zip(transfer.loops, strides, strict=True)
    )
    return replace(transfer, path=path, offset_bytes=at, loops=loops)


# ----------------------------------------------------------------------------------------------------
# Which scales a load needs, and those that were read, and found right, before the first weight is written.

#: Rows that are read or decoded at a time are a multiple of it, if there are as many: blocks of scales across rows are then seldom cut.
ROWS = 32
#: Elements of which the scales are read at a time, where a transfer takes some of a box.
_ELEMENTS = 512 * 1024
#: The share of the staging for scales that a rank keeps from the check to the decoding, so that it reads them once.
_KEPT_SHARE = 3 / 8
#: Scales of which codes have this many times the bytes are read twice, if there is no room to keep them.
_FEW = 64


class CheckedScales:
    """Boxes of scales in memory, by the stored tensor that they are of; a part of ``staging_bytes``."""

    def __init__(self, staging_bytes: int) -> None:
        self._most_bytes = int(_KEPT_SHARE * staging_bytes)
        self.nbytes = 0
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = {}

    def has_room(self, one: Coded, boxes: Mapping[str, Box]) -> bool | None:
        """Whether the scales of a box can be kept; None if they can't, and are too many to be read twice."""
        nbytes = sum(box.numel * itemsize(one.parts[role].dtype) for role, box in boxes.items())
        if self.nbytes + nbytes <= self._most_bytes:
            return True
        scales = sum(one.parts[role].nbytes for role in boxes)
        return False if scales * _FEW <= one.stored_bytes - scales else None

    def keep(self, name: str, box: Box, elements: torch.Tensor) -> None:
        """Keep a copy of the elements of a box."""
        self.nbytes += elements.nbytes
        self._held.setdefault(name, []).append((box, elements.clone()))

    def find(self, name: str, box: Box) -> torch.Tensor | None:
        """A copy of the elements of a box, if they are kept."""
        for outer, elements in self._held.get(name, ()):
            if outer.contains(box):
                return elements[box.slices_in(outer)].clone(memory_format=torch.contiguous_format)
        return None


def boxes_of_transfers(
    transfers: Iterable[Transfer], coded: Mapping[str, Coded]
) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that transfers read."""
    for transfer in transfers:
        if (one := coded.get(transfer.path)) is not None:
            yield from ((one, box) for box in _boxes(transfer, one.tensor.shape))


def boxes_of_conversions(
    hosts: Iterable[HostConversion], coded: Mapping[str, Coded], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[Coded, Box]]:
    """The tensors in parts that host conversions read, whole."""
    for name in dict.fromkeys(name for host in hosts for name in host.sources):
        chunks = stored[name].chunks
        if chunks and (one := coded.get(chunks[0].path)) is not None:
            yield one, whole(one.tensor.shape)


def _boxes(transfer: Transfer, shape: tuple[int, ...]) -> Iterator[Box]:
    """One box, if the transfer takes all of its elements, otherwise those of its parts."""
    transfer = transfer.along_dims(shape)
    box = transfer.box_in(shape).box
    if box.numel * itemsize(transfer.source_dtype) == transfer.bytes_to_read:
        yield box
        return
    for part in parts_of(transfer, _ELEMENTS * itemsize(transfer.source_dtype)):
        yield part.box_in(shape).box


def boxes_of_spans(
    spans: Iterable[Span], coded: Mapping[str, Coded], parts_bytes: int
) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that :class:`.DecodingReader` reads at a time for spans that come in this order.

    ``parts_bytes``: :attr:`.IOOptions.parts_bytes` of the load.
    """
    for path, start, stop in _joined(spans):
        if (one := coded.get(path)) is not None:
            size = itemsize(one.tensor.dtype)
            for box in boxes_of_range(start // size, -(-stop // size), one.tensor.shape):
                yield from ((one, part) for part in _in_parts(one, box, parts_bytes))


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans of which one goes on where the one before ends, as one."""
    last: Span | None = None
    for span in spans:
        if last is not None and (last[0], last[2]) == span[:2]:
            last = (last[0], last[1], span[2])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def elements_at_a_time(one: Coded, parts_bytes: int) -> int:
    """Elements whose parts have ``parts_bytes``: each read has its own small plan, and transposed parts come in longer runs."""
    return max(1, parts_bytes * one.tensor.nbytes // (max(1, one.stored_bytes) * itemsize(one.tensor.dtype)))


def _in_parts(one: Coded, box: Box, parts_bytes: int) -> Iterator[Box]:
    """A contiguous box in rows, of :func:`elements_at_a_time`."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if dim is None:
        yield box
        return
    rows = max(1, elements_at_a_time(one, parts_bytes) * box.sizes[dim] // box.numel)
    rows -= rows % ROWS if rows > ROWS else 0
    for first in range(box.start[dim], box.stop[dim], rows):
        last = min(first + rows, box.stop[dim])
        yield Box(
            (*box.start[:dim], first, *box.start[dim + 1 :]), (*box.stop[:dim], last, *box.stop[dim + 1 :])
        )


# ----------------------------------------------------------------------------------------------------
# Reads tensors that a source stores as codes: boxes of their parts from files, decoded in host memory.

#: Elements that are decoded at a time: what comes between stays in a processor's cache, and calls of torch weigh little.
_ELEMENTS_DECODED = 1024 * 1024
#: Bytes of memory that the decoding of an element takes on the way: its code, zero point, scale and result.
_BYTES_PER_ELEMENT = 16
Decode = Callable[[Box], torch.Tensor]


class DecodingReader:
    """Reads files. A path that names a tensor in parts reads boxes of its parts, and decodes them.

    Rank-local. Memory: within ``IOOptions.staging_bytes``, if that is 22 MiB or more. Kept scales take up to 3/8 of it, parts
    3/16 (twice for a rule that turns them), decoded elements 1/4. Scales and parts are recorded in ``peak_bytes``.
    """

    def __init__(self, files: Reader, coded: Mapping[str, Coded], io: IOOptions) -> None:
        """``coded``: by path."""
        self._files = files
        self._coded = coded
        self._staging = Staging(io)
        self._rooms: dict[str, Staging] = {}
        self._checked = CheckedScales(io.staging_bytes)
        self._announced: dict[str, list[Box]] = {}
        self._held: tuple[str, Box, Decode] | None = None
        self._opened_bytes = 0
        self._io = io
        self._elements_at_a_time = max(
            ROWS, min(_ELEMENTS_DECODED, io.staging_bytes // 4 // _BYTES_PER_ELEMENT)
        )
        if coded:
            _let_malloc_keep_memory()

    @property
    def peak_bytes(self) -> int:
        """Host memory for parts."""
        return (
            self._checked.nbytes
            + self._staging.peak_bytes
            + sum(room.peak_bytes for room in self._rooms.values())
            + self._opened_bytes
        )

    def check_scales(self, boxes: Iterable[tuple[Coded, Box]]) -> None:
        """Read the scales of boxes, and keep them for the decoding, as far as there is room.

        Raises :class:`IntegrityError` for scales that are NaN or infinite. Those that are too many to be kept are checked when their
        codes are read.
        """
        for one, box in boxes:
            asked = one.rule.scale_boxes(box)
            if not asked or (is_kept := self._checked.has_room(one, asked)) is None:
                continue
            parts = {role: self._box(role, one.parts[role], part) for role, part in asked.items()}
            if box.numel:
                one.rule.check_scales(box, parts)
            for role, part in asked.items() if is_kept else ():
                self._checked.keep(one.parts[role].name, part, parts[role])

    def announce(self, boxes: Iterable[tuple[Coded, Box]]) -> None:
        """Parts of these boxes are read at a time, and kept for the reads of ranges of bytes within them: each is read once."""
        self._announced = {}
        for one, box in boxes:
            self._announced.setdefault(one.path, []).append(box)

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """As :meth:`FileReader.expecting`. Each read of a box announces its own spans."""
        return self._files.expecting(span for span in spans if span[0] not in self._coded)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """As :meth:`FileReader.read_into`. Raises :class:`IntegrityError` for scales that are NaN or infinite."""
        one = self._coded.get(path)
        if one is None:
            self._files.read_into(path, offset_bytes, view)
            return
        size, found = itemsize(one.tensor.dtype), torch.frombuffer(view, dtype=torch.uint8)
        start = offset_bytes // size
        assert start * size == offset_bytes, (path, offset_bytes)
        at = 0
        for box in boxes_of_range(start, start + view.nbytes // size, one.tensor.shape):
            for piece, decode in self._pieces(one, box):
                for slab in _slabs(piece, self._elements_at_a_time):
                    nbytes = slab.numel * size
                    made = _checked(one, slab, decode(slab)).to(torch_dtype(one.tensor.dtype))
                    found[at : at + nbytes] = made.reshape(-1).view(torch.uint8)
                    at += nbytes

    def _pieces(self, one: Coded, box: Box) -> Iterator[tuple[Box, Decode]]:
        """A contiguous box in pieces, in order, each with what decodes boxes within the announced box around it."""
        within = [
            (around, piece)
            for around in self._announced.get(one.path, ())
            if (piece := around.intersect(box))
        ]
        if sum(piece.numel for _, piece in within) != box.numel:  # not announced
            within = [(box, box)]
        for around, piece in within:
            if self._held is None or self._held[:2] != (one.path, around):
                self._held = (one.path, around, self._opened(one, around))
            yield piece, self._held[2]

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of a transfer, in parts with their loops as dims; None if they lie in a file."""
        one = self._coded.get(transfer.path)
        return self._files.elements(transfer) if one is None else self._elements(one, transfer)

    def _elements(self, one: Coded, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]]:
        transfer = transfer.along_dims(one.tensor.shape)
        slab_bytes = _slab_bytes(transfer, self._elements_at_a_time)
        most = elements_at_a_time(one, self._io.parts_bytes)
        slabs = most * itemsize(transfer.source_dtype) // slab_bytes
        for large in _by_columns(one, transfer, most) or parts_of(transfer, max(1, slabs) * slab_bytes):
            decode = self._opened(one, large.box_in(one.tensor.shape).box)
            for part in parts_of(large, slab_bytes):
                found = part.box_in(one.tensor.shape)
                made = _checked(one, found.box, decode(found.box))
                sizes = [loop.size for loop in part.loops]
                yield part, torch.as_strided(made, found.sizes, found.strides).reshape(sizes)

    def _opened(self, one: Coded, box: Box) -> Decode:
        """Read the parts of a box, into memory that the next call takes again; what decodes boxes within it."""
        self._held, boxes = None, one.rule.boxes(box)
        parts = {role: self._box(role, one.parts[role], part) for role, part in boxes.items()}
        if one.rule.is_turned:
            self._opened_bytes = max(self._opened_bytes, sum(part.nbytes for part in parts.values()))
        return one.rule.opened(box, parts)

    def _box(self, role: str, stored: StoredTensor, box: Box) -> torch.Tensor:
        """A box of a stored tensor, in memory that the next box of this role takes again."""
        if (kept := self._checked.find(stored.name, box)) is not None:
            return kept
        wanted = wanted_box(stored.name, stored.dtype, stored.shape, box)
        if role not in self._rooms:
            self._rooms[role] = Staging(replace(self._io, staging_bytes=2**62))  # as much as the largest box
        tile = identity(stored.name, stored.shape)
        return read_box(wanted, (tile,), {stored.name: stored}, self._files, self._staging, self._rooms[role])


def _by_columns(one: Coded, transfer: Transfer, most: int) -> list[Transfer]:
    """A transfer in pieces of whole groups of columns, of at most ``most`` elements; none where rows are read as well.

    ``transfer``: with loops along dims. Each piece of a transposed matrix is then contiguous in the file, and nothing is read twice.
    """
    together = one.rule.columns_together
    if not together or not transfer.loops or transfer.loops[-1].source_stride != 1:
        return []
    loop = transfer.loops[-1]
    step = most // max(1, transfer.numel // loop.size) // together * together
    if not step:
        return []
    first = transfer.offset_bytes // itemsize(transfer.source_dtype) % one.tensor.shape[1]
    found, at = [], 0
    while at < loop.size:
        count = min(step - (first + at) % together, loop.size - at)
        found.append(
            replace(
                transfer,
                offset_bytes=transfer.offset_bytes + at * itemsize(transfer.source_dtype),
                target_offset=transfer.target_offset + at * loop.target_stride,
                loops=(*transfer.loops[:-1], replace(loop, size=count)),
            )
        )
        at += count
    return found


def _let_malloc_keep_memory() -> None:
    """Make ``malloc`` reuse what each decoded slab frees; on the machine measured, a third of the time of a decoding load.

    glibc gives freed blocks back to the system, so that each slab faults in its pages anew, unless they are smaller than half
    of the largest block that was freed before (``M_MMAP_THRESHOLD``, mallopt(3)). This one is never touched.
    """
    torch.empty(16 * 1024**2, dtype=torch.uint8)


def _checked(one: Coded, box: Box, made: torch.Tensor) -> torch.Tensor:
    assert made.shape == box.sizes, one.tensor.name
    assert made.dtype in (torch_dtype(one.tensor.dtype), torch.float32), one.tensor.name
    return made.contiguous()


def spans_of_box(one: Coded, box: Box) -> Iterator[Span]:
    """What the parts of a box are read from."""
    for role, part in one.rule.boxes(box).items():
        stored = one.parts[role]
        wanted = wanted_box(stored.name, stored.dtype, stored.shape, part)
        tile = identity(stored.name, stored.shape)
        yield from spans_of(transfers_of(tile, wanted, {stored.name: stored}))


def _slab_bytes(transfer: Transfer, elements: int) -> int:
    """Bytes of the slabs that a transfer is decoded in: about ``elements`` elements."""
    row = transfer.numel // transfer.loops[0].size if transfer.loops else 1
    if elements >= ROWS * row:
        elements -= elements % (ROWS * row)
    return elements * itemsize(transfer.source_dtype)


def _slabs(box: Box, elements: int) -> Iterator[Box]:
    """A contiguous box in contiguous parts of about ``elements`` elements."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if dim is None or box.numel <= elements:
        yield box
        return
    step = max(1, elements * box.sizes[dim] // box.numel)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        part = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :])
        )
        yield from _slabs(part, elements) if part.numel > elements and stop - start == 1 else (part,)
