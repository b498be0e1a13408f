"""Trainers and engines in process groups of their own, killed, paused and restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handover import chaos
from tests.harness.tiers import nightly_rows


@pytest.mark.parametrize(("versions", "seed"), [(60, 4), *nightly_rows((1000, 1), (1000, 2))])
def test_no_engine_ever_has_wrong_weights(tmp_path: Path, versions: int, seed: int) -> None:
    counts = chaos.run(versions, seed, tmp_path)
    assert counts["versions switched on"] >= versions / 4
    if versions > 500:
        assert min(counts["kills of a trainer"], counts["kills of an engine"], counts["pauses"]) > 0
