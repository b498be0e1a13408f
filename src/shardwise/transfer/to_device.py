"""Copies from files to accelerators through a ring of pinned memory: the host reads into one slot while a device copies from the rest.

Everything goes through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``: CUDA, ROCm, XPU and other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from ..devices import release_pinned_memory

__all__ = ["SLOTS", "DeviceRings"]

SLOTS = 4

#: Fills a slot's bytes, and returns them as the elements to copy: a view of the slot.
Fill = Callable[[torch.Tensor], torch.Tensor]


class DeviceRings:
    """A ring for each device that a load fills. Rank-local, one thread.

    Bytes go to the device as they are stored; casts and scattered writes run there. The host waits for the copy from a
    slot before it reads into that slot again, and once for each device at the end. Then the current stream goes on after
    the copies. Memory: ``limit_bytes`` pinned on the host for each device, and two slots on the device.
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
            release_pinned_memory()

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Copy what ``fill`` reads, ``nbytes`` bytes at most :attr:`slot_bytes`, into ``target`` on its device."""
        ring = self._rings.get(target.device)
        if ring is None:
            ring = self._rings[target.device] = _Ring(target.device, self.slot_bytes)
        ring.put(target, nbytes, fill)


class _Ring:
    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._slots: list[torch.Tensor] = []
        self._events: list[torch.Event | None] = []
        self._next = 0
        self._side = torch.Stream(device)
        # What allocated the targets, and what the program enqueued on them, comes first.
        self._side.wait_stream(torch.accelerator.current_stream(device))

    @property
    def nbytes(self) -> int:
        return sum(slot.numel() for slot in self._slots)

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        slot = self._free_slot()
        staged = fill(slot[:nbytes])
        with self._side:
            if staged.dtype == target.dtype and staged.is_contiguous() and target.is_contiguous():
                target.copy_(staged, non_blocking=True)
            else:
                raw = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                raw.copy_(slot[:nbytes], non_blocking=True)
                there = torch.as_strided(raw.view(staged.dtype), staged.size(), staged.stride())
                target.copy_(there)
        self._events[self._next] = self._side.record_event()
        self._next = (self._next + 1) % SLOTS

    def _free_slot(self) -> torch.Tensor:
        if len(self._slots) <= self._next:
            self._slots.append(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True))
            self._events.append(None)
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        return self._slots[self._next]

    def finish(self, *, wait: bool) -> None:
        """Order the current stream after the copies. ``wait``: until they are done, so that a failed one is raised here."""
        torch.accelerator.current_stream(self._device).wait_stream(self._side)
        if wait:
            self._side.synchronize()
