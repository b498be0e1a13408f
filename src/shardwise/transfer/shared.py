"""Reads that ranks share: a bucket of the source is read by one rank, and the others take their parts from it.

Rounds go through the buckets in order. In each round some ranks read a bucket each, all ranks agree that every bucket is
there, and then each rank hands :func:`.copy.execute` its transfers from these buckets, and their bytes. So a rank that fails
stops all ranks between two rounds, and no rank waits for it in a collective.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby, islice

import torch
import torch.distributed as dist

from ..dtypes import itemsize, torch_dtype
from ..errors import RankError, SourceError
from ..layout.wanted import contiguous_strides
from ..objects import frozen
from ..planning.buckets import Bucket, Buckets, Span
from ..planning.records import StridedLoop, Transfer
from ..ranks.ranks import Ranks
from .converted import Reader

__all__ = [
    "NodeReader",
    "NotShared",
    "OnceReader",
    "SharedReader",
    "bucket_bytes",
    "held_bytes",
    "spans_in_turn",
]

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
