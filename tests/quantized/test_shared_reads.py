"""Ranks that read for each other read the parts of a tensor once, also where its codes are stored transposed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.quantized_formats import write
from shardwise.catalog.open import open_catalog
from shardwise.dtypes import itemsize
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.quantized import _shared_fns as fns

_COUNT, _ROWS, _COLUMNS = 3, 1024, 1536


@pytest.mark.parametrize(
    "kind", ["awq", "gpt-oss", *nightly("gptq", "nvfp4", "fp8", "int4", "nf4", "mxfp4", "int8")]
)
def test_parts_are_read_once(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """A bucket is far smaller than a tensor. Cuts between ranks lie on words and blocks."""
    write(str(tmp_path / kind), kind, _COUNT, _ROWS, _COLUMNS)
    shape = (1, _ROWS, _COLUMNS) if kind == "gpt-oss" else (_ROWS, _COLUMNS)
    stored = sum(
        math.prod(t.shape) * itemsize(t.dtype) for t in open_catalog(tmp_path / kind).tensors.values()
    )
    digests = set()
    for strategy in ("own", "node", "once"):
        found = ranks.run_ranks(2, fns.loaded, str(tmp_path / kind), _COUNT, shape, strategy)
        if (kind, strategy) != ("awq", "own"):  # its runs are so short that each rank reads all words
            assert sum(nbytes for nbytes, _ in found) <= 1.02 * stored, strategy
        digests |= {digest for _, digest in found}
    assert len(digests) == 1
