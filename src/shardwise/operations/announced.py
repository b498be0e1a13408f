"""Functions whose every call is an operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from .operation import Operation, operation
from .recorder import current
from .records import OperationName

__all__ = ["announced"]

P = ParamSpec("P")
T = TypeVar("T")


def announced(name: OperationName, *arguments: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make each call of a function an :func:`operation`. The report that it returns goes to the recorder, too.

    ``arguments``: those of the function's arguments that the recorder is told. Listeners get the path from the function, by
    :func:`this_operation`, when it knows it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder = current()
            if recorder is None:
                with operation(name) as heard:
                    return _heard(heard, function(*args, **kwargs))
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the function itself says what is wrong with its arguments
                given = {}
            with operation(name, **{n: given[n] for n in arguments if n in given}) as heard:
                result = _heard(heard, function(*args, **kwargs))
            for report in _reports_in(result):
                recorder.note(name, report.to_json())
            return result

        return call

    return decorate


def _heard(heard: Operation, result: T) -> T:
    for report in _reports_in(result):
        heard.returns(report)
    return result


def _reports_in(result: object) -> Iterable[Any]:
    for one in result if isinstance(result, tuple) else (result,):
        if hasattr(one, "to_json") and type(one).__name__.endswith("Report"):
            yield one
