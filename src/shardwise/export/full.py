"""``iter_full_tensors``: a sharded model's full tensors, one bucket at a time, for example for an inference engine."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..adapters.names import adapter_tensors
from ..errors import CheckpointError
from ..internals.peft import has_adapters, peft_model
from ..layout.live import LiveModel, describe
from ..layout.spec import TensorSpec
from ..models.kept import has_blocks
from ..ranks.hosts import device_where_ranks_sum
from ..ranks.ranks import Ranks
from ..recipe.tiles import Tile
from .gather import FullTensors, buckets, device_of, gathered, planned
from .hub import dtype_code
from .live import LiveJob
from .tensors import HubTensors, as_named

__all__ = ["iter_full_tensors"]


def iter_full_tensors(
    model: nn.Module,
    *,
    naming: Literal["hub", "module", "adapter"] = "hub",
    bucket_bytes: int = 512 * 1024**2,
    dtype: torch.dtype | str | None = None,
    timeout_s: float = 300.0,
) -> FullTensors:
    """Iterate over ``(name, full tensor)`` for all stored tensors of ``model``, in the same order on every rank.

    Yields the tensors that :func:`export_hf` would write, bit for bit, without files: every parameter and persistent buffer, tied
    ones once, on the device of the model's mesh (without a mesh, on the model's own). Tensors are gathered as you iterate. They belong to the
    caller: shardwise neither keeps nor changes them.

    Args:
        model: a live model, sharded in any way or not at all.
        naming: ``"hub"``: names and shapes as in the files from which it was loaded (otherwise those of its class). ``"module"``:
            names and shapes as in ``state_dict``, without wrapper parts. ``"adapter"``: only the active adapter of a ``PeftModel``,
            with the names in its file.
        bucket_bytes: how many bytes to gather at a time: as many tensors as fit, at least one.
        dtype: cast floating-point tensors to this dtype. Default: no cast.
        timeout_s: as in :class:`IOOptions`; nothing is read or written here.

    Every rank of the default process group must call it, iterate in step, and stop at the same tensor (with ``break`` or ``close()``; nothing
    is in flight between tensors). If a rank can't provide its part of a bucket, all ranks raise. If a rank stops alone, the others
    raise an error that names it after ``timeout_s``. Don't change the model during the iteration.

    Memory in addition to the shards: ``bucket_bytes``, or the largest tensor if that is larger, plus the tensors of the last bucket that
    the caller still holds (one tensor in a plain ``for`` loop). If the process group can't reduce on the model's device (a CPU model
    with NCCL only), the bucket is on the group's device and each tensor is copied. Traffic: one all-reduce per tensor.

    Raises, on every rank, :class:`CheckpointError` (hub names of a model with adapters), :class:`FormatError` (a conversion that can't be
    inverted), :class:`StateError` (nothing loaded yet) or :class:`RankError`.
    """
    ranks = Ranks.current(timeout_s=timeout_s)
    with ranks.agree("plan full tensors") as claim:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        live = describe(model)
        full = planned(live, _contents(live, naming), dtype_code(dtype), ranks.rank)
        claim.alike([bucket_bytes, [[f.stored.name, f.stored.dtype, list(f.stored.shape)] for f in full]])
        device = device_of(live)
        sums_on = device_where_ranks_sum(device) if ranks.world_size > 1 else device
    return gathered(live, buckets(full, bucket_bytes), (sums_on, device), ranks)


def _contents(live: LiveModel, naming: str) -> HubTensors:
    """The full tensors to yield, by name, and the tiles that map the model's tensors to them."""
    if naming == "hub":
        if has_adapters(live.root):
            raise CheckpointError(
                "a model with PEFT adapters has no names on the hub: naming='adapter' gives the active adapter, "
                "naming='module' all tensors under the model's own names"
            )
        if has_blocks(live.root):
            raise CheckpointError(
                "a model that holds 4-bit codes has no full weights under hub names: naming='module' gives its blocks; export_hf "
                "dequantizes them"
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
