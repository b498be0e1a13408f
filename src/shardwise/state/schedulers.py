"""What learning rate schedulers leave out of their own state: functions, which the program has to give again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .encoding import FUNCTIONS

__all__ = ["functions_left_out"]


def functions_left_out(scheduler: Any, where: str = "scheduler") -> Iterator[str]:
    """Paths of the functions in a scheduler (or in several by name, or inside each other) that its state is without.

    torch's LambdaLR and MultiplicativeLR have them as ``lr_lambdas`` (as most of transformers' schedules do),
    CyclicLR as ``scale_fn``. Of a callable object torch stores the attributes; of a function, or a
    ``functools.partial`` of one, nothing.
    """
    if isinstance(scheduler, Mapping) and not hasattr(scheduler, "state_dict"):
        for name, one in scheduler.items():
            yield from functions_left_out(one, f"{where}.{name}")
        return
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        if isinstance(function, FUNCTIONS):
            yield f"{where}.lr_lambdas[{index}]"
    if isinstance(getattr(scheduler, "_scale_fn_custom", None), FUNCTIONS):
        yield f"{where}.scale_fn"
    for index, inner in enumerate(getattr(scheduler, "_schedulers", ())):  # SequentialLR, ChainedScheduler
        yield from functions_left_out(inner, f"{where}.schedulers[{index}]")
    if hasattr(inner := getattr(scheduler, "scheduler", None), "state_dict"):  # Accelerate's wrapper
        yield from functions_left_out(inner, where)
