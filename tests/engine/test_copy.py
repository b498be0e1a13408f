"""Transfers carried out: every rank's local memory, bit by bit, against slicing the whole tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.catalog import Catalog, Chunk, StoredFile, StoredTensor
from shardwise.dtypes import itemsize, torch_dtype
from shardwise.engine.engine import Destination, Staging, compare, execute, fill, write_back
from shardwise.engine.files import FileReader
from shardwise.errors import CheckpointError, IntegrityError, PlanError
from shardwise.planning import plan as records
from shardwise.planning.match import Matched, Recipe
from shardwise.planning.plan import IOOptions, Plan, build_plan
from shardwise.publish.write import FileFiller
from shardwise.tensors.boxes import Box, Layout, LocalBox, Wanted, whole, whole_tensor
from shardwise.tensors.placements import Cut, Geometry, cut_boxes, local_shape
from shardwise.tensors.tiles import Loop, Tile, identity
from tests.harness.open_files import open_below
from tests.harness.tiers import examples

MIB = 1024**2
_files = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copy")


# --- material --------------------------------------------------------------------------------------------


def random_tensor(code: str, shape: Sequence[int], *, bits: bool = True) -> torch.Tensor:
    """Random bits, NaNs and all; or ordinary numbers, for casts, where a NaN's payload is not defined."""
    generator = torch.Generator().manual_seed(math.prod(shape) + len(code))
    if not bits and code in ("F16", "BF16", "F32", "F64"):
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(torch_dtype(code))
    high = 2 if code == "BOOL" else 256
    raw = torch.randint(0, high, (math.prod(shape) * itemsize(code),), generator=generator, dtype=torch.uint8)
    return raw.view(torch_dtype(code)).reshape(tuple(shape))


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def grid(edges: Sequence[Sequence[int]]) -> list[Box]:
    spans = [list(pairwise(e)) for e in edges]
    boxes = [Box(tuple(a for a, _ in c), tuple(b for _, b in c)) for c in product(*spans)]
    return [b for b in boxes if b.numel]


def store(
    folder: Path, name: str, tensor: torch.Tensor, code: str, boxes: Sequence[Box], pad: int
) -> StoredTensor:
    """Chunks in two files, each behind some bytes of something else (so that none is aligned)."""
    run, chunks = next(_files), []
    content = [bytearray(b"\xee" * pad), bytearray(b"\xdd" * (2 * pad + 1))]
    for k, box in enumerate(boxes):
        path = folder / f"{run}.{k % 2}"
        chunks.append(Chunk(box, str(path), len(content[k % 2])))
        content[k % 2] += raw(box_of(tensor, box)) + b"\xaa" * pad
    for k, one in enumerate(content):
        (folder / f"{run}.{k}").write_bytes(one)
    return StoredTensor(name, code, tuple(tensor.shape), tuple(chunks))


def catalog_of(*tensors: StoredTensor) -> Catalog:
    paths = sorted({c.path for t in tensors for c in t.chunks})
    files = tuple(StoredFile(p, os.path.getsize(p)) for p in paths)
    return Catalog("safetensors", "source", {t.name: t for t in tensors}, files)


@dataclass
class Held:
    """A local tensor within larger memory, and what that memory must look like in the end."""

    wanted: Wanted
    memory: torch.Tensor
    local: torch.Tensor
    expected: torch.Tensor


def allocate(shape: Sequence[int], dtype: torch.dtype, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of ones bits, and a view of it: contiguous, transposed, or within padding on every side."""
    outer = (
        [n + 3 for n in shape] if how == "padded" else list(reversed(shape)) if how == "transposed" else shape
    )
    size = torch.empty((), dtype=dtype).element_size()
    memory = torch.full((math.prod(outer) * size,), 1, dtype=torch.uint8)
    view = memory.view(dtype).reshape(tuple(outer))
    if how == "transposed":
        return memory, view.permute(tuple(reversed(range(len(shape)))))
    if how == "padded":
        for dim, n in enumerate(shape):
            view = view.narrow(dim, 2, n)
    return memory, view


def hold(name: str, full: torch.Tensor, code: str, boxes: tuple[LocalBox, ...], how: str) -> Held:
    shape = local_shape(full.shape, boxes)
    if shape is None:
        shape = (0,) * full.ndim
    memory, local = allocate(shape, torch_dtype(code), how)
    expected_memory, expected = allocate(shape, torch_dtype(code), how)
    for b in boxes:
        place = Box(b.local_start, tuple(s + n for s, n in zip(b.local_start, b.box.sizes, strict=True)))
        box_of(expected, place).copy_(box_of(full, b.box))
    wanted = Wanted(name, code, tuple(full.shape), boxes, tuple(local.shape), tuple(local.stride()))
    return Held(wanted, memory, local, expected_memory)


def plan_for(catalog: Catalog, held: Held, tiles: Sequence[Tile]) -> Plan:
    matched = Matched({held.wanted.name: Recipe(held.wanted.name, tuple(tiles))})
    return build_plan(catalog, Layout((held.wanted,)), matched, IOOptions(staging_bytes=MIB))


def carry_out(plan: Plan, held: Held, limit_bytes: int | None) -> None:
    """Execute, and check content, memory around it, bytes read and staging."""
    staging = Staging(IOOptions(staging_bytes=MIB))
    if limit_bytes is not None:
        staging.limit_bytes = limit_bytes  # less than an option may say
    progress: list[int] = []
    with FileReader(progress.append) as reader:
        execute(plan.transfers, reader, Destination({held.wanted.name: held.local}), staging)
    assert torch.equal(held.memory, held.expected)
    assert staging.peak_bytes <= staging.limit_bytes
    assert sum(progress) == reader.bytes_read
    spans = [t for t in plan.transfers if t.reads_whole_span and t.bytes_to_read > staging.limit_bytes]
    if not spans:
        assert reader.bytes_read == plan.bytes_to_read
    else:  # a span that staging can't hold is read in parts, without the gaps between them
        gaps = sum(t.bytes_to_read - t.numel * itemsize(t.source_dtype) for t in spans)
        assert plan.bytes_to_read - gaps <= reader.bytes_read <= plan.bytes_to_read


sizes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
dtypes = st.one_of(
    st.sampled_from(["U8", "BOOL", "I64", "F8_E4M3", "BF16", "F32", "C64"]).map(lambda c: (c, c)),
    st.tuples(st.sampled_from(["F32", "BF16", "F16", "F64"]), st.sampled_from(["F32", "BF16", "F16", "F64"])),
)
hows = st.sampled_from(["contiguous", "transposed", "padded"])
# Runs count as short below this many bytes; small numbers make tensors of a few elements take every path.
min_runs = st.sampled_from([1, 8, 24, 512])
limits = st.sampled_from([None, 8, 24, 60, 200])


@st.composite
def geometries(draw: st.DrawFn, ndim: int) -> Geometry:
    axes = []
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "strided"])) if ndim else "replicate"
        dim = draw(st.integers(0, max(0, ndim - 1)))
        axes.append(
            (draw(st.integers(1, 3)), Cut(kind, dim, draw(st.integers(2, 3)) if kind == "strided" else 1))
        )
    sizes, cuts = zip(*axes, strict=True)
    return Geometry(sizes, ("a", "b")[: len(axes)], cuts, tuple(range(math.prod(sizes))), draw(st.booleans()))


@st.composite
def chunkings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    return grid(edges) if shape else [whole(())]


# --- from files into shards ------------------------------------------------------------------------------


@examples(250)
@given(shape=sizes, codes=dtypes, how=hows, min_run=min_runs, limit=limits, data=st.data())
def test_every_rank_gets_its_shard(
    folder: Path,
    shape: tuple[int, ...],
    codes: tuple[str, str],
    how: str,
    min_run: int,
    limit: int | None,
    data: st.DataObject,
) -> None:
    stored_code, wanted_code = codes
    full = random_tensor(stored_code, shape, bits=stored_code == wanted_code)
    boxes = data.draw(chunkings(shape))
    stored = store(folder, "x", full, stored_code, boxes, data.draw(st.integers(0, 3)))
    geometry = data.draw(geometries(len(shape)))
    cast = full.to(torch_dtype(wanted_code))
    total = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "MIN_RUN_BYTES", min_run)
        for rank in geometry.ranks:
            coordinate = geometry.coordinate(rank)
            assert coordinate is not None
            held = hold("w", cast, wanted_code, cut_boxes(shape, geometry, coordinate), how)
            plan = plan_for(catalog_of(stored), held, [identity("x", shape)])
            assert plan.local_nbytes == held.wanted.local_nbytes
            carry_out(plan, held, limit)
            total += held.wanted.local_nbytes
    replicas = math.prod(
        n for n, c in zip(geometry.axis_sizes, geometry.cuts, strict=True) if c.kind == "replicate"
    )
    assert total == replicas * math.prod(shape) * itemsize(wanted_code)


@examples(100)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    codes=dtypes,
    how=hows,
    min_run=min_runs,
    limit=limits,
    data=st.data(),
)
def test_transposed_and_concatenated_sources(
    folder: Path,
    rows: int,
    columns: int,
    codes: tuple[str, str],
    how: str,
    min_run: int,
    limit: int | None,
    data: st.DataObject,
) -> None:
    """w = cat([a.T, b]), and every rank's part of it, from chunked a and b."""
    stored_code, wanted_code = codes
    a = random_tensor(stored_code, (columns, rows), bits=stored_code == wanted_code)
    b = random_tensor(stored_code, (2, columns), bits=stored_code == wanted_code)
    catalog = catalog_of(
        store(folder, "a", a, stored_code, data.draw(chunkings((columns, rows))), 1),
        store(folder, "b", b, stored_code, data.draw(chunkings((2, columns))), 0),
    )
    tiles = [
        Tile("a", (Loop(rows, 1, 1, 0, 1), Loop(columns, 0, 1, 1, 1)), (0, 0), (0, 0)),
        Tile("b", (Loop(2, 0, 1, 0, 1), Loop(columns, 1, 1, 1, 1)), (0, 0), (rows, 0)),
    ]
    bytes_of = {code: torch.empty((), dtype=torch_dtype(code)).element_size() for code in codes}
    full = torch.empty(rows + 2, columns, dtype=torch_dtype(stored_code))
    full.view(torch.uint8).reshape(rows + 2, columns, bytes_of[stored_code])[:rows] = (
        a.view(torch.uint8).reshape(columns, rows, -1).transpose(0, 1)
    )
    full[rows:].copy_(b)
    geometry = data.draw(geometries(2))
    cast = full.to(torch_dtype(wanted_code))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "MIN_RUN_BYTES", min_run)
        for rank in geometry.ranks:
            coordinate = geometry.coordinate(rank)
            assert coordinate is not None
            held = hold("w", cast, wanted_code, cut_boxes(full.shape, geometry, coordinate), how)
            carry_out(plan_for(catalog, held, tiles), held, limit)


def test_narrow_columns_are_read_in_one_span(folder: Path) -> None:
    """Runs of 8 bytes: read together with what lies between, picked out in staging, at most the limit at once."""
    full = random_tensor("F32", (6000, 64))
    stored = store(folder, "x", full, "F32", [whole(full.shape)], 0)
    held = hold("w", full, "F32", (LocalBox(Box((0, 10), (6000, 12)), (0, 0)),), "contiguous")
    plan = plan_for(catalog_of(stored), held, [identity("x", full.shape)])
    (transfer,) = plan.transfers
    assert transfer.reads_whole_span
    assert transfer.bytes_to_read == plan.bytes_to_read == (5999 * 64 + 2) * 4
    assert plan.staging_bytes == MIB  # the span is larger
    carry_out(plan, held, None)


def test_long_runs_go_straight_into_place(folder: Path) -> None:
    full = random_tensor("BF16", (40, 1024))
    stored = store(folder, "x", full, "BF16", [whole(full.shape)], 3)
    held = hold("w", full, "BF16", (LocalBox(Box((0, 512), (40, 1024)), (0, 0)),), "padded")
    plan = plan_for(catalog_of(stored), held, [identity("x", full.shape)])
    assert [t.is_direct for t in plan.transfers] == [True]
    assert plan.staging_bytes == 0
    assert plan.bytes_to_read == 40 * 1024
    staging = Staging(IOOptions())
    with FileReader() as reader:
        execute(plan.transfers, reader, Destination({"w": held.local}), staging)
    assert torch.equal(held.memory, held.expected)
    assert staging.peak_bytes == 0


def test_larger_than_staging(folder: Path) -> None:
    """A cast of 3 MiB through 1 MiB."""
    full = random_tensor("F32", (768, 1024), bits=False)
    stored = store(folder, "x", full, "F32", [whole(full.shape)], 0)
    held = hold("w", full.bfloat16(), "BF16", (LocalBox(whole(full.shape), (0, 0)),), "contiguous")
    plan = plan_for(catalog_of(stored), held, [identity("x", full.shape)])
    assert plan.staging_bytes == MIB < plan.bytes_to_read
    carry_out(plan, held, None)


# --- from shards into files ------------------------------------------------------------------------------


@examples(150)
@given(shape=sizes, codes=dtypes, how=hows, min_run=min_runs, limit=limits, data=st.data())
def test_write_back(
    folder: Path,
    shape: tuple[int, ...],
    codes: tuple[str, str],
    how: str,
    min_run: int,
    limit: int | None,
    data: st.DataObject,
) -> None:
    """What every rank writes back makes up the stored file again, and nothing around it is touched."""
    stored_code, live_code = codes
    live = random_tensor(live_code, shape, bits=stored_code == live_code)
    stored = store(
        folder, "x", live.to(torch_dtype(stored_code)), stored_code, data.draw(chunkings(shape)), 2
    )
    catalog = catalog_of(*([stored] if stored.chunks else []))
    names = [Path(f.path).name for f in catalog.files]
    target = folder / f"out{next(_files)}"
    target.mkdir()
    for name in names:
        (target / name).write_bytes(b"\x77" * (folder / name).stat().st_size)
    chunks = tuple(Chunk(c.box, Path(c.path).name, c.offset_bytes) for c in stored.chunks)
    relative = Catalog("safetensors", "out", {"x": StoredTensor("x", stored_code, shape, chunks)}, ())
    geometry = data.draw(geometries(len(shape)))
    written = 0
    with pytest.MonkeyPatch.context() as patch, FileFiller(str(target)) as filler:
        patch.setattr(records, "MIN_RUN_BYTES", min_run)
        for rank in geometry.ranks:
            coordinate = geometry.coordinate(rank)
            assert coordinate is not None
            held = hold("w", live, live_code, cut_boxes(shape, geometry, coordinate), how)
            held.memory.copy_(held.expected)
            plan = plan_for(relative, held, [identity("x", shape)])
            staging = Staging(IOOptions(staging_bytes=MIB))
            staging.limit_bytes = max(16, limit) if limit else MIB
            write_back(plan.transfers, filler, Destination({"w": held.local}), staging)
            assert torch.equal(held.memory, held.expected), "the source of a write was changed"
            written += held.wanted.local_nbytes // itemsize(live_code) * itemsize(stored_code)
    assert filler.bytes_written == written
    for c in stored.chunks:
        wrote = (target / Path(c.path).name).read_bytes()
        nbytes = c.box.numel * itemsize(stored_code)
        expected = Path(c.path).read_bytes()[c.offset_bytes : c.offset_bytes + nbytes]
        assert wrote[c.offset_bytes : c.offset_bytes + nbytes] == expected
    payload = sum(c.box.numel for c in stored.chunks) * itemsize(stored_code)
    untouched = sum((target / n).read_bytes().count(b"\x77") for n in names)
    assert untouched >= sum((target / n).stat().st_size for n in names) - payload


def test_a_file_that_can_not_be_filled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.*No such file"), FileFiller(str(tmp_path)) as filler:
        filler.write_at("gone", 0, memoryview(b"1"))


# --- comparing second copies -----------------------------------------------------------------------------


def compare_copy(folder: Path, loaded: torch.Tensor, copy: torch.Tensor, stored: str, live: str) -> None:
    held = hold("w", loaded, live, (LocalBox(whole(loaded.shape), (0,) * loaded.ndim),), "padded")
    held.memory.copy_(held.expected)
    catalog = catalog_of(store(folder, "x", copy, stored, [whole(copy.shape)], 1))
    plan = plan_for(catalog, held, [identity("x", tuple(copy.shape))])
    staging = Staging(IOOptions())
    staging.limit_bytes = 40
    with FileReader() as reader:
        compare(plan.transfers, reader, Destination({"w": held.local}), staging)
    assert reader.bytes_read == plan.bytes_to_read == copy.numel() * itemsize(stored)


def test_copies_are_compared_bit_by_bit(folder: Path) -> None:
    good = torch.tensor([[1.0, float("nan"), -0.0], [0.0, float("inf"), 5.0]])
    compare_copy(folder, good, good, "F32", "F32")
    compare_copy(folder, good.bfloat16(), good, "F32", "BF16")
    for place, value in (((0, 2), 0.0), ((1, 2), 5.0000005), ((0, 1), 1.0)):
        other = good.clone()
        other[place] = value
        with pytest.raises(PlanError, match="second copy of 'w' that differs") as caught:
            compare_copy(folder, good, other, "F32", "F32")
        assert str(folder) in str(caught.value)


# --- reading and staging ---------------------------------------------------------------------------------


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"0123456789")
    with FileReader() as reader:
        buffer = bytearray(4)
        reader.read_into(str(path), 6, memoryview(buffer))
        assert buffer == b"6789"
        with pytest.raises(IntegrityError, match=r"short: ends at byte 10, but 4 bytes were expected at 8"):
            reader.read_into(str(path), 8, memoryview(buffer))
        with pytest.raises(IntegrityError, match="truncated"):
            reader.read_into(str(path), 800, memoryview(buffer))
        with pytest.raises(IntegrityError, match=r"gone: lost: no such file"):
            reader.read_into(str(tmp_path / "gone"), 0, memoryview(buffer))


def test_files_are_opened_once_and_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(64))
    with FileReader() as reader:
        for at in range(8):
            reader.read_into(str(tmp_path / "x"), at, memoryview(bytearray(8)))
        assert open_below(tmp_path) == [str(tmp_path / "x")]
        assert reader.bytes_read == 64
    assert open_below(tmp_path) == []


def test_staging_grows_up_to_its_limit() -> None:
    staging = Staging(IOOptions(staging_bytes=MIB))
    assert staging.peak_bytes == 0
    for nbytes in (1, 100, 150, 7, MIB - 1, MIB):
        assert staging.take(nbytes).numel() == nbytes
        assert staging.peak_bytes <= MIB
    with pytest.raises(AssertionError):
        staging.take(MIB + 1)


def test_a_requires_grad_parameter_is_filled_in_place(folder: Path) -> None:
    full = random_tensor("F32", (5, 7), bits=False)
    stored = store(folder, "x", full, "F32", [whole(full.shape)], 0)
    parameter = torch.nn.Parameter(torch.zeros(5, 7))
    pointer = parameter.data_ptr()
    wanted = whole_tensor("w", "F32", (5, 7))
    plan = build_plan(
        catalog_of(stored),
        Layout((wanted,)),
        Matched({"w": Recipe("w", (identity("x", (5, 7)),))}),
        IOOptions(),
    )
    with FileReader() as reader:
        execute(plan.transfers, reader, Destination({"w": parameter}), Staging(IOOptions()))
    assert torch.equal(parameter.detach(), full)
    assert parameter.requires_grad
    assert parameter.data_ptr() == pointer


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 70), (9, 7), (2, 1, 40)])
def test_casts_between_halves(
    monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, ...]
) -> None:
    """By way of fp32, in pieces: what torch's own cast gives, and nothing beside it is written."""
    monkeypatch.setattr("shardwise.engine.engine._CAST_ELEMENTS", 16)
    source = torch.randn(shape).mul_(1000).to(dtypes[0])
    if source.dim():
        source[..., :1] = math.nan
    memory = torch.full((*shape, 2), 7, dtype=dtypes[1])
    fill(memory[..., 0], source)
    assert torch.equal(memory[..., 0].contiguous().view(torch.int16), source.to(dtypes[1]).view(torch.int16))
    assert bool((memory[..., 1] == 7).all())


def test_every_nan_between_halves() -> None:
    """In one tensor: torch casts few elements and many in different ways, which give a NaN different bits on some CPUs."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for source, target in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)):
        found, given = torch.empty(every.numel(), dtype=target), every.view(source)
        fill(found, given)
        assert torch.equal(found.view(torch.int16), given.to(target).view(torch.int16))
