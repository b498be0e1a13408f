"""torchdata's StatefulDataLoader as a data position: its states through typed JSON, and going on from them.

That a whole run goes on bitwise with it is held by tests/checkpoint/test_continue.py.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardwise.rng import preserve_rng
from shardwise.state.data import ResumableLoader, data_caveats, make_iterator
from shardwise.state.typed_json import decode, encode
from tests.harness.tiers import nightly


@pytest.fixture(autouse=True)
def _own_rng() -> Iterator[None]:
    with preserve_rng():
        yield


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(start, 11, step)


def stored(state: Any) -> Any:
    """``state`` as it comes back from files."""
    encoded = encode(state)
    assert encoded.not_stored == ()
    return decode(json.loads(json.dumps(encoded.document, allow_nan=False)), encoded.tensors)


def stateful(kind: str, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():  # torchdata 0.11 sets a "vital" of torch
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        if kind == "iterable":
            return StatefulDataLoader(Counting(), batch_size=2, num_workers=workers)
        generator = torch.Generator().manual_seed(5) if kind == "own generator" else None
        return StatefulDataLoader(
            range(11),  # type: ignore[arg-type]
            batch_size=2,
            shuffle=True,
            generator=generator,
            num_workers=workers,
            persistent_workers=kind == "persistent" and workers > 0,
        )


def text(state: Any) -> str:
    """Everything of a state, with its types."""
    encoded = encode(state)
    return json.dumps([encoded.document, {key: t.tolist() for key, t in encoded.tensors.items()}])


@pytest.mark.parametrize("workers", [2, *nightly(0)])
@pytest.mark.parametrize("kind", ["own generator", "iterable", *nightly("shuffled", "persistent")])
@pytest.mark.processes
def test_states_of_torchdata_come_back_equal_and_go_on(kind: str, workers: int) -> None:
    torch.manual_seed(7)
    loader = stateful(kind, workers)
    epochs, states = [], {}
    for epoch in range(3):
        taken = []
        for index, batch in enumerate(loader, 1):
            taken.append(batch.tolist())
            states[epoch, index] = stored(loader.state_dict())
            assert text(states[epoch, index]) == text(loader.state_dict())
        epochs.append(taken)
        states[epoch, "ended"] = stored(loader.state_dict())
    assert sorted(n for batch in epochs[0] for n in batch) == list(range(11))
    assert kind == "iterable" or epochs[0] != epochs[1]
    exact = kind != "own generator" or workers > 0  # else only the rest of the epoch; data_caveats says so
    stops: list[Any] = [(1, 1), (0, len(epochs[0])), *([(0, "ended")] if exact else [])]
    for epoch, done in stops:
        random.seed(8), torch.manual_seed(8)
        fresh = stateful(kind, workers)
        fresh.load_state_dict(states[epoch, done])
        make_iterator(fresh)
        before = draws_ahead()
        if done != "ended":
            assert [batch.tolist() for batch in fresh] == epochs[epoch][done:]
            assert draws_ahead() == before, "going on draws nothing"
        if exact:
            assert [batch.tolist() for batch in fresh] == epochs[epoch + 1], (epoch, done)


def draws_ahead() -> list[float]:
    with preserve_rng():
        return [random.random(), torch.rand(()).item()]


def test_caveats_of_torchdata_and_of_several_loaders() -> None:
    assert data_caveats(None) == data_caveats(stateful("shuffled", 0)) == ()
    assert "generator" in data_caveats(stateful("own generator", 0))[0]
    (caveat,) = data_caveats({"a": stateful("shuffled", 2), "b": ResumableLoader(DataLoader(range(4)))})
    assert "num_workers=2" in caveat
    assert "iterable" in data_caveats({"a": ResumableLoader(DataLoader(Counting()))})[0]


@pytest.mark.parametrize("workers", [0, *nightly(2)])
@pytest.mark.processes
def test_the_end_of_an_epoch_is_a_caveat(workers: int) -> None:
    """After its last batch torchdata's loader ends its epoch with an empty loop; a loop that counts epochs by steps loses one."""
    torch.manual_seed(7)
    loader, states = stateful("shuffled", workers), []
    for _ in loader:
        states.append(stored(loader.state_dict()))
    states.append(stored(loader.state_dict()))
    for taken, state in enumerate(states, 1):
        ours, theirs = stateful("shuffled", workers), stateful("shuffled", workers)
        ours.load_state_dict(state), theirs.load_state_dict(state)
        make_iterator(ours)
        caveats = [line for line in data_caveats(ours) if "step // len(loader)" in line]
        rest = [batch.tolist() for batch in theirs]
        assert [batch.tolist() for batch in ours] == rest, "as torchdata itself"
        assert len(caveats) == (not rest)
        assert (not rest) == (taken == len(loader))
