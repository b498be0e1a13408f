"""Makes many Python objects cheaper: records that cost a tenth to define, and a pause for the cyclic garbage collector."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

C = TypeVar("C", bound=type)
_MISSING = dataclasses.MISSING


@overload
def frozen(cls: C, /) -> C: ...
@overload
def frozen(*, kw_only: bool = ..., eq: bool = ...) -> Callable[[C], C]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(cls: Any = None, /, *, kw_only: bool = False, eq: bool = True) -> Any:
    """A frozen dataclass with slots, for records inside the package. What users create (options, policies) are ordinary dataclasses.

    ``dataclasses.dataclass`` compiles up to eight methods for each class. With a hundred classes, that was half of what the first
    use of :func:`shardwise.load` spent on imports. Records share their methods, and ``__init__`` is compiled when a class is first
    used. ``dataclasses.replace``, ``fields``, ``asdict`` and ``field`` work as usual. mypy checks that nothing assigns to a field;
    nothing does at run time, which also makes an instance cheaper to create. ``eq=False``: compare by identity.
    """
    if cls is None:
        return lambda found: frozen(found, kw_only=kw_only, eq=eq)  # type: ignore[call-overload]
    cls.__doc__ = (
        cls.__doc__ or cls.__name__
    )  # else dataclass() works out a signature, in a tenth of a millisecond
    has_own_hash = "__hash__" in cls.__dict__
    decorate = dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=kw_only)
    made = _with_slots(decorate(cls))
    made.__init__ = _compiled_on_first_use(made)
    made.__repr__ = _repr
    if eq:
        made.__eq__, hashed = _comparing(made)
        if not has_own_hash:
            made.__hash__ = hashed
    return made


def _with_slots(cls: Any) -> Any:
    """The class again, with slots for its fields: slots can't be added to a class that exists."""
    names = [f.name for f in dataclasses.fields(cls)]
    inherited = {n for base in cls.__mro__[1:-1] for n in getattr(base, "__slots__", ())}
    body = {k: v for k, v in cls.__dict__.items() if k not in {*names, "__dict__", "__weakref__"}}
    made = type(cls)(
        cls.__name__, cls.__bases__, {**body, "__slots__": tuple(n for n in names if n not in inherited)}
    )
    made.__qualname__ = cls.__qualname__
    return made


def _compiled_on_first_use(cls: Any) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = _init_of(cls)
        cls.__init__(self, *args, **kwargs)

    return __init__


def _init_of(cls: Any) -> Any:
    """``__init__``, as :mod:`dataclasses` would write it."""
    plain, keywords, body = ["self"], list[str](), list[str]()
    given: dict[str, Any] = {"_MISSING": _MISSING}
    for f in dataclasses.fields(cls):
        value, default = f.name, ""
        if f.default_factory is not _MISSING:
            given[f"_new_{f.name}"] = f.default_factory
            default = "=_MISSING"
            value = f"_new_{f.name}() if {f.name} is _MISSING else {f.name}"
        elif f.default is not _MISSING:
            given[f"_default_{f.name}"] = f.default
            default = f"=_default_{f.name}"
        if f.init:
            (keywords if f.kw_only else plain).append(f.name + default)
            body.append(f"self.{f.name} = {value}")
        else:
            assert not default, f"{cls.__name__}.{f.name}: set it in __post_init__"
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join([*plain, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({parameters}):\n  " + "\n  ".join(body or ["pass"]), given)
    made = given["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made


def _comparing(cls: Any) -> tuple[Callable[[Any, Any], Any], Callable[[Any], int]]:
    """``__eq__`` and ``__hash__`` by all fields that are compared."""
    names = [f.name for f in dataclasses.fields(cls) if f.compare]
    values: Callable[[Any], Any] = attrgetter(*names) if names else lambda _: ()

    def __eq__(self: Any, other: Any) -> Any:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __eq__, __hash__


def _repr(self: Any) -> str:
    fields = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({fields})"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector during the block (or the decorated function), if it was on.

    Loads, saves and restores make many records and no cycles. The collector would look several times through everything that the
    process holds, a quarter of a second each time once transformers is imported, and find nothing. Reference counting continues.
    Blocks may be nested, and run in several threads: the last that ends leaves the collector on.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(
            1
        )  # young garbage, a model that was dropped just before: it would keep its memory meanwhile
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
