"""Case 5: training is stable until it is resumed, then the loss jumps; shards are stored as fp32.

The same training under Accelerate with FSDP2: never stopped; stopped and resumed here, at the same and at other world
sizes; and with Accelerate's own save_state and load_state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cases import _case_05_fns as fns
from tests.harness.pool import RankPool

STOP, END = 10, 30


def write_source(folder: Path, dtype: torch.dtype) -> str:
    torch.manual_seed(1)
    folder.mkdir()
    save_file({n: t.to(dtype) for n, t in fns.Curve().state_dict().items()}, folder / "model.safetensors")
    return str(folder)


def run(
    ranks: RankPool, world_size: int, source: str, dtype: str, *jobs: dict[str, Any]
) -> list[list[float]]:
    """The curves of each job; every rank found the same."""
    found = ranks.run_ranks(world_size, fns.a_life, list(jobs), source, dtype, timeout_s=200)
    assert all(rank == found[0] for rank in found)
    return found[0]


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_no_spike(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    source = write_source(tmp_path / "source", getattr(torch, dtype))
    ours, own = str(tmp_path / "ours"), str(tmp_path / "own")
    whole, first, resumed, first_own, resumed_own = run(
        ranks,
        2,
        source,
        dtype,
        {"begin": 0, "end": END},
        {"begin": 0, "end": STOP, "save": ours},
        {"begin": STOP, "end": END, "resume": ours},
        {"begin": 0, "end": STOP, "save": own, "own": True},
        {"begin": STOP, "end": END, "resume": own, "own": True},
    )
    assert whole[END - 1] < 0.7 * whole[0], "it learns"
    assert first + resumed == whole, "the same world size: bit for bit"
    assert first_own == first
    fresh, elsewhere, taken_up = run(
        ranks,
        4,
        source,
        dtype,
        {"begin": 0, "end": END},
        {"begin": STOP, "end": END, "resume": ours},
        {"begin": STOP, "end": END, "resume": own},
    )
    if dtype == "float32":
        assert worst(whole[STOP:], elsewhere) <= 1e-5, "another world size: 20 steps within 1e-5"
    else:
        spread = max(abs(a - b) for a, b in zip(whole, fresh, strict=True))
        assert max(abs(a - b) for a, b in zip(whole[STOP:], elsewhere, strict=True)) <= 3 * spread
    assert taken_up == elsewhere, "what Accelerate saved is taken up alike"
    assert fns.stored_dtypes(ours, own=False) == {"F32" if dtype == "float32" else "BF16"}
    print(
        f"{dtype}: ours {worst(whole[STOP:], resumed)}, 4 ranks {worst(whole[STOP:], elsewhere)}, "
        f"Accelerate's own {worst(whole[STOP:], resumed_own)}"
    )
