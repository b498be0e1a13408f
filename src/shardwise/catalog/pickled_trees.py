"""The values of pickles as trees: records for objects, and the check that a walk through a value comes to an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FormatError
from ..limits import MAX_PICKLE_DEPTH

__all__ = ["Record", "check_walk"]


class Record:
    """Stands for an object of the class ``kind``, with its arguments and state. Equal only to itself."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, *args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


_CONTAINERS = frozenset((dict, list, tuple, Record, Counter))


def check_walk(value: Any, most: int) -> None:
    """Refuse cycles, too deep nesting, and shared parts that a walk would meet more than ``most`` times.

    Looks at each container about once. After it any reader can walk through the value as a tree. Raises
    :class:`FormatError`, in which the caller names the file.
    """
    done: dict[int, tuple[int, int]] = {}  # visits and depth, by id: all are alive
    frames = [_Frame(value)] if type(value) in _CONTAINERS else []
    open_here = {id(value)}
    while frames:
        frame = frames[-1]
        inner = frame.next_unknown(done, most)
        if inner is None:
            frames.pop()
            open_here.discard(frame.key)
            done[frame.key] = frame.visits, frame.depth
            continue
        if id(inner) in open_here:
            raise FormatError("rejected: a container of its pickle holds itself")
        if len(frames) == MAX_PICKLE_DEPTH:
            raise FormatError(f"rejected: its pickle is nested deeper than {MAX_PICKLE_DEPTH} containers")
        open_here.add(id(inner))
        frames.append(_Frame(inner))


class _Frame:
    """A container that the walk is in, with the number of values met below it and their depth."""

    __slots__ = ("_at", "_parts", "depth", "key", "visits")

    def __init__(self, node: Any) -> None:
        self.key, self.visits, self.depth = id(node), 1, 1
        self._parts, self._at = _parts(node), 0

    def next_unknown(self, done: Mapping[int, tuple[int, int]], most: int) -> Any:
        """The next part to walk through before this one is finished; None at the end."""
        parts = self._parts
        for k in range(self._at, len(parts)):
            part = parts[k]
            self.visits += 1
            cls = type(part)
            if cls in _CONTAINERS:
                known = done.get(id(part))
                if known is not None:
                    self.visits += known[0]
                    self.depth = max(self.depth, 1 + known[1])
                elif cls is tuple and _CONTAINERS.isdisjoint(map(type, part)):  # a shape
                    self.visits += len(part)
                    self.depth = max(self.depth, 2)
                else:
                    self._at = k
                    self.visits -= 1
                    return part
            if self.visits > most:
                raise FormatError(
                    f"rejected: its pickle repeats shared parts, and a walk meets more than {most} values"
                )
        if self.depth > MAX_PICKLE_DEPTH:
            raise FormatError(f"rejected: its pickle is nested deeper than {MAX_PICKLE_DEPTH} containers")
        return None


def _parts(node: Any) -> Sequence[Any]:
    """The values that a container holds. The state of a record belongs to the record."""
    cls = type(node)
    if cls is tuple or cls is list:
        return node  # type: ignore[no-any-return]
    if cls is Record:
        state = node.state
        return (*node.args, *(_parts(state) if type(state) in (dict, tuple) else (state,)))
    return [*(key for key in node if type(key) is Record), *node.values()]
