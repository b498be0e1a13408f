"""Finds state beyond parameters, buffers, ``state`` and ``param_groups`` in an object's own state dict.

A model or an optimizer may save more than torch's base classes do: by its own ``state_dict``, by a module's
``_save_to_state_dict``, by hooks. Its state dict is compared with the state that the checkpoint holds anyway. The rest
is a set of *leaves*: values by their path in the state dict. Leaves become a typed JSON document, and a restore gives
them back through the object's own ``load_state_dict``. Reports name leaves that can't be stored. A second look at the
state dict shows whether they arrived.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import ShardwiseError
from ..internals.torch import keep_metadata
from ..layout.model import local_tensor
from ..objects import frozen
from .encoding import quantized_parts
from .places import Places
from .typed_json import encode

__all__ = [
    "MAX_BEYOND_BYTES",
    "Beyond",
    "Path",
    "StoredOwn",
    "differing_leaves",
    "leaves_beyond",
    "path_key",
    "path_text",
    "put_leaves",
    "same",
    "split_storable",
    "with_leaves",
]

#: Path of a value in a state dict: keys of dicts, indices of lists.
Path = tuple[Any, ...]
#: Tensors in documents are held in host memory, so one object may not have many.
MAX_BEYOND_BYTES = 64 * 1024**2
_MISSING = object()


@frozen
class Beyond:
    """State of one object that only its own saving would store."""

    leaves: tuple[tuple[Path, Any], ...] = ()
    """Values that can be stored, by path."""
    not_stored: Mapping[str, str] = field(default_factory=dict)
    """Values that can't be stored: one line each, by :func:`path_key`."""


@frozen
class StoredOwn:
    """The own state of one object as a checkpoint holds it."""

    name: str
    """The object's, for reports."""
    leaves: list[tuple[Path, Any]]
    """Stored values by path. Their tensors move when the object takes them."""
    not_stored: Mapping[str, str]
    """As in :class:`Beyond`."""

    def stale(self, live: Iterable[Path]) -> list[Path]:
        """Live paths to delete before inserting stored values: those under a stored top-level key, except parts that were
        not stored."""
        heads = {path[0] for path, _ in self.leaves}
        return [path for path in live if path[0] in heads and path_key(path) not in self.not_stored]


def leaves_beyond(
    own: Any, plain: Any, known: Collection[int], path: Path = (), inside: tuple[int, ...] = ()
) -> Iterator[tuple[Path, Any]]:
    """Values of a state dict ``own`` that neither follow from ``plain`` nor are objects with an id in ``known``.

    ``plain`` is the state dict of torch's base class; a tensor that is a cast of the plain one holds nothing new.
    ``inside``: ids of the containers on the path; a container inside itself is a leaf.
    """
    within = (*inside, id(own))
    if isinstance(own, dict) and id(own) not in inside:
        below = plain if isinstance(plain, dict) else {}
        for key, value in own.items():
            yield from leaves_beyond(value, below.get(key, _MISSING), known, (*path, key), within)
    elif (
        isinstance(own, list) and isinstance(plain, list) and len(own) == len(plain) and id(own) not in inside
    ):
        for index, (value, under) in enumerate(zip(own, plain, strict=True)):
            yield from leaves_beyond(value, under, known, (*path, index), within)
    elif own is not plain and id(own) not in known and not _follows(own, plain):
        yield path, own


def _follows(own: Any, plain: Any) -> bool:
    if not (isinstance(own, torch.Tensor) and isinstance(plain, torch.Tensor)):
        return plain is not _MISSING and same(own, plain)
    try:
        mine, live = local_tensor(own).detach(), local_tensor(plain).detach()
        return mine.shape == live.shape and _same_bits(mine, live.to(mine.dtype))
    except (RuntimeError, NotImplementedError, TypeError):  # quantized, sparse, another device's, …
        return False


def same(a: Any, b: Any) -> bool:
    """Whether two values of state dicts have one type and are equal: tensors and floats bit for bit, on one device type."""
    try:
        if isinstance(a, torch.Tensor):
            return isinstance(b, torch.Tensor) and _same_kind(a, b) and _same_bits(a, b)
        if isinstance(a, np.ndarray):
            return type(b) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (
                b.dtype,
                b.shape,
                b.tobytes(),
            )
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, np.generic):
            return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
        if isinstance(a, deque):
            return a.maxlen == b.maxlen and same(list(a), list(b))
        if isinstance(a, float):
            return struct.pack("d", a) == struct.pack("d", b) or (a != a and b != b)
        if isinstance(a, complex):
            return same((a.real, a.imag), (b.real, b.imag))
        return bool(a == b)
    except Exception:  # a state dict may hold any class, with any __eq__
        return False


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.device.type == b.device.type


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.is_quantized:
        return b.is_quantized and same(quantized_parts(a), quantized_parts(b))
    left, right = (local_tensor(t).detach().to("cpu").contiguous().reshape(-1) for t in (a, b))
    return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))


def split_storable(leaves: Iterable[tuple[Path, Any]], what: str) -> Beyond:
    """Split leaves into those that typed JSON can hold and a line for each other one. ``what`` begins the lines."""
    kept: list[tuple[Path, Any]] = []
    lines: dict[str, str] = {}
    nbytes = 0
    for path, live in leaves:
        value, why = live, ""
        try:
            value = _without_parameters(live)
            encoded = encode((path, value), where="it")
        except RecursionError:
            why = "it contains itself or is nested too deeply"
        except ShardwiseError as error:
            why = str(error)
        else:
            size = sum(t.numel() * t.element_size() for t in encoded.tensors.values())
            if encoded.not_stored:
                why = "it holds a function"
            elif nbytes + size > MAX_BEYOND_BYTES:
                why = f"with it such state has {nbytes + size} bytes; the limit is {MAX_BEYOND_BYTES}"
            else:
                nbytes += size
        if why:
            text = path_text(path)
            lines[path_key(path)] = (
                f"{what}: {text}, which the object itself would save, is not stored ({why})"
            )
        else:
            kept.append((path, value))
    return Beyond(tuple(kept), lines)


def _without_parameters(value: Any) -> Any:
    """``value`` (tuples, lists, dicts) with tensors in place of its parameters. Containers that hold any are new."""
    if isinstance(value, nn.Parameter):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(_without_parameters, value))
    return {k: _without_parameters(v) for k, v in value.items()} if type(value) is dict else value


def path_text(path: Path) -> str:
    """A path for people: ``state[0].momentum``."""
    text = ""
    for part in path:
        text += f"{'.' if text else ''}{part}" if isinstance(part, str) else f"[{part!r:.80}]"
    return text or "all of it"


def path_key(path: Path) -> str:
    """A path as Python writes it: unlike ``a.b``, it tells ``('a.b',)`` from ``('a', 'b')``."""
    try:
        return repr(path)
    except Exception:  # a key may have any class, and Python refuses to print integers of 4300 digits
        return path_text(tuple(part if isinstance(part, str) else type(part).__qualname__ for part in path))


def put_leaves(
    stored: Iterable[tuple[Path, Any]], live: Mapping[Path, Any], places: Places
) -> list[tuple[Path, Any]]:
    """``stored`` with its tensors moved to the devices of the ``live`` ones at their paths (see :meth:`Places.put`)."""
    return [(path, places.put(value, lambda p=path: live.get(p))) for path, value in stored]  # type: ignore[misc]


def with_leaves(own: Any, stored: Iterable[tuple[Path, Any]], stale: Iterable[Path]) -> Any:
    """A copy of a live state dict with ``stored`` leaves in it, and without the ``stale`` ones.

    Containers are new, tensors are not. Raises :class:`LookupError` or :class:`TypeError` for a path that the live
    state dict does not have.
    """
    made = _copied(own)
    for path in stale:
        parent = _at(made, path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
    for path, value in stored:
        parent = made
        for key in path[:-1]:
            parent = parent.setdefault(key, {}) if isinstance(parent, dict) else parent[key]
        parent[path[-1]] = value
    return made


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        made = value.copy()  # keeps its class, and what a module's state dict says of versions
        keep_metadata(value, made)
        for key, one in value.items():
            made[key] = _copied(one)
        return made
    return [_copied(one) for one in value] if type(value) is list else value


def differing_leaves(
    now: Iterable[tuple[Path, Any]],
    stored: Iterable[tuple[Path, Any]],
    not_stored: Collection[str],
    what: str,
) -> Iterator[str]:
    """One line for each leaf that differs from the stored one. ``not_stored``: keys of paths already reported."""
    found, wanted = dict(now), dict(stored)
    for path in sorted(found.keys() | wanted.keys(), key=path_text):
        if path_key(path) in not_stored:
            continue
        text = path_text(path)
        if path not in wanted:
            yield f"{what}: {text}, which the object itself would save, is not in the checkpoint"
        elif path not in found or not same(found[path], wanted[path]):
            yield f"{what}: {text}, which the object itself saved, was not taken back by its load_state_dict"
