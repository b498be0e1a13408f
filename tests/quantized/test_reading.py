"""The reader of tensors in parts: any bytes of them, any strided elements, and as much memory as it says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shardwise.catalog.open import open_catalog
from shardwise.dtypes import itemsize
from shardwise.planning.records import IOOptions
from shardwise.quantized.dequantized import dequantized
from shardwise.transfer import SourceReader
from shardwise.transfer.decoded import DecodingReader
from tests.quantized._made import decoded, plain_tensors, quantised_directories, whole


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return quantised_directories(tmp_path_factory.mktemp("quantised"))


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
