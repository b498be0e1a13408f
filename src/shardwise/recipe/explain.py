"""Explains unmatched names: wanted tensors that are not stored, and stored tensors that are not wanted.

Many tensors with one cause get one line: a prefix that is superfluous, missing or different, or a whole part of a
model (the vision tower of a checkpoint that is loaded into the text model).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from os.path import commonprefix

from ..catalog.quantized import code_of_weight, is_part
from ..catalog.records import Catalog
from ..layout.wanted import Wanted

__all__ = ["unmatched"]

#: This many tensors or more with one cause share one line.
_MANY = 8
#: Edit similarity costs about 0.1 ms a pair: for at most this many names, each compared with at most this many.
_FEW_NAMES = 100
_FEW_LINES = 40


def unmatched(
    catalog: Catalog,
    missing: Sequence[Wanted],
    spare: Sequence[str],
    *,
    caller_declares: bool,
    expected_in: Mapping[str, str],
) -> list[str]:
    """One problem per line: wanted tensors that are not stored, and stored ones that are not wanted.

    Each line advises a declaration, unless the call takes none (``restore``, ``convert``). A tensor that a file must store
    (``expected_in``) can't be new, so the advice for it is a rename.
    """
    lines = []
    change = _prefix_change(catalog, missing, spare)
    if change:
        before, after, found = change
        advice = _advised_change(catalog, before, after, found) if caller_declares else ""
        lines.append(_describe_change(before, after, found, len(missing)) + advice)
        targets = set(found.values())
        missing = [w for w in missing if targets.isdisjoint((w.name, *w.aliases))]
        spare = [name for name in spare if name not in found]
    lines += _missing(catalog, missing, spare, caller_declares, expected_in)
    lines += _unused(catalog, missing, spare, caller_declares)
    return lines


def _missing(
    catalog: Catalog,
    missing: Sequence[Wanted],
    spare: Sequence[str],
    caller_declares: bool,
    expected_in: Mapping[str, str],
) -> Iterator[str]:
    pool = list(spare) or list(catalog.tensors)
    for k, w in enumerate(missing):
        near = _nearest(w.name, pool) if k < _FEW_LINES else None
        hint = f"; nearest stored name: {near!r}" if near else ""
        if file := catalog.unheld.get(w.name):
            hint = f": the index finds it in {file}, which doesn't hold it; that file may be damaged or out of date"
        also = f" (also named {', '.join(map(repr, w.aliases))})" if w.aliases else ""
        advice = f"; give allow_missing=({w.name!r},) if it is new" if caller_declares else ""
        if file := expected_in.get(w.name):
            advice = (
                f"; expected in {file}: if it has another name there, give key_mapping= (regex → replacement)"
            )
        if codes := next(
            (c for n in (w.name, *w.aliases) if (c := code_of_weight(n, catalog.tensors))), None
        ):
            hint, advice = (
                "",
                f"; its quantized codes are stored ({codes!r}), but not all that goes with them",
            )
        if w.name in catalog.referred:
            hint, advice = (
                "",
                "; the checkpoint holds only its digest: load the base, and sw.restore the checkpoint into it",
            )
        yield f"missing: {w.kind} {w.name!r}{also} of shape {list(w.shape)} is not stored{hint}{advice}"


def _unused(
    catalog: Catalog, missing: Sequence[Wanted], spare: Sequence[str], caller_declares: bool
) -> Iterator[str]:
    wanted_names = [w.name for w in missing]
    for k, (pattern, names) in enumerate(_families(catalog.tensors, spare).items()):
        them = "they" if len(names) > 1 else "it"
        advice = f"; give allow_unused=({pattern!r},) if {them} may be left" if caller_declares else ""
        if any(is_part(name, catalog.tensors) for name in names):
            advice = "; quantized codes, or their scales"
        stored = catalog.tensors[names[0]]
        where = stored.chunks[0].path if stored.chunks else catalog.root
        if len(names) > 1:
            yield (
                f"unused: {len(names)} stored tensors {pattern!r} ({names[0]!r} {list(stored.shape)} in {where} to "
                f"{names[-1]!r}) aren't used by the model{advice}"
            )
            continue
        near = _nearest(names[0], wanted_names) if k < _FEW_LINES else None
        hint = f"; nearest wanted name: {near!r}" if near else ""
        yield f"unused: stored tensor {names[0]!r} {list(stored.shape)} in {where} isn't used by the model{hint}{advice}"


# ----------------------------------------------------------------------------------------------------
# Tensors with one cause


def _families(stored: Iterable[str], spare: Sequence[str]) -> dict[str, list[str]]:
    """Spare names by a pattern that covers them and no other stored name; small groups stay single names."""
    in_use = {prefix for name in set(stored) - set(spare) for prefix in _prefixes(name)}
    parts: dict[str, list[str]] = {}
    for name in spare:
        prefix = next((p for p in _prefixes(name) if p not in in_use), "")
        parts.setdefault(f"{prefix}*" if prefix else name, []).append(name)
    found: dict[str, list[str]] = {}
    for pattern, names in parts.items():
        found.update({pattern: names} if len(names) >= _MANY else {name: [name] for name in names})
    return found


def _prefixes(name: str) -> Iterator[str]:
    """``a.``, ``a.b.`` of ``a.b.c``."""
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()]


def _prefix_change(
    catalog: Catalog, missing: Sequence[Wanted], spare: Sequence[str]
) -> tuple[str, str, dict[str, str]] | None:
    """A prefix of spare names and its replacement that together give most of the missing names.

    Returns both, and the missing name of each spare one.
    """
    shapes = {name: w.shape for w in missing for name in (w.name, *w.aliases)}
    by_end: dict[str, list[str]] = {}
    for name in spare:
        for end in _ends(name):
            by_end.setdefault(end, []).append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for wanted in list(shapes)[:: max(1, len(shapes) // _FEW_NAMES)]:
        shared = next((e for e in _ends(wanted) if e in by_end), "")
        for name in by_end.get(shared, ())[:_FEW_NAMES]:
            votes[name.removesuffix(shared), wanted.removesuffix(shared)] += 1
    best: tuple[str, str, dict[str, str]] | None = None
    for (before, after), _ in votes.most_common(5):
        found = {}
        for name in spare:
            target = after + name.removeprefix(before)
            if name.startswith(before) and shapes.get(target) == catalog.tensors[name].shape:
                found[name] = target
        if best is None or len(found) > len(best[2]):
            best = before, after, found
    if best is None or len(best[2]) < max(_MANY, min(len(missing), len(spare)) / 2):
        return None
    return best


def _ends(name: str) -> Iterator[str]:
    """``a.b.c``, ``b.c``, ``c`` of ``a.b.c``."""
    yield name
    for dot in re.finditer(r"\.", name):
        yield name[dot.end() :]


def _describe_change(before: str, after: str, found: Mapping[str, str], missing: int) -> str:
    first, target = next(iter(found.items()))
    how = (
        f"under {before!r}"
        if not after
        else f"without {after!r}"
        if not before
        else f"{before!r} for {after!r}"
    )
    return f"prefix: {len(found)} of {missing} missing tensors are stored {how} ({target!r} as {first!r})"


def _advised_change(catalog: Catalog, before: str, after: str, found: Mapping[str, str]) -> str:
    if catalog.has_module_names:
        return "; if they are the same, give names= (stored name → module name) to load"
    tops = sorted({name.split(".")[0] for name in found})
    # If nothing is replaced, the pattern says which names get the prefix: all other names stay.
    pattern = f"^{re.escape(before)}" if before else f"^(?=({'|'.join(map(re.escape, tops))})\\.)"
    return f"; if they are the same, give key_mapping={{{pattern!r}: {after!r}}}"


def _nearest(name: str, pool: Sequence[str]) -> str | None:
    """The closest name by edit similarity; in a large pool, only among names with similar beginning, end and form."""
    if len(pool) > _FEW_NAMES:
        parts = set(name.split("."))

        def likeness(other: str) -> int:
            pairs = ((name, other), (name[::-1], other[::-1]))
            ends = sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 - characters are meant
            return ends + 4 * len(parts & set(other.split(".")))

        pool = nlargest(_FEW_NAMES, pool, key=likeness)
    close = difflib.get_close_matches(name, pool, n=1, cutoff=0.5)
    return close[0] if close else None
