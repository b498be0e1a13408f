"""Every format in every layout: the shards are bitwise those of the tensors that the format's own library dequantises, cut."""

from __future__ import annotations

import pytest

from tests.harness.pool import RankPool
from tests.harness.tiers import long_but
from tests.quantized._layout_fns import different
from tests.quantized._made import dequantised_twin, quantised_directories


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Quantised directories, each with a plain one that holds what the library makes of it."""
    root = tmp_path_factory.mktemp("quantised")
    found = quantised_directories(root)
    twins = [(quantised, root / "plain" / str(k)) for k, quantised in enumerate(found)]
    for quantised, plain in twins:
        dequantised_twin(quantised, plain)
    return [(str(quantised), str(plain)) for quantised, plain in twins]


@pytest.mark.parametrize("world_size", long_but((1, 2, 3, 4, 5), 3))
def test_every_layout(world_size: int, pairs: list[tuple[str, str]], ranks: RankPool) -> None:
    found = ranks.run_ranks(world_size, different, pairs, ["bfloat16"], timeout_s=500)
    for cases, wrong in found:
        assert cases >= len(pairs) * 2
        assert not wrong, wrong[:5]
