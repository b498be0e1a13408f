"""Pickles that no pickler wrote: names, keys and shapes that ask for more than their bytes. All are refused at once."""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.catalog.dcp import read_dcp
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, ShardwiseError, SourceError
from shardwise.runs.third_party import Objects, ThirdPartyRun, plain_values
from tests.harness.bombs import refused_within, run_apart

METADATA = "torch.distributed.checkpoint.metadata"


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def pickled(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def torch_file(path: Path, content: bytes) -> Path:
    """A file of torch.save whose description is ``content``."""
    sound = path.with_suffix(".sound")
    torch.save({"w": torch.ones(2)}, sound)
    with zipfile.ZipFile(sound) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    sound.unlink()
    return path


def dcp_folder(root: Path, content: bytes) -> Path:
    root.mkdir()
    (root / ".metadata").write_bytes(content)
    return root


def get(index: int) -> bytes:
    return b"h" + bytes([index])


def levels(first: bytes, level: Callable[[bytes], bytes], depth: int) -> bytes:
    """Objects that hold the one below, each made, noted in the memo and taken off; the last is put on."""
    made = [first, *(level(get(k)) for k in range(depth))]
    return b"".join(body + b"\x940" for body in made) + get(depth)


def nested_tuple_key(depth: int) -> bytes:
    """{((…),(…)): 1}, each level holding the one below twice: the hash visits 2^depth tuples."""
    return b"}" + levels(b")", lambda below: below * 2 + b"\x86", depth) + b"K\x01s"


def shared_lists(depth: int, width: int) -> bytes:
    """Lists that hold the list below ``width`` times."""
    return levels(b"]", lambda below: b"](" + below * width + b"e", depth)


def shared_dicts(depth: int) -> bytes:
    return levels(b"}", lambda below: b"}(" + short("a") + below + short("b") + below + b"u", depth)


def tensor_with_metadata(body: bytes) -> bytes:
    """A tensor whose description of views is ``body``, which an error might print."""
    storage = b"(" + short("storage") + b"ctorch\nFloatStorage\n" + short("0") + short("cpu") + b"K\x02tQ"
    args = storage + b"K\x00K\x02\x85K\x01\x85\x89N" + body
    return b"}" + short("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + args + b"tRs"


def calls(name: bytes, shared: bytes, more: bytes = b"", *, count: int) -> bytes:
    """A list of ``count`` results of a function, all called with one shared argument, and ``more`` after it."""
    arguments = b"(" + get(0) + more + b"t"
    return shared + b"\x940" + name + b"\x940](" + (get(1) + arguments + b"R") * count + b"e"


def long_text(size: int = 2**20 - 1) -> bytes:
    return b"X" + struct.pack("<I", size) + b"a" * size


def list_of_numbers(count: int) -> bytes:
    return b"](" + b"".join(b"J" + struct.pack("<i", k) for k in range(count)) + b"e"


def dict_of_numbers(count: int) -> bytes:
    return b"}(" + b"".join(b"J" + struct.pack("<i", k) + b"N" for k in range(count)) + b"u"


_STORAGE = b"(" + short("storage") + b"ctorch\nFloatStorage\n" + short("0") + short("cpu") + b"K\x02tQ"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def tensors_of_shared_dims(count: int) -> bytes:
    """Tensors of 64 dims, of which the pickle has one shape."""
    known = _STORAGE + b"\x940(" + b"K\x01" * 64 + b"t\x940" + _REBUILD + b"\x940"
    one = get(2) + b"(" + get(0) + b"K\x00" + get(1) * 2 + b"\x89NtR"
    return known + b"}(" + b"".join(short(str(k)) + one for k in range(count)) + b"u"


def tensors_of_shared_names(count: int, most: int) -> bytes:
    """A list that repeats a dict of tensors with long names."""
    known = _STORAGE + b"\x940" + _REBUILD + b"\x940"
    one = get(1) + b"(" + get(0) + b"K\x00K\x01\x85K\x01\x85\x89NtR"
    names = b"".join(b"X" + struct.pack("<I", 900) + f"{k:0900}".encode() + one for k in range(count))
    return known + b"}(" + names + b"u\x940](" + get(2) * most + b"e"


#: Bodies of pickles, from a few bytes to a MiB.
BOMBS: dict[str, bytes] = {
    "hash of nested tuples": nested_tuple_key(60),
    "index of the memo": b"}\x94r\xff\xff\xff\x7f",
    "index of the memo, as mutation made it": b"}\x94}r\x00\x00\x00\x40\x94",
    "text of shared lists": tensor_with_metadata(shared_lists(9, 60)),
    "walk through shared lists": b"}" + short("model") + b"}" + short("x") + shared_lists(7, 60) + b"ss",
    "shared dicts": b"}" + short("model") + shared_dicts(60) + b"s",
    "nested lists": b"]" * 100_000 + b"a" * 99_999,
    "nested tuples": b")" + b"\x85" * 100_000,
    "a list in itself": b"]\x94h\x00a",
    "a dict in itself": b"}\x94" + short("x") + b"h\x00s",
    "a record in itself": short(METADATA) + short("Metadata") + b"\x93)\x81\x94}" + short("x") + b"h\x03sb",
    "length of a text": b"X\xff\xff\xff\x7f",
    "length of a frame": b"\x95" + struct.pack("<Q", 2**63),
    "length of bytes": b"\x8e" + struct.pack("<Q", 2**40),
    "room for bytes": b"c__builtin__\nbytearray\n" + b"\x8a\x06" + (2**40).to_bytes(6, "little") + b"\x85R",
    "a text encoded again and again": calls(b"c_codecs\nencode\n", long_text(), short("latin1"), count=4000),
    "a list as torch.Size": calls(b"ctorch\nSize\n", list_of_numbers(60_000), count=6000),
    "a list as a set": calls(b"c__builtin__\nset\n", list_of_numbers(60_000), count=6000),
    "a text as a set": calls(b"c__builtin__\nset\n", long_text(), count=20_000),
    "a dict as a Counter": calls(b"ccollections\nCounter\n", dict_of_numbers(50_000), count=3000),
    "a text as a storage": long_text() + b"\x940" + _REBUILD + b"\x940](" + (get(1) + b"(" + get(0) + b"NNNtR") * 999 + b"e",
    "a text as a path": calls(b"cpathlib\nPosixPath\n", long_text(), count=9999) + b"0N",
    "many arguments": calls(b"ctorch.serialization\n_get_layout\n", b"(" + b"N" * 60_000 + b"t", count=1).replace(b"](", b"](" + (get(1) + get(0) + b"R") * 6000),
    "one shape for many tensors": tensors_of_shared_dims(4000),
    "long names met again": tensors_of_shared_names(500, 500),
    "a large number": b"\x8b" + struct.pack("<I", 2**30),
    "keys that collide": b"}(" + b"".join(b"\x8a\x0a" + ((2**61 - 1) * k).to_bytes(10, "little") + b"N" for k in range(1, 20_000)) + b"u",
    "many dims": tensor_with_metadata(b"N").replace(b"K\x02\x85", b"(" + b"\x8a\x08" + b"\xff" * 7 + b"\x1f" + b"h\x00" * 0 + b"K\x02" * 60_000 + b"t"),
}  # fmt: skip


def scheduler_in(file: str) -> object:
    """The file read as a scheduler's state, which lies beside a run."""
    shutil.copy(file, f"{file}-run/scheduler.bin")
    return ThirdPartyRun(f"{file}-run", (), ()).document("scheduler")


HARMLESS = ("index of the memo", "index of the memo, as mutation made it")


@pytest.mark.parametrize("kind", ["torch.save", "DCP"])
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.processes
def test_bombs_are_refused_at_once(tmp_path: Path, bomb: str, kind: str) -> None:
    content = pickled(BOMBS[bomb])
    if kind == "torch.save":
        source = torch_file(tmp_path / "x.pt", content)
        (tmp_path / "x.pt-run").mkdir()
        readers: tuple[Callable[[str], object], ...] = (open_catalog, scheduler_in)
    else:
        source, readers = dcp_folder(tmp_path / "dcp", content), (open_catalog,)
    for read in readers:
        if bomb in HARMLESS and kind == "torch.save":  # an empty dict, once the index costs nothing
            outcome = run_apart(lambda read=read: read(str(source)))  # type: ignore[misc]
            assert outcome.kind == "done"
            assert outcome.seconds < 1
            assert outcome.mbytes < 200
        else:
            text = refused_within(lambda read=read: read(str(source)))  # type: ignore[misc]
            assert str(tmp_path) in text
            assert len(text) < 5000


def tensor_of(shape: list[int], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of one process."""
    root = tmp_path_factory.mktemp("saved") / "dcp"
    state = {"model": {"w": torch.ones(4, 3), "b": torch.zeros(3)}, "optim": {"step": 3}, "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(root), no_dist=True)
    return root


def with_metadata(saved: Path, tmp_path: Path, change: Callable[[Metadata], None]) -> Path:
    root = tmp_path / "copy"
    root.mkdir()
    for name in os.listdir(saved):
        (root / name).write_bytes((saved / name).read_bytes())
    metadata = pickle.loads((saved / ".metadata").read_bytes())  # what torch wrote a moment ago
    change(metadata)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    return root


def large_dims(metadata: Metadata) -> None:
    shape = [2**61] * 60_000
    metadata.state_dict_metadata["w"] = tensor_of(
        shape, [ChunkStorageMetadata(torch.Size(shape), torch.Size(shape))]
    )


def product_beside_zero(metadata: Metadata) -> None:
    metadata.state_dict_metadata["w"] = tensor_of([0, 2**61, 2**61], [])


def chunks_shared(metadata: Metadata) -> None:
    """300 tensors of one list of 300 chunks, and the file is small: 90,000 looks into it."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3]))
    shared = tensor_of([4, 3], [chunk] * 300)
    metadata.state_dict_metadata.update(dict.fromkeys((f"w{k}" for k in range(300)), shared))


def one_range_for_all(metadata: Metadata) -> None:
    info = next(i for index, i in metadata.storage_data.items() if index.fqn == "model.w")
    for k in range(20_000):
        metadata.storage_data[MetadataIndex(f"w{k}", torch.Size([0, 0]))] = info


class ById(MetadataIndex):
    """An index that is pickled like its base, and does not collide in the dict of this test."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __class__ = property(lambda self: MetadataIndex)  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        state = {"fqn": self.fqn, "offset": self.offset, "index": self.index}
        return copyreg.__newobj__, (MetadataIndex,), state  # type: ignore[attr-defined]


def colliding_offsets(metadata: Metadata) -> None:
    """Pairs of numbers of equal hash: a dict of them is quadratic."""
    for k, offset in enumerate(pairs_of_one_hash(20_000)):
        name, info = "model.w", next(iter(metadata.storage_data.values()))
        metadata.storage_data[ById(name, torch.Size(offset), k)] = type(info)("x.distcp", k, 1)


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """By CPython's hash of tuples (xxHash): for each first number, the second that leads to the same accumulator."""
    mask, one, two, five = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(two, -1, 2**64)

    def lane(state: int, number: int) -> int:
        state = (state + number * two) & mask
        return (state << 31 | state >> 33) & mask

    found: list[tuple[int, int]] = []
    target, first = (lane(five, 1) * one + 2 * two) & mask, 0
    while len(found) < count:
        second = (target - lane(five, first) * one) * inverse & mask
        if second < 2**61 - 1:
            found.append((first, second))
        first += 1
    assert len({hash(pair) for pair in found}) == 1
    return found


def irregular_cuts(metadata: Metadata) -> None:
    """Chunks that no dim tells apart: each pair has to be compared."""
    info = type(next(iter(metadata.storage_data.values())))
    chunks = [ChunkStorageMetadata(torch.Size([0, 0, k]), torch.Size([1, 1, 4])) for k in range(10)]
    chunks += [
        ChunkStorageMetadata(torch.Size([0, 0, 20_000 - k]), torch.Size([2, 2, 20_000 + k]))
        for k in range(9000)
    ]
    metadata.state_dict_metadata["w"] = tensor_of([40_000] * 3, chunks)
    for k, c in enumerate(chunks):
        metadata.storage_data[MetadataIndex("w", c.offsets, k)] = info("x.distcp", k * 10, 10)


def path_of_lists(metadata: Metadata) -> None:
    metadata.planner_data = {"model.w": []}


def text_with_half_a_surrogate(metadata: Metadata) -> None:
    metadata.state_dict_metadata["\ud800"] = metadata.state_dict_metadata.pop("model.w")


@pytest.mark.parametrize(
    "change",
    [
        large_dims, product_beside_zero, chunks_shared, one_range_for_all, irregular_cuts,
        path_of_lists, text_with_half_a_surrogate,
    ],
)  # fmt: skip
@pytest.mark.processes
def test_metadata_that_asks_for_much(saved: Path, tmp_path: Path, change: Callable[[Metadata], None]) -> None:
    root = with_metadata(saved, tmp_path, change)
    text = refused_within(lambda: read_dcp(root), seconds=1)
    assert str(root) in text


@pytest.mark.processes
def test_offsets_can_not_be_made_to_collide(saved: Path, tmp_path: Path) -> None:
    """What lies nowhere is not asked for; 20,000 such entries cost no more than others."""
    root = with_metadata(saved, tmp_path, colliding_offsets)
    outcome = run_apart(lambda: read_dcp(root), seconds=2)
    assert outcome.kind == "done"
    assert outcome.seconds < 2


def test_an_item_of_a_sparse_file_is_not_read(saved: Path, tmp_path: Path) -> None:
    def enlarge(metadata: Metadata) -> None:
        info = next(i for index, i in metadata.storage_data.items() if index.fqn == "step")
        info.relative_path, info.offset, info.length = "sparse.distcp", 0, 6 * 1024**3

    root = with_metadata(saved, tmp_path, enlarge)
    with (root / "sparse.distcp").open("wb") as stream:
        stream.truncate(6 * 1024**3)

    def read() -> None:
        with Objects() as objects:
            objects.value(read_dcp(root).objects["step"])

    assert "sparse.distcp" in refused_within(read)


@pytest.mark.parametrize("name", [".metadata", "x.pt"])
def test_a_sparse_description_is_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(900 * 1024**2)
    refused_within(lambda: open_catalog(tmp_path if name == ".metadata" else tmp_path / name))


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    """Every kind of plain value that torch's own reader takes back from a state dict."""
    base = torch.arange(12.0)
    content: dict[Any, Any] = {
        "numbers": [0, -1, 255, 256, 65536, -(2**31), 2**40, -(2**70), 1.5, float("inf"), True, False, None],
        "text": ["", "plain", "ä€😀", "x" * 300, "y" * 70_000],
        "bytes": [b"", b"\0\xff", b"z" * 300],
        3: (1, (2, (3,)), {4: {5: [6]}}),
        "counter": Counter({2: 1, 5: 2}),
        "set": {1, "a"},
        "complex": 1 + 2j,
        "ordered": OrderedDict(a=1, b=[]),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "tensors": [
            torch.ones(2, 3),
            torch.tensor(3),
            base[2:4],
            torch.empty(0, 4),
            torch.tensor([True, False]),
        ],
        "more": {"c": torch.ones(2, dtype=torch.complex64), "u": torch.ones(2, dtype=torch.uint16)},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "shared": [base, base],
    }
    for protocol in (2, 3, 4, 5):
        if protocol > 2:
            content.pop("set", None)  # an opcode of its own then, which torch's reader refuses, too
        torch.save(content, tmp_path / "x.pt", pickle_protocol=protocol)
        found, expected = plain_values(str(tmp_path / "x.pt")), content
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key in ("tensors", "shared"):
                assert all(
                    torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found[key], value, strict=True)
                )
            elif key == "more":
                assert all(torch.equal(found[key][k], t) for k, t in value.items())
            elif key == "parameter":
                assert torch.equal(found[key], value)
            else:
                assert found[key] == value, key


@pytest.mark.hypothesis  # a random search, by a seed
def test_mutations_raise_nothing_else(saved: Path, tmp_path: Path) -> None:
    """Bytes exchanged, cut and doubled, in descriptions that torch wrote."""
    generator = random.Random(0)
    torch.save({"w": torch.ones(2), "g": [{"lr": 0.1, "params": ["w"]}]}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound:
        description = sound.read("sound/data.pkl")
    metadata = (saved / ".metadata").read_bytes()
    whole = (tmp_path / "sound.pt").read_bytes()
    folder = with_metadata(saved, tmp_path, lambda _: None)

    def mutated(content: bytes) -> bytes:
        made = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            at, kind = generator.randrange(len(made)), generator.randrange(4)
            if kind == 0:
                made[at] = generator.randrange(256)
            elif kind == 1:
                del made[at : at + generator.randint(1, 8)]
            elif kind == 2:
                made[at:at] = made[at : at + generator.randint(1, 40)]
            else:
                made[at] ^= 1 << generator.randrange(8)
        return bytes(made)

    def tries() -> None:
        for _ in range(150):
            (folder / ".metadata").write_bytes(mutated(metadata))
            (tmp_path / "whole.pt").write_bytes(mutated(whole))
            readers: list[Callable[[], object]] = [
                lambda: read_dcp(folder),
                lambda: open_catalog(torch_file(tmp_path / "x.pt", mutated(description))),
                lambda: plain_values(str(tmp_path / "x.pt")),
                lambda: open_catalog(tmp_path / "whole.pt"),
            ]
            for read in readers:
                with contextlib.suppress(SourceError):
                    read()

    outcome = run_apart(tries, seconds=60, mbytes=200)
    assert outcome.kind == "done", outcome
    assert outcome.mbytes < 200, outcome


@pytest.mark.parametrize(
    ("where", "value"),
    [("storage", "x"), ("offset", -1), ("offset", "0"), ("sizes", [2]), ("strides", (1, 1)), ("strides", ()), ("code", {})],
)  # fmt: skip
def test_a_tensor_described_wrongly(tmp_path: Path, where: str, value: Any) -> None:
    class Described:
        def __reduce__(self) -> Any:
            parts = {"storage": ("storage", torch.FloatStorage, "0", "cpu", 2), "offset": 0, "sizes": (2,)}
            parts |= {"strides": (1,), "grad": False, "hooks": None, "code": torch.float32, where: value}
            return torch._utils._rebuild_tensor_v3, tuple(parts.values())

    torch_file(tmp_path / "x.pt", pickle.dumps({"w": Described()}, protocol=2))
    with pytest.raises(FormatError, match=r"x\.pt"):
        open_catalog(tmp_path / "x.pt")


def test_one_storage_for_many_large_tensors(tmp_path: Path) -> None:
    """Each lies in the file, and together they are 3,000 times as long."""
    base = torch.zeros(10_000)
    torch.save({f"w{k}": base[:9_999] for k in range(3000)}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="its tensors overlap"):
        open_catalog(tmp_path / "x.pt")
    torch.save({"a": base, "b": base}, tmp_path / "tied.pt")
    assert len(open_catalog(tmp_path / "tied.pt").tensors) == 2


def test_truncated_members_and_their_checksum(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()
    at = content.index(b"_rebuild_tensor_v2")
    for k in range(0, len(content), 7):
        (tmp_path / "cut.pt").write_bytes(content[:k])
        with pytest.raises(ShardwiseError):
            open_catalog(tmp_path / "cut.pt")
    (tmp_path / "flip.pt").write_bytes(content.replace(b"K\x02\x85", b"K\x01\x85"))
    with pytest.raises(FormatError, match="CRC"):
        open_catalog(tmp_path / "flip.pt")
    assert at > 0
