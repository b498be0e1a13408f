"""Every format in every layout: the shards are bitwise those of the tensors that the format's own library dequantises, cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.harness import models
from tests.harness.pool import RankPool
from tests.quantized._layout_fns import different
from tests.quantized._made import fp8_directory


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Quantised directories, each with a plain one that holds what the library made of it."""
    root = tmp_path_factory.mktemp("quantised")
    found = []
    for kind in ("qwen3", "qwen3-moe", "qwen3-tied"):
        models.write_hub_directory(kind, root / kind, torch.bfloat16)
        fp8_directory(root / kind, root / f"{kind}-fp8", (4, 8))
        found.append((root / f"{kind}-fp8", root / f"{kind}-fp8-plain"))
    for quantised, plain in found:
        dequantise(quantised, plain)
    return [(str(quantised), str(plain)) for quantised, plain in found]


def dequantise(quantised: Path, plain: Path) -> None:
    """By the library, in fp32: a load in bf16 then rounds what the library would."""
    found = transformers.AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    model = type(found)._from_config(
        found.config, dtype=torch.float32
    )  # one that is not quantised again when it is saved
    model.load_state_dict(found.state_dict())
    model.save_pretrained(plain)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_every_layout(world_size: int, pairs: list[tuple[str, str]], ranks: RankPool) -> None:
    for cases, wrong in ranks.run_ranks(world_size, different, pairs, ["bfloat16", "float32"]):
        assert cases >= 12
        assert not wrong, wrong[:5]
