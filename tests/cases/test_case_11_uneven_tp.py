"""Case 11: FSDP and TP on one dim, sizes that do not divide (n=38, dp 4, tp 4).

torch's own helper knows one offset per dim and is wrong for some of these layouts, and what is stored
with its answer is wrong too. Ours must be right for all: live shards, files, and loads under another mesh.
https://github.com/pytorch/pytorch/issues/116101
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.catalog import catalog_of_safetensors
from shardwise.engine.engine import Destination, Staging, execute
from shardwise.engine.files import FileReader
from shardwise.format.slices import SliceTensor, file_name, rank_files
from shardwise.planning.match import match
from shardwise.planning.plan import IOOptions, build_plan
from shardwise.publish.write import write_slices
from shardwise.tensors.boxes import Layout, Wanted, contiguous_strides
from shardwise.tensors.placements import Cut, Geometry, cut_boxes, local_boxes, local_shape

ROWS, COLUMNS = 38, 3
FULL = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
_runs = count()


@contextmanager
def fake_mesh(rank: int, dp: int, tp: int) -> Iterator[DeviceMesh]:
    """The mesh as one rank sees it, nothing communicated; new names, because torch caches by equal meshes."""
    run = next(_runs)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dp * tp)
    try:
        yield init_device_mesh("cpu", (dp, tp), mesh_dim_names=(f"dp_{run}", f"tp_{run}"))
    finally:
        dist.destroy_process_group()


def geometry(dp: int, tp: int) -> Geometry:
    """How fully_shard marks a dim that tensor parallelism cut before."""
    first = Cut("strided", 0, tp) if tp > 1 else Cut("shard", 0)
    return Geometry((dp, tp), ("dp", "tp"), (first, Cut("shard", 0)), tuple(range(dp * tp)))


def chunk(tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    found = torch.chunk(tensor, parts)
    return found[index] if index < len(found) else tensor[:0]


def rows_of(boxes: object) -> list[int]:
    return [row for b in boxes for row in range(b.box.start[0], b.box.stop[0])]  # type: ignore[attr-defined]


def test_live_shards() -> None:
    wrong = []
    held: list[int] = []
    for rank in range(16):
        with fake_mesh(rank, 4, 4) as mesh:
            model = nn.Linear(COLUMNS, ROWS, bias=False)
            assert mesh.mesh_dim_names
            dp, tp = (mesh[name] for name in mesh.mesh_dim_names)
            model.weight = nn.Parameter(distribute_tensor(FULL, tp, [Shard(0)], src_data_rank=None))
            fully_shard(model, mesh=dp)
            tensor = model.weight
            really = [int(v) // COLUMNS for v in tensor._local_tensor[:, 0]]
            boxes = local_boxes(tensor)
            assert rows_of(boxes) == really
            assert boxes == cut_boxes(FULL.shape, geometry(4, 4), divmod(rank, 4))
            held += really
            shape, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            if really and list(range(offset[0], offset[0] + shape[0])) != really:
                wrong.append(rank)
    assert sorted(held) == list(range(ROWS))
    # What the peer says, for the record: torch 2.13 is wrong on some of these ranks. Not asserted, so
    # that the day it is mended is no failure here.
    print(f"compute_local_shape_and_global_offset is wrong on ranks {wrong}")


def test_every_small_layout() -> None:
    """n ≤ 40, dp and tp ≤ 8: against chunking twice."""
    for n, dp, tp in product(range(1, 41), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8)):
        rows = torch.arange(n)
        seen = []
        for i, j in product(range(dp), range(tp)):
            boxes = cut_boxes((n,), geometry(dp, tp), (i, j))
            assert rows_of(boxes) == chunk(chunk(rows, tp, j), dp, i).tolist(), (n, dp, tp, i, j)
            seen += rows_of(boxes)
        assert sorted(seen) == rows.tolist()


def strided_geometry(dp: int, tp: int) -> Geometry:
    """The same marks read left to right, as distribute_tensor does: a rank may hold several pieces."""
    g = geometry(dp, tp)
    return Geometry(g.axis_sizes, g.axis_names, g.cuts, g.ranks, fsdp_order=False)


def save(folder: Path, spread: Geometry) -> int:
    """Every rank's slice files; returns how many files the rank with most of them wrote."""
    stored = [SliceTensor("w", "F32", (ROWS, COLUMNS), spread)]
    per_rank = {rank: rank_files(stored, rank) for rank in spread.ranks}
    most = max(map(len, per_rank.values()))

    folder.mkdir()
    for rank, files in per_rank.items():
        for k, slices in enumerate(files):
            write_slices(
                str(folder / file_name("model", rank, k, most)),
                slices,
                ([FULL[s.held.box.slices]] for s in slices),
            )
    return most


def load(folder: Path, spread: Geometry, rank: int) -> torch.Tensor:
    coordinate = spread.coordinate(rank)
    assert coordinate is not None
    boxes = cut_boxes(FULL.shape, spread, coordinate)
    shape = local_shape(FULL.shape, boxes) or (0, COLUMNS)
    wanted = Wanted("w", "F32", (ROWS, COLUMNS), boxes, shape, contiguous_strides(shape))
    catalog = catalog_of_safetensors(folder)
    matched = match(
        catalog,
        [wanted],
        lambda names: {n: n for n in names},
        allow_unused=lambda *_: None,
        allow_missing=lambda _: None,
    )
    io = IOOptions()
    plan = build_plan(catalog, Layout((wanted,)), matched, io)
    local = torch.full(shape, -1.0)
    with FileReader() as reader:
        execute(plan.transfers, reader, Destination({"w": local}), Staging(io))
    assert math.prod(shape) * 4 == plan.bytes_to_read == reader.bytes_read
    return local


@pytest.mark.parametrize("written", [geometry(4, 4), strided_geometry(4, 4), geometry(1, 1)], ids=str)
@pytest.mark.parametrize(
    "read", [geometry(4, 4), geometry(8, 2), geometry(3, 1), strided_geometry(2, 4)], ids=str
)
def test_saved_under_one_mesh_and_loaded_under_another(
    tmp_path: Path, written: Geometry, read: Geometry
) -> None:
    save(tmp_path / "model", written)
    for rank in read.ranks:
        coordinate = read.coordinate(rank)
        assert coordinate is not None
        rows = rows_of(cut_boxes(FULL.shape, read, coordinate))
        assert torch.equal(load(tmp_path / "model", read, rank), FULL[rows])


def test_separate_pieces_go_to_separate_files(tmp_path: Path) -> None:
    assert save(tmp_path / "one", geometry(4, 4)) == 1
    assert save(tmp_path / "several", strided_geometry(4, 4)) > 1
