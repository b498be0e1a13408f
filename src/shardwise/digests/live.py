"""Digests of a live, sharded model: every rank sums its own boxes, then the sums are added over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..dtypes import code_of
from ..errors import IntegrityError
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor
from ..layout.placements import Geometry, cut_boxes, geometry_of
from ..ranks.ranks import Ranks
from .digest import finish, format_digest, tensor_digest
from .pending import partial_sums
from .replicas import ReplicaTotals, added_sums

__all__ = [
    "differing_digests",
    "differing_from",
    "digest",
    "live_digests",
    "local_boxes",
    "model_digests",
    "own_sums",
    "own_sums_of_model",
]


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
            if (start, size) != (0, piece.shape[dim]):
                piece = piece.narrow(dim, start, size)
        yield piece, held.box.start


def live_digests(
    tensors: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    ranks: Ranks,
    *,
    may_differ: Collection[str] = (),
) -> dict[str, int]:
    """Digest of the global content of each live tensor. Every rank must call it; 8 bytes per tensor travel, 16 with replicas.

    Every replica is summed and compared. Raises :class:`IntegrityError` on every rank, naming tensors whose replicas
    differ; for tensors in ``may_differ`` the first replica counts.
    """
    found = _sum_up(tensors, geometries, ranks, may_differ, lambda sums: {"sums": sums})["sums"].tolist()
    return {name: _finished(t, total) for total, (name, t) in zip(found, tensors.items(), strict=True)}


def differing_digests(
    tensors: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    ranks: Ranks,
    expected: Mapping[str, int],
    *,
    may_differ: Collection[str] = (),
    own: NDArray[np.uint64] | None = None,
) -> dict[str, int]:
    """:func:`live_digests` of those tensors that have another digest than ``expected``, which is the same on every rank.

    Rank 0 compares, so that ranks receive the digests of these alone. ``own``: the :func:`own_sums` of these tensors, from a rank that has
    made them already.
    """

    def wrong(sums: NDArray[np.uint64]) -> dict[str, Any]:
        pairs = zip(tensors.items(), sums.tolist(), strict=True)
        found = {n: _finished(t, total) for (n, t), total in pairs if n in expected}
        return {"wrong": {n: digest for n, digest in found.items() if digest != expected[n]}}

    differing: dict[str, int] = _sum_up(tensors, geometries, ranks, may_differ, wrong, own)["wrong"]
    return differing


def _finished(tensor: torch.Tensor, total: int) -> int:
    return finish(total, code_of(tensor.dtype), tuple(tensor.shape))


def own_sums(
    tensors: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry], ranks: Ranks
) -> NDArray[np.uint64]:
    """What this rank adds to the digests of live tensors, as :class:`.ReplicaTotals` wants it. Rank-local: waits for no rank."""
    indices: list[int] = []

    def boxes() -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        for index, (name, tensor) in enumerate(tensors.items()):
            for box in local_boxes(tensor, tuple(tensor.shape), geometries[name], ranks.rank):
                indices.append(index)
                yield box
            ranks.tick()

    sums, found = np.zeros(len(tensors), dtype=np.uint64), partial_sums(boxes())
    np.add.at(sums, indices, np.array(found, dtype=np.uint64))
    return _totals(tensors, geometries).share(sums, ranks.rank)


def _totals(tensors: Iterable[str], geometries: Mapping[str, Geometry]) -> ReplicaTotals:
    names = list(tensors)
    return ReplicaTotals([geometries[n] for n in names], [0] * len(names))


def _sum_up(
    tensors: Mapping[str, torch.Tensor],
    geometries: Mapping[str, Geometry],
    ranks: Ranks,
    may_differ: Collection[str],
    reply: Callable[[NDArray[np.uint64]], dict[str, Any]],
    own: NDArray[np.uint64] | None = None,
) -> dict[str, Any]:
    """Rank 0's ``reply`` to the sums of all tensors over all ranks."""

    def told() -> NDArray[np.uint64]:
        return own_sums(tensors, geometries, ranks) if own is None else own

    def decide(added: NDArray[np.uint64]) -> dict[str, Any]:
        sums, differ = _totals(tensors, geometries).read(added)
        names = list(tensors)
        unequal = [names[k] for k in differ.tolist() if names[k] not in may_differ]
        return {"unequal": unequal[:10], **({} if unequal else reply(sums))}

    found: dict[str, Any] = ranks.reduce("digest", told, added_sums, decide)
    if found["unequal"]:  # on every rank
        raise IntegrityError(f"replicas of {', '.join(found['unequal'])} differ between ranks")
    return found


def model_digests(live: LiveModel, ranks: Ranks) -> dict[str, int]:
    """Digest of every parameter and persistent buffer by canonical name. Every rank must call it; one round.

    Plain buffers may differ between ranks (BatchNorm statistics): rank 0's count. Raises :class:`IntegrityError` if
    replicas of any other tensor differ.
    """
    tensors = {t.name: t.tensor for t in live.stored}
    return live_digests(tensors, live.geometries, ranks, may_differ=_plain_buffers(live))


def own_sums_of_model(live: LiveModel, ranks: Ranks) -> NDArray[np.uint64]:
    """:func:`own_sums` of every parameter and persistent buffer. Rank-local."""
    return own_sums({t.name: t.tensor for t in live.stored}, live.geometries, ranks)


def differing_from(
    expected: Mapping[str, int], live: LiveModel, ranks: Ranks, own: NDArray[np.uint64] | None = None
) -> dict[str, int]:
    """:func:`model_digests` of those tensors that have another digest than ``expected``. ``own``: :func:`own_sums_of_model`, if it is made."""
    tensors = {t.name: t.tensor for t in live.stored}
    plain = _plain_buffers(live)
    return differing_digests(tensors, live.geometries, ranks, expected, may_differ=plain, own=own)


def _plain_buffers(live: LiveModel) -> set[str]:
    return {t.name for t in live.stored if t.kind == "buffer" and local_tensor(t.tensor) is t.tensor}


def digest(model_or_tensor: nn.Module | torch.Tensor) -> dict[str, str] | str:
    """Compute a digest of a model's or tensor's content that doesn't depend on how it is sharded.

    Returns 16 hexadecimal digits, as a checkpoint records them: a mapping by name for a model, a single one for a tensor. A digest detects
    errors, but it isn't cryptographic.

    For a model or a DTensor, every rank of the default process group must call it. Ranks exchange 8 bytes per tensor, or 16 with
    replicas. Raises, on every rank, :class:`IntegrityError` if replicas of a tensor differ between ranks, :class:`LayoutError` for
    unsupported placements, and :class:`RankError` if a rank fails or is missing. Raises ``ValueError`` for tensors without content (on meta,
    sparse).
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
