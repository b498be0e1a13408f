"""From placements to boxes: where FSDP2, HSDP, TP and EP really cut a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal

from ..errors import LayoutError
from ..gates import require
from ..objects import frozen
from .boxes import Box, LocalBox, whole

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------
# From placements to boxes: where FSDP2, HSDP, TP and EP really cut a tensor.
#
# ``cut_boxes`` is pure (shape, axis sizes, placements, coordinate → boxes): one process can plan for every rank. torch's
# ``compute_local_shape_and_global_offset`` is not used: it knows one offset per dim and is wrong for uneven FSDP+TP
# (https://github.com/pytorch/pytorch/issues/116101).
#
# The rule: TP (and EP) cut a dim first, then FSDP cuts the pieces; torch marks that with ``_StridedShard`` on the FSDP
# axis, whose split factor is the number of shards made before it. A ``_StridedShard`` that no other axis explains
# (packed q/k/v or gate/up weights under TP) cuts each of its ``split_factor`` blocks.
# Every cut follows ``torch.chunk``: ceil-sized pieces first, then possibly shorter and empty ones.

#: Names the cutting rule in manifests: a later rule must get another number.
RULE_VERSION = 1

Interval = tuple[int, int]


@frozen
class Cut:
    """How one mesh axis cuts a tensor.

    ``replicate``: every coordinate holds the same. ``shard``: torch.chunk along ``dim``.
    ``strided``: ``_StridedShard(dim, split_factor)``.
    """

    kind: Literal["replicate", "shard", "strided"]
    dim: int = 0
    split_factor: int = 1


@frozen
class Geometry:
    """How a tensor is spread over a mesh: the axes' sizes and names, a cut per axis, and the ranks in order.

    ``ranks`` are the global ranks of the mesh, row-major. A tensor that is not a DTensor lies whole on
    every rank: one replicated axis.
    """

    axis_sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    cuts: tuple[Cut, ...]
    ranks: tuple[int, ...]
    fsdp_order: bool = True
    parts: tuple[int, ...] = ()
    """Of each dim, how many parts of the whole tensor the live tensors of ranks are (:mod:`..sharding.declared`). Empty: they have the whole one's shape."""
    # Cached, because thousands of tensors share one geometry.
    _places: dict[int, int] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", {rank: place for place, rank in enumerate(self.ranks)})
        # Hash numbers only: a geometry may be sent to another process, where text hashes differ.
        cuts = tuple((len(cut.kind), cut.dim, cut.split_factor) for cut in self.cuts)
        object.__setattr__(self, "_hash", hash((self.axis_sizes, cuts, self.ranks, self.fsdp_order)))

    def __hash__(self) -> int:
        return self._hash

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The mesh coordinate of a global rank, or None if the mesh leaves it out."""
        place = self._places.get(rank)
        if place is None:
            return None
        coordinate = []
        for size in reversed(self.axis_sizes):
            place, here = divmod(place, size)
            coordinate.append(here)
        return tuple(reversed(coordinate))

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        return math.prod(
            n for n, cut in zip(self.axis_sizes, self.cuts, strict=True) if cut.kind == "replicate"
        )

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, by that of a live one."""
        return (
            tuple(n * parts for n, parts in zip(shape, self.parts, strict=True))
            if self.parts
            else tuple(shape)
        )

    def is_same_place(self, other: Geometry) -> bool:
        """Whether both put the same elements on the same ranks; names of axes do not matter."""
        own = (self.axis_sizes, self.cuts, self.ranks, self.fsdp_order)
        return own == (other.axis_sizes, other.cuts, other.ranks, other.fsdp_order)


def _chunk(length: int, parts: int, index: int) -> Interval:
    """The index-th of ``parts`` pieces as torch.chunk cuts them (the last ones may be short or empty)."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def _slice(intervals: Sequence[Interval], low: int, high: int) -> list[Interval]:
    """Positions low … high-1 of the concatenated intervals, as intervals."""
    found: list[Interval] = []
    base = 0
    for a, b in intervals:
        begin, end = max(low - base, 0), min(high - base, b - a)
        if begin < end:
            if found and found[-1][1] == a + begin:
                found[-1] = (found[-1][0], a + end)
            else:
                found.append((a + begin, a + end))
        base += b - a
    return found


def _cut_order(
    cuts: Sequence[tuple[int, Cut]], sizes: Sequence[int], fsdp_order: bool
) -> list[tuple[int, Cut, int]]:
    """The axes that cut one dim, in the order in which they really cut: (axis, cut, split factor left)."""
    order: list[tuple[int, Cut, int]] = []
    for axis, cut in reversed(cuts):
        place, factor = 0, cut.split_factor
        if cut.kind == "strided" and fsdp_order:
            done = 1
            while place < len(order) and done < factor:
                done *= sizes[order[place][0]]
                place += 1
            if done == factor:  # the axes to the right explain the factor: they cut first
                factor = 1
            else:
                place = 0
        order.insert(place, (axis, cut, factor))
    return order


def blocks_of(geometry: Geometry) -> int:
    """The largest number of blocks that the strided cuts of a geometry make of a tensor, over all dims.

    Cuts explained by the order of FSDP and TP do not count; the rest bound the number of boxes on one rank.
    """
    blocks = 1
    for dim in {cut.dim for cut in geometry.cuts if cut.kind != "replicate"}:
        order = _cut_order(cutting_axes(geometry, dim), geometry.axis_sizes, geometry.fsdp_order)
        blocks *= math.prod(factor for _, _, factor in order)
    return blocks


def _dim_intervals(
    length: int, cuts: Sequence[tuple[int, Cut]], geometry: Geometry, coordinate: Sequence[int]
) -> list[Interval]:
    """The intervals of one dim that a coordinate holds, in local order."""
    if len(cuts) == 1 and cuts[0][1].kind == "shard":  # a shortcut for the usual case
        axis = cuts[0][0]
        begin, end = _chunk(length, geometry.axis_sizes[axis], coordinate[axis])
        return [(begin, end)] if begin < end else []
    held: list[Interval] = [(0, length)] if length else []
    for axis, _cut, factor in _cut_order(cuts, geometry.axis_sizes, geometry.fsdp_order):
        size = sum(b - a for a, b in held)
        parts, index = geometry.axis_sizes[axis], coordinate[axis]
        pieces: list[Interval] = []
        for block in range(factor):
            low, high = _chunk(size, factor, block)
            begin, end = _chunk(high - low, parts, index)
            for piece in _slice(held, low + begin, low + end):
                if pieces and pieces[-1][1] == piece[0]:
                    pieces[-1] = (pieces[-1][0], piece[1])
                else:
                    pieces.append(piece)
        held = pieces
    return held


def cutting_axes(geometry: Geometry, dim: int) -> list[tuple[int, Cut]]:
    """The mesh axes that cut a dim, with their cuts."""
    return [(a, c) for a, c in enumerate(geometry.cuts) if c.kind != "replicate" and c.dim == dim]


def dim_intervals(length: int, dim: int, geometry: Geometry, coordinate: Sequence[int]) -> list[Interval]:
    """The intervals of one dim that a coordinate holds, in local order; not empty ones if the dim is cut."""
    cuts = cutting_axes(geometry, dim)
    return _dim_intervals(length, cuts, geometry, coordinate) if cuts else [(0, length)]


def cut_boxes(shape: Sequence[int], geometry: Geometry, coordinate: Sequence[int]) -> tuple[LocalBox, ...]:
    """The boxes of a tensor of global ``shape`` that the rank at ``coordinate`` holds.

    Several boxes if an uneven cut leaves a rank with separate pieces; none if its shard is empty. ``local_start`` is
    the place of each box in the local tensor (pieces are concatenated along their dim).
    """
    return _cut_boxes(tuple(shape), geometry, tuple(coordinate))


@lru_cache(maxsize=16384)  # thousands of tensors have one shape and one geometry
def _cut_boxes(
    shape: tuple[int, ...], geometry: Geometry, coordinate: tuple[int, ...]
) -> tuple[LocalBox, ...]:
    per_dim: list[list[tuple[Interval, int]]] = []
    for dim, length in enumerate(shape):
        placed, base = [], 0
        for interval in dim_intervals(length, dim, geometry, coordinate):
            placed.append((interval, base))
            base += interval[1] - interval[0]
        per_dim.append(placed)
    boxes = []
    for choice in product(*per_dim):
        box = Box(tuple(i[0] for i, _ in choice), tuple(i[1] for i, _ in choice))
        if box.numel:
            boxes.append(LocalBox(box, tuple(base for _, base in choice)))
    return tuple(boxes)


def local_shape(shape: Sequence[int], boxes: Sequence[LocalBox]) -> tuple[int, ...] | None:
    """The shape of the local tensor that these boxes make up, or None if there are none."""
    if not boxes:
        return None
    return tuple(
        max(b.local_start[d] + b.box.stop[d] - b.box.start[d] for b in boxes) for d in range(len(shape))
    )


def geometry_of(tensor: torch.Tensor, *, world_size: int, fsdp_order: bool = True) -> Geometry:
    """How a live parameter or buffer is spread. Raises :class:`LayoutError` for placements we can't describe.

    ``fsdp_order=False`` reads ``_StridedShard`` as ``distribute_tensor`` applies it (left to right) instead of as
    ``fully_shard`` does (TP first); the two differ only for uneven sizes.

    A mesh sliced from a larger one (``mesh["dp"]`` of ``("dp", "tp")``) differs between ranks. The geometry holds all
    of these slices, as replicas on a leading axis, and is the same on every rank.
    """
    from torch.distributed.tensor import DTensor

    from ..internals.torch import fsdp_placements, sibling_meshes

    if not isinstance(tensor, DTensor):
        return replicated(world_size)
    mesh, ranks = tensor.device_mesh, sibling_meshes(tensor.device_mesh)
    names = mesh.mesh_dim_names or tuple(map(_unnamed, range(mesh.ndim)))
    placements = fsdp_placements(tensor) if fsdp_order else tensor.placements
    cuts = tuple(_cut_of(p, tensor.ndim) for p in placements)
    if ranks.shape[0] == 1:
        ranks = ranks[0]
    else:
        names, cuts = ("siblings", *names), (Cut("replicate"), *cuts)
    found = Geometry(tuple(ranks.shape), tuple(names), cuts, tuple(ranks.flatten().tolist()), fsdp_order)
    if not _blocks_are_even(tensor.shape, found):
        require("packed")
    return one_of_equals(found)


def _blocks_are_even(shape: Sequence[int], geometry: Geometry) -> bool:
    """Whether cuts in blocks divide their dims without a rest. All rules for such cuts then agree."""
    for dim in {cut.dim for cut in geometry.cuts if cut.kind == "strided"}:
        done = 1
        for axis, _, factor in _cut_order(
            cutting_axes(geometry, dim), geometry.axis_sizes, geometry.fsdp_order
        ):
            parts = geometry.axis_sizes[axis]
            if factor > 1 and parts > 1 and shape[dim] % (done * factor * parts):
                return False
            done *= parts
    return True


@lru_cache(maxsize=64)
def one_of_equals(geometry: Geometry) -> Geometry:
    """One object for all equal geometries, of every look at a model: thousands of look-ups by geometry then compare by identity.

    To compare those of 4,096 ranks takes 40 us; the second save of 100,000 tensors would take 4 seconds more than the first.
    """
    return geometry


def replicated(world_size: int) -> Geometry:
    """The geometry of a plain tensor: the same on every rank."""
    return one_of_equals(Geometry((world_size,), ("world",), (Cut("replicate"),), tuple(range(world_size))))


def _cut_of(placement: object, ndim: int) -> Cut:
    from torch.distributed.tensor import Replicate, Shard

    from ..internals.torch import StridedShard

    if isinstance(placement, StridedShard):
        return Cut("strided", placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut("shard", placement.dim % ndim)
    if isinstance(placement, Replicate):
        return Cut("replicate")
    raise LayoutError(
        f"placement {placement!r} is not supported; expected Shard, _StridedShard, or Replicate"
    )


def local_boxes(
    tensor: torch.Tensor, *, name: str = "tensor", fsdp_order: bool = True
) -> tuple[LocalBox, ...]:
    """The boxes of a live tensor that this rank holds, checked against the local tensor's real shape.

    For a plain tensor: the whole of it. Local call, no communication. Raises :class:`LayoutError` if torch allocated
    another shape than the cuts give.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from ..internals.torch import local_tensor

    if not isinstance(tensor, DTensor):
        box = whole(tensor.shape)
        return (LocalBox(box, box.start),) if box.numel else ()
    geometry = geometry_of(tensor, world_size=dist.get_world_size(), fsdp_order=fsdp_order)
    coordinate = geometry.coordinate(dist.get_rank())
    boxes = cut_boxes(tensor.shape, geometry, coordinate) if coordinate is not None else ()
    check_local_shape(tuple(tensor.shape), boxes, tuple(local_tensor(tensor).shape), name, tensor.placements)
    return boxes


def check_local_shape(
    shape: tuple[int, ...], boxes: Sequence[LocalBox], found: tuple[int, ...], name: str, placements: object
) -> None:
    """Raise :class:`LayoutError` unless boxes make up exactly a local tensor of shape ``found``."""
    expected = local_shape(shape, boxes)
    held = sum(b.box.numel for b in boxes)
    if held != math.prod(found) or (expected is not None and expected != found):
        raise LayoutError(
            f"{name}: global shape {shape} with placements {placements} should give local shape "
            f"{expected or 'empty'}, but torch allocated {found}; please report this layout"
        )


def mesh_text(geometries: Iterable[Geometry]) -> str:
    """The meshes that cut tensors, for people: ``dp_shard 2 × tp 2``, ``mesh of 2 × 2`` without names; ``whole`` if nothing is cut."""
    cut = (g for g in geometries if any(c.kind != "replicate" for c in g.cuts))
    axes = {tuple(zip(g.axis_names, g.axis_sizes, strict=True)) for g in cut}
    return "; ".join(map(_axes_text, sorted(axes))) or "whole"


def _axes_text(mesh: tuple[tuple[str, int], ...]) -> str:
    if all(name == _unnamed(i) for i, (name, _) in enumerate(mesh)):
        return "mesh of " + " × ".join(str(size) for _, size in mesh)
    return " × ".join(f"{name} {size}" for name, size in mesh)


def _unnamed(axis: int) -> str:
    """The name of an axis of a mesh without names."""
    return f"axis{axis}"


# ----------------------------------------------------------------------------------------------------
# Blocks of consecutive elements: how they lie in a tensor, and which cuts fall on them. Pure.
#
# Quantized optimizer states have one scale for each block of the rank's own elements, row-major. Where every cut falls between
# blocks, these are the blocks of the whole tensor, however it is cut. So the scales are a tensor that is cut like the codes.

#: The largest number of ranks that an error suggests.
_MOST_RANKS = 64


@frozen
class BlockGrid:
    """Blocks of a tensor of global ``shape``. A unit is the least number of rows of ``dim`` that whole blocks fill."""

    shape: tuple[int, ...]
    block: int
    """Elements of a block."""
    dim: int
    """The dim that units cut. No cut may lie in a later one."""
    rows: int
    """Rows of ``dim`` in a unit."""
    unit: int
    """Elements of a unit: a multiple of ``block``."""

    def part_shape(self, elements: int, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of a tensor with one number for ``elements`` elements of this one, of a block or less.

        ``shape``: that of a local tensor, instead of the global one. Cuts between blocks cut both alike. 1 gives the
        shape itself.
        """
        whole = tuple(self.shape if shape is None else shape)
        if elements == 1:
            return whole
        return (*whole[: self.dim], whole[self.dim] // self.rows, self.unit // elements)

    def falls_on(self, geometry: Geometry) -> bool:
        """Whether every cut of a geometry lies between blocks."""
        if any(cut.kind != "replicate" and cut.dim > self.dim for cut in geometry.cuts):
            return False
        units = (*self.shape[: self.dim], self.shape[self.dim] // self.rows)
        return all(
            tuple(self._scaled(cut_boxes(units, geometry, at))) == cut_boxes(self.shape, geometry, at)
            for at in product(*map(range, geometry.axis_sizes))
        )

    def _scaled(self, boxes: Iterable[LocalBox]) -> Iterator[LocalBox]:
        """Boxes of units as boxes of elements."""
        after = self.shape[self.dim + 1 :]

        def scaled(at: Sequence[int], rest: Sequence[int]) -> tuple[int, ...]:
            return (*at[: self.dim], at[self.dim] * self.rows, *rest)

        zeros = (0,) * len(after)
        for one in boxes:
            box = Box(scaled(one.box.start, zeros), scaled(one.box.stop, after))
            yield LocalBox(box, scaled(one.local_start, zeros))


def grid_of(shape: Sequence[int], block: int) -> BlockGrid | None:
    """The blocks of a tensor, row-major; None if they don't fill it.

    The cut dim is the last one that can be: of rows that hold whole blocks, columns may be cut, too.
    """
    numel = 1
    for dim in reversed(range(len(shape))):
        row, numel = numel, numel * shape[dim]
        if numel and numel % block == 0:
            unit = math.lcm(row, block)
            return BlockGrid(tuple(shape), block, dim, unit // row, unit)
    return None


def fitting_ranks(grids: Iterable[tuple[BlockGrid, int]]) -> tuple[int, ...]:
    """Numbers of ranks, up to 64, over which each of these tensors can be cut along its dim, between blocks."""
    pairs = set(grids)

    def fits(count: int) -> bool:
        cuts = {d: Geometry((count,), ("ranks",), (Cut("shard", d),), tuple(range(count))) for _, d in pairs}
        return all(grid.falls_on(cuts[dim]) for grid, dim in pairs)

    return tuple(n for n in range(1, _MOST_RANKS + 1) if fits(n))
