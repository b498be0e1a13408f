"""``frozen`` against ``dataclasses.dataclass``: the same records, cheaper to define. The collector waits, and goes on as before."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any

import pytest

from shardwise.objects import frozen, gc_paused

ordinary = dataclass(frozen=True, slots=True)
ordinary_by_name = dataclass(frozen=True, slots=True, kw_only=True)


def define(decorate: Any, by_name: Any) -> tuple[Any, Any, Any]:
    @decorate
    class Base:
        """A record."""

        name: str
        sizes: tuple[int, ...] = ()
        notes: list[str] = field(default_factory=list, compare=False, repr=False)

        @property
        def total(self) -> int:
            return sum(self.sizes)

    @decorate
    class Derived(Base):
        more: int = 3

    @by_name
    class ByName:
        """Checked."""

        low: int
        high: int = 9
        between: int = field(init=False, compare=False)

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low > high")
            object.__setattr__(self, "between", self.high - self.low)

    return Base, Derived, ByName


PAIRS = list(zip(define(ordinary, ordinary_by_name), define(frozen, frozen(kw_only=True)), strict=True))


def both(make: Callable[[Any], Any], pair: tuple[Any, Any]) -> None:
    """Both kinds of class give the same, or raise the same."""
    given = []
    for kind in pair:
        try:
            given.append(make(kind))
        except Exception as error:
            given.append((type(error), str(error)))
    assert given[0] == given[1]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
@pytest.mark.parametrize(
    "arguments",
    [
        ((), {}),
        (("a",), {}),
        (("a", (1, 2), ["x"]), {}),
        ((), {"name": "a", "sizes": (3,)}),
        ((), {"low": 1}),
        ((), {"low": 10}),
        ((1,), {"high": 2}),
        (("a",), {"unknown": 1}),
    ],
)
def test_the_same_instances(pair: tuple[Any, Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = arguments
    both(lambda kind: repr(kind(*args, **kwargs)), pair)
    both(lambda kind: asdict(kind(*args, **kwargs)), pair)
    both(lambda kind: astuple(kind(*args, **kwargs)), pair)
    both(lambda kind: [f.name for f in fields(kind)], pair)
    both(lambda kind: hash(kind(*args, **kwargs)), pair)
    both(lambda kind: kind(*args, **kwargs) == kind(*args, **kwargs), pair)
    both(lambda kind: asdict(copy.deepcopy(kind(*args, **kwargs))), pair)


def test_what_compares_equal() -> None:
    base, derived, _ = (pair[1] for pair in PAIRS)
    assert base("a", notes=["x"]) == base("a")
    assert hash(base("a")) == hash(base("a"))
    assert base("a") not in (base("b"), derived("a"), "a")
    assert replace(base("a"), sizes=(1, 2)).total == 3
    assert not any(hasattr(one, "__dict__") for one in (base("a"), derived("a")))


@frozen(eq=False)
class Identity:
    """Compared by identity."""

    value: int


@frozen
class Stored:
    """Can be pickled."""

    value: int
    rest: tuple[int, ...] = (1,)


def test_identity_and_pickles() -> None:
    assert len({Identity(1), Identity(1)}) == 2
    assert pickle.loads(pickle.dumps(Stored(3))) == Stored(3)


def test_each_instance_has_a_default_of_its_own() -> None:
    base = PAIRS[0][1]
    assert base("a").notes is not base("a").notes


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def make(count: int) -> list[list[int]]:
    return [[k] for k in range(count)]


def test_none_in_the_block(collections: list[int]) -> None:
    with gc_paused():
        assert collections == [1], "what was dropped just before"
        collections.clear()
        assert not gc.isenabled()
        with gc_paused():
            kept = make(50_000)
        assert not gc.isenabled()
        kept += make(50_000)
        assert collections == []
    assert gc.isenabled()
    assert not any(found is kept for found in gc.get_objects(generation=2)), "no older than it is"
    assert len(kept) == 100_000
    make(50_000)
    assert collections, "it goes on afterwards"


def test_what_the_program_froze_stays_frozen() -> None:
    kept = make(1)
    gc.freeze()
    try:
        with gc_paused():
            make(1000)
        assert not any(found is kept for found in gc.get_objects()), "which leaves out what is frozen"
    finally:
        gc.unfreeze()
    assert any(found is kept for found in gc.get_objects())


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
