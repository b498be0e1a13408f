"""Matching stored names to wanted names, giving a recipe for each wanted tensor and a list of what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..catalog.records import Catalog, StoredTensor
from ..layout.wanted import Wanted
from ..names import canonical_name
from .tiles import Tile, identity

__all__ = ["Declaration", "Matched", "Recipe", "Rename", "match", "matches_any"]

#: From the sorted stored names to the wanted name of each (a function of the whole list: some renames are stateful).
Rename = Callable[[Sequence[str]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one wanted tensor is made: tiles that cover it, and stored copies of it under its other names."""

    wanted: str
    tiles: tuple[Tile, ...]
    copies: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Declaration:
    """A tensor that a load leaves out, and who said that it may."""

    name: str
    declared_by: str


@dataclass(slots=True)
class Matched:
    """Outcome of matching: recipes by wanted name, what is left out by declaration, and every problem."""

    recipes: dict[str, Recipe] = field(default_factory=dict)
    unused: list[Declaration] = field(default_factory=list)
    initialized: list[Declaration] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def match(
    catalog: Catalog,
    wanted: Sequence[Wanted],
    rename: Rename,
    *,
    unused: Callable[[str, str], str | None],
    init: Callable[[str], str | None],
) -> Matched:
    """Match a catalog against what is wanted.

    ``unused(stored name, wanted name)`` and ``init(wanted name)`` tell who declared that a tensor may be
    left over or be initialised instead of loaded (None: nobody, so it is a problem). Pure; the same on
    every rank, because only global names and shapes are looked at.
    """
    result = Matched()
    by_name = {name: w for w in wanted for name in (w.name, *w.aliases)}
    stored_for: dict[str, list[tuple[str, StoredTensor]]] = {}
    leftover: list[tuple[str, str]] = []
    for stored, target in rename(sorted(catalog.tensors)).items():
        name = target if target in by_name else canonical_name(target)
        found = by_name.get(name)
        if found is None:
            leftover.append((stored, target))
        else:
            stored_for.setdefault(found.name, []).append((name, catalog.tensors[stored]))
    missing = []
    for w in wanted:
        sources = stored_for.get(w.name, [])
        if sources:
            _add_recipe(result, w, sources)
        elif who := init(w.name):
            result.initialized.append(Declaration(w.name, who))
        else:
            missing.append(w)
    spare = []
    for stored, target in leftover:
        if who := unused(stored, target):
            result.unused.append(Declaration(stored, who))
        else:
            spare.append(stored)
    _report(result, catalog, missing, spare)
    return result


def _add_recipe(result: Matched, w: Wanted, sources: list[tuple[str, StoredTensor]]) -> None:
    """One tile from the stored tensor; further stored copies must be names of the same (tied) tensor."""
    names = [target for target, _ in sources]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated:
        stored = ", ".join(f"{s.name!r} in {_file_of(s)}" for t, s in sources if t == repeated[0])
        result.problems.append(f"duplicated: {w.name!r} would be made from {stored}; rename or remove one")
        return
    sources.sort(
        key=lambda pair: (w.name, *w.aliases).index(pair[0]) if pair[0] in (w.name, *w.aliases) else 0
    )
    good = []
    for _, tensor in sources:
        if tensor.shape != w.shape:
            result.problems.append(
                f"mis-shaped: {w.name!r} expects shape {list(w.shape)}, but {tensor.name!r} in {_file_of(tensor)} "
                f"has {list(tensor.shape)}"
            )
        elif not castable(tensor.dtype, w.dtype):
            result.problems.append(
                f"un-castable: {w.name!r} expects {w.dtype}, but {tensor.name!r} in {_file_of(tensor)} is "
                f"{tensor.dtype}; convert it first or load with that dtype"
            )
        else:
            good.append(identity(tensor.name, w.shape))
    if len(good) == len(sources):
        result.recipes[w.name] = Recipe(w.name, (good[0],), tuple(good[1:]))


def _file_of(stored: StoredTensor) -> str:
    """Where a tensor (or its first chunk) is stored."""
    return stored.chunks[0].path if stored.chunks else "?"


_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def castable(stored: str, wanted: str) -> bool:
    """Whether a load may change one dtype into the other: equal, or both plain floating point."""
    return stored == wanted or (stored in _FLOATS and wanted in _FLOATS)


def _report(result: Matched, catalog: Catalog, missing: Sequence[Wanted], spare: Sequence[str]) -> None:
    pool = list(spare) or list(catalog.tensors)
    for k, w in enumerate(missing):
        near = _nearest(w.name, pool) if k < 40 else None
        hint = f"; nearest stored name: {near!r}" if near else ""
        also = f" (also named {', '.join(map(repr, w.aliases))})" if w.aliases else ""
        result.problems.append(
            f"missing: {w.kind} {w.name!r}{also} of shape {list(w.shape)} is not stored{hint}; "
            f"give init={{{w.name!r}: 'model'}} if it is new"
        )
    wanted_names = [w.name for w in missing]
    for k, name in enumerate(spare):
        stored = catalog.tensors[name]
        near = _nearest(name, wanted_names) if k < 40 else None
        hint = f"; nearest wanted name: {near!r}" if near else ""
        where = stored.chunks[0].path if stored.chunks else catalog.root
        result.problems.append(
            f"unused: stored tensor {name!r} {list(stored.shape)} in {where} is not wanted{hint}; "
            f"give unused=({name!r},) if it may be left"
        )


def _nearest(name: str, pool: Sequence[str]) -> str | None:
    """The closest name, by edit similarity; a name that ends alike wins among thousands."""
    if len(pool) > 2000:
        tail = name.rsplit(".", 2)[-2:]
        pool = [p for p in pool if p.rsplit(".", 2)[-2:] == tail][:2000]
    close = difflib.get_close_matches(name, pool, n=1, cutoff=0.5)
    return close[0] if close else None
