"""``shardwise.__all__`` is the public surface: sorted, complete, documented, and nothing beside it."""

from __future__ import annotations
import __future__

import inspect
from types import ModuleType

import shardwise


def _public_names() -> list[str]:
    """``__all__``, or a failure that says so: a package without one has no surface to hold it to."""
    names = getattr(shardwise, "__all__", None)
    assert names, "shardwise/__init__.py must define __all__"
    return list(names)


def _is_incidental(value: object) -> bool:
    """Submodules show up once something imports them, and ``from __future__`` leaves its name."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith("shardwise.")
    return isinstance(value, type(__future__.annotations))


def test_all_is_sorted_and_has_no_duplicates() -> None:
    names = _public_names()
    assert names == sorted(set(names))


def test_every_name_resolves_to_something_of_its_own() -> None:
    names = _public_names()
    missing = [name for name in names if not hasattr(shardwise, name)]
    assert not missing
    # A submodule under the name of a function (`load`, `verify`) means that the import was forgotten.
    modules = [name for name in names if isinstance(getattr(shardwise, name), ModuleType)]
    assert not modules


def test_every_name_has_a_docstring() -> None:
    undocumented = []
    for name in _public_names():
        value = getattr(shardwise, name, None)
        if not (inspect.isclass(value) or callable(value)):
            continue  # a constant such as __version__
        text = (getattr(value, "__doc__", None) or "").strip()
        generated = text.startswith(f"{name}(")  # what @dataclass writes when there is none
        if not text or generated:
            undocumented.append(name)
    assert not undocumented


def test_nothing_public_outside_of_all() -> None:
    names = set(_public_names())
    exposed = {
        name
        for name, value in vars(shardwise).items()
        if not name.startswith("_") and not _is_incidental(value)
    }
    assert not exposed - names
