"""Copies from files to accelerators through a ring of pinned memory: the host reads into one slot while a device copies from the rest.

Everything goes through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``: CUDA, ROCm, XPU and other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from ..devices import flat_bytes
from ..internals.torch import empty_host_cache
from ..planning.records import Transfer

__all__ = ["SLOTS", "DeviceRings"]

SLOTS = 4

#: Fills a slot's bytes, and returns them as the elements to copy: a view of the slot.
Fill = Callable[[torch.Tensor], torch.Tensor]


class DeviceRings:
    """A ring for each device that a load fills. Rank-local, one thread.

    Bytes go to the device as they are stored; casts and scattered writes run there. The host waits for the copy from a
    slot before it reads into that slot again, and once for each device at the end. Then the current stream goes on after
    the copies. Memory: ``limit_bytes`` pinned on the host for each device; on the device one slot, to compare a few.
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

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Copy what ``fill`` reads, ``nbytes`` bytes at most :attr:`slot_bytes`, into ``target`` on its device."""
        self._ring(target.device).put(target, nbytes, fill)

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Compare what ``fill`` reads with ``target`` on its device, bit by bit, in the dtype of ``target``.

        ``transfer``: to be named by :meth:`differing`.
        """
        self._ring(target.device).compare(transfer, target, nbytes, fill)

    def differing(self) -> list[Transfer]:
        """The transfers that were compared and differ. The host waits once for each device."""
        return [transfer for ring in self._rings.values() for transfer in ring.differing()]

    def _ring(self, device: torch.device) -> _Ring:
        if device not in self._rings:
            self._rings[device] = _Ring(device, self.slot_bytes)
        return self._rings[device]


class _Ring:
    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._slots: list[torch.Tensor] = []
        self._events: list[torch.Event | None] = []
        self._next = 0
        self._compared: list[Transfer] = []
        self._differ: list[torch.Tensor] = []
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
                target.copy_(self._on_device(slot[:nbytes], staged))
        self._was_used()

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        slot = self._free_slot()
        staged = fill(slot[:nbytes])
        with self._side:
            there = self._on_device(slot[:nbytes], staged).to(target.dtype)
            # As bits NaN equals NaN, and -0 differs from 0.
            self._differ.append((flat_bytes(there) != flat_bytes(target)).any())
        self._compared.append(transfer)
        self._was_used()

    def differing(self) -> list[Transfer]:
        if not self._differ:
            return []
        with self._side:
            differ = torch.stack(self._differ).tolist()
        return [transfer for transfer, is_so in zip(self._compared, differ, strict=True) if is_so]

    def _on_device(self, slot: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """``staged``, a view of the slot, as a view of a copy of the slot's bytes."""
        raw = torch.empty(slot.numel(), dtype=torch.uint8, device=self._device)
        raw.copy_(slot, non_blocking=True)
        return torch.as_strided(raw.view(staged.dtype), staged.size(), staged.stride())

    def _was_used(self) -> None:
        """Note what the next use of the slot waits for."""
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
        if wait and not self._side.query():
            self._side.synchronize()
