"""Copies from files to accelerators through a ring of pinned memory: the host reads into some slots while a device copies from others.

Everything goes through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``: CUDA, ROCm, XPU and other backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType

import torch

from ..devices import flat_bytes
from ..internals.torch import empty_host_cache
from ..planning.records import Transfer

__all__ = ["SLOTS", "DeviceRings"]

#: Threads that read fill one each, while the device copies from others.
SLOTS = 8

#: Fills a slot's bytes, and returns them as the elements to copy: a view of the slot.
Fill = Callable[[torch.Tensor], torch.Tensor]


class DeviceRings:
    """A ring for each device that a load fills. Rank-local; several threads may fill slots at a time.

    Bytes go to the device as they are stored; casts and scattered writes run there. The host waits for the copy from a
    slot before it reads into that slot again, and once for each device at the end. Then the current stream goes on after
    the copies. Memory: ``limit_bytes`` pinned on the host for each device; on the device, where bytes are cast, scattered or
    compared, a slot for each thread that does so at the moment, to compare a few.
    """

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes``: of pinned memory. Slots are powers of two, because torch's host allocator makes them so."""
        self.slot_bytes = 1 << (limit_bytes // SLOTS).bit_length() - 1
        self.pinned_bytes = 0
        """Pinned memory that was allocated; the system has it back at the end."""
        self._rings: dict[torch.device, _Ring] = {}

    def __enter__(self) -> DeviceRings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pinned_bytes = sum(ring.nbytes for ring in self._rings.values())
        while self._rings:
            self._rings.popitem()[1].finish(wait=error is None)
        if self.pinned_bytes:
            empty_host_cache()

    @property
    def are_used(self) -> bool:
        """Whether a device has a ring."""
        return bool(self._rings)

    def prepare(self, device: torch.device) -> None:
        """Make a device's ring: copies come after what this thread's current stream has been given. Before other threads fill slots of it."""
        if device not in self._rings:
            self._rings[device] = _Ring(device, self.slot_bytes)

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Copy what ``fill`` reads, ``nbytes`` bytes at most :attr:`slot_bytes`, into ``target`` on its device."""
        self.prepare(target.device)
        self._rings[target.device].put(target, nbytes, fill)

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Compare what ``fill`` reads with ``target`` on its device, bit by bit, in the dtype of ``target``.

        ``transfer``: to be named by :meth:`differing`.
        """
        self.prepare(target.device)
        self._rings[target.device].compare(transfer, target, nbytes, fill)

    def differing(self) -> list[Transfer]:
        """The transfers that were compared and differ. The host waits once for each device."""
        return [transfer for ring in self._rings.values() for transfer in ring.differing()]


class _Slot:
    """Pinned memory, and what its next use waits for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.event: torch.Event | None = None


class _Ring:
    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._free: SimpleQueue[_Slot] = SimpleQueue()  # the one that was used longest ago comes first
        self._slots = 0
        self._lock = threading.Lock()  # around the making of slots
        self._compared: list[Transfer] = []
        self._differ: list[torch.Tensor] = []
        self._side = torch.Stream(device)
        self._threads = threading.local()
        # What allocated the targets, and what the program enqueued on them, comes first.
        self._side.wait_stream(torch.accelerator.current_stream(device))

    @property
    def nbytes(self) -> int:
        return self._slots * self._slot_bytes

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        with self._filled(nbytes, fill) as (raw, staged):
            if staged.dtype == target.dtype and staged.is_contiguous() and target.is_contiguous():
                target.copy_(staged, non_blocking=True)
            else:
                target.copy_(self._on_device(raw, staged))

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        with self._filled(nbytes, fill) as (raw, staged):
            there = self._on_device(raw, staged).to(target.dtype)
            # As bits NaN equals NaN, and -0 differs from 0.
            self._differ.append((flat_bytes(there) != flat_bytes(target)).any())
        self._compared.append(transfer)

    def differing(self) -> list[Transfer]:
        if not self._differ:
            return []
        with self._entered():
            differ = torch.stack(self._differ).tolist()
        return [transfer for transfer, is_so in zip(self._compared, differ, strict=True) if is_so]

    def _on_device(self, slot: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """``staged``, a view of the slot, as a view of a copy of the slot's bytes."""
        raw = torch.empty(slot.numel(), dtype=torch.uint8, device=self._device)
        raw.copy_(slot, non_blocking=True)
        return torch.as_strided(raw.view(staged.dtype), staged.size(), staged.stride())

    @contextmanager
    def _filled(self, nbytes: int, fill: Fill) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A slot's first bytes, and the elements that ``fill`` made of them. The block enqueues what uses them, on the ring's stream."""
        slot = self._free_slot()
        try:
            raw = slot.memory[:nbytes]
            staged = fill(raw)
            with self._entered() as stream:
                yield raw, staged
                slot.event = stream.record_event(slot.event)
        finally:
            self._free.put(slot)

    def _entered(self) -> torch.Stream:
        """The ring's stream, to be entered by this thread: an object of its own, since it keeps what was current before."""
        if (stream := getattr(self._threads, "stream", None)) is None:
            side = self._side
            stream = self._threads.stream = torch.Stream(
                stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type
            )
        return stream

    def _free_slot(self) -> _Slot:
        with self._lock:
            if self._slots < SLOTS:
                with self._entered():  # a thread begins on the first device, and would open a context there
                    slot = _Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True))
                self._slots += 1
                return slot
        slot = self._free.get()
        if (event := slot.event) is not None:
            event.synchronize()
        return slot

    def finish(self, *, wait: bool) -> None:
        """Order the current stream after the copies. ``wait``: until they are done, so that a failed one is raised here."""
        torch.accelerator.current_stream(self._device).wait_stream(self._side)
        if wait and not self._side.query():
            self._side.synchronize()
