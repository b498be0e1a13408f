"""Case 19: one rank can't read: all raise, naming it and why, at once, and the group stays usable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("truncated", ["IntegrityError", "model.safetensors", "truncated"]),
        ("unlinked", ["can't see the source's files", "strategy='own'"]),
        ("unreadable", ["SourceError", "model.safetensors", "Input/output error"]),
    ],
)
def test_every_rank_learns_of_it(ranks: RankPool, tmp_path: Path, how: str, parts: list[str]) -> None:
    models.write_state(models.state_of(fns.finite_reference()), tmp_path / "shared")
    shutil.copytree(tmp_path / "shared", tmp_path / "private")
    found = ranks.run_ranks(
        3, fns.one_rank_fails, str(tmp_path / "shared"), str(tmp_path / "private"), how, timeout_s=60
    )
    assert len({each["text"] for each in found}) == 1
    assert all(list(each["causes"]) == [1] for each in found)
    for part in ("rank 1", *parts):
        assert part in found[0]["text"], found[0]["text"]
