"""ElasticSampler: one order of samples at every world size, taken up anywhere, nothing skipped and nothing repeated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise.errors import StateError
from shardwise.rng import capture_rng, preserve_rng
from shardwise.state.typed_json import decode, encode


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True)
class Run:
    """Settings that all stages of a run have in common."""

    length: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def sampler(self, world_size: int, rank: int, global_batch: int) -> sw.ElasticSampler:
        return sw.ElasticSampler(
            range(self.length),
            global_batch_size=global_batch,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_replicas=world_size,
            rank=rank,
        )

    def loaders(self, world_size: int, global_batch: int, **options: Any) -> list[sw.ResumableLoader]:
        """One loader a rank, as if each were a process."""
        data = Numbers(self.length)
        samplers = [self.sampler(world_size, rank, global_batch) for rank in range(world_size)]
        return [sw.ResumableLoader(DataLoader(data, batch_sampler=s, **options)) for s in samplers]

    def order(self, epoch: int) -> list[int]:
        """The plain list that all is held against: the epoch's samples in their order."""
        if not self.shuffle:
            return list(range(self.length))
        whole = self.sampler(1, 0, 1)
        whole.set_epoch(epoch)
        return [index for (index,) in whole]

    def batches(self, global_batch: int, epochs: int) -> list[tuple[int, list[int]]]:
        """(epoch, samples) of each global batch, of one run that nothing stops, made from the plain lists."""
        found = []
        for epoch in range(epochs):
            order = self.order(epoch)
            for begin in range(0, self.length, global_batch):
                batch = order[begin : begin + global_batch]
                if len(batch) < global_batch and self.drop_last:
                    continue
                filled = batch + order * global_batch
                found.append((epoch, filled[:global_batch]))
        return found


def stored(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The one state of all ranks, as it comes back from files."""
    assert all(state == states[0] for state in states)
    encoded = encode(states[0])
    assert not encoded.tensors
    assert not encoded.not_stored
    return decode(json.loads(json.dumps(encoded.document)), {})


def take(loaders: list[sw.ResumableLoader]) -> Iterator[tuple[int, list[int]]]:
    """(epoch, samples) of global batches, for ever, all ranks in step."""
    while True:
        for parts in zip(*loaders, strict=True):
            (epoch,) = {loader.epoch for loader in loaders}
            yield epoch, torch.cat(parts).tolist()


runs = st.builds(Run, st.integers(1, 60), st.integers(0, 3), st.booleans(), st.booleans())


@given(run=runs, global_batch=st.sampled_from([12, 24]), stops=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 2, 3, 4])), min_size=1, max_size=6))  # fmt: skip
def test_a_run_that_changes_its_world_size_equals_a_plain_list(
    run: Run, global_batch: int, stops: list[tuple[int, int]]
) -> None:
    if run.drop_last and run.length < global_batch:
        with pytest.raises(StateError, match=f"{run.length} samples make no global batch of {global_batch}"):
            run.loaders(1, global_batch)
        return
    found: list[tuple[int, list[int]]] = []
    state = None
    for count, world_size in stops:
        loaders = run.loaders(world_size, global_batch)
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        batches = take(loaders)
        found += [next(batches) for _ in range(count)]
        state = stored([loader.state_dict() for loader in loaders])
    total = len(found)
    assert found == run.batches(global_batch, epochs=total + 1)[:total]


@given(run=runs, sizes=st.lists(st.sampled_from([4, 8, 12, 24]), min_size=1, max_size=5), data=st.data())
def test_another_global_batch_goes_on_at_the_same_sample(
    run: Run, sizes: list[int], data: st.DataObject
) -> None:
    """Whether an epoch holds one more global batch is judged by the sampler that is asked for it."""
    epoch, position, state = 0, 0, None
    for size in sizes:
        if run.drop_last and run.length < size:
            return
        loaders = run.loaders(data.draw(st.sampled_from([1, 2, 4])), size)
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        batches = take(loaders)
        for _ in range(data.draw(st.integers(0, 3))):
            if position + (size if run.drop_last else 1) > run.length:
                epoch, position = epoch + 1, 0
            order = run.order(epoch)
            assert next(batches) == (epoch, (order[position:] + order * size)[:size])
            position += size
        state = stored([loader.state_dict() for loader in loaders])


@given(run=runs)
def test_every_epoch_holds_every_sample_in_another_order(run: Run) -> None:
    orders = [run.order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(run.length)) for order in orders)
    assert orders == [run.order(epoch) for epoch in range(3)]
    if run.shuffle and run.length > 20:
        assert orders[0] != orders[1] != orders[2]
        other = Run(run.length, run.seed + 1)
        assert other.order(0) != orders[0]


def test_the_order_never_changes() -> None:
    """Frozen: another one would change the order of a stored run in the middle of an epoch."""
    assert Run(10, seed=3).order(2) == [8, 1, 6, 7, 2, 9, 3, 4, 0, 5]


def test_global_generators_are_neither_drawn_from_nor_looked_at() -> None:
    with preserve_rng():
        before = encode(capture_rng())
        order = Run(50).order(1)
        after = encode(capture_rng())
        assert after.document == before.document
        assert all(torch.equal(after.tensors[key], kept) for key, kept in before.tensors.items())
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        assert Run(50).order(1) == order


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_prefetched_does_not_count(workers: int) -> None:
    run = Run(40, seed=1)
    (loader,) = run.loaders(1, 4, num_workers=workers)
    batches = iter(loader)
    for count in range(1, 4):
        next(batches)
        state = loader.state_dict()
        assert (state["sampler"]["epoch"], state["sampler"]["consumed"]) == (0, 4 * count)
        assert (loader.epoch, loader.consumed) == (0, count)
    resumed = run.loaders(2, 4, num_workers=workers)
    for one in resumed:
        one.load_state_dict(state)
    taken = list(zip(*resumed, strict=True))
    assert [torch.cat(parts).tolist() for parts in taken] == [b for _, b in run.batches(4, 1)[3:]]
    assert {(one.epoch, one.consumed) for one in resumed} == {(1, 0)}


class Counting(Numbers):
    """Counts what is read of it."""

    read = 0

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


def test_skipped_samples_are_not_read_again_and_nothing_is_drawn() -> None:
    run = Run(40)
    (first,) = run.loaders(1, 4)
    batches = iter(first)
    for _ in range(7):
        next(batches)
    data = Counting(40)
    second = sw.ResumableLoader(DataLoader(data, batch_sampler=run.sampler(1, 0, 4)))
    second.load_state_dict(first.state_dict())
    before = torch.get_rng_state()
    assert len(list(second)) == 3
    assert data.read == 12
    assert torch.equal(torch.get_rng_state(), before), "the stored run drew when the epoch began"
    list(second)
    assert not torch.equal(torch.get_rng_state(), before), (
        "an epoch that begins draws, as with any DataLoader"
    )


def test_leaving_a_loop_early_begins_a_new_epoch() -> None:
    run = Run(20)
    (loader,) = run.loaders(1, 4)
    assert next(iter(loader)).tolist() == run.order(0)[:4]
    assert (loader.epoch, loader.consumed) == (0, 1)
    assert next(iter(loader)).tolist() == run.order(1)[:4]
    assert (loader.epoch, loader.consumed) == (1, 1)


def test_an_old_iteration_does_not_disturb_a_loaded_position() -> None:
    run = Run(20)
    (loader,) = run.loaders(1, 4)
    state = loader.state_dict()
    old = iter(loader)
    next(old)
    loader.load_state_dict(state)
    assert len(list(old)) == 4
    assert loader.state_dict() == state
    assert next(iter(loader)).tolist() == run.order(0)[:4]


def test_set_epoch_begins_one_and_leaves_a_loaded_one_alone() -> None:
    run = Run(20)
    (loader,) = run.loaders(1, 4)
    sampler = loader.loader.batch_sampler
    assert isinstance(sampler, sw.ElasticSampler)
    sampler.set_epoch(5)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [run.order(5)[:4], run.order(5)[4:8]]
    (fresh,) = run.loaders(1, 4)
    fresh.load_state_dict(loader.state_dict())
    fresh.loader.batch_sampler.set_epoch(fresh.epoch)  # type: ignore[union-attr]
    assert next(iter(fresh)).tolist() == run.order(5)[8:12]


def test_a_loader_that_is_not_counted_is_refused_by_name() -> None:
    sampler = Run(20).sampler(1, 0, 4)
    sampler.state_dict()
    for batch in DataLoader(Numbers(20), batch_sampler=sampler):
        with pytest.raises(StateError, match="wrap the loader"):
            sampler.state_dict()
        sampler.advance()
        assert sampler.state_dict()["consumed"] == 4
        assert len(batch) == 4
        break
    assert len(list(sampler)) == 4, "goes on after what was consumed"


def test_without_automatic_batching() -> None:
    """The dataset is handed lists of indices; only as ``sampler`` beside ``batch_size=None``."""
    data: Any = torch.arange(20) * 10
    sampler = Run(20).sampler(1, 0, 4)
    loader = sw.ResumableLoader(DataLoader(data, sampler=sampler, batch_size=None))
    first = next(iter(loader))
    assert torch.as_tensor(first).tolist() == [10 * i for i in Run(20).order(0)[:4]]
    assert loader.state_dict()["sampler"]["consumed"] == 4
    with pytest.raises(StateError, match="batch_sampler"):
        sw.ResumableLoader(DataLoader(data, sampler=sampler, batch_size=4))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Run(21), "dataset length was 20 and is 21"),
        (Run(20, seed=1), "seed was 0 and is 1"),
        (Run(20, shuffle=False), "shuffle was True and is False"),
    ],
)
def test_another_order_is_refused_by_name(other: Run, named: str) -> None:
    (loader,) = Run(20).loaders(1, 4)
    next(iter(loader))
    (fresh,) = other.loaders(1, 4)
    before = fresh.state_dict()
    with pytest.raises(StateError, match=named):
        fresh.load_state_dict(loader.state_dict())
    assert fresh.state_dict() == before


def test_positions_of_other_loaders_are_refused() -> None:
    (elastic,) = Run(20).loaders(1, 4)
    plain = sw.ResumableLoader(DataLoader(Numbers(20), batch_size=4))
    with pytest.raises(StateError, match="stored with an ElasticSampler, but the loader is without"):
        plain.load_state_dict(elastic.state_dict())
    with pytest.raises(StateError, match="stored without an ElasticSampler"):
        elastic.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="version 9"):
        elastic.load_state_dict({"version": 1, "sampler": {"version": 9}})
    with pytest.raises(StateError, match="position is list, expected a dict"):
        elastic.load_state_dict({"version": 1, "sampler": []})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"consumed": -3}, "'consumed' is -3"),
        ({"consumed": "8"}, "'consumed' is '8'"),
        ({"epoch": True}, "'epoch' is True"),
        ({"epoch": None}, "'epoch' is None"),
        ({}, "'epoch' is missing"),
    ],
)
def test_a_damaged_position_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    sampler = Run(20).sampler(1, 0, 4)
    before = sampler.state_dict()
    position = {**before, **wrong}
    if not wrong:
        del position["epoch"]
    with pytest.raises(StateError, match=named):
        sampler.load_state_dict(position)
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"global_batch_size": 10, "num_replicas": 3, "rank": 0}, "10 isn't divisible by 3 replicas"),
        ({"global_batch_size": 0}, "a global batch of 0"),
        ({"global_batch_size": 4, "num_replicas": 2, "rank": 2}, "rank 2 is not one of 2"),
        ({"global_batch_size": 21, "drop_last": True}, "20 samples make no global batch of 21"),
    ],
)
def test_what_can_not_be_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(StateError, match=named):
        sw.ElasticSampler(range(20), **options)


@pytest.mark.parametrize("name", ["global_batch_size", "seed", "num_replicas", "rank"])
@pytest.mark.parametrize("value", [2.0, "2"])
def test_only_whole_numbers_are_taken(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, got {value!r}"):
        sw.ElasticSampler(range(20), **{"global_batch_size": 4, "num_replicas": 2, "rank": 0, name: value})


def test_whole_numbers_of_numpy_are_taken_as_pythons() -> None:
    four, one = np.int64(4), np.int64(1)
    sampler = sw.ElasticSampler(range(20), global_batch_size=four, seed=one, num_replicas=four, rank=one)  # type: ignore[arg-type]
    assert sampler.state_dict() == Run(20, seed=1).sampler(4, 1, 4).state_dict()
    assert all(type(value) in (int, bool) for value in sampler.state_dict().values())


def test_a_dataset_without_a_length_is_named() -> None:
    with pytest.raises(StateError, match="needs a dataset with a length, got list_iterator"):
        sw.ElasticSampler(iter([1]), global_batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="0 samples"):
        sw.ElasticSampler([], global_batch_size=1)


def test_length_counts_whole_epochs() -> None:
    assert len(Run(20).sampler(2, 0, 8)) == 3
    assert len(Run(20, drop_last=True).sampler(2, 0, 8)) == 2
    assert len(Run(16).loaders(2, 8)[0]) == 2


def test_only_draws_in_workers_are_a_caveat() -> None:
    (plain,) = Run(20).loaders(1, 4)
    assert plain.caveats == ()
    (loader,) = Run(20).loaders(1, 4, num_workers=2)
    assert "num_workers=2" in loader.caveats[0]
    (loader,) = Run(20).loaders(1, 4, num_workers=2, in_order=False)
    assert "in_order=False" in loader.caveats[1]
