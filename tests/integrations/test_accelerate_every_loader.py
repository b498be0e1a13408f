"""Every sampler and loader that an accelerator can be given, resumed inside and between epochs: exact is bitwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.launch import Launch
from tests.integrations import _accelerate_every_loader_fns as fns

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]  # two launches, which import everything anew

#: Exact at every place.
EXACT = (
    "shuffled",
    "seedable",
    "in order",
    "weighted",
    "subset",
    "replacement",
    "own generator",
    "split",
    "rng_types",
    "torchdata",
    "dispatched",
    "theirs, seeded before",
)
#: Not exact inside of an epoch, though the same bits may come out: by name, what the report says.
SAYS_WHY = {
    "lazy": "may be in a different order: it isn't known when a Lazy draws",
    "own batches": "may be in a different order",
    "reshuffled": "may be in a different order",
    "plain reshuffled": "only exact if the loop skips",
    "self-seeded": "may be in a different order",
    "nested self-seeded": "may be in a different order",
    "seeded rows": "the prefetched batch is drawn again",
    "plain seeded rows": "only exact if the loop skips",
    "plain self-seeded": "only exact if the loop skips",
    "noisy": "the dataset draws from the training process's global generators",
    "workers": "may differ",
    "workers, own generator": "may differ",
    "weighted, workers": "may differ",
    "theirs, workers": "not in the checkpoint",
    "theirs, seeded before, workers": "not in the checkpoint",
    "streamed": "it may continue at a different sample",
    "plain shuffled": "only exact if the loop skips",
    "plain weighted": "only exact if the loop skips",
    "plain noisy": "only exact if the loop skips",
    "plain dispatched": "only exact if the loop skips",
    "theirs": "not in the checkpoint",
    "theirs, noisy": "not in the checkpoint",
}
ALL = [*EXACT, *SAYS_WHY]
#: Only random draws in workers could differ, and these datasets draw nothing.
WORKERS = ("workers", "workers, own generator", "weighted, workers")


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By rank: what each kind did after each save, and what it did in a new process that resumed there."""
    root = str(tmp_path_factory.mktemp("every"))
    found = []
    for life in (fns.first_life, fns.second_life):
        with Launch(2, life, root, ALL) as job:
            assert job.wait(280) == [0, 0]
            found.append([job.result(rank) for rank in range(2)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("place", fns.PLACES)
@pytest.mark.parametrize("name", ALL)
def test_exact_is_bitwise(lives: Any, name: str, place: str) -> None:
    for first, second in lives:
        trace, exact, caveats, differences = second[name, place]
        assert not differences
        assert exact == (not caveats)
        if exact:
            assert trace == first[name, place]
        else:
            assert all("may" in line or "only exact if" in line for line in caveats), (
                "it is possible, not certain"
            )


@pytest.mark.parametrize("name", EXACT)
def test_is_exact_at_every_place(lives: Any, name: str) -> None:
    for _, second in lives:
        assert [second[name, place][1:] for place in fns.PLACES] == [(True, (), ())] * len(fns.PLACES)


@pytest.mark.parametrize("place", fns.PLACES)
@pytest.mark.parametrize("name", WORKERS)
def test_the_order_from_workers_is_bitwise(lives: Any, name: str, place: str) -> None:
    """torchdata starts workers, and draws the first order, before Accelerate returns the prepared loader."""
    for first, second in lives:
        assert second[name, place][0] == first[name, place]


@pytest.mark.parametrize("name", SAYS_WHY)
def test_says_why_it_may_not_be(lives: Any, name: str) -> None:
    """Of what Accelerate prepared alone nothing is noted before the first save."""
    exact = {place: all(second[name, place][1] for _, second in lives) for place in fns.PLACES}
    assert exact == {
        "inside epoch 1": False,
        "between": name != "streamed",
        "inside epoch 2": name == "theirs",  # with workers there is another caveat
    }
    assert any(SAYS_WHY[name] in line for _, second in lives for line in second[name, "inside epoch 1"][2])
