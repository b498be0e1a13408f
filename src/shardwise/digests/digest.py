"""Digest: a 64-bit fingerprint of a tensor's *global* content, the same however it is sharded.

::

    digest = finish( Σ over all boxes of partial_sum(box) , dtype code, global shape )

Every element contributes by its global index and its stored bits only, so the sums of any boxes that cover
the tensor once (shards, row blocks of a file) add up to the same total mod 2^64. NaN payloads, −0.0, bool and
fp8 count as stored; there is no floating point arithmetic. It detects errors; it is not cryptography.

Definition (stored in manifests: a change here needs a new manifest version). All arithmetic is mod 2^64::

    bits         element as an unsigned integer of at most 32 bits. 64-bit dtypes and C64 are seen as having
                 one more trailing dim of two 32-bit lanes (low word, high word; C64: real, imaginary)
    total      = Σ_i w(i) · (bits_i + 1)         w(i) = Π_d T(d, i_d), i the global index
    T(d, k)    = R(2d, k mod 4096) · R(2d + 1, k div 4096)
    R(s, n)    = mix(mix((s + 1)·γ) + (n + 1)·γ) | 1                       γ = 0x9E3779B97F4A7C15
    mix          the finalizer of splitmix64
    digest       from h = 0, h ← mix((h xor word) + γ) for the words total, length of the dtype code, the code
                 as little-endian 64-bit words, number of dims, sizes of the dims

Weights are odd, so no change of one element (|difference| < 2^32) is ever missed. A change of several elements is
missed with a chance of about 2^-32; in the worst known case, the sign bits of a whole box of positive fp32 flipped,
about 2^-23. T is a product of two table entries, which makes long dims as cheap as matrices: a dim of 100M elements
needs 4096 + 24415 random values instead of 100M.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dtypes import code_of, itemsize

if TYPE_CHECKING:
    import torch

__all__ = [
    "finish",
    "format_digest",
    "partial_sum",
    "partial_sum_bytes",
    "pending_sum",
    "random_odd",
    "tensor_digest",
]

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

    Of a tensor on a device, the host waits for the sum: :func:`.pending.partial_sums` waits once for many.
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
