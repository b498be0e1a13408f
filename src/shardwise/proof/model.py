"""Digests of a live, sharded model: every rank sums its own boxes, the sums are added over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from ..dist import Ranks
from ..dtypes import code_of
from ..layout.model import geometries_of, local_tensor, reshard
from ..layout.placements import Geometry, cut_boxes, geometry_of
from ..names import named_tensors
from .digest import finish, format_digest, partial_sum, tensor_digest

__all__ = ["digest", "live_digests", "local_sum", "model_digests"]


def is_owner(geometry: Geometry, rank: int) -> bool:
    """Whether a rank's copy counts: the first of every set of replicas (coordinate 0 on replicated axes)."""
    coordinate = geometry.coordinate(rank)
    if coordinate is None:
        return False
    return all(i == 0 for i, cut in zip(coordinate, geometry.cuts, strict=True) if cut.kind == "replicate")


def local_sum(tensor: torch.Tensor, shape: tuple[int, ...], geometry: Geometry, rank: int) -> int:
    """This rank's share of a tensor's digest sum; 0 on all but one of a set of replicas."""
    coordinate = geometry.coordinate(rank)
    if coordinate is None or not is_owner(geometry, rank):
        return 0
    local = local_tensor(tensor).detach()
    total = 0
    for held in cut_boxes(shape, geometry, coordinate):
        piece = local
        for dim, (start, size) in enumerate(zip(held.local_start, held.box.sizes, strict=True)):
            piece = piece.narrow(dim, start, size)
        total += partial_sum(piece, held.box.start)
    return total % 2**64


def live_digests(
    tensors: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry], ranks: Ranks
) -> dict[str, int]:
    """Digest of the global content of each live tensor. Every rank must call it; 8 bytes a tensor travel."""
    with ranks.agree("digest"):
        sums = []
        for name, tensor in tensors.items():
            sums.append(local_sum(tensor, tuple(tensor.shape), geometries[name], ranks.rank))
            ranks.tick()
    return add_up(sums, {n: (code_of(t.dtype), tuple(t.shape)) for n, t in tensors.items()}, ranks)


def add_up(sums: list[int], kinds: Mapping[str, tuple[str, tuple[int, ...]]], ranks: Ranks) -> dict[str, int]:
    """Finished digests from every rank's partial sums, in the order of ``kinds``."""
    gathered = ranks.gather("digest sums", np.array(sums, dtype=np.uint64).tobytes())
    total = b""
    if gathered is not None:
        stacked = np.stack([np.frombuffer(g, dtype=np.uint64) for g in gathered])
        total = stacked.sum(axis=0, dtype=np.uint64).tobytes()
    totals = np.frombuffer(ranks.share("digests", total if ranks.rank == 0 else None), dtype=np.uint64)
    return {
        name: finish(int(total), dtype, shape)
        for total, (name, (dtype, shape)) in zip(totals, kinds.items(), strict=True)
    }


def model_digests(model: nn.Module, ranks: Ranks) -> dict[str, int]:
    """Digest of every parameter and persistent buffer by canonical name. Every rank must call it."""
    reshard(model)
    tensors = [t for t in named_tensors(model) if t.persistent]
    return live_digests({t.name: t.tensor for t in tensors}, geometries_of(model, tensors), ranks)


def digest(model_or_tensor: nn.Module | torch.Tensor) -> dict[str, str] | str:
    """Digest of global content, the same however it is sharded: per name for a model, one for a tensor.

    16 hexadecimal digits each. For a model or a DTensor every rank of the default process group must call
    it; 8 bytes a tensor travel. An error detector, not cryptography; defined in ``proof/digest.py``.
    """
    ranks = Ranks.current()
    if isinstance(model_or_tensor, nn.Module):
        return {name: format_digest(d) for name, d in model_digests(model_or_tensor, ranks).items()}
    from torch.distributed.tensor import DTensor

    if not isinstance(model_or_tensor, DTensor):
        return format_digest(tensor_digest(model_or_tensor))
    geometry = geometry_of(model_or_tensor, world_size=ranks.world_size, fsdp_order=True)
    return format_digest(live_digests({"tensor": model_or_tensor}, {"tensor": geometry}, ranks)["tensor"])
