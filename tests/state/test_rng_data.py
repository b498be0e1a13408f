"""Random generators and data position: a resumed run draws and reads what an uninterrupted one does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from shardwise.errors import StateError
from shardwise.rng import capture_host_rng, capture_rng, derive_rng, plan_rng, preserve_rng, restore_rng
from shardwise.state.data import ResumableLoader
from shardwise.state.typed_json import decode, encode
from tests.harness.tiers import examples, nightly_but


@pytest.fixture(autouse=True)
def _own_rng() -> Iterator[None]:
    with preserve_rng():
        yield


def draws() -> list[float]:
    """One draw of every global generator, and of the halves of normal pairs that they keep."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


def stored(state: Any) -> Any:
    """``state`` as it comes back from files."""
    encoded = encode(state)
    assert encoded.not_stored == ()
    return decode(json.loads(json.dumps(encoded.document, allow_nan=False)), encoded.tensors)


# ------------------------------------------------------------------------------------------------ generators


def test_draws_after_restore_are_the_same() -> None:
    draws()  # so that one half of a normal pair is kept in each
    state = stored(capture_rng())
    expected = [draws() for _ in range(3)]
    restore_rng(state)
    assert [draws() for _ in range(3)] == expected


def test_capture_draws_nothing() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draws()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    capture_rng()
    assert draws() == expected


def test_capture_does_not_initialize_cuda() -> None:
    before = torch.cuda.is_initialized()
    capture_rng()
    assert torch.cuda.is_initialized() == before


def test_preserve_gives_back_also_after_an_error() -> None:
    state = capture_rng()
    expected = draws()
    restore_rng(state)

    def fail() -> None:
        with preserve_rng():
            draws()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draws() == expected


def test_derived_generators_follow_their_rule() -> None:
    seen = {}
    for seed, step, rank in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (-1, 0, 0), (2**80, 10**9, 4096)]:
        rule = derive_rng(seed=seed, step=step, rank=rank)
        seen[tuple(draws())] = rule
        derive_rng(seed=seed, step=step, rank=rank)
        assert tuple(draws()) in seen
        assert "\n" not in rule
        assert f"seed {seed}, step {step}, rank {rank}" in rule
    assert len(seen) == 6
    for generator in range(6):
        assert len({drawn[generator] for drawn in seen}) == 6


def test_derived_draws_never_change() -> None:
    derive_rng(seed=1, step=2, rank=3)
    drawn = (random.getrandbits(32), int(np.random.randint(2**31)), int(torch.randint(2**31, ())))
    assert drawn == (2555157051, 340518238, 1168787646)


def test_derive_refuses_what_is_no_integer() -> None:
    with pytest.raises(StateError, match="step"):
        derive_rng(seed=0, step=1.5, rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_bad_state_is_refused_whole(part: str) -> None:
    state = capture_rng()
    draws()
    before = stored(capture_rng())
    for bad in ({**state, part: None}, {k: v for k, v in state.items() if k != part}):
        with pytest.raises(StateError):
            restore_rng(bad)
    bad_words = {**state, "python": {**state["python"], "words": torch.zeros(8, dtype=torch.uint8)}}
    with pytest.raises(StateError):
        restore_rng(bad_words)
    expected = draws()
    restore_rng(before)
    assert draws() == expected


def test_devices_of_another_process_are_refused_whole() -> None:
    state = stored(capture_host_rng())
    expected = draws()
    strange = {"type": "xla", "own": [torch.zeros(16, dtype=torch.uint8)]}  # a kind that no test machine has
    with pytest.raises(StateError, match="saved on a xla device, but this process has") as caught:
        restore_rng({**state, "accelerator": strange})
    assert "derive_rng" not in str(caught.value), "is not public"
    restore_rng(state)
    plan = plan_rng({**state, "accelerator": strange}, seed=0, step=0, rank=0)
    assert draws() == expected, "a plan changes nothing"
    assert "saved on a xla device" in plan.differences[0]
    plan.apply()
    assert draws() == expected, "the host's generators come back"


def test_a_plan_without_a_state_derives() -> None:
    plan = plan_rng(None, seed=1, step=2, rank=3)
    plan.apply()
    found = draws()
    assert plan.rule == derive_rng(seed=1, step=2, rank=3)
    assert (found, plan.differences) == (draws(), ())


# ---------------------------------------------------------------------------------------------- data position


class Noisy(Dataset[torch.Tensor]):
    """Samples with an augmentation that draws from every global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, 11, step)


def plain(workers: int) -> DataLoader[Any]:
    return DataLoader(Noisy(11), batch_size=2, shuffle=True, num_workers=workers)


def persistent() -> DataLoader[Any]:
    # Augmentation in persistent workers is a caveat, so the samples here are plain numbers.
    return DataLoader(range(11), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]


def own_generator(workers: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Noisy(10), batch_size=2, shuffle=True, generator=generator, num_workers=workers)


def two_generators() -> DataLoader[Any]:
    sampler = RandomSampler(
        range(40), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(1)
    )
    batches = BatchSampler(sampler, 10, drop_last=True)
    return DataLoader(Noisy(40), batch_sampler=batches, generator=torch.Generator().manual_seed(2))


def weighted() -> DataLoader[Any]:
    return DataLoader(Noisy(12), batch_size=3, sampler=WeightedRandomSampler([0.1, 0.9] * 6, 12))


def distributed() -> DataLoader[Any]:
    dataset = Noisy(21)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


def iterable(workers: int) -> DataLoader[Any]:
    return DataLoader(Counting(), batch_size=2, num_workers=workers)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: plain(0),
    "own generator": lambda: own_generator(0),
    "two generators": two_generators,
    "weighted": weighted,
    "distributed": distributed,
    "iterable": lambda: iterable(0),
}
WORKER_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: plain(2),
    "own generator": lambda: own_generator(2),
    "iterable": lambda: iterable(2),
    "persistent": persistent,
}
EPOCHS = 3


def train(loader: ResumableLoader, log: list[Any], *, stop_after: int | None = None) -> Any:
    """Three epochs of batches and draws between them, or less: stops once ``log`` has ``stop_after`` batches.

    Returns what was stored then.
    """
    for epoch in range(loader.epoch, EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            log.append((epoch, batch.tolist(), draws()))
            if len(log) == stop_after:
                return stored({"data": loader.state_dict(), "rng": capture_rng()})
    return None


def seed() -> None:
    torch.manual_seed(7), random.seed(7), np.random.seed(7)


def uninterrupted(make: Callable[[], DataLoader[Any]]) -> tuple[list[Any], list[float]]:
    seed()
    log: list[Any] = []
    train(ResumableLoader(make()), log)
    return log, draws()


def interrupted(make: Callable[[], DataLoader[Any]], stops: list[int]) -> tuple[list[Any], list[float]]:
    seed()
    log: list[Any] = []
    loader = ResumableLoader(make())
    for stop in stops:
        states = train(loader, log, stop_after=stop)
        seed()  # the new process has been doing other things
        draws()
        loader = ResumableLoader(make())
        loader.load_state_dict(states["data"])
        restore_rng(states["rng"])
    train(loader, log)
    return log, draws()


@examples(20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", LOADERS)
def test_resumed_run_equals_uninterrupted(name: str, data: st.DataObject) -> None:
    expected = uninterrupted(LOADERS[name])
    total = len(expected[0])
    stops = sorted(data.draw(st.sets(st.integers(1, total), min_size=1, max_size=3)))
    assert interrupted(LOADERS[name], stops) == expected


@pytest.mark.parametrize("name", nightly_but(WORKER_LOADERS, "own generator"))
@pytest.mark.processes
def test_resumed_run_equals_uninterrupted_with_workers(name: str) -> None:
    expected = uninterrupted(WORKER_LOADERS[name])
    per_epoch = len(expected[0]) // EPOCHS
    for stops in ([1], [per_epoch - 1, per_epoch + 1], [per_epoch], [2 * per_epoch], [3 * per_epoch]):
        assert interrupted(WORKER_LOADERS[name], stops) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_wrapping_changes_nothing(name: str) -> None:
    seed()
    log: list[Any] = []
    loader = LOADERS[name]()
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        log += [(epoch, batch.tolist(), draws()) for batch in loader]
    expected = (log, draws())
    assert uninterrupted(LOADERS[name]) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_stored_between_epochs(name: str) -> None:
    expected, _ = uninterrupted(LOADERS[name])
    seed()
    loader = ResumableLoader(LOADERS[name]())
    for _ in loader:
        draws()
    assert (loader.epoch, loader.consumed) == (1, 0)
    state = stored({"data": loader.state_dict(), "rng": capture_rng()})
    log: list[Any] = []
    fresh = ResumableLoader(LOADERS[name]())
    fresh.load_state_dict(state["data"])
    restore_rng(state["rng"])
    train(fresh, log)
    assert log == [entry for entry in expected if entry[0] > 0]


def test_a_batch_counts_when_the_loop_gets_it() -> None:
    loader = ResumableLoader(plain(2))
    assert loader.state_dict()["consumed"] == 0
    for index, _ in enumerate(loader):
        assert loader.state_dict()["consumed"] == loader.consumed == index + 1
        assert loader.epoch == 0
    assert (loader.epoch, loader.consumed) == (1, 0)


def test_leaving_early_begins_a_new_epoch() -> None:
    def first_batches(loader: Any) -> list[Any]:
        seed()
        return [next(iter(loader)).tolist() for _ in range(3)]

    loader = ResumableLoader(plain(0))
    assert first_batches(loader) == first_batches(plain(0))
    assert (loader.epoch, loader.consumed) == (2, 1)


def test_a_loaded_state_is_stored_again_unchanged() -> None:
    loader = ResumableLoader(own_generator(0))
    batches = iter(loader)
    next(batches), next(batches)
    state = stored(loader.state_dict())
    fresh = ResumableLoader(own_generator(0))
    fresh.load_state_dict(state)
    assert encode(fresh.state_dict()).document == encode(state).document
    next(batches)  # the old iteration does not disturb anything
    assert loader.consumed == 3
    assert fresh.consumed == 2


def test_complete_epoch_is_counted_as_done_once_loaded() -> None:
    loader = ResumableLoader(plain(0))
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert (loader.epoch, loader.consumed) == (0, len(loader))
    fresh = ResumableLoader(plain(0))
    fresh.load_state_dict(stored(loader.state_dict()))
    assert (fresh.epoch, fresh.consumed) == (1, 0)
    assert len(list(fresh)) == len(fresh)
    assert fresh.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_draws_nothing(workers: int) -> None:
    loader = ResumableLoader(plain(workers))
    next(iter(loader))
    fresh = ResumableLoader(plain(workers))
    fresh.load_state_dict(loader.state_dict())
    fresh_batches = iter(fresh)
    with preserve_rng():
        expected = draws()
    if workers:  # in the training process the second batch itself draws, as without workers
        next(fresh_batches)
        assert draws() == expected


def test_state_is_small() -> None:
    loader = ResumableLoader(DataLoader(range(100_000), batch_size=1, shuffle=True))  # type: ignore[arg-type]
    next(iter(loader))
    encoded = encode(loader.state_dict())
    assert len(json.dumps(encoded.document)) < 4096
    assert sum(t.nbytes for t in encoded.tensors.values()) < 16384


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda: DataLoader(Noisy(12), batch_size=2, shuffle=True), "dataset length was 11 and is 12"),
        (lambda: DataLoader(Noisy(11), batch_size=3, shuffle=True), "batch size was 2 and is 3"),
        (
            lambda: DataLoader(Noisy(11), batch_size=2, shuffle=True, num_workers=2),
            "num_workers was 0 and is 2",
        ),
        (
            lambda: DataLoader(Noisy(11), batch_size=2),
            "sampler was 'RandomSampler' and is 'SequentialSampler'",
        ),
        (
            lambda: DataLoader(Noisy(11), batch_size=2, shuffle=True, generator=torch.Generator()),
            r"parts with generators was \[\] and is \['loader', 'sampler'\]",
        ),
    ],
)
def test_another_loader_is_named(changed: Callable[[], DataLoader[Any]], named: str) -> None:
    state = stored(ResumableLoader(plain(0)).state_dict())
    with pytest.raises(StateError, match=named):
        ResumableLoader(changed()).load_state_dict(state)


def test_other_world_size_is_named() -> None:
    state = stored(ResumableLoader(distributed()).state_dict())
    dataset = Noisy(21)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=3, rank=1)
    with pytest.raises(StateError, match="sampler's replicas was 2 and is 3"):
        ResumableLoader(DataLoader(dataset, batch_size=2, sampler=sampler)).load_state_dict(state)


class Shrinking(IterableDataset[int]):
    length = 6

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def test_a_dataset_that_became_shorter_is_an_error() -> None:
    loader = ResumableLoader(DataLoader(Shrinking(), batch_size=2))
    batches = iter(loader)
    next(batches), next(batches)
    shorter = Shrinking()
    shorter.length = 2
    fresh = ResumableLoader(DataLoader(shorter, batch_size=2))
    fresh.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="ended after 1 batches, but the stored run had consumed 2"):
        next(iter(fresh))


class WrongLength(BatchSampler):
    def __len__(self) -> int:
        return 1


def test_a_length_that_is_too_small_is_an_error() -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(DataLoader(Noisy(4), batch_sampler=WrongLength(range(4), 2, False)))

    loader = make()
    next(iter(loader))
    fresh = make()
    fresh.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="more batches than its length 1"):
        next(iter(fresh))


def test_foreign_states_and_loaders_are_refused() -> None:
    loader = ResumableLoader(plain(0))
    with pytest.raises(StateError, match="version"):
        loader.load_state_dict({"version": 99})
    with pytest.raises(StateError, match="lacks consumed, epoch"):
        loader.load_state_dict({"version": 1})
    with pytest.raises(StateError, match="got list"):
        ResumableLoader([])  # type: ignore[arg-type]


def test_running_persistent_workers_cannot_go_back_to_their_start() -> None:
    state = ResumableLoader(persistent()).state_dict()
    loader = ResumableLoader(persistent())
    next(iter(loader))
    with pytest.raises(StateError, match="persistent workers"):
        loader.load_state_dict(state)


def test_caveats_name_what_is_not_exact() -> None:
    for name in ("plain", "own generator", "two generators", "weighted", "distributed"):
        assert ResumableLoader(LOADERS[name]()).caveats == ()
    assert "iterable" in ResumableLoader(iterable(0)).caveats[0]
    assert ResumableLoader(iterable(2)).caveats == ()
    assert "persistent_workers" in ResumableLoader(persistent()).caveats[0]
    disordered = DataLoader(Noisy(4), num_workers=2, in_order=False)
    assert "in_order" in ResumableLoader(disordered).caveats[0]
    custom = DataLoader(Noisy(4), batch_sampler=WrongLength(range(4), 2, False))
    assert "batch_sampler is a WrongLength" in ResumableLoader(custom).caveats[0]


def test_attributes_pass_through() -> None:
    inner = plain(0)
    loader = ResumableLoader(inner)
    assert loader.loader is inner
    assert loader.dataset is inner.dataset
    assert loader.sampler is inner.sampler
    assert (loader.batch_size, len(loader)) == (2, 6)
