"""The layout of a live module: plain, FSDP2, HSDP, TP, EP or any mix, on meta or not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .._compat import fsdp_parameter_ids
from ..dtypes import code_of
from ..errors import LayoutError
from ..names import NamedTensor, named_tensors
from .placements import Geometry, check_local_shape, cut_boxes, geometry_of, local_shape
from .wanted import Kind, Layout, Wanted, contiguous_strides

__all__ = ["geometries_of", "layout_of", "local_tensor", "reshard", "wanted_of", "world_size"]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter or buffer that lies on this rank (the tensor itself if it is not a DTensor)."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Put every FSDP module back to its sharded parameters.

    After a forward pass without backward the root keeps its gathered parameters registered; what reads or
    fills a model must see the shards. Rank-local and free where nothing is gathered.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def geometries_of(model: nn.Module, tensors: Iterable[NamedTensor]) -> dict[str, Geometry]:
    """How each named tensor is spread over ranks."""
    fsdp = fsdp_parameter_ids(model)
    world = world_size()
    # Reading a mesh costs more than everything else here, and most tensors share mesh and placements.
    known: dict[object, Geometry] = {}
    found = {}
    for t in tensors:
        managed = id(t.tensor) in fsdp
        mesh = getattr(t.tensor, "device_mesh", None)
        key = (id(mesh), getattr(t.tensor, "placements", None), t.tensor.dim(), managed)
        if key not in known:
            known[key] = geometry_of(t.tensor, world_size=world, fsdp_order=managed)
        found[t.name] = known[key]
    return found


def layout_of(model: nn.Module, *, rank: int | None = None) -> Layout:
    """What a load has to fill: every parameter and persistent buffer, with the boxes of one rank.

    ``rank=None`` is this rank; its boxes are checked against the local tensors that torch allocated.
    Another rank's layout is computed from placements alone, so that one process can plan for all.
    Reads structure only. Raises :class:`LayoutError`.
    """
    tensors = [t for t in named_tensors(model) if t.persistent]
    geometries = geometries_of(model, tensors)
    return Layout(
        tuple(
            wanted_of(t.name, t.tensor, geometries[t.name], aliases=t.aliases, kind=t.kind, rank=rank)
            for t in tensors
        )
    )


def wanted_of(
    name: str,
    tensor: torch.Tensor,
    geometry: Geometry,
    *,
    aliases: tuple[str, ...] = (),
    kind: Kind = "state",
    rank: int | None = None,
) -> Wanted:
    """One tensor of a layout; see :func:`layout_of`."""
    shape = tuple(tensor.shape)
    local = local_tensor(tensor)
    mine = rank is None
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    coordinate = geometry.coordinate(rank)
    boxes = cut_boxes(shape, geometry, coordinate) if coordinate is not None else ()
    if mine:
        check_local_shape(shape, boxes, tuple(local.shape), name, getattr(tensor, "placements", "none"))
        held, strides = tuple(local.shape), tuple(local.stride())
        if local.numel() and not _owns_elements(local):
            raise LayoutError(
                f"{name}: local tensor with strides {strides} stores several elements in one place "
                f"(an expanded tensor); make it contiguous before loading into it"
            )
    else:
        held = local_shape(shape, boxes) or (0,) * len(shape)
        strides = contiguous_strides(held)
    return Wanted(
        name=name,
        dtype=code_of(tensor.dtype),
        shape=shape,
        boxes=boxes,
        local_shape=held,
        local_strides=strides,
        aliases=aliases,
        kind=kind,
    )


def _owns_elements(tensor: torch.Tensor) -> bool:
    """Whether no two indices of a strided tensor share a storage element (exact for what torch makes)."""
    pairs = sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
