"""Staging: host memory through which tensors go to the writer.

One thread copies tensors in, the writer takes their bytes out in the same order. With room for the whole state, an
async save is over for the training when the last copy is enqueued. With less, copying goes in waves: it waits until
the writer frees room.

Copies from a device run on a stream beside the current one, after all work that was enqueued before. The host waits
for none of them before the writer takes their bytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..devices import copies_late, flat_bytes
from ..errors import CheckpointError
from ..internals.torch import empty_host_cache
from ..state.typed_json import Encoded
from .collect import Collected

__all__ = ["StagingBuffer", "detached_documents", "pinned_sizes", "room_for"]

_ALIGNMENT = 64
_PAGE_BYTES = 4096
#: The largest block of pinned memory.
_BLOCK_BYTES = 64 * 1024**2
#: Bytes of one copy from a device: the writer has the first ones while the next are under way.
_COPY_BYTES = 8 * 1024**2
#: Bytes of a tensor without a dense memory order that become dense at a time.
_DENSE_BYTES = 4 * 1024**2


class StagingBuffer:
    """A ring of host memory between a thread that copies and the writer.

    ``nbytes`` is its size. :meth:`reserve` allocates and touches it; it is kept for the next save, until :meth:`release`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._is_pinned = False
        self._blocks: list[torch.Tensor] = []
        self._sides: dict[torch.device, torch.Stream] = {}
        self._changed = threading.Condition()
        self._reset()

    def reserve(self, nbytes: int, most_bytes: int | None = None, *, pinned: bool = False) -> None:
        """Make room for ``nbytes``, at most ``most_bytes``, reusing existing memory. Not while a save runs.

        ``pinned``: for copies from a device. Raises :class:`CheckpointError` if the system has not enough memory.
        """
        if most_bytes is not None:
            nbytes = max(_ALIGNMENT, min(nbytes, most_bytes // _ALIGNMENT * _ALIGNMENT))
        sizes = pinned_sizes(nbytes, most_bytes) if pinned else [_aligned(nbytes)]
        if sum(sizes) > self.nbytes or (pinned and not self._is_pinned):
            try:
                self._allocate(sizes, pinned=pinned)
            except (RuntimeError, MemoryError) as error:
                self._blocks, self.nbytes = [], 0
                raise CheckpointError(
                    f"can't allocate {nbytes} bytes of host memory for the copy of the state "
                    f"({error}); give a smaller max_staging_bytes, or mode='sync'"
                ) from error
        self._reset()

    def _allocate(self, sizes: list[int], *, pinned: bool) -> None:
        """Allocate blocks; keeps the largest pinned ones, and frees the other ones before."""
        keeps, frees_pinned = pinned and self._is_pinned, self._is_pinned
        self._blocks = [b for b in self._blocks if keeps and b.numel() == _BLOCK_BYTES]
        if frees_pinned:  # torch's host allocator keeps what is freed
            empty_host_cache()
        for size in sizes[len(self._blocks) :]:
            # Of zeros, so that the system finds the pages now; pinning does that, too.
            memory = torch.empty if pinned else torch.zeros
            self._blocks.append(memory(size, dtype=torch.uint8, pin_memory=pinned))
        self._is_pinned, self.nbytes = pinned, sum(sizes)

    def release(self) -> None:
        """Give the memory back. Not while a save runs; a later :meth:`reserve` allocates it again."""
        was_pinned = self._is_pinned and self.nbytes > 0
        self._blocks, self.nbytes, self._is_pinned = [], 0, False
        self._sides.clear()
        self._reset()
        if was_pinned:  # torch's host allocator keeps what is freed
            empty_host_cache()

    def _reset(self) -> None:
        self._stops = list(accumulate(block.numel() for block in self._blocks))
        self._enqueued: list[_Copy] = []  # copies without an event behind them
        self._ready: deque[_Copy] = deque()  # oldest first
        self._taken: _Copy | None = None
        # Positions: bytes put in and bytes free again, since the save began.
        self._head = self._tail = 0
        self._asked = 0
        self._ordered: set[torch.device] = set()  # devices whose copies began
        self._error: BaseException | None = None

    # -- the thread that copies --------------------------------------------------------------------------

    def copying(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Copy tensors in, in order. Yields when there is no room: see :meth:`wait_for_room`.

        At the end all copies are enqueued, and their devices' current streams go on after them: the caller may then
        change or free the tensors.
        """
        for tensor in tensors:
            side = self._side_of(tensor.device)
            if side is not None:
                tensor.record_stream(side)  # else its memory could be used again while it is copied
            for cut in _cuts(tensor):
                with side or nullcontext():
                    flat = flat_bytes(cut)
                done = 0
                while done < flat.numel():
                    view = self._room(
                        flat.numel() - done if side is None else min(flat.numel() - done, _COPY_BYTES)
                    )
                    if view is None:
                        self._publish()
                        yield
                        continue
                    with side or nullcontext():
                        view.copy_(flat[done : done + view.numel()], non_blocking=side is not None)
                    done += view.numel()
                    if side is None or self._head - self._enqueued[0].begin >= _COPY_BYTES:
                        self._publish()
        self._publish()
        for device in self._ordered:
            torch.accelerator.current_stream(device).wait_stream(self._sides[device])

    def order(self) -> None:
        """Make the next copies wait for all that was enqueued on the current streams, not only before the first copy."""
        for device in self._ordered:
            self._wait_for_current(device)

    def _wait_for_current(self, device: torch.device) -> None:
        self._sides[device].wait_stream(torch.accelerator.current_stream(device))

    def wait_for_room(self) -> bool:
        """Wait until :meth:`copying` can go on. False if the writer has failed: then there is nothing more to do.

        All ranks learn of that together, when they ask for the outcome.
        """
        with self._changed:
            while self._free_bytes < self._asked and self._error is None:
                self._changed.wait()
            return self._error is None

    def _side_of(self, device: torch.device) -> torch.Stream | None:
        """The stream for copies from a device; None where copies are made at once."""
        if not copies_late(device):
            return None
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        if device not in self._ordered:
            self._wait_for_current(device)
            self._ordered.add(device)
        return self._sides[device]

    @property
    def _free_bytes(self) -> int:
        return self.nbytes - (self._head - self._tail)

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """The place of the next bytes, at most ``nbytes``; None while the writer still needs that memory."""
        at = self._head % self.nbytes
        index = bisect_right(self._stops, at)
        nbytes = min(nbytes, self._stops[index] - at)
        with self._changed:
            self._asked = _aligned(nbytes)
            if self._free_bytes < self._asked or self._error is not None:
                return None
        start = at - self._stops[index] + self._blocks[index].numel()
        view = self._blocks[index][start : start + nbytes]
        self._enqueued.append(_Copy(self._head, view))
        self._head += self._asked
        return view

    def _publish(self) -> None:
        """Let the writer have the copies that are enqueued so far."""
        if self._enqueued:
            events = [self._sides[device].record_event() for device in self._ordered]
            with self._changed:
                for copy in self._enqueued:
                    copy.events = events
                self._ready += self._enqueued
                self._changed.notify_all()
            self._enqueued = []

    # -- the writer --------------------------------------------------------------------------------------

    def take(self) -> torch.Tensor:
        """The next bytes, as ``uint8``. Frees those taken before."""
        self.free()
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise CheckpointError(f"copying the state failed: {self._error}") from self._error
                self._changed.wait()
            self._taken = self._ready.popleft()
        for event in self._taken.events:
            event.synchronize()
        self._taken.events.clear()  # those enqueued with it have arrived, too
        return self._taken.view

    def pull(self, copying: Iterator[None]) -> torch.Tensor:
        """:meth:`take` for a writer that copies by itself: first it enqueues as many copies as there is room for."""
        self.free()
        next(copying, None)
        return self.take()

    def free(self) -> None:
        """Free the bytes that were taken last."""
        with self._changed:
            if self._taken is not None:
                self._tail = self._taken.begin + _aligned(self._taken.view.numel())
            self._taken = None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the other thread raise instead of waiting forever."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


@dataclass(slots=True)
class _Copy:
    """Bytes at a position of the ring, and the events after which they are there."""

    begin: int
    view: torch.Tensor
    events: Any = ()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _cuts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in row-major order as parts that are contiguous, or small enough to be made so."""
    if tensor.is_contiguous() or tensor.nbytes <= _DENSE_BYTES:
        yield tensor
        return
    rows = max(1, _DENSE_BYTES * tensor.shape[0] // tensor.nbytes)
    for part in tensor.split(rows):
        yield from _cuts(part[0] if part.shape[0] == 1 else part)


def room_for(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in the buffer."""
    return sum(_aligned(cut.nbytes) for cut in _cuts(tensor))


def pinned_sizes(nbytes: int, most_bytes: int | None = None) -> list[int]:
    """Sizes of pinned blocks that hold ``nbytes``, or as many whole pages of them as fit into ``most_bytes``.

    Powers of two: torch's host allocator rounds every request up to one.
    """
    pages = -(-nbytes // _PAGE_BYTES)
    if most_bytes is not None and pages * _PAGE_BYTES > most_bytes:
        pages = most_bytes // _PAGE_BYTES
        if not pages:
            return [max(_ALIGNMENT, 1 << most_bytes.bit_length() - 1)]
    full, rest = divmod(pages * _PAGE_BYTES, _BLOCK_BYTES)
    bits = reversed(range(rest.bit_length()))
    return [_BLOCK_BYTES] * full + [1 << bit for bit in bits if rest >> bit & 1]


def detached_documents(collected: Collected) -> Collected:
    """``collected`` with copies of the (small) tensors of documents: training may then change the originals."""

    def copies(documents: Mapping[str, Encoded]) -> dict[str, Encoded]:
        return {
            name: replace(encoded, tensors={k: t.detach().clone() for k, t in encoded.tensors.items()})
            for name, encoded in documents.items()
        }

    return replace(collected, shared=copies(collected.shared), local=copies(collected.local))
