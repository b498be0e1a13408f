"""Digests: 64-bit fingerprints of tensors' *global* content, the same under every sharding; of live models, too."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .dtypes import code_of, itemsize
from .errors import IntegrityError
from .format.slices import replicas
from .host import to_host
from .internals.peft import is_of_base, places
from .internals.torch import local_tensor
from .names import unwrap
from .ranks.ranks import Ranks
from .tensors.live import LiveModel, describe, world_size
from .tensors.placements import Geometry, cut_boxes, geometry_of, replicated

if TYPE_CHECKING:
    import torch

__all__ = [
    "PendingSums",
    "ReplicaTotals",
    "added_sums",
    "differing_digests",
    "differing_from",
    "digest",
    "finish",
    "format_digest",
    "live_digests",
    "local_boxes",
    "model_digests",
    "own_sums",
    "own_sums_of_model",
    "partial_sum",
    "partial_sum_bytes",
    "partial_sums",
    "pending_sum",
    "random_odd",
    "refuse_other_tensors",
    "tensor_digest",
]


# ----------------------------------------------------------------------------------------------------
# Digest: a 64-bit fingerprint of a tensor's *global* content, the same however it is sharded.
#
# ::
#
#     digest = finish( Σ over all boxes of partial_sum(box) , dtype code, global shape )
#
# Every element contributes by its global index and its stored bits only, so the sums of any boxes that cover
# the tensor once (shards, row blocks of a file) add up to the same total mod 2^64. NaN payloads, −0.0, bool and
# fp8 count as stored; there is no floating point arithmetic. It detects errors; it is not cryptography.
#
# Definition (stored in manifests: a change here needs a new manifest version). All arithmetic is mod 2^64::
#
#     bits         element as an unsigned integer of at most 32 bits. 64-bit dtypes and C64 are seen as having
#                  one more trailing dim of two 32-bit lanes (low word, high word; C64: real, imaginary)
#     total      = Σ_i w(i) · (bits_i + 1)         w(i) = Π_d T(d, i_d), i the global index
#     T(d, k)    = R(2d, k mod 4096) · R(2d + 1, k div 4096)
#     R(s, n)    = mix(mix((s + 1)·γ) + (n + 1)·γ) | 1                       γ = 0x9E3779B97F4A7C15
#     mix          the finalizer of splitmix64
#     digest       from h = 0, h ← mix((h xor word) + γ) for the words total, length of the dtype code, the code
#                  as little-endian 64-bit words, number of dims, sizes of the dims
#
# Weights are odd, so no change of one element (|difference| < 2^32) is ever missed. A change of several elements is
# missed with a chance of about 2^-32; in the worst known case, the sign bits of a whole box of positive fp32 flipped,
# about 2^-23. T is a product of two table entries, which makes long dims as cheap as matrices: a dim of 100M elements
# needs 4096 + 24415 random values instead of 100M.

_Words = NDArray[np.uint64]

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

#: Entries of a low table; part of the format.
_LOW = 1 << 12
#: Elements widened to 64 bits at a time: on the host they stay in the L2 cache; on a device there are enough to hide
#: the cost of launches. Also the longest vector of weights.
_HOST_BLOCK = 1 << 16
_DEVICE_BLOCK = 1 << 19
#: Bytes of a tensor without a dense memory order that are copied at a time.
_COPY_BYTES = 4 << 20
#: A box of at most so many elements is summed as one vector, and the weights of the last ones are kept.
_SMALL = 1 << 12
#: Vectors shorter than this are summed over rows first (measured: the call per row costs more).
_SHORT_ROW = 32


def partial_sum(local: torch.Tensor, start: Sequence[int]) -> int:
    """Contribution to the digest, in [0, 2^64), of the box of a global tensor that ``local`` holds.

    ``start`` is the global index of ``local``'s first element; the box's sizes are ``local.shape``. Any strides, CPU
    or accelerator. Tensors without gaps in memory are read in place; tensors with gaps are copied in pieces of at most
    4 MiB. All temporaries together stay under 16 MiB. Purely local, no communication. Cut off padding first. Raises
    ``ValueError`` for a wrong ``start`` or a tensor without its own content (meta, sparse, DTensor),
    :class:`FormatError` for a dtype that can't be stored.

    Of a tensor on a device, the host waits for the sum: :func:`.partial_sums` waits once for many.
    """
    return int(pending_sum(local, start)) & _MASK


def pending_sum(local: torch.Tensor, start: Sequence[int]) -> int | torch.Tensor:
    """:func:`partial_sum`; of a tensor on a device a 0-d ``int64`` there, which the current stream makes.

    The bits of a negative number stand for the number plus 2^64. The host waits for nothing, except for tables of
    weights when a device or a size is met for the first time.
    """
    code = code_of(local.dtype)
    _check_box(start, local.shape)
    _check_plain(local)
    if local.numel() == 0:
        return 0
    order, box = list(range(local.ndim)), local.detach()
    if not box.is_contiguous():
        # Weights multiply over dims, so any order of dims is right. In memory order most tensors are dense.
        order.sort(key=box.stride, reverse=True)
        box = box.permute(order)
    where = _sum_on(local.device, code)
    # One buffer for all copies: fresh ones left 70 MiB in the allocator.
    buffer: torch.Tensor | None = None
    for piece, piece_start in _pieces(box, [start[dim] for dim in order]):
        if not _lies_dense(piece):
            if buffer is None:
                buffer = piece.new_empty(min(_COPY_BYTES, local.nbytes) // piece.element_size())
            piece = buffer[: piece.numel()].view(piece.shape).copy_(piece)
        spans = [_Span(dim, at, size) for dim, at, size in zip(order, piece_start, piece.shape, strict=True)]
        _add_lanes(_lanes(piece, code), _with_lanes(spans, code), where)
    found: int | torch.Tensor = where.total
    return found


def partial_sum_bytes(
    view: memoryview | NDArray[np.uint8], dtype_code: str, sizes: Sequence[int], start: Sequence[int]
) -> int:
    """:func:`partial_sum` of a box that lies in ``view`` as contiguous little-endian bytes, any alignment.

    ``sizes`` and ``start`` describe the box in the global tensor. A caller that streams a box calls this on blocks of
    its rows, each with its own ``start``, and adds the results. Copies only 512 KiB blocks.
    Raises ``ValueError`` if sizes, start and bytes don't fit together.
    """
    _check_box(start, sizes)
    expected_bytes = math.prod(sizes) * itemsize(dtype_code)
    if view.nbytes != expected_bytes:
        raise ValueError(f"{dtype_code} {tuple(sizes)} is {expected_bytes} bytes, got {view.nbytes}")
    if expected_bytes == 0:
        return 0
    if not np.asarray(view).flags.c_contiguous:
        raise ValueError(f"the bytes of {dtype_code} {tuple(sizes)} must be contiguous")
    lane_bytes = min(itemsize(dtype_code), 4)
    lanes = np.frombuffer(view, dtype=f"<u{lane_bytes}")
    spans = [_Span(dim, first, size) for dim, (first, size) in enumerate(zip(start, sizes, strict=True))]
    where = _HostSum()
    _add_lanes(lanes, _with_lanes(spans, dtype_code), where)
    return where.total & _MASK


def finish(total: int, dtype_code: str, shape: Sequence[int]) -> int:
    """The digest of a tensor of global ``shape`` whose partial sums add up to ``total`` (taken mod 2^64)."""
    itemsize(dtype_code)
    name = dtype_code.encode()
    words = [int.from_bytes(name[at : at + 8], "little") for at in range(0, len(name), 8)]
    digest = _fold(0, total & _MASK)
    for word in (len(name), *words, len(shape), *shape):
        digest = _fold(digest, word)
    return digest


def tensor_digest(t: torch.Tensor) -> int:
    """The digest of a whole plain tensor. Raises as :func:`partial_sum`."""
    return finish(partial_sum(t, (0,) * t.ndim), code_of(t.dtype), t.shape)


def format_digest(digest: int) -> str:
    """``digest`` as 16 lowercase hex digits, as manifests and reports write it."""
    if not 0 <= digest <= _MASK:
        raise ValueError(f"a digest must be in [0, 2^64), got {digest}")
    return f"{digest:016x}"


# --- weights ---------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """``size`` indices from ``start`` on of the global dim ``dim``."""

    dim: int
    start: int
    size: int


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def _fold(digest: int, word: int) -> int:
    return _mix(((digest ^ word) + _GAMMA) & _MASK)


def random_odd(stream: int, first: int, count: int) -> _Words:
    """R(stream, n) for ``count`` values of n from ``first`` on."""
    base = (_mix((stream + 1) * _GAMMA & _MASK) + (first + 1) * _GAMMA) & _MASK
    word = np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(base)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MIX_2)
    return (word ^ (word >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=64)  # 32 KiB each
def _low_table(dim: int) -> _Words:
    table = random_odd(2 * dim, 0, _LOW)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=1024)
def _one_high(dim: int, first: int) -> _Words:
    """The only value of a high table that most boxes need."""
    table = random_odd(2 * dim + 1, first, 1)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=64)  # of the device: 32 KiB each, or 8 bytes for each 4096 indices of a dim
def _on_device(device: torch.device, dim: int, highs: tuple[int, int] | None) -> torch.Tensor:
    """The low table of a dim on a device, or ``highs`` (first, count) of its high table."""
    import torch

    table = _low_table(dim) if highs is None else random_odd(2 * dim + 1, *highs)
    return torch.tensor(table.view(np.int64), device=device)


# --- the two places where sums are made ------------------------------------------------------------------


class _Sum(Protocol):
    """Adds up lanes × weights on the host (numpy arrays) or on a device (torch tensors)."""

    block: int
    total: Any
    """The sum so far; the caller takes it mod 2^64."""

    def one(self) -> Any:
        """The number 1 as a vector."""

    def low(self, dim: int) -> Any:
        """R(2 dim, n) for all n."""

    def high(self, dim: int, first: int, count: int) -> Any:
        """R(2 dim + 1, n) for ``count`` values of n from ``first`` on."""

    def add(self, lanes: Any, rows: Any, columns: Any) -> None:
        """Add Σ_rc rows[r] · columns[c] · (lanes[r, c] + 1)."""


class _HostSum:
    block = _HOST_BLOCK

    def __init__(self) -> None:
        self.total = 0

    def one(self) -> _Words:
        return np.ones(1, dtype=np.uint64)

    def low(self, dim: int) -> _Words:
        return _low_table(dim)

    def high(self, dim: int, first: int, count: int) -> _Words:
        return _one_high(dim, first) if count == 1 else random_odd(2 * dim + 1, first, count)

    @cached_property
    def _wide(self) -> _Words:
        """One buffer for all blocks: fresh ones would cost a page fault per 4 KiB."""
        return np.empty(_HOST_BLOCK, dtype=np.uint64)

    def add(self, lanes: NDArray[Any], rows: _Words, columns: _Words) -> None:
        width = len(columns)
        step = max(1, self.block // width)
        for first in range(0, len(rows), step):
            block, weights = lanes[first : first + step], rows[first : first + step]
            wide = self._wide[: block.size].reshape(block.shape)
            np.copyto(wide, block)
            if width < _SHORT_ROW:
                part = np.dot(np.dot(weights, wide), columns)
            else:  # numpy's dot takes half as long again
                part = np.dot(weights, np.einsum("rc,c->r", wide, columns))
            self.total += int(part)
        self.total += int(rows.sum()) * int(columns.sum())


class _DeviceSum:
    block = _DEVICE_BLOCK

    def __init__(self, device: torch.device, lane_bytes: int) -> None:
        import torch

        self._lane_mask = 256**lane_bytes - 1
        # int64 multiplication and addition wrap, as for uint64.
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def one(self) -> torch.Tensor:
        return self.total.new_ones(1)

    def low(self, dim: int) -> torch.Tensor:
        return _on_device(self.total.device, dim, None)

    def high(self, dim: int, first: int, count: int) -> torch.Tensor:
        return _on_device(self.total.device, dim, (first, count))

    def add(self, lanes: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        step = max(1, self.block // len(columns))
        for first in range(0, len(rows), step):
            wide = lanes[first : first + step].to(self.total.dtype)
            wide.bitwise_and_(self._lane_mask).add_(1).mul_(columns).mul_(rows[first : first + step, None])
            self.total += wide.sum()


# --- one dense box ---------------------------------------------------------------------------------------


def _add_lanes(lanes: Any, spans: Sequence[_Span], where: _Sum) -> None:
    """Add Σ over a dense box; ``lanes`` are its elements in the order of ``spans``, the last one fastest.

    Treats the box as a matrix whose columns are as many trailing dims as fit into a block. Vectors of weights and runs
    of memory are then long for any shape.
    """
    if isinstance(where, _HostSum) and math.prod(span.size for span in spans) <= _SMALL:
        weights, of_ones = _small_weights(tuple(spans))
        where.total += int(np.dot(lanes, weights)) + of_ones
        return
    leading = _leading(spans, where.block)
    if leading == len(spans) > 0:  # the last dim alone is longer than a block
        leading -= 1
    matrix = lanes.reshape(-1, math.prod(span.size for span in spans[leading:]))
    for left, columns in _weight_runs(spans[leading:], where):
        for top, rows in _weight_runs(spans[:leading], where):
            where.add(matrix[top : top + len(rows), left : left + len(columns)], rows, columns)


def _weight_runs(spans: Sequence[_Span], where: _Sum) -> Iterator[tuple[int, Any]]:
    """The weights of a box in order, in vectors of at most ``where.block``: (first position, vector)."""
    leading = _leading(spans, where.block)
    if leading == len(spans) > 0:
        leading -= 1
        runs = [[piece] for piece in _cut(spans[leading], where.block)]
    else:
        runs = [list(spans[leading:])]
    outer = spans[:leading]
    position = 0
    for index in np.ndindex(*(span.size for span in outer)):
        point = [_Span(span.dim, span.start + at, 1) for span, at in zip(outer, index, strict=True)]
        for run in runs:
            weights = _weights([*point, *run], where)
            yield position, weights
            position += len(weights)


def _cut(span: _Span, limit: int) -> list[_Span]:
    """Cut ``span`` into the fewest pieces of at most ``limit``, all about equally long."""
    step = math.ceil(span.size / math.ceil(span.size / limit))
    return [_Span(span.dim, span.start + at, min(step, span.size - at)) for at in range(0, span.size, step)]


def _leading(spans: Sequence[_Span], limit: int) -> int:
    """The number of leading dims outside the block, if as many trailing dims as fit into ``limit`` become one."""
    leading, count = len(spans), 1
    while leading > 0 and count * spans[leading - 1].size <= limit:
        leading -= 1
        count *= spans[leading].size
    return leading


@lru_cache(maxsize=64)  # 32 KiB each
def _small_weights(spans: tuple[_Span, ...]) -> tuple[_Words, int]:
    """The weights of a box of at most ``_SMALL`` elements on the host, and their sum. Layers have equal boxes."""
    weights = _weights(spans, _HostSum()).copy()  # not a view of a longer table
    weights.flags.writeable = False
    return weights, int(weights.sum())


def _weights(spans: Sequence[_Span], where: _Sum) -> Any:
    """The weights of a small box as one vector: the outer product of its dims' tables."""
    tables = [_dim_weights(span, where) for span in spans] or [where.one()]
    return reduce(lambda outer, inner: (outer[:, None] * inner).reshape(-1), tables)


def _dim_weights(span: _Span, where: _Sum) -> Any:
    """T(dim, k) for the indices of ``span``."""
    first_high, at = divmod(span.start, _LOW)
    highs = (at + span.size - 1) // _LOW + 1
    low, high = where.low(span.dim), where.high(span.dim, first_high, highs)
    if highs == 1:
        return low[at : at + span.size] * high
    return (high[:, None] * low).reshape(-1)[at : at + span.size]


def _with_lanes(spans: Sequence[_Span], code: str) -> list[_Span]:
    return [*spans, _Span(len(spans), 0, 2)] if itemsize(code) == 8 else list(spans)


# --- tensors ---------------------------------------------------------------------------------------------


def _sum_on(device: torch.device, code: str) -> _Sum:
    return _HostSum() if device.type == "cpu" else _DeviceSum(device, min(itemsize(code), 4))


def _lanes(piece: torch.Tensor, code: str) -> Any:
    """The raw bits of a contiguous tensor, flat: unsigned numpy on the host, torch on a device."""
    import torch

    lane_bytes = min(itemsize(code), 4)
    lane_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[lane_bytes]
    # Not reshape: it keeps the odd stride of a single element, and view() refuses that.
    lanes = piece.as_strided((piece.numel(),), (1,)).view(lane_dtype)
    return lanes.numpy().view(f"u{lane_bytes}") if lanes.device.type == "cpu" else lanes


def _lies_dense(box: torch.Tensor) -> bool:
    return box.is_contiguous() and not box.is_conj() and not box.is_neg()


def _pieces(box: torch.Tensor, start: Sequence[int]) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """``box`` cut into pieces that lie dense in memory or are small enough to copy, each with its start."""
    if _lies_dense(box) or box.nbytes <= _COPY_BYTES:
        yield box, start
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    size = box.shape[dim]
    step = max(1, size * _COPY_BYTES // box.nbytes)
    for at in range(0, size, step):
        cut = box.narrow(dim, at, min(step, size - at))
        yield from _pieces(cut, [*start[:dim], start[dim] + at, *start[dim + 1 :]])


def _check_box(start: Sequence[int], sizes: Sequence[int]) -> None:
    if len(start) != len(sizes) or any(first < 0 for first in start) or any(size < 0 for size in sizes):
        raise ValueError(f"start {tuple(start)} and sizes {tuple(sizes)} are not a box of one tensor")


def _check_plain(local: torch.Tensor) -> None:
    import torch

    if local.layout != torch.strided or local.is_meta:
        raise ValueError(f"no content to digest: a tensor of layout {local.layout} on {local.device}")
    if hasattr(local, "__tensor_flatten__"):  # DTensor and other wrappers: torch's protocol for them
        raise ValueError(f"{type(local).__name__} is a wrapper: digest its local tensor at its box's start")


# ----------------------------------------------------------------------------------------------------
# Digest sums of many tensors at once: those on a device are made there, and come to the host together.


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
    """:func:`.partial_sum` of each box, a tensor with its start. The host waits once per device."""
    pending = PendingSums(boxes)
    return pending.on_host(to_host(pending.vectors))


# ----------------------------------------------------------------------------------------------------
# Digest sums of all ranks, added up on their way to rank 0: the digest of each tensor, and whether its replicas are equal.
#
# A rank adds its sum of a tensor to two totals. One is that of the replica that counts. In the other the sums of replica k weigh
# R(1024, k) of :mod:`.digests`, an odd number of 64 bits. If all replicas are equal, the second is the first times the sum of the
# weights. With two replicas the comparison finds every difference of their sums, because the weights are odd. With more, the differences
# of several replicas cancel with a chance of about 2^-32, as several changed elements of one tensor may in its digest. 8 bytes for each
# tensor travel, 16 if it has replicas, whatever the number of ranks and replicas.

#: No dim has the weights of this stream: changes in two replicas can't cancel because rows and replicas weigh alike.
_STREAM = 1024


class _Alike(NamedTuple):
    """Tensors, by index, with one geometry and one replica that counts."""

    indices: NDArray[np.int64]
    weighted: NDArray[np.int64]
    """Their places in the second total; none without replicas."""
    geometry: Geometry
    owner: int


@lru_cache(maxsize=64)
def _replica_of(geometry: Geometry) -> tuple[dict[int, int], _Words]:
    """The replica of each rank of a geometry, and the weight of each replica."""
    found = replicas(geometry)
    return {rank: k for k, ranks in enumerate(found) for rank in ranks}, random_odd(_STREAM, 0, len(found))


class ReplicaTotals:
    """Adds up the sums of tensors over ranks. Every rank makes the same one. ``owners``: for each tensor, the replica that counts."""

    def __init__(self, geometries: Sequence[Geometry], owners: Sequence[int]) -> None:
        groups: dict[tuple[Geometry, int], list[int]] = {}
        for index, key in enumerate(zip(geometries, owners, strict=True)):
            groups.setdefault(key, []).append(index)
        self._tensors, self._weighted = len(geometries), 0
        self._groups: list[_Alike] = []
        for (geometry, owner), indices in groups.items():
            held = len(indices) if len(_replica_of(geometry)[1]) > 1 else 0
            places = np.arange(self._weighted, self._weighted + held)
            self._groups.append(_Alike(np.array(indices, np.int64), places, geometry, owner))
            self._weighted += held

    def share(self, sums: _Words, rank: int) -> _Words:
        """What a rank adds to the totals. ``sums``: of its copies of all tensors."""
        found = np.zeros(self._tensors + self._weighted, np.uint64)
        for one in self._groups:
            places, weights = _replica_of(one.geometry)
            replica = places.get(rank)
            if replica is None:  # the mesh leaves this rank out
                continue
            if replica == one.owner:
                found[one.indices] = sums[one.indices]
            if len(one.weighted):
                found[self._tensors + one.weighted] = sums[one.indices] * weights[replica]
        return found

    def read(self, totals: _Words) -> tuple[_Words, NDArray[np.int64]]:
        """From the added shares of all ranks: the sum of each tensor, and the indices of those whose replicas differ."""
        if totals.shape != (self._tensors + self._weighted,):
            raise ValueError(f"expected sums of {self._tensors} tensors, got {totals.shape[0]} numbers")
        sums, unequal = totals[: self._tensors], [np.zeros(0, np.int64)]
        for one in self._groups:
            if len(one.weighted):
                weight = _replica_of(one.geometry)[1].sum(dtype=np.uint64)
                expected = sums[one.indices] * weight
                unequal.append(one.indices[totals[self._tensors + one.weighted] != expected])
        return sums, np.sort(np.concatenate(unequal))


def added_sums(parts: Sequence[_Words]) -> _Words:
    """Shares of several ranks, added. Raises :class:`ValueError` if ranks have other tensors."""
    refuse_other_tensors(parts)
    found: _Words = np.sum(parts, axis=0, dtype=np.uint64)
    return found


def refuse_other_tensors(parts: Sequence[_Words]) -> None:
    """Raise :class:`ValueError` unless all ranks sent as many numbers."""
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"ranks have other tensors: they sent {sorted({len(p) for p in parts})} numbers")


# ----------------------------------------------------------------------------------------------------
# Digests of a live, sharded model: every rank sums its own boxes, then the sums are added over ranks.


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
    pairs = zip(found, tensors.items(), strict=True)
    return {name: _finished(t, geometries[name], total) for total, (name, t) in pairs}


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
        found = {n: _finished(t, geometries[n], total) for (n, t), total in pairs if n in expected}
        return {"wrong": {n: digest for n, digest in found.items() if digest != expected[n]}}

    differing: dict[str, int] = _sum_up(tensors, geometries, ranks, may_differ, wrong, own)["wrong"]
    return differing


def _finished(tensor: torch.Tensor, geometry: Geometry, total: int) -> int:
    return finish(total, code_of(tensor.dtype), geometry.whole_shape(tensor.shape))


def own_sums(
    tensors: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry], ranks: Ranks
) -> NDArray[np.uint64]:
    """What this rank adds to the digests of live tensors, as :class:`.ReplicaTotals` wants it. Rank-local: waits for no rank."""
    return _totals(tensors, geometries).share(local_sums(tensors, geometries, ranks), ranks.rank)


def local_sums(
    tensors: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry], ranks: Ranks
) -> NDArray[np.uint64]:
    """The sum of each tensor over the boxes that this rank holds. Rank-local."""
    indices: list[int] = []

    def boxes() -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        for index, (name, tensor) in enumerate(tensors.items()):
            geometry = geometries[name]
            for box in local_boxes(tensor, geometry.whole_shape(tensor.shape), geometry, ranks.rank):
                indices.append(index)
                yield box
            ranks.tick()

    sums, found = np.zeros(len(tensors), dtype=np.uint64), partial_sums(boxes())
    np.add.at(sums, indices, np.array(found, dtype=np.uint64))
    return sums


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
    everywhere = replicated(world_size())
    return {
        t.name
        for t in live.stored
        if t.kind == "buffer" and local_tensor(t.tensor) is t.tensor and live.geometries[t.name] == everywhere
    }


# ----------------------------------------------------------------------------------------------------
# Remembers a base under adapters as its load left it. A checkpoint needs no copy of what the load can read again.


@dataclass
class LoadedBase:
    """Frozen parameters as a load filled them: by name, what this rank adds to their digests."""

    sums: Mapping[str, int]
    is_unchanged: bool | None = None
    """What ranks agreed on when they last compared it with the live parameters; None: they have not yet."""


# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_BASES: weakref.WeakKeyDictionary[nn.Module, LoadedBase] = weakref.WeakKeyDictionary()


def remember_base(live: LiveModel, made: Collection[str], ranks: Ranks) -> None:
    """Sum up the base's frozen parameters in a model that was just loaded. Rank-local; reads them once.

    ``made``: those that no file holds, or not whole. They are left out.
    """
    found = places(live.root)
    frozen = [
        t.name
        for t in live.parameters
        if not t.tensor.requires_grad and t.name not in made and is_of_base(t.name, found)
    ]
    _BASES[unwrap(live.root)] = LoadedBase(_sums_of(live, frozen, ranks))


def loaded_base(model: nn.Module) -> LoadedBase | None:
    """What :func:`remember_base` noted of a model, if it did."""
    return _BASES.get(unwrap(model))


def still_as_loaded(base: LoadedBase, live: LiveModel, ranks: Ranks) -> bool:
    """Whether this rank's part of a base has the sums that it had after the load. Rank-local; reads it once."""
    try:
        return _sums_of(live, base.sums, ranks) == base.sums
    except KeyError:  # renamed or removed
        return False


def _sums_of(live: LiveModel, names: Iterable[str], ranks: Ranks) -> dict[str, int]:
    held = {t.name: t.tensor for t in live.parameters}
    tensors = {name: held[name] for name in names}
    return dict(zip(tensors, local_sums(tensors, live.geometries, ranks).tolist(), strict=True))


def digest(model_or_tensor: nn.Module | torch.Tensor) -> dict[str, str] | str:
    """Compute a digest of a model's or tensor's content that doesn't depend on how it is sharded.

    Returns 16 hexadecimal digits for a tensor, or a mapping from names to digits for a model, as a checkpoint records them. A digest detects
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
