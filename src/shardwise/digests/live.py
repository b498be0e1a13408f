"""Digests of a live, sharded model: every rank sums its own boxes, then the sums are added over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..dtypes import code_of
from ..errors import IntegrityError
from ..format.slices import replicas
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor
from ..layout.placements import Geometry, cut_boxes, geometry_of
from ..ranks.ranks import Ranks
from .digest import finish, format_digest, tensor_digest
from .pending import partial_sums

__all__ = ["digest", "live_digests", "local_boxes", "model_digests", "replica_totals"]


def local_boxes(
    tensor: torch.Tensor, shape: tuple[int, ...], geometry: Geometry, rank: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """The boxes of a tensor that a rank holds, with their starts. Their digest sums are its share of the tensor's."""
    coordinate = geometry.coordinate(rank)
    if coordinate is None:
        return
    local = local_tensor(tensor).detach()
    for held in cut_boxes(shape, geometry, coordinate):
        piece = local
        for dim, (start, size) in enumerate(zip(held.local_start, held.box.sizes, strict=True)):
            piece = piece.narrow(dim, start, size)
        yield piece, held.box.start


def replica_totals(sums: Any, geometries: Sequence[Geometry]) -> list[list[int]]:
    """Per tensor, the digest sum of each of its replicas. ``sums``: uint64, by rank, then by tensor."""
    by_geometry: dict[Geometry, list[int]] = {}
    for index, geometry in enumerate(geometries):
        by_geometry.setdefault(geometry, []).append(index)
    found: list[list[int]] = [[] for _ in geometries]
    for geometry, indices in by_geometry.items():
        for ranks in replicas(geometry):
            total = np.zeros(len(indices), dtype=np.uint64)
            for rank in ranks:
                total += sums[rank][indices]
            for index, value in zip(indices, total.tolist(), strict=True):
                found[index].append(value)
    return found


def live_digests(
    tensors: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    ranks: Ranks,
    *,
    may_differ: Collection[str] = (),
) -> dict[str, int]:
    """Digest of the global content of each live tensor. Every rank must call it; 8 bytes per tensor travel.

    Every replica is summed and compared. Raises :class:`IntegrityError` on every rank, naming tensors whose replicas
    differ; for tensors in ``may_differ`` the first replica counts.
    """

    def own() -> NDArray[np.uint64]:
        totals = np.zeros(len(tensors), dtype=np.uint64)
        indices: list[int] = []
        sums = partial_sums(boxes(indices))
        np.add.at(totals, indices, np.array(sums, dtype=np.uint64))
        return totals

    def boxes(indices: list[int]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        for index, (name, tensor) in enumerate(tensors.items()):
            for box in local_boxes(tensor, tuple(tensor.shape), geometries[name], ranks.rank):
                indices.append(index)
                yield box
            ranks.tick()

    def add_up(gathered: list[NDArray[np.uint64]]) -> list[Any]:
        totals = replica_totals(np.stack(gathered), [geometries[n] for n in tensors])
        unequal = [n for n, t in zip(tensors, totals, strict=True) if len(set(t)) > 1 and n not in may_differ]
        return [unequal, [int(t[0]) for t in totals]]

    unequal, firsts = ranks.combine("digest", own, add_up)
    if unequal:  # on every rank
        raise IntegrityError(f"replicas of {', '.join(unequal[:10])} differ between ranks")
    return {
        name: finish(first, code_of(tensor.dtype), tuple(tensor.shape))
        for first, (name, tensor) in zip(firsts, tensors.items(), strict=True)
    }


def model_digests(live: LiveModel, ranks: Ranks) -> dict[str, int]:
    """Digest of every parameter and persistent buffer by canonical name. Every rank must call it; one round.

    Plain buffers may differ between ranks (BatchNorm statistics): rank 0's count. Raises :class:`IntegrityError` if
    replicas of any other tensor differ.
    """
    tensors = live.stored
    plain = {t.name for t in tensors if t.kind == "buffer" and local_tensor(t.tensor) is t.tensor}
    return live_digests({t.name: t.tensor for t in tensors}, live.geometries, ranks, may_differ=plain)


def digest(model_or_tensor: nn.Module | torch.Tensor) -> dict[str, str] | str:
    """Digest of global content, the same however it is sharded: per name for a model, one for a tensor.

    16 hexadecimal digits each, the same as a checkpoint records. It detects errors; it is not cryptography.

    For a model or a DTensor every rank of the default process group must call it; 8 bytes per tensor travel. Raises, on
    every rank: :class:`IntegrityError` if replicas of a tensor differ between ranks, :class:`LayoutError` for placements
    that are not supported, :class:`RankError` if a rank fails or is missing. ``ValueError`` for tensors without content (on
    meta, sparse).
    """
    ranks = Ranks.current()
    if isinstance(model_or_tensor, nn.Module):
        with ranks.agree("describe model"):
            live = describe(model_or_tensor)
            _ = live.geometries  # refuses unsupported placements here, on all ranks alike
        return {name: format_digest(d) for name, d in model_digests(live, ranks).items()}
    from torch.distributed.tensor import DTensor

    if not isinstance(model_or_tensor, DTensor):
        return format_digest(tensor_digest(model_or_tensor))
    geometry = geometry_of(model_or_tensor, world_size=ranks.world_size, fsdp_order=True)
    return format_digest(live_digests({"tensor": model_or_tensor}, {"tensor": geometry}, ranks)["tensor"])
