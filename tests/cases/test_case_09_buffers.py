"""Case 9: buffers that no checkpoint holds equal those of an ordinary construction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool


def test_computed_buffers(ranks: RankPool, tmp_path: Path) -> None:
    directories = []
    for kind in ("qwen3", "gemma", "bert", "llava"):
        for dtype in (torch.float32, torch.bfloat16):
            directories.append(str(tmp_path / f"{kind}-{dtype}"))
            models.write_hub_directory(kind, Path(directories[-1]), dtype)
    names = ranks.run_ranks(2, fns.buffers_are_right, directories)[0]
    assert "model.rotary_emb.inv_freq" in names["qwen3-torch.bfloat16"]
    assert "model.embed_tokens.embed_scale" in names["gemma-torch.bfloat16"]
    assert all(names.values()), names


def test_a_buffer_filled_by_hand_is_left(ranks: RankPool, tmp_path: Path) -> None:
    file = models.write_state(models.state_of(fns.Derived()), tmp_path)
    assert ranks.run_ranks(2, fns.buffer_filled_by_hand, str(file)) == [2.5, 2.5]


@pytest.mark.parametrize("memory", [False, True], ids=["on meta", "given memory"])
def test_a_buffer_that_only_values_give_is_named(ranks: RankPool, tmp_path: Path, memory: bool) -> None:
    file = models.write_state(models.state_of(fns.Derived()), tmp_path)
    texts = ranks.run_ranks(2, fns.buffer_without_value, str(file), memory)
    assert len(set(texts)) == 1
    assert "'norm'" in texts[0]
    assert "non-persistent" in texts[0]
