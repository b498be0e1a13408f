"""``iter_full``: a sharded model's full tensors, one bucket at a time, for example for an inference engine.

Each rank copies its elements into a zeroed full tensor, by the tiles of an export; an integer all-reduce combines them
bit-exactly. This works for any layout, with uneven and empty shards, and holds nothing twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapters.names import adapter_tensors
from ..catalog import Chunk, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import CheckpointError, StateError
from ..internals.peft import has_adapters, peft_model
from ..layout.boxes import whole
from ..layout.live import LiveModel, describe
from ..layout.spec import TensorSpec
from ..layout.wanted import Wanted
from ..models.memory import default_device
from ..planning.build import transfers_of
from ..ranks.hosts import device_where_ranks_sum
from ..ranks.ranks import Ranks
from ..recipe.match import castable
from ..recipe.tiles import Tile
from ..transfer.copy import Destination
from .hub import dtype_code
from .live import LiveJob
from .live_windows import brought_by
from .tensors import HubTensors, as_named

__all__ = ["iter_full"]

FullTensors = Generator[tuple[str, torch.Tensor], None, None]


def iter_full(
    model: nn.Module,
    *,
    naming: Literal["hub", "module", "adapter"] = "hub",
    bucket_bytes: int = 512 * 1024**2,
    dtype: torch.dtype | str | None = None,
    timeout_s: float = 300.0,
) -> FullTensors:
    """Iterate lazily over ``(name, full tensor)`` of all stored tensors of ``model``, in one order on every rank.

    Gives the tensors that :func:`export_hf` would write, bit for bit, without files: every parameter and persistent
    buffer, ties once, on the device of the model's mesh (without a mesh: on the model's own). The caller owns the
    tensors: shardwise neither keeps nor changes them.

    Args:
        model: a live model, sharded in any way or not at all.
        naming: ``"hub"``: names and shapes of the files that it was loaded from (else those of its class).
            ``"module"``: names and shapes as in ``state_dict``, without wrapper parts. ``"adapter"``: only the active
            adapter of a ``PeftModel``, with the names in its file.
        bucket_bytes: bytes gathered at a time: as many tensors as fit, at least one.
        dtype: cast floating-point tensors to it. Default: no cast.
        timeout_s: as in :class:`IOOptions`; nothing is read or written here.

    Every rank of the default process group must call it, iterate in step, and stop at the same tensor (``break``
    or ``close()``: nothing is in flight between tensors). If a rank fails to make its part of a bucket, all ranks
    raise; if a rank stops alone, the other ranks' error names it after ``timeout_s``. The model must not change
    during the iteration.

    Memory, besides the shards: ``bucket_bytes``, or the largest tensor if that is more, plus the tensors of the last
    bucket that the caller still holds (one tensor in a plain ``for`` loop). If the process group can't add on the
    model's device (a CPU model under NCCL alone), the bucket lies on the group's device and each tensor is copied.
    Traffic: one all-reduce of each tensor.

    Raises :class:`CheckpointError` (hub names of a model with adapters), :class:`FormatError` (a conversion that
    can't be inverted), :class:`StateError` (nothing loaded yet) or :class:`RankError` alike on every rank.
    """
    ranks = Ranks.current(timeout_s=timeout_s)
    with ranks.agree("plan full tensors") as claim:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        live = describe(model)
        full = _plan(live, _contents(live, naming), dtype_code(dtype), ranks.rank)
        claim.alike([bucket_bytes, [[f.stored.name, f.stored.dtype, list(f.stored.shape)] for f in full]])
        parts = Destination(live.local_tensors())
        device = _device(live)
        sums_on = device_where_ranks_sum(device) if ranks.world_size > 1 else device
    return _iterate(_buckets(full, bucket_bytes), parts, (sums_on, device), ranks)


@dataclass(frozen=True, slots=True)
class _Full:
    """A full tensor, and the elements that this rank contributes."""

    stored: StoredTensor
    parts: tuple[tuple[Wanted, Tile], ...]


def _contents(live: LiveModel, naming: str) -> HubTensors:
    """The full tensors to yield, by name, and the tiles that map the model's tensors to them."""
    if naming == "hub":
        if has_adapters(live.root):
            raise CheckpointError(
                "a model with PEFT adapters has no names on the hub: naming='adapter' gives the active adapter, "
                "naming='module' all tensors under the model's own names"
            )
        return LiveJob(live).contents()
    if naming == "module":
        return as_named({t.name: TensorSpec.of(t.tensor) for t in live.stored})
    if naming == "adapter":
        return _adapter_contents(live)
    raise ValueError(f"naming must be 'hub', 'module' or 'adapter', got {naming!r}")


def _adapter_contents(live: LiveModel) -> HubTensors:
    peft = peft_model(live.root)
    if peft is None:
        raise TypeError(f"naming='adapter': {type(live.root).__name__} is not a PeftModel")
    held = {stored: t for stored, (_, t) in adapter_tensors(live, peft.active_adapter).items()}
    hub = {stored: TensorSpec.of(t.tensor) for stored, t in held.items()}
    tiles: dict[str, tuple[Tile, ...]] = {}
    for stored, t in held.items():
        tiles[t.name] = tiles.get(t.name, ()) + as_named({stored: hub[stored]}).tiles[stored]
    return HubTensors(hub, tiles)


def _plan(live: LiveModel, contents: HubTensors, dtype: str | None, rank: int) -> list[_Full]:
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
        full.append(_Full(stored, tuple(brought.get(name, ()))))
    return full


def _buckets(full: Sequence[_Full], bucket_bytes: int) -> Iterator[list[_Full]]:
    """The tensors in order, in buckets of as many as fit; a tensor larger than a bucket is alone."""
    bucket: list[_Full] = []
    used = 0
    for one in full:
        if bucket and used + one.stored.nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(one)
        used += one.stored.nbytes
    if bucket:
        yield bucket


def _iterate(
    buckets: Iterator[list[_Full]],
    parts: Destination,
    devices: tuple[torch.device, torch.device],
    ranks: Ranks,
) -> FullTensors:
    sums_on, given_on = devices
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
    bucket: Sequence[_Full], parts: Destination, device: torch.device, ranks: Ranks
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


def _fill(full: torch.Tensor, one: _Full, parts: Destination) -> None:
    """Copy this rank's elements into a full tensor, with a cast if its dtype differs."""
    stored: Mapping[str, StoredTensor] = {one.stored.name: one.stored}
    for wanted, tile in one.parts:
        for transfer in transfers_of(tile, wanted, stored):
            sizes = [loop.size for loop in transfer.loops]
            strides = [loop.source_stride for loop in transfer.loops]
            first = transfer.offset_bytes // itemsize(one.stored.dtype)
            full.as_strided(sizes, strides, first).copy_(parts.strided(transfer))


def _device(live: LiveModel) -> torch.device:
    """Where full tensors are given: the device of the model's mesh, or of a model without one itself."""
    tensors = [t.tensor for t in live.tensors]
    if any(isinstance(t, DTensor) for t in tensors) or not tensors:
        return default_device(live.parameters)
    return tensors[0].device
