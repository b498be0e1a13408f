"""Counts the steps that a regular expression from a file can take. Reads Python's parse of it. CPython 3.11-3.14.

Python's engine tries one way of matching after the other: ``.*.*.*.*x`` has as many as a name has places for four cuts,
``(a|a)*x`` twice as many for each letter. All ways through an expression, over all names, are counted here in one pass of
vectors, without trying any. The engine tries at most these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..limits import MAX_PATTERN_MATCHES, MAX_PATTERN_STEPS, brief

#: Numbers that counting may touch, and what an operation on few counts at least: counting takes time, too.
_MOST_WORK, _LEAST_WORK = 2**30, 2**15
#: Expressions that Python keeps compiled. With more, in turn, every match compiles again, which takes as long as that many matches.
_KEPT_COMPILED, _MATCHES_PER_COMPILE = 512, 32
#: Names that are counted together.
_TOGETHER = 2048
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_Ways = NDArray[np.float64]


def check_patterns(
    patterns: Iterable[str], names: Iterable[str], what: str, path: str | None, form: str = "{}"
) -> None:
    """Refuse regular expressions from a file that are invalid, or could take forever on ``names``.

    ``form``: the expression that the reader of the file makes of one, with ``{}`` in its place. Raises
    :class:`FormatError` naming ``what``, the expression and ``path``.

    Without Python's own parse, an expression could be judged only by its letters.
    """
    ordered, distinct = sorted(set(names), key=len), dict.fromkeys(patterns)
    if (matches := _matches(len(distinct), len(ordered))) > MAX_PATTERN_MATCHES:
        raise FormatError(
            f"{what}: {len(distinct)} expressions for {len(ordered)} names may take forever: to match them costs as much as "
            f"{matches} matches, more than {MAX_PATTERN_MATCHES}; join them to fewer expressions",
            path=path,
        )
    steps = 0.0
    for pattern in distinct:
        try:
            parsed = _parser.parse(form.replace("{}", pattern))
            re.compile(form.replace("{}", pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise FormatError(
                f"{what} {brief(pattern)} is not a regular expression ({error})", path=path
            ) from error
        if _is_simple(pattern):
            continue
        for start in range(0, len(ordered), _TOGETHER):
            counter = _Counter(
                ordered[start : start + _TOGETHER], parsed.state.flags, MAX_PATTERN_STEPS - steps
            )
            try:
                counter.all_ways(parsed)
            except (_TooMany, RecursionError):
                raise FormatError(
                    f"{what} {brief(pattern)} may take forever: to match it with {len(ordered)} names can take more "
                    f"than {MAX_PATTERN_STEPS} steps; use fewer repeats, or alternatives that exclude each other",
                    path=path,
                ) from None
            steps += counter.steps


def _matches(patterns: int, names: int) -> int:
    """What it costs to match each name with each expression, in matches of one that is compiled."""
    return patterns * names * (_MATCHES_PER_COMPILE if patterns > _KEPT_COMPILED else 1)


def _is_simple(pattern: str) -> bool:
    """Whether an expression has at most one repeat or alternative: at most as many ways as a name has letters."""
    return sum(pattern.count(sign) for sign in "*+?|") + 2 * pattern.count("{") < 2


class _TooMany(Exception):
    """More steps than the limit."""


class _Counter:
    """Counts the ways to each place of each name: a row for each place, a column for each name."""

    def __init__(self, names: Sequence[str], flags: int, most_steps: float) -> None:
        length = max(map(len, names), default=0)
        self._codes = np.full((length, len(names)), -1, np.int64)
        for column, name in enumerate(names):
            self._codes[: len(name), column] = [ord(letter) for letter in name]
        self._letters = sorted({letter for name in names for letter in name})
        self._flags, self._most, self._work = flags, most_steps, 0
        self._taken: dict[tuple[str, int], NDArray[np.bool_]] = {}
        self.steps = 0.0

    def all_ways(self, parsed: Any) -> None:
        """Count an expression that is matched from the start of each name."""
        ways = np.zeros((len(self._codes) + 1, self._codes.shape[1]))
        ways[0] = 1
        self._through(parsed, ways, self._flags)

    def _through(self, nodes: Iterable[tuple[Any, Any]], ways: _Ways, flags: int) -> _Ways:
        """The ways to each place after some nodes, from those before them."""
        for operation, argument in nodes:
            self._count(ways)
            if not ways.any():
                break
            ways = self._through_one(str(operation), argument, ways, flags)
        return ways

    def _count(self, ways: _Ways) -> None:
        self.steps += float(ways.sum())
        self._work += ways.size + _LEAST_WORK
        if self.steps > self._most or self._work > _MOST_WORK:
            raise _TooMany

    def _through_one(self, operation: str, argument: Any, ways: _Ways, flags: int) -> _Ways:
        if operation == "SUBPATTERN":
            _, added, removed, inner = argument
            return self._through(inner, ways, (flags | added) & ~removed)
        if operation == "BRANCH":
            return sum((self._through(one, ways, flags) for one in argument[1]), np.zeros_like(ways))
        if operation in _REPEATS:
            low, high, inner = argument
            return self._repeated(int(low), int(high), inner, ways, flags)
        if operation == "ATOMIC_GROUP":
            return self._through(argument, ways, flags)
        if operation in ("ASSERT", "ASSERT_NOT"):
            self._asserted(argument[0], argument[1], ways, flags)
            return ways
        if operation == "GROUPREF_EXISTS":
            _, yes, no = argument
            return self._through(yes, ways, flags) + self._through(no or (), ways, flags)
        if operation == "GROUPREF":
            return np.cumsum(ways, axis=0)
        if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._moved(ways, self._letters_of(operation, argument, flags))
        return ways  # AT: a place is no other place

    def _asserted(self, direction: int, inner: Any, ways: _Ways, flags: int) -> None:
        if direction < 0:  # Python takes only those of one width
            width = min(int(inner.getwidth()[0]), len(ways) - 1)
            ways = np.concatenate([ways[width:], np.zeros((width, ways.shape[1]))])
        self._through(inner, ways, flags)

    def _moved(self, ways: _Ways, letters: NDArray[np.bool_]) -> _Ways:
        """One letter on, where the letter is among those taken."""
        moved = np.zeros_like(ways)
        np.multiply(ways[:-1], letters, out=moved[1:])
        return moved

    def _repeated(self, low: int, high: int, inner: Any, ways: _Ways, flags: int) -> _Ways:
        for _ in range(low):
            self._count(ways)  # also where there is nothing to repeat
            ways = self._through(inner, ways, flags)
            if not ways.any():
                return ways
        found = ways.copy()
        if high == int(_parser.MAXREPEAT) and len(inner) == 1 and str(inner[0][0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):  # fmt: skip
            letters = self._letters_of(str(inner[0][0]), inner[0][1], flags)
            for place, taken in enumerate(letters):
                found[place + 1] += found[place] * taken
            return found
        # An iteration that takes no letter is the last: no way has more of them than a name has letters, and one.
        for _ in range(min(high - low, len(ways))):
            ways = self._through(inner, ways, flags)
            if not ways.any():
                break
            found += ways
        return found

    def _letters_of(self, operation: str, argument: Any, flags: int) -> NDArray[np.bool_]:
        """Where the names have letters that a node takes: asked of a compiled expression of that node alone."""
        key = f"{operation} {argument}", flags
        if key not in self._taken:
            node = (getattr(_parser, operation), argument)
            state = _parser.State()
            state.flags = flags
            alone = _compiler.compile(_parser.SubPattern(state, [node]), flags)
            taken = [ord(letter) for letter in self._letters if alone.fullmatch(letter)]
            self._taken[key] = np.isin(self._codes, taken)
        return self._taken[key]
