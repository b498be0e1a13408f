"""Case 20: untrusted or damaged sources: pickles, ``../``, header bombs, overlapping or truncated data.

Each is refused with its file and the reason, before payload is read and before the model is touched; no code
of a file is ever run.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, IntegrityError, SourceError, VersionError
from shardwise.format.manifest import MANIFEST_NAME
from tests.harness.payload_reads import before_each_read

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH = "pytorch_model.bin"

pytestmark = pytest.mark.timeout(60)


def header(document: object) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text


def entry(begin: int, end: int, shape: list[int]) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


class Bomb:
    """What a pickle can do when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def pickled(folder: Path) -> None:
    (folder / TORCH).write_bytes(pickle.dumps(Bomb(folder / "ran")))


def pickled_by_torch(folder: Path) -> None:
    torch.save({"weight": Bomb(folder / "ran")}, folder / TORCH)


def pickled_compressed(folder: Path) -> None:
    """A description that is a thousand times larger than the file."""
    with zipfile.ZipFile(folder / TORCH, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(64 * 1024**2))


def pickled_under_any_name(folder: Path) -> None:
    torch.save({"weight": Bomb(folder / "ran")}, folder / "model.pt")


def pickled_into_chunks(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(folder / "ran")))


def pickled_under_another_name(folder: Path) -> None:
    (folder / SINGLE).write_bytes(pickle.dumps(Bomb(folder / "ran")))


def pickled_beside_an_index(folder: Path) -> None:
    (folder / "x.bin").write_bytes(pickle.dumps(Bomb(folder / "ran")))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": "x.bin"}}))


def index_leaves_the_directory(folder: Path) -> None:
    outside = folder / ".." / f"{folder.name}-outside.safetensors"
    save_file({"weight": torch.ones(4, 3)}, outside)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": f"../{outside.name}"}}))


def header_bomb(folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", 2**62) + b"{")


def header_as_large_as_allowed(folder: Path) -> None:
    with open(folder / SINGLE, "wb") as file:  # sparse: takes no space
        file.write(struct.pack("<Q", 99_999_999))
        file.truncate(1000)


def shape_bomb(folder: Path) -> None:
    document = {"weight": {"dtype": "F32", "shape": [2**61] * 50_000, "data_offsets": [0, 48]}}
    (folder / SINGLE).write_bytes(header(document) + bytes(48))


def overlapping(folder: Path) -> None:
    document = {"weight": entry(0, 48, [4, 3]), "bias": entry(40, 56, [4])}
    (folder / SINGLE).write_bytes(header(document) + bytes(56))


def outside_the_file(folder: Path) -> None:
    document = {"weight": entry(0, 48, [4, 3]), "bias": entry(48, 64, [4])}
    (folder / SINGLE).write_bytes(header(document) + bytes(50))


def stored_in_two_files(folder: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.ones(4, 3), f"bias_{name}": torch.ones(4)}, folder / f"{name}.safetensors")


def manifest_that_is_none(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text(json.dumps({"format": "shardwise-checkpoint", "version": 1}))


def manifest_of_a_later_version(folder: Path) -> None:
    document = {"format": "shardwise-checkpoint", "version": 7}
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    document["xxh3"] = xxhash.xxh3_64_hexdigest(text.encode())
    (folder / MANIFEST_NAME).write_text(json.dumps(document))


DAMAGE: dict[Callable[[Path], None], tuple[type[SourceError], str, str]] = {
    pickled: (FormatError, TORCH, "not a torch.save file"),
    pickled_by_torch: (FormatError, TORCH, "rejected: its pickle asks for"),
    pickled_compressed: (FormatError, TORCH, "compressed"),
    pickled_under_any_name: (SourceError, "", "give the path of the one"),
    pickled_into_chunks: (FormatError, ".metadata", "rejected: its pickle asks for"),
    pickled_under_another_name: (FormatError, SINGLE, "isn't a safetensors file"),
    pickled_beside_an_index: (FormatError, "x.bin", "header"),
    index_leaves_the_directory: (FormatError, INDEX, "not a plain file name"),
    header_bomb: (FormatError, SINGLE, "the limit is"),
    header_as_large_as_allowed: (FormatError, SINGLE, "truncated"),
    shape_bomb: (FormatError, SINGLE, "50000 dims"),
    overlapping: (FormatError, SINGLE, "'bias' overlaps"),
    outside_the_file: (FormatError, SINGLE, "truncated: tensors need"),
    stored_in_two_files: (FormatError, "a.safetensors", "'weight' is stored twice"),
    manifest_that_is_none: (IntegrityError, MANIFEST_NAME, "damaged"),
    manifest_of_a_later_version: (VersionError, MANIFEST_NAME, "update shardwise"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_refused_with_the_file_and_the_reason(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    kind, name, reason = DAMAGE[damage]
    folder = tmp_path / "source"
    folder.mkdir()
    damage(folder)

    def read_payload(*_: object) -> None:
        raise AssertionError("payload is read from a source that is refused")

    model = nn.Linear(3, 4)
    before = {n: (p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    tracemalloc.start()
    try:
        with before_each_read(read_payload), pytest.raises(SourceError) as caught:
            open_catalog(folder)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind
    assert str(folder / name) in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert peak_bytes < 16 * 1024**2, "memory as a header claims, not as the file has"
    with before_each_read(read_payload), pytest.raises(SourceError, match=re.escape(reason)):
        sw.load(model, folder)
    for n, p in model.named_parameters():
        assert p.data_ptr() == before[n][0]
        assert torch.equal(p.detach(), before[n][1])
    assert not (folder / "ran").exists(), "code of a file was run"


def test_the_pickle_used_here_is_dangerous(tmp_path: Path) -> None:
    """The check above can fail: reading this pickle leaves a trace."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_payload_that_is_cut_after_the_plan(tmp_path: Path) -> None:
    """A file that shrinks between header and payload ends in an error that names it, not in garbage."""
    path = tmp_path / SINGLE
    save_file({"weight": torch.ones(4, 3), "bias": torch.ones(4)}, path)
    catalog = open_catalog(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SourceError, match=r"model\.safetensors: ends at byte .*truncated"):
        sw.load(nn.Linear(3, 4), catalog)
    path.unlink()
    with pytest.raises(IntegrityError, match=r"model\.safetensors: lost"):
        sw.load(nn.Linear(3, 4), catalog)
