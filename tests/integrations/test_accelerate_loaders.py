"""Accelerate's loaders over a resume in new processes: exact where the report says so, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.launch import Launch
from tests.harness.pool import RankPool
from tests.integrations import _accelerate_loaders_fns as fns
from tests.integrations._accelerate_loaders_fns import STEPS, Script

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(330)]  # two launches, which import everything anew

INSIDE, LAST = 2, STEPS
EXACT = [
    Script(stateful=True, seedable=True, save_after=INSIDE),
    Script(stateful=True, seedable=False, shuffle=False, save_after=INSIDE),
    Script(stateful=True, seedable=False, save_after=INSIDE),
    Script(stateful=True, seedable=True, save_after=LAST),
    Script(stateful=True, seedable=False, save_after=LAST),
    Script(stateful=True, seedable=False, save_after=None),
    Script(stateful=False, seedable=True, save_after=LAST),
    Script(stateful=False, seedable=True, save_after=None),
    Script(stateful=False, seedable=False, save_after=LAST),
    Script(stateful=False, seedable=False, save_after=None),
    Script(stateful=True, seedable=False, save_after=LAST, own_generator=True),
    Script(stateful=True, seedable=False, save_after=None, own_generator=True),
    Script(stateful=False, seedable=False, save_after=None, own_generator=True),
]
#: Bitwise, because these scripts skip what was consumed: that is up to the script, so it is not called exact.
SKIPS = [
    Script(stateful=False, seedable=True, save_after=INSIDE),
    Script(stateful=False, seedable=False, shuffle=False, save_after=INSIDE),
    Script(stateful=False, seedable=False, save_after=INSIDE),
]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """By rank: what each script did after its save, and what it did in a new process that resumed."""
    root = str(tmp_path_factory.mktemp("lives"))
    found = []
    for life in (fns.first_life, fns.second_life):
        with Launch(2, life, [*EXACT, *SKIPS], root) as job:
            assert job.wait(150) == [0, 0]
            found.append([job.result(rank) for rank in range(2)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("script", EXACT, ids=lambda script: script.name)
def test_goes_on_bitwise(lives: Any, script: Script) -> None:
    for first, second in lives:
        trace, exact, caveats, differences = second[script.name]
        assert trace == first[script.name]
        assert (exact, caveats, differences) == (True, (), ())


@pytest.mark.parametrize("script", SKIPS, ids=lambda script: script.name)
def test_says_that_its_epoch_begins_again(lives: Any, script: Script) -> None:
    for first, second in lives:
        trace, exact, caveats, _ = second[script.name]
        assert trace == first[script.name]
        assert not exact
        assert len(caveats) == 1
        assert "only exact if the loop skips" in caveats[0]


@pytest.mark.nightly
@pytest.mark.needs("accelerate>=1.13", "raises a KeyError for stateful loaders with workers")
def test_says_what_other_loaders_cannot_promise(ranks: RankPool) -> None:
    for found in ranks.run_ranks(2, fns.caveats_of_others, timeout_s=100):
        assert found["none"] == found["own generator"] == ()
        assert found["rng_types"] == (), "generators are put back after they were made alike"
        for name, words in (
            ("workers", "num_workers=1: workers start"),
            ("iterable", "iterable dataset"),
            ("batch", "had 4 samples when saved, and has 2 now"),
            ("own batches", "in a different order"),
            ("skipped", "skip_first_batches"),
            (
                "older",
                "batch_sampler.generator: the checkpoint and the loader don't hold the same random generators",
            ),
        ):
            assert len(found[name]) == 1, (name, found[name])
            assert words in found[name][0]
        assert [line.partition("=")[0] for line in found["kept workers"]] == [
            "data loader 0: num_workers",
            "data loader 0: persistent_workers",
        ]
        assert "without use_stateful_dataloader, and is with" in found["stateful"]
        assert "1 data loaders, 2 are prepared" in found["two"]
