"""Tracing against torch: what a conversion does to real data, and what its tiles say that it does.

Every element of the data is unique, so that equal arrays mean that every element is where it belongs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps

from shardwise.tensors.boxes import Box
from shardwise.tensors.placements import Cut, Geometry, local_shape
from shardwise.tensors.tiles import Tile, cut, invert, translate
from shardwise.tensors.trace import Traced, Untraceable, is_untraceable, stored_tensor
from tests.harness.rank_boxes import every_rank_boxes
from tests.harness.tiers import examples

Array = np.ndarray[Any, Any]

# --- data and symbols side by side -------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A tensor with data, and the symbol of the same."""

    data: torch.Tensor
    symbol: Traced

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim


def stored(name: str, shape: Sequence[int], first: int = 0) -> Pair:
    """A stored tensor that counts from ``first``."""
    data = torch.arange(first, first + math.prod(shape)).reshape(tuple(shape))
    return Pair(data, stored_tensor(name, shape, data.dtype))


def on_both(function: Callable[..., Any], *pairs: Pair) -> list[Pair]:
    """The results of a function of tensors (one, or several) on data and on symbols."""
    data, symbols = function(*(p.data for p in pairs)), function(*(p.symbol for p in pairs))
    if isinstance(data, torch.Tensor):
        data, symbols = [data], [symbols]
    made = [Pair(d, s) for d, s in zip(data, symbols, strict=True)]
    for pair in made:
        assert isinstance(pair.symbol, Traced)
        assert pair.symbol.shape == pair.data.shape
        assert pair.symbol.dtype == pair.data.dtype
    return made


def indices(tile: Tile, side: str) -> tuple[Array, ...]:
    """An index array per dim of one side, over all iterations, by the definition in the module's docstring."""
    steps = np.indices([v.size for v in tile.loops])
    start = tile.source_start if side == "source" else tile.target_start
    found = [np.full(steps.shape[1:], first) for first in start]
    for k, v in enumerate(tile.loops):
        dim, step = (v.source_dim, v.source_step) if side == "source" else (v.target_dim, v.target_step)
        found[dim] = found[dim] + steps[k] * step
    return tuple(found)


def fill(shape: Sequence[int], tiles: Sequence[Tile], sources: Mapping[str, Array]) -> Array:
    """The tensor that tiles make up; every element must be written exactly once."""
    filled, times = np.full(tuple(shape), -1), np.zeros(tuple(shape), int)
    for tile in tiles:
        target = indices(tile, "target")
        filled[target] = sources[tile.source][indices(tile, "source")]
        np.add.at(times, target, 1)
    assert (times == 1).all(), "written never, or more than once"
    return filled


@dataclass(frozen=True)
class Traces:
    """Stored tensors, and everything that a chain of operations made of them, the last one at the end."""

    sources: dict[str, Array]
    made: list[Pair]

    def assert_exact(self, pair: Pair) -> None:
        assert np.array_equal(fill(pair.shape, pair.symbol.tiles, self.sources), pair.data.numpy())


# --- operations that must trace ----------------------------------------------------------------------------

#: Tensors of more elements than this are left alone.
MOST = 240

Draw = Callable[[st.SearchStrategy[Any]], Any]


def a_dim(draw: Draw, x: Pair, extra: int = 0) -> int:
    """Counted from either end."""
    n = x.ndim + extra
    return int(draw(st.integers(-n, n - 1)))


def splits(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim, size = a_dim(draw, x), draw(st.integers(1, 5))
    return on_both(lambda t: t.split(size, dim), x)


def splits_with_sizes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x)
    n = x.shape[dim]
    edges = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n]
    return on_both(lambda t: torch.split(t, [b - a for a, b in pairwise(edges)], dim), x)


def chunks(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim, count = a_dim(draw, x), draw(st.integers(1, 5))
    return on_both(lambda t: t.chunk(count, dim), x)


def concatenates(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x) % x.ndim
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    fit = [p for p in pool if p.ndim == x.ndim and [n for d, n in enumerate(p.shape) if d != dim] == rest]
    chosen = [*draw(st.lists(st.sampled_from(fit), max_size=2)), x]
    chosen = draw(st.permutations(chosen))
    return on_both(lambda *t: torch.cat(t, dim), *chosen)


def alike(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Some tensors of the same shape."""
    fit = [p for p in pool if p.shape == x.shape]
    return [x, *draw(st.lists(st.sampled_from(fit), max_size=2))]


def stacks(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x, 1)
    return on_both(lambda *t: torch.stack(t, dim), *alike(draw, x, pool))


def interleaves(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """One element of each in turn, along a dim."""
    dim, chosen = a_dim(draw, x) % x.ndim, alike(draw, x, pool)
    shape = [n * len(chosen) if d == dim else n for d, n in enumerate(x.shape)]
    return on_both(lambda *t: torch.stack(t, dim + 1).reshape(shape), *chosen)


def unbinds(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x)
    return on_both(lambda t: t.unbind(dim), x)


def selects(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x)
    n = x.shape[dim]
    if n == 0:
        return []
    index = draw(st.integers(-n, n - 1))
    return on_both(lambda t: t.select(dim, index), x)


def squeezes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Dims of another size stay, as torch has it."""
    dims = tuple(draw(st.sets(st.integers(0, x.ndim - 1))))
    dim = a_dim(draw, x)
    return on_both(
        draw(st.sampled_from([lambda t: t.squeeze(), lambda t: t.squeeze(dim), lambda t: t.squeeze(dims)])), x
    )


def unsqueezes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x, 1)
    return on_both(
        draw(st.sampled_from([lambda t: t.unsqueeze(dim), lambda t: t[None], lambda t: t[..., None]])), x
    )


def transposes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    a, b = a_dim(draw, x), a_dim(draw, x)
    ways = [lambda t: t.transpose(a, b), lambda t: t.swapaxes(a, b), lambda t: t.movedim(a, b)]
    if x.ndim == 2:
        ways += [lambda t: t.t(), lambda t: t.T, lambda t: t.mT]
    return on_both(draw(st.sampled_from(ways)), x)


def permutes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dims = [d - draw(st.sampled_from((0, x.ndim))) for d in draw(st.permutations(range(x.ndim)))]
    return on_both(lambda t: t.permute(dims), x)


def factors(draw: Draw, numel: int) -> list[int]:
    """A shape with so many elements, with ones in it."""
    shape: list[int] = []
    while numel > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([k for k in range(1, numel + 1) if numel % k == 0])))
        numel //= shape[-1]
    return list(draw(st.permutations([*shape, numel])))


def reshapes(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Another factorization; sometimes one size is left for torch to find."""
    shape = factors(draw, math.prod(x.shape))
    if math.prod(shape) and draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = -1
    return on_both(
        draw(st.sampled_from([lambda t: t.reshape(shape), lambda t: t.contiguous().view(shape)])), x
    )


def repacks(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Several tensors one after another, cut into rows that begin and end inside of them."""
    chosen = draw(st.permutations([x, *draw(st.lists(st.sampled_from(pool), max_size=3))]))
    numel = sum(p.data.numel() for p in chosen)
    if numel > MOST:
        return []
    shape = factors(draw, numel)
    return on_both(lambda *t: torch.cat([each.flatten() for each in t]).reshape(shape), *chosen)


def flattens(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    first, last = sorted((a_dim(draw, x) % x.ndim, a_dim(draw, x) % x.ndim))
    return on_both(lambda t: t.flatten(first, last), x)


def unflattens(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x)
    n = x.shape[dim]
    inner = draw(st.sampled_from([k for k in range(1, max(n, 1) + 1) if n % k == 0]))
    return on_both(lambda t: t.unflatten(dim, (n // inner, inner)), x)


def slices(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Bounds as Python takes them: negative, beyond the end, the wrong way round."""
    dim = a_dim(draw, x)
    n = x.shape[dim]
    bound = st.none() | st.integers(-n - 2, n + 2)
    start, stop = draw(bound), draw(bound)
    key = tuple(slice(start, stop) if d == dim % x.ndim else slice(None) for d in range(x.ndim))
    return on_both(lambda t: t[key], x)


def narrows(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    dim = a_dim(draw, x)
    start = draw(st.integers(0, x.shape[dim]))
    length = draw(st.integers(0, x.shape[dim] - start))
    return on_both(lambda t: t.narrow(dim, start, length), x)


def every_kth(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """Strides that divide the dim."""
    dim = a_dim(draw, x) % x.ndim
    step = draw(st.sampled_from([k for k in range(1, 9) if x.shape[dim] % k == 0]))
    first = draw(st.integers(0, step - 1))
    key = tuple(slice(first, None, step) if d == dim else slice(None) for d in range(x.ndim))
    return on_both(lambda t: t[key], x)


def copies(draw: Draw, x: Pair, pool: list[Pair]) -> list[Pair]:
    """The same values: what a rename leaves."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: t.clone(),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.contiguous(),
        lambda t: t.clone(memory_format=torch.contiguous_format),
        lambda t: t.to(torch.int64),
        lambda t: t.to(torch.int64, copy=True),
    ]
    return on_both(draw(st.sampled_from(ways)), x)


#: For any tensor, and for those with a dim at least.
ANY = [stacks, squeezes, unsqueezes, reshapes, repacks, copies]
WITH_DIMS = [
    splits,
    splits_with_sizes,
    chunks,
    concatenates,
    interleaves,
    unbinds,
    selects,
    transposes,
    permutes,
    flattens,
    unflattens,
    slices,
    narrows,
    every_kth,
]
WITHOUT_DIMS = [operation for operation in ANY if operation is not squeezes]


@st.composite
def traces(draw: st.DrawFn) -> Traces:
    """One to three stored tensors, often of one shape, and what up to six operations make of them."""
    sizes = st.lists(st.sampled_from((0, 1, 1, 2, 3, 4, 6, 8)), max_size=4)
    shapes = [draw(sizes.filter(lambda shape: math.prod(shape) <= MOST))]
    for _ in range(draw(st.integers(0, 2))):
        shapes.append(draw(st.sampled_from(shapes) | sizes.filter(lambda shape: math.prod(shape) <= MOST)))
    pool, first = [], 0
    for k, shape in enumerate(shapes):
        pool.append(stored(f"stored.{k}", shape, first))
        first += math.prod(shape)
    sources = {f"stored.{k}": p.data.numpy() for k, p in enumerate(pool)}
    for _ in range(draw(st.integers(1, 6))):
        x = pool[-1] if draw(st.booleans()) else draw(st.sampled_from(pool))
        operations = [*ANY, *WITH_DIMS] if x.ndim else WITHOUT_DIMS
        made = draw(st.sampled_from(operations))(draw, x, pool)
        pool += [p for p in made if p.data.numel() <= MOST and p.ndim <= 5][:6]
    return Traces(sources, pool)


@examples(1000)
@given(traces())
def test_tiles_say_what_torch_does(found: Traces) -> None:
    """Also read the other way, as an export does: every element goes back to where it was stored."""
    for pair in found.made:
        found.assert_exact(pair)
        for tile in pair.symbol.tiles:
            back = invert(tile, "made")
            values = pair.data.numpy()[indices(back, "source")]
            assert np.array_equal(values, found.sources[tile.source][indices(back, "target")])


@examples(500)
@given(st.data())
def test_rows_that_begin_and_end_anywhere(data: st.DataObject) -> None:
    """A part of each dim, laid out in a row at some place, and viewed as rows of any length.

    Loops of the part then begin within a row, and what is inside of one of their steps reaches across the rows' ends.
    """
    draw, pairs = (
        data.draw,
        [stored("stored.0", data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))],
    )

    def filler(shape: Sequence[int]) -> Pair:
        first = sum(p.data.numel() for p in pairs)
        pairs.append(stored(f"stored.{len(pairs)}", shape, first))
        return pairs[-1]

    made = pairs[0]
    for dim in range(made.ndim):
        shape = list(made.shape)
        sides = []
        for _ in range(2):
            shape[dim] = draw(st.integers(0, 2))
            sides.append(filler(shape))
        (made,) = on_both(lambda a, b, c, dim=dim: torch.cat([a, b, c], dim), sides[0], made, sides[1])
    inner = draw(st.integers(1, 12))
    rows = draw(st.sampled_from(([inner], [2, inner], [3, inner])))
    before = filler([draw(st.integers(0, inner))])
    after = filler([-(made.data.numel() + before.data.numel()) % math.prod(rows)])
    parts = (before, made, after)
    (made,) = on_both(lambda *t: torch.cat([each.flatten() for each in t]).view(-1, *rows), *parts)
    sources = {f"stored.{k}": p.data.numpy() for k, p in enumerate(pairs)}
    Traces(sources, []).assert_exact(made)


# --- and cut as ranks hold it ------------------------------------------------------------------------------


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Geometry, Callable[[Any], list[Any]]]:
    """Placements of a tensor, and what torch.chunk makes of it in that order, by rank."""
    dims = st.integers(0, len(shape) - 1)
    a, b = draw(st.tuples(st.integers(1, 5), st.integers(1, 3)))
    first, second = draw(dims), draw(dims)
    kind = draw(st.sampled_from(("fsdp", "packed", "tp under fsdp", "replicated")))

    def pieces(x: Any, parts: int, dim: int) -> list[Any]:
        """torch.chunk leaves out the empty ones at the end."""
        made = [part.numpy() for part in torch.from_numpy(x).chunk(parts, dim)]
        return made + [np.take(x, [], dim)] * (parts - len(made))

    def fsdp(x: Any) -> list[Any]:
        return pieces(x, a, first)

    def packed(x: Any) -> list[Any]:
        blocks = [pieces(block, a, first) for block in pieces(x, b, first)]
        return [np.concatenate([block[rank] for block in blocks], first) for rank in range(a)]

    def tp_under_fsdp(x: Any) -> list[Any]:
        """TP has the inner axis, and cuts first."""
        by_tp = [pieces(part, a, first) for part in pieces(x, b, second)]
        return [by_tp[tp][dp] for dp in range(a) for tp in range(b)]

    def replicated(x: Any) -> list[Any]:
        return [part for part in pieces(x, a, first) for _ in range(b)]

    if kind == "fsdp":
        return Geometry((a,), ("dp",), (Cut("shard", first),), tuple(range(a))), fsdp
    if kind == "packed":
        return Geometry((a,), ("tp",), (Cut("strided", first, b),), tuple(range(a))), packed
    ranks = tuple(range(a * b))
    if kind == "replicated":
        return Geometry((a, b), ("dp", "x"), (Cut("shard", first), Cut("replicate")), ranks), replicated
    outer = Cut("strided", first, b) if first == second else Cut("shard", first)
    return Geometry((a, b), ("dp", "tp"), (outer, Cut("shard", second)), ranks), tp_under_fsdp


@examples(500)
@given(traces(), st.data())
def test_shards_of_what_is_made(found: Traces, data: st.DataObject) -> None:
    """Each rank's shard, from stored tensors that are themselves kept in pieces."""
    pair = data.draw(st.sampled_from(found.made))
    if not pair.ndim:
        return
    geometry, by_torch = data.draw(shardings(pair.shape))
    expected = by_torch(pair.data.numpy())
    pieces = {name: data.draw(partitions(array.shape)) for name, array in found.sources.items()}
    for rank, boxes in every_rank_boxes(pair.shape, geometry).items():
        parts: list[Tile] = []
        for local in boxes:
            shift = [a - b for a, b in zip(local.local_start, local.box.start, strict=True)]
            for tile in pair.symbol.tiles:
                for held in cut(tile, "target", local.box):
                    placed = translate(held, "target", shift)
                    for box in pieces[tile.source]:
                        parts += cut(placed, "source", box)
        shape = local_shape(pair.shape, boxes) or expected[rank].shape
        assert np.array_equal(fill(shape, parts, found.sources), expected[rank])
        assert all(part.numel for part in parts), "an empty read"


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that make up a shape, cut along one dim: the files of another run's ranks."""
    if not shape:
        return [Box((), ())]
    dim = draw(st.integers(0, len(shape) - 1))
    edges = [0, *sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2))), shape[dim]]
    return [
        Box(
            tuple(low if d == dim else 0 for d in range(len(shape))),
            tuple(high if d == dim else n for d, n in enumerate(shape)),
        )
        for low, high in pairwise(edges)
    ]


# --- what has no map ---------------------------------------------------------------------------------------

NO_MAP: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "add in place": lambda x: x.add_(1),
    "multiply": lambda x: 2 * x,
    "negate": lambda x: -x,
    "exp": lambda x: x.exp(),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "scale by what is not stored": lambda x: x * torch.ones(6),
    "cumsum": lambda x: x.cumsum(0),
    "clamp": lambda x: x.clamp(min=0),
    "cast down": lambda x: x.half(),
    "cast up": lambda x: x.double(),
    "cast to an integer": lambda x: x.to(torch.int32),
    "cast there and back": lambda x: x.bfloat16().float(),
    "bits as another dtype": lambda x: x.view(torch.int32),
    "read an element": lambda x: x[0, 0].item(),
    "branch on content": lambda x: bool(x.sum() > 0),
    "compare": lambda x: x == 0,
    "compare tensors": lambda x: torch.equal(x, x),
    "sort": lambda x: x.sort(),
    "topk": lambda x: x.topk(2),
    "argmax": lambda x: x.argmax(),
    "where": lambda x: torch.where(x > 0, x, 0),
    "mask": lambda x: x.masked_fill(torch.ones(4, 6, dtype=torch.bool), 0),
    "index by a tensor": lambda x: x[torch.tensor([1, 0])],
    "index by a list": lambda x: x[[1, 0]],
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "gather": lambda x: x.gather(0, torch.zeros(1, 6, dtype=torch.int64)),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "expand": lambda x: x[:1].expand(4, 6),
    "tile": lambda x: x.tile(2),
    "pad": lambda x: nn.functional.pad(x, (0, 1)),
    "triangle": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "zeros like it": lambda x: torch.zeros_like(x),
    "write into it": lambda x: x.zero_(),
    "write a part of it": lambda x: x[0].fill_(0),
    "copy into what is not stored": lambda x: torch.empty(4, 6).copy_(x),
    "concatenate with what is not stored": lambda x: torch.cat([x, torch.zeros(1, 6)]),
    "stack with what is not stored": lambda x: torch.stack([x, torch.zeros(4, 6)]),
    "concatenate dtypes": lambda x: torch.cat([x, stored_tensor("other", (4, 6), torch.float16)]),
    "stack dtypes": lambda x: torch.stack([x, stored_tensor("other", (4, 6), torch.float16)]),
    "concatenate dtypes, one of them empty": lambda x: torch.cat(
        [x.flatten(), stored_tensor("other", (0,), torch.float64)]
    ),
    "every other of an odd number": lambda x: x[:, 1:][:, ::2],
    "every third from beyond the first row": lambda x: x[:, 3::3],
    "every third of the first ones": lambda x: x[:, :3:3],
}


@pytest.mark.parametrize("what", NO_MAP)
def test_what_has_no_map_is_not_guessed(what: str) -> None:
    data = torch.arange(24.0).reshape(4, 6)
    if "dtypes" not in what:
        NO_MAP[what](data.clone())  # torch can do it
    with pytest.raises(Untraceable):
        NO_MAP[what](stored_tensor("stored", (4, 6), torch.float32))


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_reading_every_value_counts_as_having_no_map(read: Callable[[torch.Tensor], Any]) -> None:
    """torch refuses these itself; a wrong shape is something else."""
    with pytest.raises((RuntimeError, TypeError)) as caught:
        read(stored_tensor("stored", (4, 6), torch.float32))
    assert is_untraceable(caught.value)
    with pytest.raises(ValueError) as wrong:
        stored_tensor("stored", (4, 6), torch.float32).view(5, 5)
    assert not is_untraceable(wrong.value)


def test_a_view_that_would_need_too_many_tiles_is_refused() -> None:
    """Rows of 3 out of steps of 2: no loop does it, so that each step would be a tile."""
    few, many = (stored_tensor("stored", (n, 3), torch.float32) for n in (40, 20_000))
    assert len(torch.stack([few, few], 2).view(-1, 4).tiles) > 1
    with pytest.raises(Untraceable, match="cuts"):
        torch.stack([many, many], 1).transpose(0, 1).reshape(-1, 4)


#: Wrong arguments. torch looks at them after the symbol does.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "a view of another size": lambda x: x.view(5, 5),
    "a view with a size that nothing can be": lambda x: x.view(-1, 5),
    "a view with two sizes left open": lambda x: x.view(-1, -1),
    "a view of nothing with a size left open": lambda x: x[:0].view(0, -1),
    "a dim that is not there": lambda x: x.transpose(0, 2),
    "a dim from the end that is not there": lambda x: x.unsqueeze(-4),
    "a dim twice": lambda x: x.permute(0, 0),
    "too few dims": lambda x: x.permute(0),
    "an index that is not there": lambda x: x.select(0, 4),
    "an index from the end that is not there": lambda x: x.select(0, -5),
    "parts that are too small": lambda x: x.split([1, 2], 0),
    "parts that are too large": lambda x: x.split([3, 2], 0),
    "parts of no size": lambda x: x.split(0, 0),
    "rows of different lengths": lambda x: torch.cat([x, x[:, 1:]], 0),
    "different numbers of dims": lambda x: torch.cat([x, x[0]], 0),
    "a stack of different shapes": lambda x: torch.stack([x, x[1:]], 0),
    "a negative step": lambda x: torch.ops.aten.slice(x, 0, 0, 4, -1),
    "a transpose of three dims by t": lambda x: x[None].t(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_refuses_is_refused(what: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        REFUSED[what](torch.arange(24.0).reshape(4, 6))
    with pytest.raises((RuntimeError, IndexError, ValueError, Untraceable)):
        REFUSED[what](stored_tensor("stored", (4, 6), torch.float32))


# --- the operations of transformers' conversions -----------------------------------------------------------

#: Every kind of operation that the library's own conversions can be made of; quantizers bring others.
OPERATIONS = {
    name: kind
    for name, kind in vars(core_model_loading).items()
    if isinstance(kind, type) and issubclass(kind, ConversionOps) and kind is not ConversionOps
}


@dataclass(frozen=True)
class Case:
    """An operation, the stored tensors that it gets by pattern, and the patterns that it makes."""

    operation: ConversionOps
    inputs: dict[str, list[Pair]]
    targets: list[str]
    extra: dict[str, Any]
    is_bijective: bool = True
    """Whether the reverse operation gives the stored tensors back."""
    is_reversible: bool = True
    """Whether the reverse operation is known, and makes its tensors of stored ones."""
    most_tiles: int = 1
    """For each stored tensor that takes part in a made one."""

    def convert(self) -> dict[str, Pair]:
        return converted(self.operation, self.inputs, list(self.inputs), self.targets, self.extra)

    def revert(self, made: dict[str, Pair]) -> dict[str, Pair]:
        inputs: dict[str, list[Pair]] = {}
        for name, pair in made.items():  # numbered names under the pattern that they came from
            pattern = next(t for t in self.targets if fnmatchcase(name, t))
            inputs.setdefault(pattern, []).append(pair)
        return converted(self.operation.reverse_op, inputs, self.targets, list(self.inputs), self.extra)


def converted(
    operation: ConversionOps,
    inputs: dict[str, list[Pair]],
    sources: list[str],
    targets: list[str],
    extra: dict[str, Any],
) -> dict[str, Pair]:
    """The operation run on data and on symbols, as a ``WeightConverter`` runs it."""
    results = []
    for attribute in ("data", "symbol"):
        collected = {name: [getattr(p, attribute) for p in pairs] for name, pairs in inputs.items()}
        made = operation.convert(collected, source_patterns=sources, target_patterns=targets, **extra)
        results.append({n: v[0] if isinstance(v, list) else v for n, v in made.items()})
    data, symbols = results
    assert list(data) == list(symbols)
    return {name: Pair(data[name], symbols[name]) for name in data}


def several(patterns: Sequence[str], shape: Sequence[int], count: int = 1) -> dict[str, list[Pair]]:
    """``count`` stored tensors of one shape for each pattern."""
    found, first = {}, 0
    for pattern in patterns:
        found[pattern] = []
        for k in range(count):
            found[pattern].append(stored(f"{pattern} {k}", shape, first))
            first += math.prod(shape)
    return found


def sizes_of(draw: Draw, ndim: int) -> list[int]:
    return [draw(st.integers(1, 4)) for _ in range(ndim)]


def case_of_identity(draw: Draw) -> Case:
    return Case(
        OPERATIONS["_IdentityOp"](), several(["a"], sizes_of(draw, 2)), ["a"], {}, is_reversible=False
    )


def case_of_chunk(draw: Draw) -> Case:
    dim, shape = draw(st.integers(0, 1)), sizes_of(draw, 2)
    targets = ["q", "k", "v"][: draw(st.integers(1, 3))]
    shape[dim] *= len(targets)
    return Case(OPERATIONS["Chunk"](dim), several(["qkv"], shape), targets, {})


def case_of_split(draw: Draw) -> Case:
    dim, shape = draw(st.integers(0, 1)), sizes_of(draw, 2)
    parts = {name: sizes_of(draw, 1)[0] for name in ("q", "k", "v")}
    model = nn.ModuleDict({n: nn.Linear(*((4, p), (p, 4))[dim], bias=False) for n, p in parts.items()})
    shape[dim] = sum(parts.values())
    extra = {"full_layer_name": "q.weight", "model": model}
    return Case(OPERATIONS["Split"](dim), several(["qkv"], shape), [f"{n}.weight" for n in parts], extra)


def case_of_concatenate(draw: Draw) -> Case:
    dim, count = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    inputs = several(["q", "k", "v"][:count], sizes_of(draw, 2))
    return Case(OPERATIONS["Concatenate"](dim), inputs, ["qkv"], {})


def case_of_interleave(draw: Draw) -> Case:
    ndim = draw(st.integers(1, 3))
    dim, shape = draw(st.integers(0, ndim - 1)), sizes_of(draw, ndim)
    shape[dim] *= 2
    operation = OPERATIONS["Interleave"](dim, inverse=draw(st.booleans()))
    return Case(operation, several(["w"], shape), ["v"], {})


def case_of_merge(draw: Draw) -> Case:
    """Of one list, or of two whose names stay for the operation that comes next."""
    patterns = [["experts.*.w"], ["experts.*.gate", "experts.*.up"]][draw(st.integers(0, 1))]
    inputs = several(patterns, sizes_of(draw, 2), draw(st.integers(1, 5)))
    targets = ["experts.w"] if len(patterns) == 1 else patterns
    return Case(OPERATIONS["MergeModulelist"](draw(st.integers(0, 2))), inputs, targets, {})


def case_of_split_modulelist(draw: Draw) -> Case:
    patterns = [["experts.w"], ["experts.*.gate", "experts.*.up"]][draw(st.integers(0, 1))]
    targets = ["experts.*.w"] if len(patterns) == 1 else patterns
    inputs = several(patterns, sizes_of(draw, 3))
    return Case(OPERATIONS["SplitModulelist"](draw(st.integers(0, 2))), inputs, targets, {})


def case_of_transpose(draw: Draw) -> Case:
    """``check_dims`` transposes only what does not fit the model."""
    shape, check = sizes_of(draw, 2), draw(st.booleans())
    inputs = several(["w"], shape)
    extra = {"model": nn.Linear(4, 3), "full_layer_name": "weight"}
    if check:
        inputs = several(["w"], [3, 4] if draw(st.booleans()) else [4, 3])
    dims = draw(st.permutations((0, 1)))
    return Case(
        OPERATIONS["Transpose"](*dims, check_dims=check), inputs, ["v"], extra, is_bijective=not check
    )


def case_of_conv3d(draw: Draw) -> Case:
    channels, *kernel = sizes_of(draw, 4)
    inputs = several(["w"], [*sizes_of(draw, 1), channels, *kernel])
    return Case(OPERATIONS["Conv3dToLinear"](channels, tuple(kernel)), inputs, ["v"], {})


def case_of_linear_to_conv3d(draw: Draw) -> Case:
    channels, *kernel = sizes_of(draw, 4)
    inputs = several(["w"], [*sizes_of(draw, 1), channels * math.prod(kernel)])
    return Case(OPERATIONS["LinearToConv3d"](channels, tuple(kernel)), inputs, ["v"], {})


def heads_of(draw: Draw) -> tuple[Any, int]:
    """A config with a vision part, and rows that its heads take."""
    heads, half = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    part = {"num_attention_heads": heads, "hidden_size": heads * 2 * half}
    return transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**part)), heads * 2 * half


def case_of_rope(draw: Draw) -> Case:
    config, rows = heads_of(draw)
    shape = [rows, *sizes_of(draw, draw(st.integers(0, 1)))]
    operation = OPERATIONS["PermuteForRope"]("vision_config", inverse=draw(st.booleans()))
    return Case(operation, several(["q"], shape), ["q"], {"config": config})


def case_of_vision_fuse(draw: Draw) -> Case:
    config, rows = heads_of(draw)
    operation = OPERATIONS["VisionFuseAndPermuteForRope"](0, permute_layer_names=["q", "k"])
    inputs = several(["q", "k", "v"], [rows, *sizes_of(draw, 1)])
    return Case(operation, inputs, ["fused"], {"config": config})


def case_of_vision_unfuse(draw: Draw) -> Case:
    config, rows = heads_of(draw)
    operation = OPERATIONS["VisionUnfuseAndPermuteForRope"](0, permute_layer_names=["q", "k"])
    inputs = several(["fused"], [3 * rows, *sizes_of(draw, 1)])
    return Case(operation, inputs, ["q", "k", "v"], {"config": config})


def case_of_ernie_fuse(draw: Draw) -> Case:
    experts = 2 * draw(st.integers(1, 3))
    inputs = several(["experts.*.gate", "experts.*.up"], sizes_of(draw, 2), experts)
    operation = OPERATIONS["ErnieFuseAndSplitTextVisionExperts"]()
    return Case(operation, inputs, ["text", "vision"], {"config": None})


def case_of_alignment(draw: Draw) -> Case:
    """transformers before 5.4: asks for an address, which is 0 of a symbol."""
    return Case(OPERATIONS["Force16BytesAlignment"](), several(["w"], sizes_of(draw, 3)), ["v"], {})


def case_of_ernie_split(draw: Draw) -> Case:
    experts, rows, columns = sizes_of(draw, 3)
    inputs = several(["text", "vision"], [experts, 2 * rows, columns])
    operation = OPERATIONS["ErnieSplitAndDecoupleTextVisionExperts"]()
    targets = ["experts.*.gate", "experts.*.up"]
    return Case(operation, inputs, targets, {"config": None})


def case_of_dequantized_experts(draw: Draw) -> Case:
    """Of a plain tensor, which it passes on."""
    inputs = several(["experts.w"], sizes_of(draw, 3))
    return Case(OPERATIONS["Inkling2LoopDequantizeExperts"](), inputs, ["experts.v"], {}, is_bijective=False)


def case_of_message_queries(draw: Draw) -> Case:
    """The reverse picks rows by a list, which has no tiles."""
    layers, size = sizes_of(draw, 2)
    inputs = several(["queries", "kv_queries"], [2 * layers, size])
    operation = OPERATIONS["Inkling2LoopMergeMessageQueries"]()
    return Case(operation, inputs, ["merged"], {}, is_reversible=False, most_tiles=2)


def case_of_unpad(draw: Draw) -> Case:
    """The reverse pads with zeros, which no stored tensor holds."""
    padded, size = sizes_of(draw, 2)
    config = transformers.PreTrainedConfig()
    config.vocab_size, config.unpadded_vocab_size = padded, draw(st.integers(1, padded))
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    extra = {"config": config, "model": model, "full_layer_name": "weight"}
    inputs = several(["w"], [padded, size])
    return Case(OPERATIONS["Inkling2UnpadVocab"](), inputs, ["v"], extra, is_reversible=False)


CASES: dict[str, Callable[[Draw], Case]] = {
    "_IdentityOp": case_of_identity,
    "Chunk": case_of_chunk,
    "Split": case_of_split,
    "Concatenate": case_of_concatenate,
    "Interleave": case_of_interleave,
    "MergeModulelist": case_of_merge,
    "SplitModulelist": case_of_split_modulelist,
    "Transpose": case_of_transpose,
    "Conv3dToLinear": case_of_conv3d,
    "LinearToConv3d": case_of_linear_to_conv3d,
    "PermuteForRope": case_of_rope,
    "VisionFuseAndPermuteForRope": case_of_vision_fuse,
    "VisionUnfuseAndPermuteForRope": case_of_vision_unfuse,
    "ErnieFuseAndSplitTextVisionExperts": case_of_ernie_fuse,
    "ErnieSplitAndDecoupleTextVisionExperts": case_of_ernie_split,
    "Force16BytesAlignment": case_of_alignment,
    "Inkling2LoopDequantizeExperts": case_of_dequantized_experts,
    "Inkling2LoopMergeMessageQueries": case_of_message_queries,
    "Inkling2UnpadVocab": case_of_unpad,
}


def test_every_operation_has_a_case() -> None:
    """Also those that conversions of some class bring from elsewhere."""
    assert set(OPERATIONS) <= set(CASES), "new operations"
    used = {
        type(operation)
        for model_type in transformers.CONFIG_MAPPING
        for entry in get_checkpoint_conversion_mapping(model_type) or ()
        for operation in getattr(entry, "operations", ())
    }
    assert len(used) >= 5
    assert used <= set(OPERATIONS.values())


#: In 5.12 and before these of transformers itself refuse one tensor, don't undo themselves, or have no inverse.
_NARROWER = {"Transpose", "Chunk", "Concatenate", "MergeModulelist", "SplitModulelist", "PermuteForRope"}
_SINCE = pytest.mark.needs("transformers>=5.20", "its own operation takes fewer shapes")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_SINCE if name in _NARROWER else ()) for name in OPERATIONS]
)
@examples(40)
@given(data=st.data())
def test_operations_of_transformers(name: str, data: st.DataObject) -> None:
    """There and back on symbols is what it is on data, with one tile for each stored tensor that takes part."""
    case = CASES[name](data.draw)
    originals = [pair for pairs in case.inputs.values() for pair in pairs]
    sources = {tile.source: pair.data.numpy() for pair in originals for tile in pair.symbol.tiles}
    made = case.convert()
    assert_exact_and_few(made, sources, case.most_tiles)
    if not case.is_reversible:
        return
    saved = {n: Pair(pair.data, stored_tensor(n, pair.shape, pair.data.dtype)) for n, pair in made.items()}
    reverted = case.revert(saved)
    assert_exact_and_few(reverted, {n: pair.data.numpy() for n, pair in saved.items()}, case.most_tiles)
    if case.is_bijective:
        for pair, original in zip(reverted.values(), originals, strict=True):
            assert np.array_equal(pair.data, original.data)


def assert_exact_and_few(made: dict[str, Pair], sources: dict[str, Array], most: int = 1) -> None:
    for pair in made.values():
        Traces(sources, []).assert_exact(pair)
        assert max(Counter(tile.source for tile in pair.symbol.tiles).values(), default=0) <= most
