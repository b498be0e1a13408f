"""HF Trainer resumes inside an epoch: for every sampler and loader, the end is bitwise that of the whole run, or it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import RankPool
from tests.harness.tiers import nightly, nightly_but
from tests.integrations import _trainer_data_fns as fns

pytestmark = pytest.mark.needs("trainer")

#: Of these a resume is not promised to be exact; the words that its report must have.
INEXACT = {
    "no place stored": "which may differ",
    "no place stored, not seedable": "which may differ",
    "index by index": "may differ",
    "own loader, prepared": "may differ",
    "stream that counts": "may keep a position",
    "stream drawn": "samples may differ",
    "index by index, without repeat": "may differ",
    "augmented, skipped": "may differ",
    "persistent workers": "may differ",
    "persistent workers, augmented": "may differ",
}
QUICK = ("not seedable", "by length", "weighted", "own loader")


def check(ranks: RankPool, world_size: int, names: list[str], folder: Path) -> dict[str, Any]:
    found = ranks.run_ranks(world_size, fns.resumed, names, str(folder), timeout_s=580)
    for rank in found:
        for place, (equal, exact, differences) in rank.items():
            name = place.rpartition(" at ")[0]
            if exact:
                assert equal, f"{place}: called exact, and is not"
            else:
                assert name in INEXACT, (place, differences)
                said = [
                    line for other in found for line in other[place][2]
                ]  # rank 0 alone reads a dispatched stream
                assert differences, place
                assert INEXACT[name] in "; ".join(said), (place, said)
            if not equal:
                assert name in INEXACT, (place, differences)
    return found[0]


@pytest.mark.nightly
def test_samplers_that_draw_from_global_generators(ranks: RankPool, tmp_path: Path) -> None:
    found = check(ranks, 1, list(QUICK), tmp_path)
    assert len(found) == len(QUICK) * len(fns.PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, *nightly(1)])
@pytest.mark.parametrize("part", nightly_but(range(8), 0, 4))  # each well within the timeout of a test
def test_every_sampler_and_loader(ranks: RankPool, tmp_path: Path, world_size: int, part: int) -> None:
    check(ranks, world_size, list(fns.KINDS)[part::8], tmp_path)
