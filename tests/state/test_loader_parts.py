"""States of generators in a loader's parts: taken by a generator of their kind, passed by and named otherwise."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import StateError
from shardwise.integrations._loaders import LoaderPositions
from shardwise.state.documents import check_position
from shardwise.state.parts import own_states, put_own_states, takes, unfit_generators
from shardwise.state.typed_json import decode, encode

GENERATORS: dict[str, Any] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "RandomState": np.random.RandomState,
    "Random": random.Random,
    **{
        kind.__name__: lambda seed, kind=kind: np.random.Generator(kind(seed))
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    },
}


class Collate:
    def __init__(self, generator: Any) -> None:
        self.drawn_with = generator

    def __call__(self, items: list[int]) -> list[int]:
        return items


def loader_with(generator: Any) -> DataLoader[int]:
    return DataLoader(list(range(4)), collate_fn=Collate(generator))  # type: ignore[arg-type]


def state_of(name: str, seed: int = 1) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    encoded = encode(own_states(loader_with(GENERATORS[name](seed))), where="here")
    found: dict[str, Any] = decode(encoded.document, encoded.tensors)
    return found


@pytest.mark.parametrize("name", GENERATORS)
def test_a_state_goes_back_into_its_kind(name: str) -> None:
    loader, states = loader_with(GENERATORS[name](2)), state_of(name)
    assert unfit_generators(loader, states) == []
    put_own_states(loader, states)
    now, was = own_states(loader)["generators"], own_states(loader_with(GENERATORS[name](1)))["generators"]
    assert repr(now) == repr(was) != repr(own_states(loader_with(GENERATORS[name](2)))["generators"])


@pytest.mark.parametrize("name", GENERATORS)
def test_no_other_kind_takes_it(name: str) -> None:
    (path,) = state_of(name)["generators"]
    for other in GENERATORS.keys() - {name}:
        loader = loader_with(GENERATORS[other](2))
        before = repr(own_states(loader))
        assert unfit_generators(loader, state_of(name)) == [path]
        put_own_states(loader, state_of(name))
        assert repr(own_states(loader)) == before


@pytest.mark.parametrize(
    ("kind", "where"), [("MT19937", "pos"), ("RandomState", "pos"), ("Philox", "buffer_pos")]
)
@pytest.mark.parametrize("position", [-1, 625, 2**40, "1", None])
def test_positions_that_numpy_would_follow_out_of_its_words(kind: str, where: str, position: Any) -> None:
    (state,) = state_of(kind)["generators"].values()
    (state["state"] if where == "pos" else state)[where] = position
    assert not takes(GENERATORS[kind](1), state)


@pytest.mark.parametrize("state", [None, {}, (), 1, "x", torch.zeros(3), torch.zeros(16, dtype=torch.uint8)])
def test_what_is_no_state_at_all(state: Any) -> None:
    for make in GENERATORS.values():
        assert not takes(make(1), state)


def test_a_generator_on_one_side_only_is_named() -> None:
    stored, bare = state_of("torch"), loader_with(None)
    assert unfit_generators(bare, stored) == ["collate_fn.drawn_with"]
    assert unfit_generators(loader_with(GENERATORS["torch"](1)), own_states(bare)) == [
        "collate_fn.drawn_with"
    ]


SEVERAL = torch.zeros(3)


@pytest.mark.parametrize("wrong", [SEVERAL, torch.zeros(()), np.zeros(3), [SEVERAL], {"a": SEVERAL}])
@pytest.mark.parametrize("where", ["version", "num_workers"])
def test_a_tensor_where_a_number_belongs(where: str, wrong: Any) -> None:
    """``tensor != number`` has no single truth: comparing positions raised a raw error."""
    loader = sw.ResumableLoader(DataLoader(list(range(4)), generator=torch.Generator()))  # type: ignore[arg-type]
    state = loader.state_dict()
    place = state if where == "version" else state["loader"]
    assert where in place
    place[where] = wrong
    with pytest.raises(StateError, match=r"version|belongs to another loader"):
        loader.load_state_dict(state)
    if where == "version":
        check_position(state, "dataloader")  # the loader itself refuses it


@pytest.mark.parametrize("wrong", [SEVERAL, [SEVERAL]])
@pytest.mark.parametrize("where", ["version", "seed"])
def test_a_tensor_in_a_samplers_position(where: str, wrong: Any) -> None:
    sampler = sw.ElasticSampler(range(8), global_batch_size=2, seed=3)
    position = {**sampler.position(), where: wrong}
    with pytest.raises(StateError, match=r"version|another order"):
        sampler.load_state_dict(position)


class Reshuffled:
    """Batches of a list that each epoch shuffles once more, by a generator of its own or by Python's."""

    def __init__(self, own: torch.Generator | random.Random | None) -> None:
        self.batches = [[2 * i, 2 * i + 1] for i in range(4)]
        self.weights = torch.ones(4)
        self.last: list[int] | None = None
        self.generator = own

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.weights += 1 if self.last is None else self.last[0]
        if not isinstance(self.generator, torch.Generator):
            (self.generator or random).shuffle(self.batches)
        else:
            order = torch.randperm(4, generator=self.generator).tolist()
            self.batches[:] = [self.batches[k] for k in order]
        self.last = self.batches[-1]
        return iter([[*batch, int(self.weights[0]) % 8] for batch in self.batches])


class Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Packs:
    """Adds to each batch what was left of the one before."""

    def __init__(self) -> None:
        self.left = [0]

    def __call__(self, rows: list[int]) -> torch.Tensor:
        packed = torch.tensor([*self.left, *rows])
        self.left[:] = rows[-1:]
        return packed


class Counting(Rows):
    """Counts what is read of it."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index + 8 * self.reads


def loader_of(kind: str) -> DataLoader[int]:
    if kind == "collator":
        return DataLoader(Rows(), batch_size=2, collate_fn=Packs())  # type: ignore[arg-type]
    if kind == "dataset":
        return DataLoader(Counting(), batch_size=2)  # type: ignore[arg-type]
    own = {"own generator": torch.Generator().manual_seed(3), "own generator of Python's": random.Random(3)}
    return DataLoader(Rows(), batch_sampler=Reshuffled(own.get(kind)))  # type: ignore[arg-type]


OWN_STATES = ("own generator", "Python's generator", "collator", "dataset")


def restored(state: Any) -> Any:
    """As a checkpoint gives it back."""
    encoded = encode(state, where="here")
    return decode(encoded.document, encoded.tensors)


@pytest.mark.parametrize("done", [0, 1, 4, 6, 8])
@pytest.mark.parametrize("kind", OWN_STATES)
def test_what_parts_change_of_themselves(kind: str, done: int) -> None:
    """It's state: a resumed loader goes on with the batches of one that wasn't stopped."""

    def made() -> Any:
        return sw.ResumableLoader(loader_of(kind))

    random.seed(0)
    loader, trace, saved = made(), [], (None, None)
    for _ in range(3):
        for batch in loader:
            trace.append(batch.tolist())
            if len(trace) == done:
                saved = restored(loader.state_dict()), random.getstate()
    if not done:
        random.seed(0)
        saved = restored(made().state_dict()), random.getstate()
    again = made()
    again.load_state_dict(saved[0])
    random.setstate(saved[1])
    rest = [batch.tolist() for _ in range(again.epoch, 3) for batch in again]
    assert rest == trace[done:]
    # Python's generator might be used between batches
    assert (again.caveats == ()) == (kind != OWN_STATES[1])


@pytest.mark.parametrize("kind", [*OWN_STATES[:2], "own generator of Python's"])
def test_what_parts_change_of_themselves_with_accelerate(kind: str) -> None:
    """Between epochs, where such a loader is exact."""
    from accelerate.data_loader import prepare_data_loader

    def made() -> Any:
        return prepare_data_loader(loader_of(kind))

    random.seed(0)
    loader = made()
    positions = LoaderPositions([loader])
    for _ in range(2):
        assert len([*loader]) == 4
    stored, rng = restored(positions.state_dict()), random.getstate()
    rest = [batch.tolist() for _ in range(2) for batch in loader]
    again = made()
    resumed = LoaderPositions([again])
    resumed.load_state_dict(stored)
    random.setstate(rng)
    assert [batch.tolist() for _ in range(2) for batch in again] == rest
    assert resumed.caveats == ()


@pytest.mark.parametrize(
    "wrong", [{"absent.batches": 1}, {"batch_sampler.generator": 3}, {"batch_sampler.__class__": 3}]
)
def test_an_order_of_another_sampler(wrong: Any) -> None:
    loader = sw.ResumableLoader(DataLoader(Rows(), batch_sampler=Reshuffled(torch.Generator())))  # type: ignore[arg-type]
    state = loader.state_dict()
    state["now"]["orders"] = wrong
    with pytest.raises(StateError, match="belongs to another loader: it has"):
        loader.load_state_dict(state)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A collator that can't be changed, with values of all kinds."""

    mean: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(2, dtype=torch.bfloat16))
    ragged: Any = dataclasses.field(default_factory=lambda: np.array([[1], [2, 3]], dtype=object))
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"most": 4})

    def __call__(self, rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows)


def test_what_a_script_sets_is_kept() -> None:
    """A position of before changes nothing that iterating didn't change."""
    loader = sw.ResumableLoader(DataLoader(Rows(), batch_size=2, collate_fn=Frozen()))  # type: ignore[arg-type]
    next(iter(loader))
    stored = restored(loader.state_dict())
    assert "orders" not in stored["now"]
    packs = Packs()
    other = sw.ResumableLoader(DataLoader(Rows(), batch_size=2, collate_fn=packs))  # type: ignore[arg-type]
    assert len([*other]) == 4
    left, packs.left = [*packs.left], [5]
    other.load_state_dict(stored)
    assert packs.left == [5]
    packs.left = left
    held = packs.left
    other.load_state_dict({**restored(other.state_dict())})
    assert packs.left is held, "others may hold the same list"
