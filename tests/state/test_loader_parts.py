"""States of generators in a loader's parts: taken by a generator of their kind, passed by and named otherwise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import StateError
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
