"""transformers' table of conversions, of which only what one model needs is made. transformers 5.20-5.23."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["get_model_conversion_mapping"]


def get_model_conversion_mapping(*args: Any, **options: Any) -> Any:
    """``conversion_mapping.get_model_conversion_mapping``, in a tenth of the time of its first call in a process.

    That first call makes the conversions of all classes that transformers has, with 860 regular expressions, which takes
    60 ms of CPU time on each rank: as long as all else that a load of 500 tensors does beside reading. Here the same
    functions run in a namespace of their own, in which a conversion is made when it is first asked for. transformers itself
    is not changed; once it has its table (the caller registered a conversion, or loaded a model by ``from_pretrained``),
    its own function is called. transformers 5.20-5.23: ``conversion_mapping._checkpoint_conversion_mapping_cache``.
    Without it, loads are right and slower.
    """
    module = importlib.import_module("transformers.conversion_mapping")
    if getattr(module, "_checkpoint_conversion_mapping_cache", ()) is not None:
        return module.get_model_conversion_mapping(*args, **options)
    return _postponing()["get_model_conversion_mapping"](*args, **options)


@functools.cache
def _postponing() -> dict[str, Any]:
    """The namespace of ``transformers.conversion_mapping`` anew, with constructors of conversions that postpone."""
    from transformers.core_model_loading import WeightTransform

    module = importlib.import_module("transformers.conversion_mapping")
    space = dict(vars(module))
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, WeightTransform):
            space[name] = functools.partial(_Postponed, value)
        elif inspect.isfunction(value) and value.__module__ == module.__name__:
            space[name] = _in(space, value)
    return space


def _in(space: dict[str, Any], function: FunctionType) -> FunctionType:
    """The same function, which looks its global names up in ``space``."""
    again = FunctionType(
        function.__code__, space, function.__name__, function.__defaults__, function.__closure__
    )
    again.__kwdefaults__ = function.__kwdefaults__
    return again


class _Postponed:
    """A conversion that is made when it is copied, as the table's reader does, or when it is asked for a field."""

    __slots__ = ("_args", "_kind", "_options")

    def __init__(self, kind: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._kind, self._args, self._options = kind, args, options

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Constructors change the lists that they are given.
        return self._kind(*copy.deepcopy(self._args), **copy.deepcopy(self._options))

    def __getattr__(self, name: str) -> Any:
        return getattr(copy.deepcopy(self), name)
