"""Slice files and the manifest: one rule for who writes what and where, and JSON that can't be damaged unseen."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint._hf_utils import _get_dcp_custom_metadata

from shardwise.catalog import catalog_of_safetensors
from shardwise.catalog.checkpoint import catalog_of_checkpoint
from shardwise.dtypes import itemsize, torch_dtype
from shardwise.errors import FormatError, IntegrityError, SourceError, VersionError
from shardwise.format.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Packed,
    StateEntry,
    TensorEntry,
    checksum_of,
    parse_manifest,
    read_manifest,
)
from shardwise.format.slices import (
    Slice,
    SliceAt,
    SliceTensor,
    Spread,
    assign_owners,
    file_name,
    header_bytes,
    owner_ranks,
    rank_files,
)
from shardwise.publish.write import write_slices
from shardwise.tensors.boxes import Box, find_overlap
from shardwise.tensors.placements import Cut, Geometry, cut_boxes

PLAIN = Geometry((4,), ("world",), (Cut("replicate"),), (0, 1, 2, 3))
FSDP = Geometry((4,), ("dp",), (Cut("shard", 0),), (0, 1, 2, 3))
HSDP = Geometry((2, 2), ("rep", "dp"), (Cut("replicate"), Cut("shard", 0)), (0, 1, 2, 3))
PACKED = Geometry((2,), ("tp",), (Cut("strided", 0, 2),), (0, 1))
STRIDED = Geometry((2, 2), ("dp", "tp"), (Cut("strided", 0, 2), Cut("shard", 0)), (0, 1, 2, 3), False)


# --- owners ----------------------------------------------------------------------------------------------


def loads(tensors: Sequence[SliceTensor]) -> dict[int, int]:
    """Payload bytes that each rank writes."""
    ranks = sorted({r for t in tensors for r in t.geometry.ranks})
    return {r: sum(s.nbytes for f in rank_files(tensors, r) for s in f) for r in ranks}


def many(geometry: Geometry, count: int) -> list[SliceTensor]:
    return [SliceTensor(f"t{k}", "F32", (8 * (1 + k % 7), 4), geometry) for k in range(count)]


@pytest.mark.parametrize("geometry", [PLAIN, HSDP], ids=["replicated", "hsdp"])
def test_replicas_share_the_writing(geometry: Geometry) -> None:
    tensors = assign_owners(many(geometry, 60))
    found = loads(tensors)
    largest = max(math.prod(t.shape) * 4 for t in tensors)
    assert max(found.values()) - min(found.values()) <= largest
    assert sum(found.values()) == sum(math.prod(t.shape) * 4 for t in tensors)
    first_only = loads(many(geometry, 60))
    assert min(first_only.values()) == 0, "without owners someone writes nothing"


def test_plain_tensors_fill_up_what_shards_leave() -> None:
    """A model of one big tensor on rank 0 alone and small ones everywhere: rank 0 gets no more."""
    alone = SliceTensor("big", "F32", (1000,), Geometry((1,), ("x",), (Cut("shard", 0),), (0,)))
    tensors = assign_owners([alone, *many(PLAIN, 12)])
    assert loads(tensors)[0] == 4000
    assert min(loads(tensors).values()) > 0


@given(st.permutations(range(12)))
def test_owners_do_not_depend_on_the_order(order: list[int]) -> None:
    tensors = [*many(PLAIN, 6), *(replace(t, name=f"h{t.name}") for t in many(HSDP, 6))]
    expected = {t.name: t.owner for t in assign_owners(tensors)}
    found = assign_owners([tensors[k] for k in order])
    assert [t.name for t in found] == [tensors[k].name for k in order]
    assert {t.name: t.owner for t in found} == expected


@st.composite
def spreads(draw: st.DrawFn) -> Geometry:
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["replicate", "shard", "strided"]))
        factor = draw(st.integers(2, 3)) if kind == "strided" else 1
        axes.append((draw(st.integers(1, 3)), Cut(kind, draw(st.integers(0, 1)), factor)))
    sizes, cuts = zip(*axes, strict=True)
    ranks = draw(st.permutations(range(math.prod(sizes))))
    return Geometry(sizes, tuple(f"a{k}" for k in range(len(sizes))), cuts, tuple(ranks), draw(st.booleans()))


slice_tensors = st.lists(
    st.tuples(
        st.sampled_from(["F32", "BF16", "I64", "U8"]),
        st.tuples(st.integers(0, 9), st.integers(0, 4)),
        spreads(),
    ),
    min_size=1,
    max_size=5,
).map(lambda found: [SliceTensor(f"t{k}", *one) for k, one in enumerate(found)])


@given(slice_tensors)
def test_each_owner_is_one_whole_replica(tensors: list[SliceTensor]) -> None:
    for tensor in assign_owners(tensors):
        geometry = tensor.geometry
        replicas = math.prod(
            n for n, c in zip(geometry.axis_sizes, geometry.cuts, strict=True) if c.kind == "replicate"
        )
        assert 0 <= tensor.owner < replicas
        ranks = [r for k in range(replicas) for r in owner_ranks(geometry, k)]
        assert Counter(ranks) == Counter(geometry.ranks)
        for rank, coordinate in owner_ranks(geometry, tensor.owner).items():
            assert geometry.coordinate(rank) == coordinate


# --- files -----------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(slice_tensors)
def test_files_of_all_ranks_hold_everything_once(tensors: list[SliceTensor]) -> None:
    tensors = assign_owners(tensors)
    found: dict[str, list[Slice]] = {t.name: [] for t in tensors}
    for rank in sorted({r for t in tensors for r in t.geometry.ranks}):
        for slices in rank_files(tensors, rank):
            assert slices, "a file of nothing"
            names = [s.tensor.name for s in slices]
            assert len(names) == len(set(names)), "two boxes of one tensor in one file"
            at = 0
            for s in slices:
                assert s.offset_bytes == at
                assert at % itemsize(s.tensor.dtype) == 0, "not aligned"
                assert s.nbytes == s.held.box.numel * itemsize(s.tensor.dtype)
                at += s.nbytes
                found[s.tensor.name].append(s)
    for tensor in tensors:
        slices = found[tensor.name]
        assert find_overlap(s.held.box for s in slices) is None
        assert sum(s.held.box.numel for s in slices) == math.prod(tensor.shape)
        if math.prod(tensor.shape) == 0:
            assert [s.held.box.stop for s in slices] == [tensor.shape], "an empty tensor is stored once"
        else:
            assert all(s.nbytes for s in slices), "an empty shard is left out"


@settings(max_examples=200)
@given(slice_tensors)
def test_slices_are_found_where_they_are_written(tensors: list[SliceTensor]) -> None:
    """By one box or one rank at a time, as a run of another world size looks for them."""
    tensors = assign_owners(tensors)
    spread = Spread(tensors)
    written = {r: rank_files(tensors, r) for r in sorted({r for t in tensors for r in t.geometry.ranks})}
    assert spread.held == {rank: len(files) for rank, files in written.items() if files}
    for rank, files in written.items():
        for k, slices in enumerate(files):
            offsets = spread.offsets_bytes(rank, k)
            for s in slices:
                position, kind = spread.find(s.tensor.name)
                assert offsets[position] == s.offset_bytes
                cut, box = spread.kinds[kind], s.held.box
                if cut is None:
                    assert not box.numel
                    continue
                last = Box(tuple(n - 1 for n in box.stop), box.stop)
                first = Box(box.start, tuple(n + 1 for n in box.start))
                for part in (box, first, last):
                    assert cut.touching(part) == (SliceAt(box, rank, k),)


def test_several_boxes_go_to_several_files() -> None:
    tensor = SliceTensor("w", "F32", (10, 3), PACKED)
    boxes = cut_boxes(tensor.shape, PACKED, (1,))
    assert [b.box.start for b in boxes] == [(3, 0), (8, 0)]
    files = rank_files([tensor, SliceTensor("v", "F64", (4,), FSDP)], 1)
    assert [[s.tensor.name for s in f] for f in files] == [["v", "w"], ["w"]]
    assert [f[-1].held for f in files] == list(boxes)
    assert [s.offset_bytes for s in files[0]] == [0, 8]
    assert files[1][0].offset_bytes == 0


def test_file_names_are_those_of_torch() -> None:
    assert file_name("model", 0, 0, 1) == "shard-00001-model-00001-of-00001.safetensors"
    assert file_name("model", 41, 1, 3) == "shard-00042-model-00002-of-00003.safetensors"
    from torch.distributed.checkpoint._hf_utils import _gen_file_name

    assert file_name("model", 41, 1, 3) == _gen_file_name(2, 3, shard_index=42)


@settings(max_examples=50)
@given(slice_tensors)
def test_headers_are_read_by_others(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[SliceTensor]
) -> None:
    """safetensors opens them, torch finds the offsets, and our own catalog puts the tensors together again."""
    folder = tmp_path_factory.mktemp("slices")
    full = {t.name: values(t) for t in tensors}
    tensors = assign_owners(tensors)
    for rank in sorted({r for t in tensors for r in t.geometry.ranks}):
        for k, slices in enumerate(rank_files(tensors, rank)):
            path = folder / file_name("model", rank, k, 9)
            entry = write_slices(str(path), slices, ([box_of(full[s.tensor.name], s)] for s in slices))
            assert entry.nbytes == path.stat().st_size
            assert entry.header_bytes == len(header_bytes(slices))
            assert entry.header_bytes % 8 == 0
            with safe_open(path, framework="pt") as file:
                info = _get_dcp_custom_metadata({"__metadata__": file.metadata()})
                info = info or json.loads(file.metadata()["DCP_SHARDING_INFO"])
                assert set(file.keys()) == set(info) == {s.tensor.name for s in slices}
                for s in slices:
                    assert info[s.tensor.name]["saved_offsets"] == list(s.held.box.start)
                    assert torch.equal(file.get_tensor(s.tensor.name), box_of(full[s.tensor.name], s))
    catalog = catalog_of_safetensors(folder)
    assert {n: t.shape for n, t in catalog.tensors.items()} == {t.name: t.shape for t in tensors}
    for stored in catalog.tensors.values():
        for chunk in stored.chunks:
            content = Path(chunk.path).read_bytes()[chunk.offset_bytes :]
            piece = full[stored.name][
                tuple(slice(a, b) for a, b in zip(chunk.box.start, chunk.box.stop, strict=True))
            ]
            expected = piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content[: len(expected)] == expected


def test_a_header_is_the_json_of_its_slices() -> None:
    """Header texts are put together of parts, and are what ``json`` makes of the whole, to the byte."""
    names = ('q"uote', "back\\slash", "nämlich", "line\nend", "\u2028", "\U0001f600", "plain.weight")
    tensors = [
        SliceTensor(f"{name}.{dtype}.{len(shape)}", dtype, shape, geometry)
        for name in names
        for dtype in ("F32", "BF16", "BOOL")  # boxes of one shape are one object, whatever the dtype
        for shape in ((8, 3), (5,), ())
        for geometry in ([FSDP] if shape else [PLAIN])
    ]
    for rank in range(4):
        for slices in (*rank_files(tensors, rank), []):
            offsets = {s.tensor.name: {"saved_offsets": s.held.box.start} for s in slices}
            info = json.dumps(offsets, separators=(",", ":"))
            document: dict[str, Any] = {
                "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
            }
            for s in slices:
                document[s.tensor.name] = {
                    "dtype": s.tensor.dtype,
                    "shape": s.held.box.sizes,
                    "data_offsets": (s.offset_bytes, s.offset_bytes + s.nbytes),
                }
            text = json.dumps(document, separators=(",", ":")).encode()
            assert header_bytes(slices)[8:].rstrip(b" ") == text


def values(tensor: SliceTensor) -> torch.Tensor:
    return torch.arange(math.prod(tensor.shape)).to(torch_dtype(tensor.dtype)).reshape(tensor.shape)


def box_of(full: torch.Tensor, one: Slice) -> torch.Tensor:
    return full[tuple(slice(a, b) for a, b in zip(one.held.box.start, one.held.box.stop, strict=True))]


def test_the_reader_of_torch_takes_the_offsets() -> None:
    slices = rank_files([SliceTensor("w", "F32", (10, 3), FSDP), SliceTensor("s", "F32", (), PLAIN)], 0)[0]
    header = header_bytes(slices)
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    document = json.loads(header[8:])
    assert _get_dcp_custom_metadata(document) == {
        "s": {"saved_offsets": []},
        "w": {"saved_offsets": [0, 0]},
    }


# --- the manifest ----------------------------------------------------------------------------------------


def manifest() -> Manifest:
    entries = {
        "embed": TensorEntry(
            "BF16", (10, 4), 2, 2**64 - 1, aliases=("head", "nämlich"), stored_aliases=("head",)
        ),
        "step": TensorEntry("I64", (), 1, 0, owner=3, kind="buffer"),
        "norm": TensorEntry(
            "F32",
            (10,),
            3,
            77,
            states={
                "optimizer": {
                    "exp_avg": StateEntry("F32", 5, 1),
                    "step": StateEntry("F32", packed="step.F32", index=0),
                }
            },
        ),
    }
    files = {
        "model/" + file_name("model", 0, 0, 1): FileEntry(1234, 128, "0123456789abcdef", ("aa", "bb")),
        "state.json": FileEntry(5, 5, "00"),
        **{f"rank/{rank:05d}.json": FileEntry(2, 2, "00") for rank in range(4)},
    }
    return Manifest(
        step=100,
        run_id="run",
        parent_step=None,
        world_size=4,
        seed=2**63 - 1,
        geometries=(FSDP, PLAIN, STRIDED, HSDP),
        models={"model": entries},
        packed={"optimizer": {"step.F32": Packed("F32", 1, 99, 2)}},
        files=files,
        software={"torch": "2.13.0"},
    )


def write_manifest(folder: Path, text: str | bytes) -> Path:
    (folder / MANIFEST_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def signed(document: Mapping[str, Any]) -> str:
    """The text of a manifest with this content and a right checksum: damage that someone made on purpose."""
    rest = {k: v for k, v in document.items() if k != "xxh3"}
    canonical = json.dumps(rest, separators=(",", ":"), sort_keys=True)
    return json.dumps({**rest, "xxh3": xxhash.xxh3_64_hexdigest(canonical.encode())})


def test_manifest_round_trip(tmp_path: Path) -> None:
    original = manifest()
    found = read_manifest(write_manifest(tmp_path, original.to_text()))
    assert found == original
    assert found.to_text() == original.to_text()
    assert signed(json.loads(original.to_text())).replace(" ", "") == original.to_text().replace(" ", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifest")


@settings(max_examples=400)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_flipped_byte_goes_unseen(folder: Path, place: int, flip: int) -> None:
    good = manifest().to_text().encode()
    bad = bytearray(good)
    bad[place % len(good)] ^= flip
    write_manifest(folder, bytes(bad))
    try:
        found = read_manifest(folder)
    except (FormatError, IntegrityError) as refusal:
        named = refusal.path
    else:
        # \\u00e4 may be written \\u00E4: other bytes, the same text. Nothing else passes.
        assert found == manifest()
        assert bytes(bad).lower() == good.lower()
        named = str(folder / MANIFEST_NAME)
    assert named == str(folder / MANIFEST_NAME)


def test_each_truncation_is_seen(folder: Path) -> None:
    good = manifest().to_text().encode()
    for length in range(0, len(good), 5):
        with pytest.raises(FormatError):
            read_manifest(write_manifest(folder, good[:length]))


def test_a_manifest_without_its_checksum_is_damaged(tmp_path: Path) -> None:
    document = json.loads(manifest().to_text())
    del document["xxh3"]
    with pytest.raises(IntegrityError, match="its checksum does not match"):
        read_manifest(write_manifest(tmp_path, json.dumps(document).encode()))


@pytest.mark.parametrize(
    ("places", "is_fine"),
    [
        ([[0, 2], [1, 3]], True),
        ([[0, 1, 2]], False),
        ([[0, 1], [1, 2, 3]], False),
        ([[0, 1], [2, 3, 4]], False),
        ([], False),
    ],
)
def test_each_rank_has_one_place(places: list[list[int]], is_fine: bool) -> None:
    document = json.loads(manifest().to_text()) | {
        "version": 2,
        "places": [{"id": f"{n:016x}", "host": "vm", "ranks": of} for n, of in enumerate(places)],
    }
    document["xxh3"] = checksum_of(document)
    text = json.dumps(document).encode()
    if is_fine:
        found = parse_manifest(text, "manifest.json")
        assert [list(p.ranks) for p in found.places] == places
        assert parse_manifest(found.to_text().encode(), "manifest.json") == found
    else:
        with pytest.raises(FormatError, match="places hold other ranks than 0 to 3"):
            parse_manifest(text, "manifest.json")


@pytest.mark.parametrize("change", [{"version": 3}, {"version": 0}, {"version": None}, {"version": "1"}])
def test_another_version_is_said_to_be_one(tmp_path: Path, change: dict[str, Any]) -> None:
    document = json.loads(manifest().to_text()) | change
    with pytest.raises(
        VersionError, match=r"format version .*, this release reads 1 and 2; update shardwise"
    ):
        read_manifest(write_manifest(tmp_path, signed(document)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        "{}",
        '"manifest"',
        '{"format": "other"}',
        '{"format": {}}',
        "\ufeff{}",
        "[" * 9000,
    ],
)
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError, match=r"manifest.json: (not a checkpoint manifest|format is)"):
        read_manifest(write_manifest(tmp_path, text))


def test_deep_nesting(folder: Path) -> None:
    """Also at the depths at which reading just succeeds and writing the canonical text would not."""
    for depth in (*range(900, 1010), 100_000):
        nested = "[" * depth + "]" * depth
        text = f'{{"format":"shardwise-checkpoint","version":1,"xxh3":"0","x":{nested}}}'
        with pytest.raises((FormatError, IntegrityError), match=r"manifest\.json"):
            read_manifest(write_manifest(folder, text))


def test_no_manifest_at_all(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(SourceError, match="no such"):
        read_manifest(tmp_path / "gone")
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(FormatError, match="is a directory, not a file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "model/../../x", "model//x", "", "..", "model\\x", "./x", "a\0b", "model/\ud800"],
)
def test_file_names_that_leave_the_directory(tmp_path: Path, name: str) -> None:
    document = json.loads(manifest().to_text())
    document["files"][name] = {"nbytes": 1, "header_bytes": 1, "header_xxh3": "00"}
    with pytest.raises(FormatError, match="malformed manifest"):
        read_manifest(write_manifest(tmp_path, signed(document)))


def test_another_cutting_rule_is_refused(tmp_path: Path) -> None:
    document = json.loads(manifest().to_text())
    document["geometries"][1]["rule"] = 2
    with pytest.raises(FormatError, match="cutting rule 2"):
        read_manifest(write_manifest(tmp_path, signed(document)))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key path of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for k, v in inner for p in places(v, (*path, k)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def stored_checkpoint() -> Manifest:
    """One whose files its tensors really need, so that a catalog can be made of it."""
    spread = [
        SliceTensor(n, t.dtype, t.shape, manifest().geometries[t.geometry], t.owner)
        for n, t in entries().items()
    ]
    per_rank = {r: rank_files(spread, r) for r in range(4)}
    count = max(map(len, per_rank.values()))
    files = {
        f"model/{file_name('model', r, k, count)}": FileEntry(400, 200, "00")
        for r, found in per_rank.items()
        for k in range(len(found))
    }
    files |= {f"rank/{r:05d}.json": FileEntry(2, 2, "00") for r in range(4)}
    return replace(manifest(), models={"model": entries()}, files=files, packed={})


def entries() -> dict[str, TensorEntry]:
    found = dict(manifest().models["model"])
    found["embed"] = replace(found["embed"], aliases=(), stored_aliases=())
    found["norm"] = replace(found["norm"], states={})
    return found


DOCUMENT = json.loads(stored_checkpoint().to_text())
junk = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        3,
        2**70,
        1.5,
        float("inf"),
        float("nan"),
        "",
        "x",
        "F32",
        "shard",
        [],
        [1],
        [-1],
        [[]],
        ["x"],
        {},
        {"x": 1},
    ]
)


def test_a_checkpoint_has_a_catalog(tmp_path: Path) -> None:
    catalog = catalog_of_checkpoint(write_manifest(tmp_path, stored_checkpoint().to_text()))
    assert {n: t.shape for n, t in catalog.tensors.items()} == {"embed": (10, 4), "step": (), "norm": (10,)}
    assert all(c.offset_bytes >= 200 for t in catalog.tensors.values() for c in t.chunks)


@pytest.mark.timeout(120)
@settings(max_examples=600)
@given(place=st.sampled_from(places(DOCUMENT)), value=junk)
def test_a_forged_manifest_is_refused_and_nothing_else(
    folder: Path, place: tuple[Any, ...], value: Any
) -> None:
    """Any value anywhere, with a right checksum: a bad source, or a catalog whose tensors are whole."""
    forged = put(DOCUMENT, place, value)
    write_manifest(folder, signed(forged) if isinstance(forged, dict) else json.dumps(forged))
    try:
        catalog = catalog_of_checkpoint(folder)
    except SourceError as refusal:
        text = str(refusal)
    else:
        text = str(folder)
        for stored in catalog.tensors.values():
            assert sum(c.box.numel for c in stored.chunks) == math.prod(stored.shape)
            assert all(c.offset_bytes >= 0 for c in stored.chunks)
            assert all(Path(c.path).is_relative_to(folder) for c in stored.chunks)
    assert str(folder) in text
