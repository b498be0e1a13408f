"""Digest sums of many tensors at once: those on a device are made there, and come to the host together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..devices import to_host
from .digest import pending_sum

__all__ = ["PendingSums", "partial_sums"]


class PendingSums:
    """Digest sums of boxes, each a tensor with its start. Those of a device wait there, one vector per device.

    Bring :attr:`vectors` to the host in any way, and give them to :meth:`on_host`.
    """

    def __init__(self, boxes: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> None:
        self._sums = [pending_sum(tensor, start) for tensor, start in boxes]
        waiting: dict[torch.device, list[torch.Tensor]] = {}
        for found in self._sums:
            if isinstance(found, torch.Tensor):
                waiting.setdefault(found.device, []).append(found)
        self._devices = list(waiting)
        self.vectors = [torch.stack(found) for found in waiting.values()]

    def on_host(self, vectors: Sequence[torch.Tensor]) -> list[int]:
        """The sums in the order of the boxes, in [0, 2^64). ``vectors``: :attr:`vectors`, on the CPU."""
        by_device = {d: iter(v.tolist()) for d, v in zip(self._devices, vectors, strict=True)}
        found = (next(by_device[s.device]) if isinstance(s, torch.Tensor) else s for s in self._sums)
        return [one % 2**64 for one in found]


def partial_sums(boxes: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> list[int]:
    """:func:`.digest.partial_sum` of each box, a tensor with its start. The host waits once per device."""
    pending = PendingSums(boxes)
    return pending.on_host(to_host(pending.vectors))
