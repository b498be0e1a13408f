"""Full tensors of a sharded model, a bucket at a time.

Each rank copies its elements into a zeroed full tensor, by the tiles of an export; an integer all-reduce combines them
bit-exactly. This works for any layout, with uneven and empty shards, and holds nothing twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..catalog import Chunk, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import StateError
from ..layout.boxes import whole
from ..layout.live import LiveModel
from ..layout.wanted import Wanted
from ..models.memory import default_device
from ..objects import frozen
from ..planning.build import transfers_of
from ..ranks.ranks import Ranks
from ..recipe.match import castable
from ..recipe.tiles import Tile
from ..transfer.copy import Destination
from .live_windows import brought_by
from .tensors import HubTensors

__all__ = ["Full", "FullTensors", "buckets", "device_of", "gathered", "planned"]

FullTensors = Generator[tuple[str, torch.Tensor], None, None]


@frozen
class Full:
    """A full tensor, and the elements that this rank contributes."""

    stored: StoredTensor
    parts: tuple[tuple[Wanted, Tile], ...]


def planned(live: LiveModel, contents: HubTensors, dtype: str | None, rank: int) -> list[Full]:
    """Each full tensor with the elements that ``rank`` contributes. Among replicas one rank contributes, chosen as in an export."""
    named = {t.name: t for t in live.stored if t.name in contents.tiles}
    unfilled = [name for name, t in named.items() if t.tensor.is_meta]
    if unfilled:
        raise StateError(f"{len(unfilled)} tensors are on meta, e.g. {unfilled[0]!r}; load the model first")
    brought = brought_by(rank, live, {n: t.tensor for n, t in named.items()}, contents.tiles)
    full = []
    for name, (code, shape) in contents.hub.items():
        given = dtype if dtype is not None and castable(code, dtype) else code
        stored = StoredTensor(name, given, shape, (Chunk(whole(shape), name, 0),))
        full.append(Full(stored, tuple(brought.get(name, ()))))
    return full


def buckets(full: Sequence[Full], bucket_bytes: int) -> Iterator[list[Full]]:
    """The tensors in order, in buckets of as many as fit; a tensor larger than a bucket is alone."""
    bucket: list[Full] = []
    used = 0
    for one in full:
        if bucket and used + one.stored.nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(one)
        used += one.stored.nbytes
    if bucket:
        yield bucket


def gathered(
    live: LiveModel,
    buckets: Iterator[list[Full]],
    devices: tuple[torch.device, torch.device],
    ranks: Ranks,
) -> FullTensors:
    """The full tensors, in order. Every rank must iterate in step. ``devices``: where ranks add, and where tensors are given."""
    sums_on, given_on = devices
    parts = Destination(live.local_tensors())
    for bucket in buckets:
        # A generator's variables live as long as the caller holds it: no variable may keep a tensor.
        ready = _gather(bucket, parts, sums_on, ranks)
        while ready:
            yield _first(ready, given_on)


def _first(ready: deque[tuple[str, torch.Tensor]], device: torch.device) -> tuple[str, torch.Tensor]:
    name, tensor = ready.popleft()
    return name, tensor.to(device)


@torch.no_grad()
def _gather(
    bucket: Sequence[Full], parts: Destination, device: torch.device, ranks: Ranks
) -> deque[tuple[str, torch.Tensor]]:
    """The full tensors of a bucket. Every rank must call it; no rank enters a collective until all have their part."""
    with ranks.agree("gather full tensors"):
        words = [torch.zeros(-(-one.stored.nbytes // 8), dtype=torch.int64, device=device) for one in bucket]
        views = [_view(own, one.stored) for own, one in zip(words, bucket, strict=True)]
        for view, one in zip(views, bucket, strict=True):
            _fill(view, one, parts)
            ranks.tick(one.stored.nbytes)
    if ranks.world_size > 1:
        for work in [dist.all_reduce(own, async_op=True) for own in words if own.numel()]:
            work.wait()
    return deque((one.stored.name, view) for one, view in zip(bucket, views, strict=True))


def _view(words: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    elements = words.view(torch_dtype(stored.dtype))
    return elements[: math.prod(stored.shape)].view(stored.shape)


def _fill(full: torch.Tensor, one: Full, parts: Destination) -> None:
    """Copy this rank's elements into a full tensor, with a cast if its dtype differs."""
    stored: Mapping[str, StoredTensor] = {one.stored.name: one.stored}
    for wanted, tile in one.parts:
        for transfer in transfers_of(tile, wanted, stored):
            sizes = [loop.size for loop in transfer.loops]
            strides = [loop.source_stride for loop in transfer.loops]
            first = transfer.offset_bytes // itemsize(one.stored.dtype)
            full.as_strided(sizes, strides, first).copy_(parts.strided(transfer))


def device_of(live: LiveModel) -> torch.device:
    """Where full tensors are given: the device of the model's mesh, or of a model without one itself."""
    tensors = [t.tensor for t in live.tensors]
    if any(isinstance(t, DTensor) for t in tensors) or not tensors:
        return default_device(live.parameters)
    return tensors[0].device
