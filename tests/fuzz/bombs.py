"""Small files that once took unbounded time or memory, or blocked. Each is refused within 1 s of CPU and 200 MB."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.checkpoint.verify import quick_check
from tests.fuzz.targets import Call, Seeds, copied, fix_checksums, replaced, restored, resumed, verified

__all__ = ["BOMBS", "CPU_S", "MEMORY_BYTES"]

CPU_S = 1.0
MEMORY_BYTES = 200_000_000

Maker = Callable[[Seeds, Path], None]
#: Name → what writes the bomb, and the call that reads it.
BOMBS: dict[str, tuple[Maker, Call]] = {}


def _bomb(*calls: Call) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        for k, call in enumerate(calls):
            name = make.__name__.removeprefix("_") + (f"_{k}" if k else "")
            BOMBS[name] = make, call
        return make

    return register


# ------------------------------------------------------------------------------------------- pickles


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return struct.pack("<I", value)


def _lists(depth: int, width: int = 2) -> bytes:
    """A list of the same list ``width`` times, ``depth`` times over."""
    levels = (b"r" + _number(k) + b"0(" + (b"j" + _number(k)) * width + b"l" for k in range(depth))
    return b"]" + b"".join(levels)


_TUPLES = b")" + b"2\x86" * 60
_PICKLES = {
    "hash_dag": b"\x80\x02}" + _TUPLES + b"K\x01s.",
    "memo_index": b"\x80\x02}r\xff\xff\xff\x0f.",
}


def _archive(description: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", description)
        archive.writestr("archive/byteorder", b"little")
    return stream.getvalue()


def _torch_bomb(name: str) -> None:
    def make(seeds: Seeds, place: Path) -> None:
        replaced(place / "pytorch_model.bin", _archive(_PICKLES[name]))

    make.__name__ = f"pickle_{name}_pt"
    _bomb(open_catalog)(make)


def _dcp_bomb(name: str) -> None:
    def make(seeds: Seeds, place: Path) -> None:
        replaced(place / ".metadata", _PICKLES[name])

    make.__name__ = f"pickle_{name}_dcp"
    _bomb(open_catalog)(make)


for _name in _PICKLES:
    _torch_bomb(_name)
    _dcp_bomb(_name)


@_bomb(restored, lambda place: sw.convert(place, place.parent / "out"))
def _pickle_list_dag_located(seeds: Seeds, place: Path) -> None:
    """A list of the same list 60 times, nine times over, in which a reader looks for tensors."""
    copied(seeds["full_state"], place)
    replaced(place / "optimizer.bin", _archive(b"\x80\x02}" + _text("state") + _lists(9, 60) + b"s."))


@_bomb(open_catalog)
def _pickle_repr_dag(seeds: Seeds, place: Path) -> None:
    """A tensor whose metadata is 2^40 lists long when it is printed."""
    names = b"ctorch._utils\n_rebuild_tensor_v2\n("
    storage = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"K\x01tQ"
    tensor = names + storage + b"K\x00K\x01\x85K\x01\x85\x89}" + _lists(40) + b"tR"
    replaced(place / "pytorch_model.bin", _archive(b"\x80\x02}" + _text("a") + tensor + b"s."))


def _metadata_with(seeds: Seeds, change: Callable[[object], None]) -> bytes:
    import pickle  # of torch's own records, written here and read by the package

    with open(seeds["dcp"] / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    change(metadata)
    return pickle.dumps(metadata)


@_bomb(open_catalog)
def _dcp_many_dims(seeds: Seeds, place: Path) -> None:
    """A tensor of 60,000 dims, the product of whose sizes has a million digits."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    def change(metadata: object) -> None:
        entry = metadata.state_dict_metadata["model.first.weight"]  # type: ignore[attr-defined]
        sizes = torch.Size([2**62] * 60_000)
        entry.size = sizes
        entry.chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * 60_000), sizes=sizes)]

    copied(seeds["dcp"], place)
    replaced(place / ".metadata", _metadata_with(seeds, change))


@_bomb(lambda place: sw.convert(place, place.parent / "out"))
def _dcp_objects_sparse(seeds: Seeds, place: Path) -> None:
    """An object of 6 GB in a file that takes nothing on disk."""

    def change(metadata: object) -> None:
        for key, where in metadata.storage_data.items():  # type: ignore[attr-defined]
            if "lr_scheduler" in key.fqn:
                where.length = 6_000_000_000

    copied(seeds["dcp"], place)
    replaced(place / ".metadata", _metadata_with(seeds, change))
    for data in place.glob("*.distcp"):
        content = data.read_bytes()
        replaced(data, content)
        os.truncate(data, 7_000_000_000)


# --------------------------------------------------------------------------------- our own checkpoints


def _changed_manifest(seeds: Seeds, place: Path, change: Callable[[dict], None], seed: str = "run") -> Path:
    step = copied(seeds[seed] / "step-00000001", place / "step-00000001")
    document = json.loads((step / "manifest.json").read_bytes())
    change(document)
    replaced(step / "manifest.json", json.dumps(document).encode())
    fix_checksums(step)
    return step


def _opened(place: Path) -> object:
    return open_catalog(place / "step-00000001")


@_bomb(_opened, verified)
def _manifest_strided_twice(seeds: Seeds, place: Path) -> None:
    """Two strided cuts of 65,536 on one dim: 4 billion intervals."""

    def change(document: dict) -> None:
        document["world_size"] = 4
        for geometry in document["geometries"]:
            geometry |= {"axis_sizes": [2, 2], "axis_names": ["a", "b"], "ranks": [0, 1, 2, 3]}
            geometry["cuts"] = [["strided", 0, 65_536], ["strided", 0, 65_536]]
        for entry in document["models"]["model"].values():
            entry["shape"] = [2**40, *entry["shape"][1:]]

    _changed_manifest(seeds, place, change)


@_bomb(_opened, verified, lambda place: quick_check(str(place / "step-00000001"), 1))
def _manifest_header_sparse(seeds: Seeds, place: Path) -> None:
    """A header of 64 GB in a file that takes nothing on disk."""
    names: list[str] = []

    def change(document: dict) -> None:
        names.extend(n for n in document["files"] if n.endswith(".safetensors"))
        document["files"][names[0]] |= {"header_bytes": 2**36, "nbytes": 2**36, "blocks": []}

    step = _changed_manifest(seeds, place, change)
    replaced(step / names[0], (step / names[0]).read_bytes())
    os.truncate(step / names[0], 2**36)


@_bomb(_opened, verified, lambda place: sw.convert(place / "step-00000001", place.parent / "out"))
def _manifest_packed_count(seeds: Seeds, place: Path) -> None:
    """A packed tensor of 2^40 scalars."""

    def change(document: dict) -> None:
        for packed in document["packed"].values():
            for entry in packed.values():
                entry["count"] = 2**40

    _changed_manifest(seeds, place, change)


def _colliding(count: int) -> list[int]:
    return [k * (2**61 - 1) for k in range(count)]


@_bomb(resumed)
def _json_int_collisions(seeds: Seeds, place: Path) -> None:
    """Sets and dicts whose numbers all have one hash."""
    copied(seeds["run"], place)
    step = place / "step-00000002"
    document = json.loads((step / "state.json").read_bytes())
    items = [v if abs(v) < 2**63 else {"$type": "int", "hex": hex(v)} for v in _colliding(60_000)]
    document["extra.plain"] = {"$type": "set", "items": items}
    replaced(step / "state.json", json.dumps(document).encode())
    fix_checksums(step)


@_bomb(resumed)
def _json_pipe(seeds: Seeds, place: Path) -> None:
    """A pipe in place of a document: opening it blocks for ever."""
    copied(seeds["run"], place)
    path = place / "step-00000002" / "state.json"
    path.unlink()
    os.mkfifo(path)


@_bomb(lambda place: sw.convert(place / "step-00000002", place.parent / "out"))
def _json_pipe_convert(seeds: Seeds, place: Path) -> None:
    _json_pipe(seeds, place)


# ------------------------------------------------------------------------------------ model directories


@_bomb(lambda place: sw.plan(place, ranks=2))
def _config_layers(seeds: Seeds, place: Path) -> None:
    """A model of four billion layers."""
    copied(seeds["model"], place)
    document = json.loads((place / "config.json").read_bytes())
    replaced(place / "config.json", json.dumps({**document, "num_hidden_layers": 4_294_967_298}).encode())


@_bomb(lambda place: sw.convert(place, place.parent / "out"), open_catalog)
def _header_empty_and_huge(seeds: Seeds, place: Path) -> None:
    """A tensor without elements whose other sizes no machine can multiply."""
    header = {"a": {"dtype": "F32", "shape": [0, 2**61, 2**61], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    replaced(place / "model.safetensors", struct.pack("<Q", len(text)) + text)
