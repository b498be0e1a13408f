"""Catalogs of safetensors: what a directory holds, and that no header or index is believed without proof."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise.catalog import catalog_of_safetensors
from shardwise.catalog.open import open_catalog
from shardwise.dtypes import ITEMSIZE, itemsize, torch_dtype
from shardwise.errors import FormatError, SourceError
from shardwise.format.header import MAX_HEADER_BYTES, read_header
from shardwise.tensors.boxes import Box, whole
from tests.harness.tiers import examples

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Refusing must not take long either, whatever a header claims.
pytestmark = pytest.mark.timeout(60)


def raw_file(header: bytes | Mapping[str, Any], payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def entry(shape: Sequence[int], begin: int = 0, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape),
        "data_offsets": [begin, begin + math.prod(shape) * itemsize(dtype)],
    }


def write(path: Path, tensors: Mapping[str, Sequence[int]], dtype: str = "F32") -> None:
    """A file of tensors of these shapes, one behind the other."""
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = entry(shape, at, dtype)
        at = header[name]["data_offsets"][1]
    path.write_bytes(raw_file(header, bytes(at)))


def write_slices(path: Path, slices: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
    """A file of chunks, name → (start, shape), marked as torch marks them."""
    info = {name: {"saved_offsets": list(start)} for name, (start, _) in slices.items()}
    header: dict[str, Any] = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)}}
    at = 0
    for name, (_, shape) in slices.items():
        header[name] = entry(shape, at)
        at = header[name]["data_offsets"][1]
    path.write_bytes(raw_file(header, bytes(at)))


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(path: Path, *facts: str, kind: type[SourceError] = FormatError) -> SourceError:
    """The error that a path gives, which must name its file and state the facts."""
    with pytest.raises(SourceError) as caught:
        catalog_of_safetensors(path)
    assert type(caught.value) is kind
    for fact in facts:
        assert fact in str(caught.value)
    assert len(str(caught.value)) < 2000
    return caught.value


# --- what is good ----------------------------------------------------------------------------------------


@pytest.mark.needs("safetensors>=0.7", "writes no complex numbers")
def test_single_file_of_every_dtype(tmp_path: Path) -> None:
    tensors = {}
    for k, code in enumerate(sorted(ITEMSIZE)):
        count = 3 * (k % 3 + 1)
        raw = torch.arange(count * itemsize(code), dtype=torch.uint8) % 2
        tensors[f"t.{code}"] = raw.view(torch_dtype(code)).reshape(3, -1)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 7)
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    catalog = catalog_of_safetensors(tmp_path)
    assert set(catalog.tensors) == set(tensors)
    content = (tmp_path / SINGLE).read_bytes()
    for name, tensor in tensors.items():
        stored = catalog.tensors[name]
        assert stored.shape == tuple(tensor.shape)
        assert torch_dtype(stored.dtype) == tensor.dtype
        (chunk,) = stored.chunks
        assert chunk.box == whole(tensor.shape)
        there = content[chunk.offset_bytes : chunk.offset_bytes + stored.nbytes]
        assert there == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert catalog.metadata == {"format": "pt"}
    assert catalog.files[0].nbytes == len(content)
    assert catalog.nbytes == sum(t.nbytes for t in tensors.values())


def test_path_of_a_file_and_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / SINGLE, {"a": (2, 3)})
    write(tmp_path / "other.safetensors", {"b": (4,)})
    by_folder, by_file = catalog_of_safetensors(tmp_path), catalog_of_safetensors(tmp_path / SINGLE)
    assert by_folder == by_file
    assert by_folder.ignored_files == ("other.safetensors",)
    assert set(catalog_of_safetensors(tmp_path / "other.safetensors").tensors) == {"b"}
    monkeypatch.chdir(tmp_path)
    assert set(catalog_of_safetensors("other.safetensors").tensors) == {"b"}
    assert open_catalog(tmp_path) == by_folder


def test_several_files_without_an_index_belong_together(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (2, 3)})
    write(tmp_path / "y.safetensors", {"b": (4,), "c": ()})
    (tmp_path / "readme.txt").write_text("not a tensor")
    catalog = catalog_of_safetensors(tmp_path)
    assert {n: t.shape for n, t in catalog.tensors.items()} == {"a": (2, 3), "b": (4,), "c": ()}
    assert catalog.ignored_files == ()


def test_the_index_decides_which_files_belong(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (2, 3)})
    write(tmp_path / "y.safetensors", {"b": (4,)})
    write(tmp_path / "stray.safetensors", {"a": (2, 3), "z": (1,)})
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    catalog = catalog_of_safetensors(tmp_path)
    assert set(catalog.tensors) == {"a", "b"}
    assert catalog.tensors["a"].chunks[0].path == str(tmp_path / "x.safetensors")
    assert catalog.ignored_files == ("stray.safetensors",)
    assert {Path(f.path).name for f in catalog.files} == {"x.safetensors", "y.safetensors"}


def test_chunks_are_put_together(tmp_path: Path) -> None:
    write_slices(tmp_path / "0.safetensors", {"w": ((0, 0), (3, 2)), "v": ((0,), (5,)), "s": ((), ())})
    write_slices(tmp_path / "1.safetensors", {"w": ((0, 2), (3, 2)), "v": ((5,), (1,))})
    write_slices(tmp_path / "2.safetensors", {"w": ((3, 0), (1, 4))})
    catalog = catalog_of_safetensors(tmp_path)
    assert {n: t.shape for n, t in catalog.tensors.items()} == {"w": (4, 4), "v": (6,), "s": ()}
    boxes = {c.box: Path(c.path).name for c in catalog.tensors["w"].chunks}
    assert boxes == {
        Box((0, 0), (3, 2)): "0.safetensors",
        Box((0, 2), (3, 4)): "1.safetensors",
        Box((3, 0), (4, 4)): "2.safetensors",
    }
    assert "DCP_SHARDING_INFO" not in catalog.metadata


# --- what is stored twice or not at all ------------------------------------------------------------------


def test_overlapping_chunks_are_refused(tmp_path: Path) -> None:
    write_slices(tmp_path / "0.safetensors", {"w": ((0, 0), (3, 2))})
    write_slices(tmp_path / "1.safetensors", {"w": ((2, 0), (3, 2))})
    refused(tmp_path, "'w' is stored twice", "[0:3, 0:2]", "[2:5, 0:2]", "0.safetensors", "1.safetensors")


def test_the_same_chunk_twice_names_both_files(tmp_path: Path) -> None:
    for name in ("0", "1"):
        write_slices(tmp_path / f"{name}.safetensors", {"w": ((0,), (3,))})
    refused(tmp_path, "'w' is stored twice", "0.safetensors", "1.safetensors")


def test_a_missing_chunk_is_refused(tmp_path: Path) -> None:
    write_slices(tmp_path / "0.safetensors", {"w": ((0, 0), (3, 2))})
    write_slices(tmp_path / "2.safetensors", {"w": ((4, 0), (1, 2))})
    refused(tmp_path, "'w' is only partly stored", "8 of 10 elements", "(5, 2)")


def test_chunks_that_disagree_are_refused(tmp_path: Path) -> None:
    write_slices(tmp_path / "0.safetensors", {"w": ((0, 0), (3, 2))})
    write_slices(tmp_path / "1.safetensors", {"w": ((3,), (1,))})
    refused(tmp_path, "'w' is F32 [3, 2]", "0.safetensors", "F32 [1] here")


def test_a_stray_second_copy_in_an_indexed_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (2, 3)})
    write(tmp_path / "y.safetensors", {"b": (4,), "a": (2, 3)})
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    refused(tmp_path, "'a' is stored twice", "x.safetensors", "y.safetensors")


def test_two_copies_without_an_index_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (2, 3)})
    write(tmp_path / "y.safetensors", {"a": (2, 3)})
    refused(tmp_path, "'a' is stored twice", "x.safetensors", "y.safetensors")


# --- indices that lie ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/model.safetensors",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\0b",
        "\ud800",
        3,
        None,
    ],
)
def test_an_index_may_name_plain_files_only(tmp_path: Path, name: object) -> None:
    write(tmp_path / SINGLE, {"a": (1,)})
    inside = tmp_path / "inside"
    inside.mkdir()
    write_index(inside, {"a": name})
    refused(inside, INDEX, "'a'", "not a plain file name")


def test_an_index_with_a_missing_file(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (1,)})
    write_index(tmp_path, {"a": "x.safetensors", "b": "lost.safetensors"})
    error = refused(tmp_path, "lost.safetensors", "No such file", kind=SourceError)
    assert error.path == str(tmp_path / "lost.safetensors")


def test_an_index_with_keys_that_its_files_do_not_hold(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": (1,)})
    write_index(tmp_path, {"a": "x.safetensors", **{f"b{k}": "x.safetensors" for k in range(9)}})
    catalog = catalog_of_safetensors(tmp_path)
    assert set(catalog.tensors) == {"a"}
    assert catalog.unheld == {f"b{k}": "x.safetensors" for k in range(9)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": ["a"]}',
        '{"weight_map": ' + "[" * 5000,
        '{"weight_map": ' + "9" * 5000 + "}",
        "\ufeff{}",
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, INDEX, "weight_map")


def test_an_index_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b"\xff\xfe\x00{}")
    refused(tmp_path, INDEX)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()  # not a candidate
    refused(tmp_path, "no .safetensors file in this directory", kind=SourceError)


# --- headers that lie ------------------------------------------------------------------------------------

GOOD = {"w": entry((2, 3)), "v": entry((4,), 24)}

HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "truncated: 0 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "truncated: 7 bytes"),
    "no header": (struct.pack("<Q", 0), "not JSON"),
    "length bomb": (struct.pack("<Q", 2**63) + b"{}", f"the limit is {MAX_HEADER_BYTES}"),
    "largest length": (b"\xff" * 8 + b"{}", f"the limit is {MAX_HEADER_BYTES}"),
    "header longer than the file": (struct.pack("<Q", 90_000_000) + b"{}", "but the file has 10"),
    "not json": (raw_file(b"\x80\x04pickle?"), "not JSON"),
    "not an object": (raw_file(b"[1, 2]"), "not a JSON object"),
    "a pickle": (b"\x80\x02}q\0." * 9, "the limit is"),
    "truncated payload": (raw_file(GOOD, bytes(39)), "tensors need"),
    "no payload": (raw_file(GOOD), "tensors need"),
    "trailing bytes": (raw_file(GOOD, bytes(41)), "1 bytes after the last tensor"),
    "overlap": (raw_file({"w": entry((2, 3)), "v": entry((4,), 20)}, bytes(36)), "'v' overlaps"),
    "hole": (raw_file({"w": entry((2, 3)), "v": entry((4,), 28)}, bytes(44)), "'v' leaves a hole"),
    "hole at the start": (raw_file({"w": entry((2, 3), 4)}, bytes(28)), "'w' leaves a hole"),
    "same bytes twice": (raw_file({"w": entry((2,)), "v": entry((2,))}, bytes(8)), "overlaps"),
    "too many bytes": (
        raw_file({"w": {**entry((2, 3)), "data_offsets": [0, 28]}}, bytes(28)),
        "takes 24 bytes, but its range has 28",
    ),
    "backwards": (raw_file({"w": {**entry((2, 3)), "data_offsets": [24, 0]}}, bytes(24)), "data_offsets"),
    "one offset": (raw_file({"w": {**entry((2, 3)), "data_offsets": [24]}}, bytes(24)), "data_offsets"),
    "negative shape": (raw_file({"w": {**entry((2, 3)), "shape": [-2, -3]}}, bytes(24)), "malformed"),
    "huge shape": (raw_file({"w": {**entry((2, 3)), "shape": [2**80, 1]}}, bytes(24)), "malformed"),
    "large shape": (raw_file({"w": {**entry((2, 3)), "shape": [2**40, 9]}}, bytes(24)), "takes"),
    "overflowing shape": (raw_file({"w": {**entry((2, 3)), "shape": [2**61] * 60}}, bytes(24)), "too large"),
    "many dims": (raw_file({"w": {**entry((2, 3)), "shape": [2**61] * 90_000}}, bytes(24)), "90000 dims"),
    "bool shape": (raw_file({"w": {**entry((1,)), "shape": [True]}}, bytes(4)), "malformed"),
    "float shape": (raw_file({"w": {**entry((1,)), "shape": [1.0]}}, bytes(4)), "malformed"),
    "infinite shape": (
        raw_file(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', bytes(4)),
        "malformed",
    ),
    "endless digits": (
        raw_file(b'{"w":{"dtype":"F32","shape":[' + b"9" * 9000 + b'],"data_offsets":[0,4]}}', bytes(4)),
        "not JSON",
    ),
    "no shape": (
        raw_file({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
        "expected dtype, shape",
    ),
    "not an entry": (raw_file({"w": 3}), "expected dtype, shape"),
    "unknown dtype": (
        raw_file({"w": {**entry((1,)), "dtype": "F33"}}, bytes(4)),
        "unknown stored dtype 'F33'",
    ),
    "dtype of no kind": (raw_file({"w": {**entry((1,)), "dtype": ["F32"]}}, bytes(4)), "malformed"),
    "repeated name": (
        raw_file(
            b'{"w":' + json.dumps(entry((1,))).encode() + b',"w":' + json.dumps(entry((1,))).encode() + b"}"
        ),
        "header repeats 'w'",
    ),
    "repeated field": (
        raw_file(b'{"w":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "header repeats 'shape'",
    ),
    "one repeated name of many": (
        raw_file(b"{" + b",".join(b'"%d":0' % (k % 200_000) for k in range(200_001)) + b"}"),
        "header repeats '0'",
    ),
    "metadata of no kind": (raw_file({"__metadata__": ["pt"], **GOOD}, bytes(40)), "__metadata__"),
    "metadata without text": (raw_file({"__metadata__": {"a": 1}, **GOOD}, bytes(40)), "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(tmp_path: Path, case: str) -> None:
    content, fact = HEADERS[case]
    (tmp_path / SINGLE).write_bytes(content)
    error = refused(tmp_path, fact)
    assert error.path == str(tmp_path / SINGLE)


def test_deep_nesting(tmp_path: Path) -> None:
    """Every depth: also those at which reading the JSON just succeeds, and printing it might not."""
    for depth in (*range(900, 1010), 100_000):
        nested = b"[" * depth + b"]" * depth
        text = b'{"w":{"dtype":"F32","shape":%s,"data_offsets":[0,4]}}' % nested
        (tmp_path / SINGLE).write_bytes(raw_file(text, bytes(4)))
        refused(tmp_path, SINGLE)


def deep(n: int) -> str:
    return "[" * n + "]" * n


@pytest.mark.parametrize(
    "info",
    [
        "not json",
        "[]",
        "3",
        "{}",
        '{"w": {}}',
        '{"w": [0, 0]}',
        '{"w": {"saved_offsets": 0}}',
        '{"w": {"saved_offsets": [0]}}',
        '{"w": {"saved_offsets": [0, -1]}}',
        '{"w": {"saved_offsets": [0, true]}}',
        '{"w": {"saved_offsets": [0, 1.0]}}',
        '{"w": {"saved_offsets": "00"}}',
        '{"w": {"saved_offsets": {"0": 0, "1": 0}}}',
        '{"w": {"saved_offsets": [' + "9" * 9000 + ", 0]}}",
        '{"v": {"saved_offsets": [0, 0]}}',
        deep(5000),
        deep(985),
    ],
)
def test_sharding_info_that_lies(tmp_path: Path, info: str) -> None:
    header = {"__metadata__": {"DCP_SHARDING_INFO": info}, "w": entry((2, 3))}
    (tmp_path / SINGLE).write_bytes(raw_file(header, bytes(24)))
    error = refused(tmp_path, SINGLE)
    assert "DCP_SHARDING_INFO" in str(error) or "expected saved_offsets" in str(error)


def test_a_chunk_far_away_allocates_nothing(tmp_path: Path) -> None:
    write_slices(tmp_path / SINGLE, {"w": ((2**61, 2**61), (2, 3))})
    refused(tmp_path, "'w' is only partly stored")


# --- no source at all ------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "no", "no such file", kind=SourceError)
    refused(tmp_path, "no .safetensors file", kind=SourceError)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_files_of_torch_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")
    refused(tmp_path, "files of torch.save", "give the path", kind=SourceError)


def test_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    refused(tmp_path, "whose slices are in model/", kind=SourceError)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    refused(tmp_path, "a.safetensors", "can't be read", kind=SourceError)
    (tmp_path / "a.safetensors").rmdir()
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "gone")
    refused(tmp_path, "a.safetensors", "No such file", kind=SourceError)
    (tmp_path / "a.safetensors").unlink()
    os.mkfifo(tmp_path / "a.safetensors")  # must not be waited on
    refused(tmp_path, "a.safetensors", "not a regular file")
    refused(tmp_path / "a.safetensors", "a.safetensors", "not a regular file")
    os.mkfifo(tmp_path / INDEX)  # not a candidate
    refused(tmp_path, "a.safetensors", "not a regular file")
    with pytest.raises(SourceError, match="names no bucket"):
        open_catalog("s3:///model")


def test_a_directory_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", listdir)
    refused(tmp_path, "can't be read: Permission denied", kind=SourceError)


# --- damage at random ------------------------------------------------------------------------------------


def base(slices: bool, folder: Path) -> bytes:
    path = folder / "base"
    if slices:
        write_slices(path, {"layer.w": ((0, 0), (3, 5)), "layer.v": ((0,), (7,)), "s": ((), ())})
    else:
        write(path, {"layer.w": (3, 5), "layer.v": (7,), "s": (), "none": (0, 4)}, "BF16")
    return path.read_bytes()


def flip(content: bytes, places: Sequence[tuple[int, int]]) -> bytes:
    damaged = bytearray(content)
    for place, value in places:
        damaged[place % len(damaged)] ^= value
    return bytes(damaged)


def check_damaged(path: Path, good: bytes, damaged: bytes) -> None:
    """Refused as a bad source; or, where damage hit only names or free text, each byte still has one owner."""
    path.write_bytes(damaged)
    try:
        header, catalog = read_header(str(path)), catalog_of_safetensors(path)
    except SourceError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert str(path.parent) in refusal
        return
    spans = sorted((e.offset_bytes, e.offset_bytes + e.nbytes) for e in header.entries.values())
    ends = [header.payload_start, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == len(damaged) == len(good)
    for stored in catalog.tensors.values():
        assert sum(c.box.numel for c in stored.chunks) == math.prod(stored.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


places = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), min_size=1, max_size=3)


@examples(400)
@given(slices=st.booleans(), places=places)
def test_flipped_bytes(folder: Path, slices: bool, places: list[tuple[int, int]]) -> None:
    good = base(slices, folder)
    check_damaged(folder / SINGLE, good, flip(good, places))


@pytest.mark.parametrize("slices", [False, True])
def test_each_truncation_is_refused(folder: Path, slices: bool) -> None:
    good = base(slices, folder)
    for length in range(len(good)):
        (folder / SINGLE).write_bytes(good[:length])
        refused(folder / SINGLE, SINGLE)


@pytest.mark.parametrize("slices", [False, True])
def test_each_digit_of_the_header_counts(folder: Path, slices: bool) -> None:
    """Another digit is another size, shape or range, and never fits all the rest."""
    good = base(slices, folder)
    length = struct.unpack("<Q", good[:8])[0]
    tried = 0
    for place in range(8, 8 + length):
        if chr(good[place]).isdigit() and chr(good[place - 1]) not in "FV":  # not in a dtype
            for digit in b"0123456789":
                if digit != good[place]:
                    check_damaged(folder / SINGLE, good, good[:place] + bytes([digit]) + good[place + 1 :])
                    tried += 1
    assert tried > 100


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("F32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
somewhat_like_an_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BOOL"]) | anything,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | anything,
        "data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2) | anything,
    }
)


@examples(300)
@given(
    document=st.dictionaries(
        st.text(max_size=2) | st.just("__metadata__"), anything | somewhat_like_an_entry, max_size=3
    ),
    info=st.none() | anything,
    payload=st.binary(max_size=9),
)
def test_any_json_at_all(folder: Path, document: dict[str, Any], info: object, payload: bytes) -> None:
    if info is not None:
        document["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(info)}
    content = raw_file(document, payload)
    check_damaged(folder / SINGLE, content, content)


@examples(200)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_at_all(folder: Path, content: bytes, framed: bool) -> None:
    content = raw_file(content) if framed else content
    check_damaged(folder / SINGLE, content, content)


@examples(200)
@given(anything)
def test_any_index_at_all(folder: Path, document: object) -> None:
    inside = folder / "indexed"
    inside.mkdir(exist_ok=True)
    write(inside / "x.safetensors", {"a": (1,)})
    (inside / INDEX).write_text(json.dumps(document))
    with pytest.raises(SourceError):
        catalog_of_safetensors(inside)
    write_index(inside, document)
    with pytest.raises(SourceError):
        catalog_of_safetensors(inside)
