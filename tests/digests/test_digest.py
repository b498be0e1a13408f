"""The digest: additive over any boxes, sensitive to every change, and pinned, because manifests store it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise import digests as module
from shardwise.digests import (
    finish,
    format_digest,
    local_boxes,
    partial_sum,
    partial_sum_bytes,
    partial_sums,
    tensor_digest,
)
from shardwise.dtypes import ITEMSIZE, code_of, torch_dtype
from shardwise.errors import FormatError
from shardwise.tensors.placements import Cut, Geometry, cut_boxes

pytestmark = pytest.mark.filterwarnings("error")

CODES = sorted(ITEMSIZE)
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


# --- a second implementation, from the definition --------------------------------------------------------


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def random_odd(stream: int, n: int) -> int:
    return mix((mix((stream + 1) * GAMMA & MASK) + (n + 1) * GAMMA) & MASK) | 1


def weight(index: Sequence[int]) -> int:
    w = 1
    for dim, k in enumerate(index):
        w = w * random_odd(2 * dim, k % 4096) * random_odd(2 * dim + 1, k // 4096) & MASK
    return w


def reference_sum(raw: bytes, code: str, sizes: Sequence[int], start: Sequence[int]) -> int:
    lane_bytes = min(ITEMSIZE[code], 4)
    lane_sizes = [*sizes, 2] if ITEMSIZE[code] == 8 else list(sizes)
    lane_start = [*start, 0] if ITEMSIZE[code] == 8 else list(start)
    total = 0
    for at, index in enumerate(np.ndindex(*lane_sizes)):
        bits = int.from_bytes(raw[at * lane_bytes : (at + 1) * lane_bytes], "little")
        total += weight([a + b for a, b in zip(lane_start, index, strict=True)]) * (bits + 1)
    return total & MASK


def reference_finish(total: int, code: str, shape: Sequence[int]) -> int:
    h = 0
    for word in (total, len(code), int.from_bytes(code.encode(), "little"), len(shape), *shape):
        h = mix(((h ^ word) + GAMMA) & MASK)
    return h


# --- material --------------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def from_raw(raw: np.ndarray[Any, Any], code: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(raw.copy()).view(torch_dtype(code)).reshape(tuple(shape))


def random_tensor(code: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Random bits: NaNs, infinities and negative zeros of every dtype included."""
    rng = np.random.default_rng(seed)
    count = math.prod(shape)
    high = 2 if code == "BOOL" else 256
    return from_raw(rng.integers(0, high, count * ITEMSIZE[code], dtype=np.uint8), code, shape)


def origin(tensor: torch.Tensor) -> tuple[int, ...]:
    return (0,) * tensor.ndim


codes = st.sampled_from(CODES)
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts that otherwise happen in tensors of many thousands of elements."""
    monkeypatch.setattr(module._HostSum, "block", 6)
    monkeypatch.setattr(module._DeviceSum, "block", 6)
    monkeypatch.setattr(module, "_COPY_BYTES", 24)
    monkeypatch.setattr(module, "_SHORT_ROW", 3)
    monkeypatch.setattr(module, "_SMALL", 0)


# --- against the definition ------------------------------------------------------------------------------


@given(code=codes, shape=shapes, seed=seeds, data=st.data())
def test_agrees_with_the_reference(code: str, shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    tensor = random_tensor(code, shape, seed)
    start = data.draw(st.tuples(*(st.integers(0, 10_000) | st.integers(0, 2**40) for _ in shape)))
    expected = reference_sum(raw_bytes(tensor), code, shape, start)
    assert partial_sum(tensor, start) == expected
    assert partial_sum_bytes(memoryview(raw_bytes(tensor)), code, shape, start) == expected
    assert finish(expected, code, shape) == reference_finish(expected, code, shape)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("code", CODES)
def test_agrees_with_the_reference_across_blocks(code: str) -> None:
    shapes: list[tuple[int, ...]] = [
        (),
        (1,),
        (5,),
        (13,),
        (4, 9),
        (9, 2),
        (3, 1, 7),
        (2, 2, 2, 2, 2),
        (2, 14, 3),
    ]
    for shape in shapes:
        tensor = random_tensor(code, shape)
        start = tuple(4090 + dim for dim in range(len(shape)))
        expected = reference_sum(raw_bytes(tensor), code, shape, start)
        assert partial_sum(tensor, start) == expected, shape
        assert device_sum(tensor, start) == expected, shape


def device_sum(tensor: torch.Tensor, start: Sequence[int]) -> int:
    """What an accelerator computes, on the CPU."""
    code = code_of(tensor.dtype)
    lane_bytes = min(ITEMSIZE[code], 4)
    where = module._DeviceSum(torch.device("cpu"), lane_bytes)
    lanes = torch.from_numpy(module._lanes(tensor, code).view({1: "u1", 2: "i2", 4: "i4"}[lane_bytes]))
    spans = [module._Span(dim, at, tensor.shape[dim]) for dim, at in enumerate(start)]
    module._add_lanes(lanes, module._with_lanes(spans, code), where)
    return int(where.total) & MASK


@pytest.mark.parametrize(
    "shape",
    [
        (200_000,),
        (70_000, 3),
        (3, 70_001),
        (3, 40, 700),
        (2, 3, 40_000),
        (66_000, 1),
        (1, 66_000),
        (2, 66_000, 2),
        (100, 700),
        (130, 4_500),
    ],
)
def test_large_shapes_agree_with_whole_weights(shape: tuple[int, ...]) -> None:
    tensor = random_tensor("BF16", shape)
    weights = np.ones(1, dtype=np.uint64)
    for dim, size in enumerate(shape):
        low = np.array([random_odd(2 * dim, n) for n in range(min(size, 4096))], dtype=np.uint64)
        high = np.array([random_odd(2 * dim + 1, n) for n in range((size - 1) // 4096 + 1)], dtype=np.uint64)
        table = np.multiply.outer(high, low).reshape(-1)[:size]
        weights = np.multiply.outer(weights, table).reshape(-1)
    bits = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1).astype(np.uint64)
    expected = int((weights * (bits + np.uint64(1))).sum())
    assert partial_sum(tensor, origin(tensor)) == expected
    assert device_sum(tensor, origin(tensor)) == expected


PINNED = [
    ("BF16", (3, 5), "6354b1592cd8b16e"),
    ("F32", (5000,), "197066d93e789ccd"),
    ("I64", (2, 3), "53b24c8af5c12509"),
    ("BOOL", (), "ece6a5678f4c2352"),
    ("C64", (4, 1, 2), "1a3e4a1a68492149"),
    ("F8_E4M3", (0, 7), "742878d74d93a97b"),
    ("U8", (2, 40_000, 3), "5ffaf1d8bfcca0ee"),
]


@pytest.mark.parametrize(("code", "shape", "pinned"), PINNED)
def test_stored_digests_stay_valid(code: str, shape: tuple[int, ...], pinned: str) -> None:
    """Manifests hold these numbers: if this fails, change the code back, not the constants."""
    count = math.prod(shape) * ITEMSIZE[code]
    raw = (np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(13)).astype(np.uint8)
    if code == "BOOL":
        raw &= np.uint8(1)
    digest = tensor_digest(from_raw(raw, code, shape))
    assert format_digest(digest) == pinned


# --- sharding --------------------------------------------------------------------------------------------


def random_boxes(data: st.DataObject, start: list[int], stop: list[int], cuts: int) -> Iterator[list[slice]]:
    """The box cut at random ``cuts`` deep along random dims: uneven, not a grid, often empty on one side."""
    if cuts == 0 or not start:
        yield [slice(a, b) for a, b in zip(start, stop, strict=True)]
        return
    dim = data.draw(st.integers(0, len(start) - 1))
    at = data.draw(st.integers(start[dim], stop[dim]))
    yield from random_boxes(data, start, [*stop[:dim], at, *stop[dim + 1 :]], cuts - 1)
    yield from random_boxes(data, [*start[:dim], at, *start[dim + 1 :]], stop, cuts - 1)


@given(code=codes, shape=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=seeds, data=st.data())
def test_shards_add_up(code: str, shape: list[int], seed: int, data: st.DataObject) -> None:
    tensor = random_tensor(code, shape, seed)
    total = total_bytes = 0
    for box in random_boxes(data, [0] * len(shape), list(shape), cuts=3):
        start = [cut.start for cut in box]
        shard = tensor[tuple(box)]
        total += partial_sum(shard, start)
        total_bytes += partial_sum_bytes(np.frombuffer(raw_bytes(shard), np.uint8), code, shard.shape, start)
    assert total & MASK == total_bytes & MASK == partial_sum(tensor, origin(tensor))
    assert finish(total, code, shape) == tensor_digest(tensor)


@pytest.mark.parametrize(
    ("shape", "dim"), [((300_001,), 0), ((5, 70_003), 1), ((300, 700), 0), ((70_000, 3), 0)]
)
@pytest.mark.parametrize("shards", [3, 7])
def test_large_uneven_shards_add_up(shape: tuple[int, ...], dim: int, shards: int) -> None:
    tensor = random_tensor("F16", shape)
    total = first = 0
    for shard in tensor.tensor_split(shards, dim):
        total += partial_sum(shard, [first if d == dim else 0 for d in range(len(shape))])
        first += shard.shape[dim]
    assert finish(total, "F16", shape) == tensor_digest(tensor)


def test_row_blocks_of_a_stored_box_add_up() -> None:
    tensor = random_tensor("I64", (11, 6, 5))
    whole = partial_sum_bytes(memoryview(raw_bytes(tensor)), "I64", (11, 6, 5), (100, 7, 0))
    parts = 0
    for first in range(0, 11, 4):
        rows = tensor[first : first + 4]
        view = memoryview(raw_bytes(rows))
        parts += partial_sum_bytes(view, "I64", rows.shape, (100 + first, 7, 0))
    assert parts & MASK == whole


def test_totals_reduced_as_signed_integers_finish_alike() -> None:
    total = partial_sum(random_tensor("F32", (9,)), (0,))
    assert (
        finish(total - 2**64, "F32", (9,)) == finish(total, "F32", (9,)) == finish(total + 2**65, "F32", (9,))
    )


# --- sensitivity -----------------------------------------------------------------------------------------


def as_rows(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Raw bytes, one row per element."""
    return np.frombuffer(raw_bytes(tensor), np.uint8).reshape(tensor.numel(), -1)


@given(code=codes, shape=shapes, seed=seeds, data=st.data())
def test_any_single_bit_counts(code: str, shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    raw = as_rows(random_tensor(code, shape, seed)).copy()
    before = tensor_digest(from_raw(raw.reshape(-1), code, shape))
    element = data.draw(st.integers(0, raw.shape[0] - 1))
    byte = data.draw(st.integers(0, raw.shape[1] - 1))
    bit = 0 if code == "BOOL" else data.draw(st.integers(0, 7))
    raw[element, byte] ^= 1 << bit
    assert tensor_digest(from_raw(raw.reshape(-1), code, shape)) != before


@given(code=codes, seed=seeds, data=st.data())
def test_swapped_elements_count(code: str, seed: int, data: st.DataObject) -> None:
    shape = (5, 3, 4)
    raw = as_rows(random_tensor(code, shape, seed)).copy()
    before = tensor_digest(from_raw(raw.reshape(-1), code, shape))
    a, b = data.draw(st.integers(0, 59)), data.draw(st.integers(0, 59))
    assume((raw[a] != raw[b]).any())
    raw[[a, b]] = raw[[b, a]]
    assert tensor_digest(from_raw(raw.reshape(-1), code, shape)) != before


SIGNED = ["F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "C64"]


@pytest.mark.parametrize("code", SIGNED)
@given(seed=seeds, data=st.data())
@settings(max_examples=30)
def test_flipped_signs_count(code: str, seed: int, data: st.DataObject) -> None:
    shape = (6, 8)
    raw = as_rows(random_tensor(code, shape, seed))
    before = tensor_digest(from_raw(raw.reshape(-1).copy(), code, shape))
    pair = st.lists(st.integers(0, 47), min_size=2, max_size=2, unique=True)
    chosen = [[data.draw(st.integers(0, 47))], data.draw(pair), list(range(48))]
    for elements in chosen:
        flipped = raw.copy()
        flipped[elements, -1] ^= 0x80
        assert tensor_digest(from_raw(flipped.reshape(-1), code, shape)) != before


@pytest.mark.parametrize("code", SIGNED)
@pytest.mark.parametrize(
    "shape", [(64,), (4096,), (1024, 1024), (4096, 64), (64, 4, 16, 32), (2, 2, 2, 2, 2, 2, 2, 2)]
)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_flipped_signs_of_a_constant_tensor_count(code: str, shape: tuple[int, ...], value: float) -> None:
    """Equal differences times weights of even sums: the sum's low bits alone would miss it."""
    tensor = torch.full(shape, value).to(torch_dtype(code))
    raw = as_rows(tensor).copy()
    raw[:, -1] ^= 0x80
    assert tensor_digest(from_raw(raw.reshape(-1), code, shape)) != tensor_digest(tensor)


@pytest.mark.parametrize("code", CODES)
def test_rearranged_or_lost_content_counts(code: str) -> None:
    tensor = random_tensor(code, (12, 12))
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEMSIZE[code]])
    swapped_rows = bits.clone()
    swapped_rows[[2, 7]] = bits[[7, 2]]
    swapped_columns = bits.clone()
    swapped_columns[:, [0, 11]] = bits[:, [11, 0]]
    zeroed_row = bits.clone()
    zeroed_row[3] = 0
    variants = [
        bits,
        swapped_rows,
        swapped_columns,
        zeroed_row,
        torch.zeros_like(bits),
        bits.T,
        bits.roll(1, 0),
        bits.roll(1, 1),
        bits.flip(0),
        bits.flip(1),
        bits.reshape(6, 2, 12).transpose(0, 1).reshape(12, 12),
    ]
    digests = {tensor_digest(v.contiguous().view(tensor.dtype)) for v in variants}
    assert len(digests) == len(variants)


def test_dims_of_a_long_vector_do_not_repeat() -> None:
    """The tables of a long dim are products; blocks of 4096 must not be interchangeable."""
    tensor = random_tensor("F32", (3 * 4096,))
    blocks = tensor.view(torch.int32).reshape(3, 4096)
    for variant in (blocks[[1, 0, 2]], blocks.roll(1, 1), blocks[[2, 0, 1]]):
        assert tensor_digest(variant.reshape(-1).view(torch.float32)) != tensor_digest(tensor)


def test_dtype_and_shape_distinguish() -> None:
    raw = np.arange(48, dtype=np.uint8)
    digests = [
        tensor_digest(from_raw(raw, code, (48 // ITEMSIZE[code],))) for code in CODES if code != "BOOL"
    ]
    digests += [tensor_digest(from_raw(raw, "F64", s)) for s in [(2, 3), (3, 2), (6, 1), (1, 6), (1, 2, 3)]]
    digests += [tensor_digest(from_raw(raw, "F32", s)) for s in [(6, 2), (2, 6)]]
    digests += [tensor_digest(torch.zeros(s)) for s in [(), (0,), (1,), (2,), (1, 1), (0, 2), (2, 0)]]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("a", "b"),
    [(0x0000, 0x8000), (0x7FC0, 0xFFC0), (0x7FC0, 0x7FC1), (0x7F80, 0x7FC0)],
    ids=["signed zeros", "signed nans", "nan payloads", "inf and nan"],
)
def test_special_values_count_as_stored(a: int, b: int) -> None:
    one, other, again = (torch.from_numpy(np.array([v], np.uint16)).view(torch.bfloat16) for v in (a, b, a))
    assert tensor_digest(one) != tensor_digest(other)
    assert tensor_digest(one) == tensor_digest(again)
    assert tensor_digest(one.float()) != tensor_digest(other.float())


# --- kinds of tensors ------------------------------------------------------------------------------------


def views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a [6, 8, 10] tensor that are not contiguous, or contiguous but odd."""
    return {
        "transposed": tensor.T if tensor.ndim == 2 else tensor.permute(2, 0, 1),
        "strided": tensor[:, ::2, 1::3],
        "rows": tensor[1:5:2],
        "inner": tensor[1:5, 2:7, 3:9],
        "column": tensor[:, :, 4],
        "expanded": tensor[:, :1, :].expand(6, 5, 10),
        "expanded scalar": tensor[0, 0, 0].expand(3, 4),
        "offset": tensor[5],
        "flat": tensor.flatten()[3:],
        "scalar": tensor[1, 2, 3],
        "empty": tensor[:, 3:3],
        "single": tensor[:1, 2, 5],
        "expanded single": tensor[0, 0, 0].expand(1, 1),
        "unit dims": tensor[:, None, :, 0, None],
    }


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("blocks", ["usual", "small"])
def test_strides_do_not_matter(code: str, blocks: str, request: pytest.FixtureRequest) -> None:
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    for name, view in views(random_tensor(code, (6, 8, 10))).items():
        start = tuple(range(5, 5 + view.ndim))
        expected = reference_sum(raw_bytes(view), code, view.shape, start)
        assert partial_sum(view, start) == partial_sum(view.contiguous(), start) == expected, name


def test_lazily_conjugated_or_negated_tensors_count_by_value() -> None:
    tensor = random_tensor("C64", (5, 4))
    conjugate = tensor.conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    assert tensor_digest(conjugate) == tensor_digest(conjugate.resolve_conj()) != tensor_digest(tensor)
    assert tensor_digest(conjugate.imag) == tensor_digest(-tensor.imag)


def test_parameters_and_inference_tensors() -> None:
    plain = torch.randn(4, 3)
    assert tensor_digest(torch.nn.Parameter(plain)) == tensor_digest(plain)
    with torch.inference_mode():
        assert tensor_digest(plain * 1) == tensor_digest(plain)


def test_input_is_left_alone() -> None:
    tensor = random_tensor("BF16", (50, 60))
    before = raw_bytes(tensor)
    partial_sum(tensor, (3, 4))
    assert raw_bytes(tensor) == before


@pytest.mark.parametrize("code", CODES)
def test_empty_boxes_add_nothing(code: str) -> None:
    for shape in [(0,), (0, 5), (3, 0, 2)]:
        tensor = torch.empty(shape, dtype=torch_dtype(code))
        assert partial_sum(tensor, (9,) * len(shape)) == 0
        assert partial_sum_bytes(memoryview(b""), code, shape, (9,) * len(shape)) == 0
        assert tensor_digest(tensor) == finish(0, code, shape)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_bytes_of_any_alignment(code: str, offset: int) -> None:
    tensor = random_tensor(code, (70, 9))
    raw = b"\xff" * offset + raw_bytes(tensor) + b"\xff"
    view = memoryview(raw)[offset:-1]
    expected = partial_sum(tensor, (1, 2))
    assert partial_sum_bytes(view, code, (70, 9), (1, 2)) == expected
    assert partial_sum_bytes(np.frombuffer(view, np.uint8), code, (70, 9), (1, 2)) == expected


# --- errors and text -------------------------------------------------------------------------------------


def test_wrong_boxes_are_refused() -> None:
    tensor = torch.zeros(2, 3)
    for start in [(0,), (0, 0, 0), (-1, 0)]:
        with pytest.raises(ValueError, match="not a box"):
            partial_sum(tensor, start)
    with pytest.raises(ValueError, match="24 bytes, got 23"):
        partial_sum_bytes(memoryview(bytes(23)), "F32", (2, 3), (0, 0))
    with pytest.raises(ValueError, match="contiguous"):
        partial_sum_bytes(memoryview(bytes(48))[::2], "F32", (2, 3), (0, 0))
    with pytest.raises(ValueError, match="contiguous"):
        partial_sum_bytes(np.zeros(48, np.uint8)[::2], "F32", (2, 3), (0, 0))


def test_tensors_without_content_are_refused() -> None:
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match="no content"):
            partial_sum(tensor, origin(tensor))


def test_wrappers_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(ValueError, match="TwoTensor is a wrapper"):
        tensor_digest(TwoTensor(torch.zeros(2), torch.ones(2)))


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match="complex128"):
        tensor_digest(torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(FormatError, match="F7"):
        finish(0, "F7", (2,))
    with pytest.raises(FormatError, match="F7"):
        partial_sum_bytes(memoryview(b""), "F7", (2,), (0,))


@given(digest=st.integers(0, MASK))
def test_text_round_trip(digest: int) -> None:
    text = format_digest(digest)
    assert len(text) == 16
    assert int(text, 16) == digest


@pytest.mark.parametrize("digest", [-1, 2**64])
def test_numbers_that_are_no_digest_are_refused(digest: int) -> None:
    with pytest.raises(ValueError, match="2\\^64"):
        format_digest(digest)


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry((3,), ("dp",), (Cut("shard", 0),), (2, 0, 1)),
        Geometry((2, 2), ("tp", "dp"), (Cut("shard", 1), Cut("shard", 0)), (0, 1, 2, 3)),
    ],
    ids=["rows", "blocks"],
)
def test_what_ranks_sum_of_their_own_shards_adds_up(geometry: Geometry) -> None:
    full = torch.randn(7, 5)
    total = 0
    for rank in geometry.ranks:
        coordinate = geometry.coordinate(rank)
        assert coordinate is not None
        (held,) = cut_boxes(full.shape, geometry, coordinate)
        local = full[tuple(slice(a, b) for a, b in zip(held.box.start, held.box.stop, strict=True))]
        total += sum(partial_sums(local_boxes(local, (7, 5), geometry, rank)))
    assert total % 2**64 == partial_sum(full, (0, 0))
    assert not list(local_boxes(full, (7, 5), geometry, 9)), "a rank that has none of it"
