"""The reader of tensors in parts: any bytes of them, any strided elements, and as much memory as it says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shardwise.catalog.open import open_catalog
from shardwise.dtypes import itemsize
from shardwise.engine.engine import Destination, Staging, execute, wanted_box
from shardwise.engine.objects import SourceReader
from shardwise.engine.shared import DecodingReader
from shardwise.planning.plan import IOOptions, transfers_of
from shardwise.quantized.open import dequantized
from shardwise.tensors.boxes import Box
from shardwise.tensors.tiles import Loop, Tile
from tests.harness.tiers import nightly_but
from tests.quantized._made import decoded, plain_tensors, quantized_directories, whole


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return quantized_directories(tmp_path_factory.mktemp("quantized"))


def test_any_range_of_bytes(directories: list[Path]) -> None:
    """As ranks that share what they read ask for it."""
    chance, cases = random.Random(0), 0
    for directory in directories:
        stored, catalog = plain_tensors(directory), dequantized(open_catalog(directory))
        with SourceReader(files=catalog.files) as files:
            reader = DecodingReader(files, catalog.coded, IOOptions(staging_bytes=1024**2))
            for one in catalog.coded.values():
                size = itemsize(one.tensor.dtype)
                expected = decoded(one, stored, whole(one.tensor.shape)).reshape(-1).view(torch.uint8)
                for _ in range(8):
                    start = chance.randrange(expected.numel() // size) * size
                    stop = chance.randint(start // size + 1, expected.numel() // size) * size
                    view = memoryview(bytearray(stop - start))
                    reader.read_into(one.path, start, view)
                    assert bytes(view) == expected[start:stop].numpy().tobytes(), (directory, one.tensor.name)
                    cases += 1
    assert cases > 500


@pytest.mark.parametrize("elements", nightly_but((50, 300, 1000), 300))
def test_elements_in_steps_of_any_size(
    directories: list[Path], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank that reads for itself asks for them: rows, columns, inner boxes, transposed."""
    monkeypatch.setattr("shardwise.engine.shared._ELEMENTS_DECODED", elements)
    monkeypatch.setattr("shardwise.engine.shared.ROWS", 1)
    chance, cases = random.Random(elements), 0
    for directory in directories:
        stored, catalog = plain_tensors(directory), dequantized(open_catalog(directory))
        with SourceReader(files=catalog.files) as files:
            reader = DecodingReader(files, catalog.coded, IOOptions())
            for one in list(catalog.coded.values())[:2]:
                shape = one.tensor.shape
                expected = decoded(one, stored, whole(shape))
                for order in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
                    loops = tuple(Loop(shape[d], d, 1, k, 1) for k, d in enumerate(order))
                    tile = Tile(one.tensor.name, loops, (0,) * len(shape), (0,) * len(shape))
                    target = tuple(shape[d] for d in order)
                    start = tuple(chance.randrange(n) for n in target)
                    stop = tuple(chance.randint(a + 1, n) for a, n in zip(start, target, strict=True))
                    for box in (Box(start, stop), whole(target)):
                        wanted = wanted_box("w", one.tensor.dtype, target, box)
                        found = torch.zeros(box.sizes, dtype=expected.dtype)
                        transfers = list(transfers_of(tile, wanted, catalog.tensors))
                        execute(transfers, reader, Destination({"w": found}), Staging(IOOptions()))
                        assert torch.equal(found, expected.permute(order)[box.slices]), (directory, box)
                        cases += 1
    assert cases > 100
