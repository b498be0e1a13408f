"""Tracing: run a conversion once on tensors that carry tiles instead of data, and read the map from the result.

``Traced`` is a wrapper subclass on meta. An operation on the allow-list rewrites tiles; any other operation raises
:class:`Untraceable`. All of transformers' own conversions (5.17-5.23) use only listed operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..internals.torch import NO_TORCH_FUNCTION, wrapper_subclass
from .tiles import Tile, Untraceable, identity, join, narrow, permute, reshape, select, squeeze, unsqueeze

__all__ = ["Traced", "Untraceable", "is_untraceable", "stored_tensor"]


class Traced(torch.Tensor):
    """A tensor that knows which stored elements it holds, instead of their values."""

    tiles: tuple[Tile, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, tiles: tuple[Tile, ...]) -> Traced:
        made: Traced = wrapper_subclass(cls, shape, dtype)
        made.tiles = tiles
        return made

    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is None:
            raise Untraceable(f"operation {func} has no map")
        return handler(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced(shape={tuple(self.shape)}, dtype={self.dtype}, tiles={len(self.tiles)})"


def stored_tensor(name: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """The stored tensor ``name`` as a symbol."""
    tile = identity(name, shape)
    return Traced(shape, dtype, (tile,) if tile.numel else ())


def is_untraceable(error: Exception) -> bool:
    """Whether an operation failed on symbols because it has no map, and not because of its shapes."""
    # torch 2.12-2.14 raises this itself for numpy() and tolist().
    return isinstance(error, Untraceable) or "not supported for tensor subclasses" in str(error)


def _dim(tensor: torch.Tensor, dim: int, extra: int = 0) -> int:
    """A dim counted from the front. torch has not checked the arguments that symbols get."""
    ndim = max(tensor.dim() + extra, 1)  # a tensor without dims takes 0 and -1
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} of a tensor with {tensor.dim()} dims")
    return dim % ndim


def _same(x: Traced, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Traced:
    if dtype is not None and dtype != x.dtype:
        raise Untraceable(f"a cast from {x.dtype} to {dtype} inside a conversion")
    return Traced(x.shape, x.dtype, x.tiles)


def _permute(x: Traced, dims: Sequence[int]) -> Traced:
    order = [_dim(x, d) for d in dims]
    if sorted(order) != list(range(x.dim())):
        raise ValueError(f"dims {list(dims)} are not a permutation of {x.dim()} dims")
    return Traced([x.shape[d] for d in order], x.dtype, permute(x.tiles, order))


def _transpose(x: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(x.dim()))
    a, b = _dim(x, dim0), _dim(x, dim1)
    if order:
        order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _t(x: Traced) -> Traced:
    if x.dim() > 2:
        raise ValueError(f"t() of a tensor with {x.dim()} dims")
    return _transpose(x, 0, 1) if x.dim() == 2 else _same(x)


def _view(x: Traced, shape: Sequence[int], *_: Any) -> Traced:
    if isinstance(shape, torch.dtype):
        raise Untraceable(f"bits of {x.dtype} taken as {shape}")
    wanted = [int(n) for n in shape]
    if -1 in wanted:
        known = 1
        for n in wanted:
            known *= n if n != -1 else 1
        if not known:
            raise ValueError(f"the size left open in shape {list(shape)} may be anything")
        wanted[wanted.index(-1)] = x.numel() // known
    if math.prod(wanted) != x.numel():
        raise ValueError(f"shape {list(shape)} is invalid for {x.numel()} elements")
    return Traced(wanted, x.dtype, reshape(x.tiles, tuple(x.shape), wanted))


def _slice(
    x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Traced:
    d = _dim(x, dim)
    size = x.shape[d]
    begin, stop, _ = slice(start, end).indices(size)
    stop = max(begin, stop)
    if step == 1:
        shape = [stop - begin if k == d else n for k, n in enumerate(x.shape)]
        return Traced(shape, x.dtype, narrow(x.tiles, x.shape, d, begin, stop))
    # Every step-th element: pad-free views only, [rows, step] with one column taken.
    if stop != size or size % step or begin >= step:
        raise Untraceable(f"a slice {start}:{end}:{step} of {size} elements")
    rows = _view(x, [*x.shape[:d], size // step, step, *x.shape[d + 1 :]])
    return _select(rows, d + 1, begin)


def _select(x: Traced, dim: int, index: int) -> Traced:
    d = _dim(x, dim)
    if not -x.shape[d] <= index < x.shape[d]:
        raise IndexError(f"index {index} of {x.shape[d]}")
    shape = [n for k, n in enumerate(x.shape) if k != d]
    return Traced(shape, x.dtype, select(x.tiles, x.shape, d, index % x.shape[d]))


def _unsqueeze(x: Traced, dim: int) -> Traced:
    d = _dim(x, dim, 1)
    return Traced([*x.shape[:d], 1, *x.shape[d:]], x.dtype, unsqueeze(x.tiles, d))


def _squeeze(x: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(x, d) for d in dims if x.dim() and x.shape[_dim(x, d)] == 1}
    tiles = x.tiles
    for d in sorted(gone, reverse=True):
        tiles = squeeze(tiles, d)
    return Traced([n for d, n in enumerate(x.shape) if d not in gone], x.dtype, tiles)


def _split(x: Traced, size: int, dim: int = 0) -> list[Traced]:
    length = x.shape[_dim(x, dim)]
    sizes = [min(size, length - a) for a in range(0, length, size)] if length else [0]
    return _split_with_sizes(x, sizes, dim)


def _split_with_sizes(x: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    if sum(sizes) != x.shape[_dim(x, dim)] or min(sizes, default=0) < 0:
        raise ValueError(f"parts of {list(sizes)} don't make up {x.shape[_dim(x, dim)]}")
    parts, base = [], 0
    for size in sizes:
        parts.append(_slice(x, dim, base, base + size))
        base += size
    return parts


def _unbind(x: Traced, dim: int = 0) -> list[Traced]:
    return [_select(x, dim, k) for k in range(x.shape[_dim(x, dim)])]


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Traced:
    parts = [_traced(t) for t in tensors if t.shape != (0,)] or [_traced(tensors[0])]
    first = parts[0]
    d = _dim(first, dim)
    if len({t.dtype for t in tensors}) > 1:
        raise Untraceable(f"a concatenation of dtypes {sorted({str(t.dtype) for t in tensors})}")
    if len({(*p.shape[:d], *p.shape[d + 1 :]) for p in parts}) > 1:
        raise ValueError(f"shapes {[list(p.shape) for p in parts]} can't be concatenated along dim {d}")
    shape = [sum(p.shape[d] for p in parts) if k == d else n for k, n in enumerate(first.shape)]
    return Traced(shape, first.dtype, join([(p.tiles, p.shape[d]) for p in parts], first.dim(), d))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Traced:
    parts = [_traced(t) for t in tensors]
    first = parts[0]
    d = _dim(first, dim, 1)
    if len({p.dtype for p in parts}) > 1:
        raise Untraceable(f"a stack of dtypes {sorted({str(p.dtype) for p in parts})}")
    if len({p.shape for p in parts}) > 1:
        raise ValueError(f"shapes {[list(p.shape) for p in parts]} can't be stacked")
    tiles = join([(unsqueeze(p.tiles, d), 1) for p in parts], first.dim() + 1, d)
    return Traced([*first.shape[:d], len(parts), *first.shape[d:]], first.dtype, tiles)


def _traced(tensor: torch.Tensor) -> Traced:
    if not isinstance(tensor, Traced):
        raise Untraceable("a tensor that is not stored takes part")
    return tensor


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.alias: _same,
    _aten.detach: _same,
    _aten.clone: _same,
    _aten.contiguous: _same,
    _aten.lift_fresh: _same,
    _aten._to_copy: _same,
    _aten.permute: _permute,
    _aten.transpose: _transpose,
    _aten.t: _t,
    _aten.view: _view,
    _aten._unsafe_view: _view,
    _aten.reshape: _view,
    _aten._reshape_alias: _view,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.unsqueeze: _unsqueeze,
    _aten.squeeze: _squeeze,
    _aten.split: _split,
    _aten.split_with_sizes: _split_with_sizes,
    _aten.unbind: _unbind,
    _aten.cat: _cat,
    _aten.stack: _stack,
}
