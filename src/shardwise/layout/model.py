"""The layout of a live module: plain, FSDP2, HSDP, TP, EP or any mix, on meta or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..dtypes import code_of
from ..errors import LayoutError
from ..internals.fsdp import fsdp_parameter_ids
from ..internals.torch import local_tensor, spec_key
from ..names import NamedTensor
from ..objects import frozen
from .boxes import LocalBox
from .placements import Geometry, check_local_shape, cut_boxes, geometry_of, local_shape
from .wanted import Layout, TensorKind, Wanted, contiguous_strides

__all__ = [
    "fsdp1_problem",
    "geometries_of",
    "layout_of",
    "local_tensor",
    "reshard",
    "wanted_of",
    "wanted_states",
    "world_size",
]


def fsdp1_problem(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Why a model that FSDP1 wraps, in whole or in part, can be neither filled nor stored, and the way out; else None.

    Its flat parameters have neither names nor shapes of the model. ``modules``: all of them, with their paths.
    """
    for path, module in modules:
        if isinstance(module, FullyShardedDataParallel):
            return (
                f"{path or 'the model'} is wrapped by FSDP1 (torch's FullyShardedDataParallel), which keeps flat "
                f"parameters; expected FSDP2. Shard with shardwise.shard or fully_shard (Accelerate: fsdp_version: 2). "
                f"A checkpoint of FSDP1 written by torch or Accelerate can be restored into an FSDP2 model"
            )
    return None


def reshard(modules: Iterable[nn.Module]) -> tuple[FSDPModule, ...]:
    """Put every FSDP2 module among ``modules`` back to its sharded parameters; returns these modules, each once.

    After a forward pass without backward the root keeps its gathered parameters registered, but reading or filling a
    model needs the shards. Rank-local, and free if nothing is gathered.
    """
    found = tuple(dict.fromkeys([m for m in modules if isinstance(m, FSDPModule)]))
    for module in found:
        module.reshard()
    return found


def world_size() -> int:
    """Size of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def geometries_of(fsdp_modules: Iterable[FSDPModule], tensors: Iterable[NamedTensor]) -> dict[str, Geometry]:
    """The geometry of each tensor, by name. ``fsdp_modules``: the model's modules that FSDP2 shards."""
    fsdp = fsdp_parameter_ids(fsdp_modules)
    world = world_size()
    # Reading a mesh dominates the cost. Most tensors share mesh and placements; many share their spec.
    known: dict[object, Geometry] = {}
    by_spec: dict[tuple[int, bool], Geometry] = {}
    found = {}
    for t in tensors:
        managed = id(t.tensor) in fsdp
        spec = (spec_key(t.tensor), managed)
        geometry = by_spec.get(spec)
        if geometry is None:
            mesh = getattr(t.tensor, "device_mesh", None)
            key = (id(mesh), getattr(t.tensor, "placements", None), t.tensor.dim(), managed)
            if key not in known:
                known[key] = geometry_of(t.tensor, world_size=world, fsdp_order=managed)
            geometry = by_spec[spec] = known[key]
        found[t.name] = geometry
    return found


def layout_of(
    tensors: Iterable[NamedTensor], geometries: Mapping[str, Geometry], *, rank: int | None = None
) -> Layout:
    """What a load has to fill: the tensors of a model with the boxes of one rank.

    ``rank=None`` is this rank; its boxes are checked against the local tensors that torch allocated. Another rank's
    layout is computed from placements alone: one process can plan for all ranks. Reads structure only. Raises
    :class:`LayoutError`.
    """
    place = _place_on(_this_rank(), is_here=True) if rank is None else _place_on(rank, is_here=False)
    return Layout(
        tuple([_wanted(t.name, t.tensor, geometries[t.name], place, t.aliases, t.kind) for t in tensors])
    )


def wanted_of(name: str, tensor: torch.Tensor, geometry: Geometry) -> Wanted:
    """A tensor on this rank that a load has to fill, outside any model; see :func:`layout_of`."""
    (found,) = wanted_states({name: tensor}, {name: geometry})
    return found


def wanted_states(tensors: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry]) -> list[Wanted]:
    """:func:`wanted_of` for many tensors; cheaper together, because most are spread alike."""
    place = _place_on(_this_rank(), is_here=True)
    return [_wanted(name, tensor, geometries[name], place) for name, tensor in tensors.items()]


def _this_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@frozen
class _LocalPlace:
    """The boxes and the storage of a tensor on one rank."""

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]


#: From a tensor's name, the tensor, its local part and its geometry to its place.
_LocalPlaceOf = Callable[[str, torch.Tensor, torch.Tensor, Geometry], _LocalPlace]


def _place_on(rank: int, *, is_here: bool) -> _LocalPlaceOf:
    """A function that places tensors on a rank. Thousands are spread alike and share one place."""
    known: dict[tuple[object, ...], _LocalPlace] = {}

    def place_of(name: str, tensor: torch.Tensor, local: torch.Tensor, geometry: Geometry) -> _LocalPlace:
        key = (tensor.shape, geometry, local.shape, local.stride())
        place = known.get(key)
        if place is None:
            place = known[key] = _find_place(name, tensor, local if is_here else None, geometry, rank)
        return place

    return place_of


def _find_place(
    name: str, tensor: torch.Tensor, local: torch.Tensor | None, geometry: Geometry, rank: int
) -> _LocalPlace:
    shape = tuple(tensor.shape)
    coordinate = geometry.coordinate(rank)
    boxes = cut_boxes(shape, geometry, coordinate) if coordinate is not None else ()
    if local is None:
        held = local_shape(shape, boxes) or (0,) * len(shape)
        return _LocalPlace(shape, boxes, held, contiguous_strides(held))
    held, strides = tuple(local.shape), tuple(local.stride())
    check_local_shape(shape, boxes, held, name, getattr(tensor, "placements", "none"))
    if local.numel() and not _owns_elements(local):
        raise LayoutError(
            f"{name}: local tensor with strides {strides} stores several elements in one place "
            f"(an expanded tensor); make it contiguous before loading into it"
        )
    return _LocalPlace(shape, boxes, held, strides)


def _wanted(
    name: str,
    tensor: torch.Tensor,
    geometry: Geometry,
    place_of: _LocalPlaceOf,
    aliases: tuple[str, ...] = (),
    kind: TensorKind = "state",
) -> Wanted:
    place = place_of(name, tensor, local_tensor(tensor), geometry)
    dtype = code_of(tensor.dtype)
    return Wanted(
        name, dtype, place.shape, place.boxes, place.local_shape, place.local_strides, aliases, kind
    )


def _owns_elements(tensor: torch.Tensor) -> bool:
    """Whether no two indices of a strided tensor share a storage element (exact for tensors that torch makes)."""
    pairs = sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
