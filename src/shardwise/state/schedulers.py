"""The contents of learning rate schedulers: inner schedulers, stored with them, and functions, which are not stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..internals.optim import inner_by_torch, scale_function
from ..limits import MAX_TEXT_CHARS
from .beyond import Path, same
from .encoding import FUNCTIONS
from .several import is_several

__all__ = [
    "callables_in",
    "class_text",
    "functions_left_out",
    "inner_schedulers",
    "inner_states",
    "unwrapped",
]


def unwrapped(scheduler: Any) -> Any:
    """The scheduler inside a wrapper without state of its own (Accelerate's); otherwise the object itself."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if hasattr(inner, "state_dict") else scheduler


def class_text(scheduler: Any) -> str:
    """The classes of a scheduler and of its inner ones: ``SequentialLR(LinearLR, StepLR)``."""
    text = _class_text(scheduler, ())
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


def _class_text(scheduler: Any, above: tuple[int, ...]) -> str:
    scheduler = unwrapped(scheduler)
    above = (*above, id(scheduler))  # an inner scheduler may refer to its outer one
    inside = ", ".join(_class_text(s, above) for s in inner_schedulers(scheduler) if id(s) not in above)
    return f"{type(scheduler).__qualname__}({inside})" if inside else type(scheduler).__qualname__


def inner_schedulers(holder: Any) -> Iterator[LRScheduler]:
    """The schedulers in the attributes of a scheduler, or of an object around one."""
    for value in getattr(holder, "__dict__", {}).values():
        several = isinstance(value, list | tuple)
        yield from (one for one in (value if several else [value]) if isinstance(one, LRScheduler))


def inner_states(holder: Any) -> Iterator[tuple[Path, LRScheduler]]:
    """Schedulers in an object, each with the path of its state in the object's. Skips those whose state is not found.

    Calls ``state_dict`` of the object and of these schedulers.
    """
    inner = list(inner_schedulers(holder))
    own = holder.state_dict() if inner else {}
    met: set[Path] = set()
    for one in inner:
        state = one.state_dict()
        path = next((p for p, value in _places(own) if p not in met and same(value, state)), None)
        if path is not None:
            met.add(path)
            yield path, one


def _places(own: Any) -> Iterator[tuple[Path, Any]]:
    yield (), own
    for key, value in own.items() if isinstance(own, Mapping) else ():
        yield (key,), value
        for k, one in enumerate(value) if isinstance(value, list | tuple) else ():
            yield (key, k), one


def functions_left_out(scheduler: Any) -> Iterator[str]:
    """Paths of the functions that the state of a scheduler (or of several by name, or of inner ones) leaves out.

    torch stores the attributes of a callable object, but nothing of a function or of a ``functools.partial`` of one.
    """
    return (path for path, called in callables_in(scheduler) if isinstance(called, FUNCTIONS))


def callables_in(scheduler: Any, where: str = "scheduler") -> Iterator[tuple[str, Any]]:
    """What a scheduler calls, by path: its program gives it again in each run.

    torch's LambdaLR and MultiplicativeLR (and most of transformers' schedules) have ``lr_lambdas``, CyclicLR has
    ``scale_fn``.
    """
    if is_several(scheduler):
        for name, one in scheduler.items():
            yield from callables_in(one, f"{where}.{name}")
        return
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"{where}.lr_lambdas[{index}]", function
    if (scale := scale_function(scheduler)) is not None:
        yield f"{where}.scale_fn", scale
    for index, inner in enumerate(inner_by_torch(scheduler)):
        yield from callables_in(inner, f"{where}.schedulers[{index}]")
    if hasattr(inner := getattr(scheduler, "scheduler", None), "state_dict"):  # Accelerate's wrapper
        yield from callables_in(inner, where)
