"""Where a tensor is cut: against torch.chunk, distribute_tensor and what fully_shard really keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.errors import LayoutError
from shardwise.tensors.boxes import LocalBox, find_overlap, whole
from shardwise.tensors.live import describe
from shardwise.tensors.placements import (
    Cut,
    Geometry,
    check_local_shape,
    cut_boxes,
    geometry_of,
    local_boxes,
    local_shape,
)
from tests.harness.rank_boxes import every_rank_boxes
from tests.harness.versions import is_open

_runs = count()


@contextmanager
def fake_mesh(rank: int, axes: dict[str, int]) -> Iterator[DeviceMesh]:
    """A mesh as one rank of many sees it, without the others: nothing is communicated.

    Axis names are new each time, because torch caches by mesh, and two ranks' meshes are equal.
    """
    run = next(_runs)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(axes.values()))
    try:
        names = tuple(f"{axis}_{run}" for axis in axes)
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def axes_of(mesh: DeviceMesh, *wanted: str) -> DeviceMesh:
    assert mesh.mesh_dim_names
    return mesh[tuple(n for n in mesh.mesh_dim_names if n.rsplit("_", 1)[0] in wanted)]


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """Every element is its own index: content tells where it comes from. Exact in float32 below 2**24."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(tuple(shape))


def chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """torch.chunk, with empty tensors for the pieces that it leaves out."""
    found = list(torch.chunk(tensor, parts, dim))
    return found + [found[0].narrow(dim, 0, 0)] * (parts - len(found))


def shard(tensor: torch.Tensor, cut: Cut, parts: int, index: int) -> torch.Tensor:
    """What one axis leaves of a tensor."""
    if cut.kind == "replicate":
        return tensor
    blocks = chunks(tensor, cut.split_factor, cut.dim)
    return torch.cat([chunks(b, parts, cut.dim)[index] for b in blocks], cut.dim)


def gathered(whole_tensor: torch.Tensor, boxes: Sequence[LocalBox]) -> torch.Tensor:
    """The local tensor that boxes describe; fails if they overlap or leave a hole in it."""
    shape = local_shape(whole_tensor.shape, boxes)
    if shape is None:
        return whole_tensor.new_empty(0)
    local = torch.full(shape, -1, dtype=whole_tensor.dtype)
    for b in boxes:
        there = tuple(slice(s, s + n) for s, n in zip(b.local_start, b.box.sizes, strict=True))
        here = tuple(slice(x, y) for x, y in zip(b.box.start, b.box.stop, strict=True))
        assert (local[there] == -1).all(), "two boxes in one place of the local tensor"
        local[there] = whole_tensor[here]
    assert (local != -1).all(), "a hole in the local tensor"
    return local


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal content; empty tensors of any shape are alike."""
    if found.numel() or expected.numel():
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


# --- pure: meshes and placements at random ---------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A geometry as fully_shard marks it, and what the axes really do, in the order in which they do it."""

    shape: tuple[int, ...]
    geometry: Geometry
    really: list[tuple[int, Cut]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Axes stand as in torch: replicas, FSDP, then expert and tensor parallel ones. The latter cut first."""
    shape = tuple(draw(st.lists(st.integers(0, 17), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    parallel: list[tuple[int, Cut]] = []
    for _ in range(draw(st.integers(0, 2))):
        kind = st.one_of(st.just(Cut("replicate")), st.builds(Cut, st.just("shard"), dims))
        parallel.append((draw(st.integers(1, 4)), draw(kind)))
    if len(parallel) == 1 and draw(st.booleans()):  # packed weights, as q/k/v in one
        parallel[0] = (parallel[0][0], Cut("strided", draw(dims), draw(st.integers(2, 3))))
    first: list[tuple[int, Cut]] = []
    fsdp = Cut("shard", draw(dims)) if draw(st.booleans()) else None
    if (not parallel and fsdp is None) or draw(st.booleans()):  # a plain tensor, or HSDP
        first.append((draw(st.integers(1, 3)), Cut("replicate")))
    really = list(enumerate((cut for _, cut in parallel), len(first) + (fsdp is not None)))
    if fsdp is not None:
        done = math.prod(n for n, cut in parallel if cut.kind != "replicate" and cut.dim == fsdp.dim)
        really.append((len(first), fsdp))
        first.append((draw(st.integers(1, 5)), Cut("strided", fsdp.dim, done) if done > 1 else fsdp))
    sizes, cuts = zip(*first, *parallel, strict=True)
    ranks = tuple(range(10, 10 + math.prod(sizes)))
    return Case(shape, Geometry(sizes, tuple(f"a{k}" for k in range(len(sizes))), cuts, ranks), really)


@settings(max_examples=300)
@given(cases())
def test_boxes_are_what_torch_chunk_leaves(case: Case) -> None:
    full = numbered(case.shape)
    for rank in case.geometry.ranks:
        coordinate = case.geometry.coordinate(rank)
        assert coordinate is not None
        held = full
        for axis, cut in case.really:
            held = shard(held, cut, case.geometry.axis_sizes[axis], coordinate[axis])
        assert_same(gathered(full, cut_boxes(case.shape, case.geometry, coordinate)), held)


@settings(max_examples=300)
@given(cases())
def test_each_replica_holds_the_tensor_exactly_once(case: Case) -> None:
    shape, geometry = case.shape, case.geometry
    replicas: dict[tuple[int, ...], list[LocalBox]] = {}
    for rank, boxes in every_rank_boxes(shape, geometry).items():
        coordinate = geometry.coordinate(rank)
        assert coordinate is not None
        copy = tuple(i for i, c in zip(coordinate, geometry.cuts, strict=True) if c.kind == "replicate")
        replicas.setdefault(copy, []).extend(boxes)
    for held in replicas.values():
        assert find_overlap(b.box for b in held) is None
        assert sum(b.box.numel for b in held) == math.prod(shape)
        assert all(whole(shape).contains(b.box) for b in held)


@given(cases())
def test_coordinates_count_row_major(case: Case) -> None:
    geometry = case.geometry
    every = list(product(*(range(n) for n in geometry.axis_sizes)))
    assert [geometry.coordinate(r) for r in geometry.ranks] == every
    assert geometry.coordinate(9) is None


def test_a_mesh_of_any_ranks() -> None:
    geometry = Geometry((2, 2), ("dp", "tp"), (Cut("shard", 0), Cut("shard", 1)), (7, 3, 5, 1))
    found = every_rank_boxes((4, 6), geometry)
    assert {rank: boxes[0].box.start for rank, boxes in found.items()} == {
        7: (0, 0),
        3: (0, 3),
        5: (2, 0),
        1: (2, 3),
    }
    assert geometry.coordinate(5) == (1, 0)
    assert geometry.coordinate(0) is None


def test_zero_dims_are_whole_everywhere() -> None:
    geometry = Geometry((3,), ("dp",), (Cut("replicate"),), (0, 1, 2))
    assert every_rank_boxes((), geometry) == {r: (LocalBox(whole(()), ()),) for r in range(3)}


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    boxes = (LocalBox(whole((4, 3)), (0, 0)),)
    check_local_shape((4, 3), boxes, (4, 3), "w", "none")
    for found in ((3, 4), (4, 2), (12,), (0,)):
        with pytest.raises(LayoutError, match=r"w: global shape \(4, 3\).*torch allocated"):
            check_local_shape((4, 3), boxes, found, "w", "none")
    check_local_shape((4, 3), (), (0, 3), "w", "none")
    with pytest.raises(LayoutError, match="empty"):
        check_local_shape((4, 3), (), (1, 3), "w", "none")


# --- against distribute_tensor ---------------------------------------------------------------------------

placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(lambda d, k: _StridedShard(d, split_factor=k), st.integers(0, 1), st.integers(2, 4)),
)


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 21), st.integers(1, 9)),
    axes=st.lists(st.tuples(st.integers(1, 4), placements), min_size=1, max_size=3),
    data=st.data(),
)
@example(shape=(38, 3), axes=[(4, _StridedShard(0, split_factor=4)), (4, Shard(0))], data=None)
def test_distribute_tensor(
    shape: tuple[int, int], axes: list[tuple[int, Placement]], data: st.DataObject | None
) -> None:
    sizes = {f"a{k}": n for k, (n, _) in enumerate(axes)}
    rank = data.draw(st.integers(0, math.prod(sizes.values()) - 1)) if data else 7
    full = numbered(shape)
    with fake_mesh(rank, sizes) as mesh:
        tensor = distribute_tensor(full, mesh, [p for _, p in axes], src_data_rank=None)
        assert tensor.device_mesh is mesh
        if not is_open("packed") and not _blocks_are_even(shape, axes):
            with pytest.raises(LayoutError, match=r"packed weights.*needs torch 2\.10 or newer"):
                local_boxes(tensor, fsdp_order=False)
            return
        assert_same(tensor._local_tensor, gathered(full, local_boxes(tensor, fsdp_order=False)))


def _blocks_are_even(shape: tuple[int, int], axes: list[tuple[int, Placement]]) -> bool:
    """Whether each cut in blocks divides what the cuts before it have left, and each block."""
    parts = [1, 1]
    for size, placement in axes:
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", 1)
        if factor > 1 and size > 1 and shape[placement.dim] % (parts[placement.dim] * factor * size):
            return False
        parts[placement.dim] *= size
    return True


def test_uneven_packed_weights_are_refused_where_torch_cuts_them_otherwise() -> None:
    """Even ones are described with any torch."""
    for rows in (24, 26):
        with fake_mesh(1, {"tp": 4}) as mesh:
            packed = distribute_tensor(
                numbered((3 * rows, 2)), mesh, [_StridedShard(0, split_factor=3)], src_data_rank=None
            )
            if rows == 24 or is_open("packed"):
                boxes = local_boxes(packed)
                assert_same(packed._local_tensor, gathered(numbered((3 * rows, 2)), boxes))
                assert len(boxes) == 3
            else:
                with pytest.raises(LayoutError, match=r"packed weights.*needs torch 2\.10 or newer"):
                    local_boxes(packed)


def test_placements_that_are_not_known_are_refused() -> None:
    with fake_mesh(0, {"dp": 2}) as mesh:
        tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with pytest.raises(LayoutError, match=r"Partial.*not supported"):
            local_boxes(tensor)


def test_plain_tensors_lie_whole_on_every_rank() -> None:
    full = numbered((3, 4))
    assert local_boxes(full) == (LocalBox(whole((3, 4)), (0, 0)),)
    assert local_boxes(torch.empty(0, 4)) == ()
    assert geometry_of(full, world_size=3).cuts == (Cut("replicate"),)
    assert geometry_of(full, world_size=3).ranks == (0, 1, 2)


# --- against what fully_shard really keeps ---------------------------------------------------------------


class Net(nn.Module):
    """An uneven vocabulary, both kinds of tensor parallelism, a norm, a scalar-like bias, packed q/k/v."""

    def __init__(self, vocabulary: int, hidden: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.norm = nn.LayerNorm(hidden)
        even = -(-width // 4) * 4  # torch 2.9: other packed weights are refused
        self.qkv = nn.Linear(hidden, 3 * (width if is_open("packed") else even), bias=False)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)
        self.register_buffer("scale", torch.ones(()))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(numbered(p.shape))


def parallelize(model: Net, mesh: DeviceMesh) -> None:
    """Tensor parallelism on a mesh of one axis; every rank keeps its part of its own copy."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        },
        src_data_rank=None,
    )
    packed = distribute_tensor(
        model.qkv.weight.data, mesh, [_StridedShard(0, split_factor=3)], src_data_rank=None
    )
    model.qkv.weight = nn.Parameter(packed)


def assert_model_is_as_described(model: nn.Module, originals: dict[str, torch.Tensor], rank: int) -> None:
    """The layout of a live model against the content of its local tensors."""
    found = {w.name: w for w in describe(model).layout().wanted}
    others = {w.name: w for w in describe(model).layout(rank=rank).wanted}
    assert set(found) == set(originals)
    for name, full in originals.items():
        tensor = model.get_parameter(name) if name != "scale" else model.get_buffer(name)
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        assert_same(local.detach(), gathered(full, found[name].boxes))
        assert found[name].local_shape == tuple(local.shape)
        assert others[name].boxes == found[name].boxes


MESHES = [
    pytest.param({"dp": 8}, (50, 4, 6), id="fsdp"),
    pytest.param({"dp": 8}, (3, 2, 1), id="fsdp-fewer-rows-than-ranks"),
    pytest.param({"rep": 2, "dp": 4}, (50, 6, 10), id="hsdp"),
    pytest.param({"dp": 4, "tp": 2}, (51, 6, 19), id="fsdp-tp"),
    pytest.param({"dp": 2, "tp": 4}, (37, 5, 38), id="fsdp-tp-wide"),
    pytest.param({"dp": 4, "tp": 4}, (38, 5, 38), id="fsdp-tp-4x4"),
    pytest.param({"rep": 2, "dp": 2, "tp": 2}, (51, 6, 19), id="hsdp-tp"),
    pytest.param({"dp": 1, "tp": 4}, (38, 5, 38), id="tp-alone"),
    pytest.param({"dp": 4, "tp": 1}, (38, 5, 38), id="tp-of-one"),
]


@pytest.mark.parametrize(("axes", "sizes"), MESHES)
def test_fully_shard(axes: dict[str, int], sizes: tuple[int, int, int]) -> None:
    originals = {n: t.detach().clone() for n, t in Net(*sizes).state_dict().items()}
    plans: list[dict[int, tuple[LocalBox, ...]]] = []
    for rank in range(math.prod(axes.values())):
        with fake_mesh(rank, axes) as mesh:
            model = Net(*sizes)
            if "tp" in axes:
                parallelize(model, axes_of(mesh, "tp"))
            fully_shard(model, mesh=axes_of(mesh, "rep", "dp"))
            assert_model_is_as_described(model, originals, rank)
            geometry = geometry_of(model.up.weight, world_size=math.prod(axes.values()))
            plans.append(every_rank_boxes(model.up.weight.shape, geometry))
            assert plans[-1][rank] == local_boxes(model.up.weight)
    assert all(plan == plans[0] for plan in plans), "ranks disagree on who holds what"


@pytest.mark.parametrize(
    ("axes", "tp"),
    [
        ({"dp": 8}, None),
        ({"dp": 4, "tp": 2}, Shard(1)),
        ({"dp": 4, "tp": 2}, Shard(0)),
        ({"rep": 2, "dp": 4}, None),
    ],
)
def test_fully_shard_along_dim_1(axes: dict[str, int], tp: Placement | None) -> None:
    full = numbered((7, 16))
    for rank in range(8):
        with fake_mesh(rank, axes) as mesh:
            model = nn.Linear(16, 7, bias=False)
            model.weight = nn.Parameter(full.clone())
            if tp is not None:
                model.weight = nn.Parameter(
                    distribute_tensor(full, axes_of(mesh, "tp"), [tp], src_data_rank=None)
                )
            fully_shard(model, mesh=axes_of(mesh, "rep", "dp"), shard_placement_fn=lambda _: Shard(1))
            assert_model_is_as_described(model, {"weight": full}, rank)


@pytest.mark.parametrize("rows", [5, 29, 32, 38])
@pytest.mark.parametrize(
    "parallel",
    [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate())],
    ids=str,
)
def test_fully_shard_over_experts_and_tensor_parallel(
    rows: int, parallel: tuple[Placement, Placement]
) -> None:
    full = numbered((rows, 6))
    for rank in range(8):
        with fake_mesh(rank, {"dp": 2, "ep": 2, "tp": 2}) as mesh:
            model = nn.Linear(6, rows, bias=False)
            model.weight = nn.Parameter(
                distribute_tensor(full, axes_of(mesh, "ep", "tp"), parallel, src_data_rank=None)
            )
            fully_shard(model, mesh=axes_of(mesh, "dp"))
            assert_model_is_as_described(model, {"weight": full}, rank)


def test_one_process_can_describe_every_rank() -> None:
    """Meta parameters on rank 0 alone: what it says of rank 5 is what rank 5 allocates."""
    axes, said = {"dp": 4, "tp": 2}, {}
    for rank in range(8):
        with fake_mesh(rank, axes) as mesh:
            with torch.device("meta"):
                model = nn.Linear(3, 19)
            parallelize_module(model, axes_of(mesh, "tp"), ColwiseParallel(), src_data_rank=None)
            fully_shard(model, mesh=axes_of(mesh, "dp"))
            if rank == 0:
                said = {r: describe(model).layout(rank=r) for r in range(8)}
            for here, there in zip(describe(model).layout().wanted, said[rank].wanted, strict=True):
                assert here.boxes == there.boxes
                assert here.local_nbytes == there.local_nbytes
