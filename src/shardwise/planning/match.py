"""Matches stored names to wanted names: a recipe for each wanted tensor, and a list of problems, explained."""

from __future__ import annotations

import difflib
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from heapq import nlargest
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal, get_args

from ..catalog.quantized import code_of_weight, is_part
from ..catalog.records import Catalog, StoredTensor
from ..models.homes import inherit_home
from ..names import canonical_name, unwrap
from ..objects import frozen
from ..tensors.boxes import Box, Wanted
from ..tensors.tiles import Tile, identity, is_identity

if TYPE_CHECKING:
    import torch
    from torch import nn


# ----------------------------------------------------------------------------------------------------
# Host conversions: a conversion that tiles can't express runs whole, on the fewest stored tensors, in host memory.
#
# Plain records, no torch; :mod:`.hub_rules` makes them, ``transfer.converted`` runs them.


@frozen
class Converted:
    """A conversion that runs whole, for reports: its name, tensors, reason and cost."""

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str
    """Why it could not be compiled to tiles."""
    staging_bytes: int
    """Host memory that it takes while it runs: sources, results and intermediate tensors."""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@frozen(eq=False)
class HostConversion:
    """A conversion from a few stored tensors to a few results that runs on real data.

    A plan treats the results as stored tensors, in files that do not exist: a tile's source is ``outputs[…].name``, a
    transfer's path is that of its chunk.
    """

    name: str
    """The operations and their inputs, in words."""
    sources: tuple[str, ...]
    outputs: Mapping[str, StoredTensor]
    """By module name."""
    reason: str
    """Why it has no map."""
    source_bytes: int
    """Bytes that each rank with a part of a result reads for it."""
    staging_bytes: int
    """Peak host memory: sources, results and intermediate tensors."""
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = field(repr=False)
    """From tensors by stored name to tensors by module name."""

    def describe(self) -> Converted:
        """The record for reports."""
        return Converted(self.name, self.sources, tuple(self.outputs), self.reason, self.staging_bytes)


# ----------------------------------------------------------------------------------------------------
# Matches stored names to wanted names: a recipe for each wanted tensor, and a list of problems.

#: From the sorted stored names to the wanted name of each. It takes the whole list because some renames are stateful.
Rename = Callable[[Sequence[str]], Mapping[str, str]]


@frozen
class Recipe:
    """How one wanted tensor is made: tiles that cover it, and the tiles of each copy stored under another name."""

    wanted: str
    tiles: tuple[Tile, ...]
    copies: tuple[tuple[Tile, ...], ...] = ()
    empty: tuple[str, ...] = ()
    """The stored names of a tensor without elements, which has no tiles to name them."""


@frozen
class Declaration:
    """A tensor that a load skips by declaration, and the author of the declaration."""

    name: str
    declared_by: str

    def __str__(self) -> str:
        return f"{self.name} (says {self.declared_by})"


#: How a load makes the rows of a tensor that are not stored: the mean of the stored ones, or the model's own initial values.
GrowRule = Literal["mean", "init"]
Grow = Callable[[str, int], str | None]


@frozen
class Grown:
    """A tensor with more rows than are stored, and the rule that makes the other rows."""

    name: str
    stored: tuple[int, ...]
    """The stored shape."""
    shape: tuple[int, ...]
    rule: str
    """``"mean"`` or ``"init"``; ``"built"`` for a buffer, which keeps the values that it was built with; ``"zeros"`` for an optimizer's state."""

    @property
    def dim(self) -> int:
        """The dim that has more rows than are stored."""
        return next(d for d, (a, b) in enumerate(zip(self.stored, self.shape, strict=True)) if a != b)

    @property
    def new(self) -> Box:
        """The box of the rows that aren't stored."""
        return Box(tuple(n if d == self.dim else 0 for d, n in enumerate(self.stored)), self.shape)

    def __str__(self) -> str:
        return f"{self.name} ({self.stored[self.dim]} of {self.shape[self.dim]} rows stored, the others: {self.rule})"


@dataclass(slots=True)
class Matched:
    """Outcome of matching: recipes by wanted name, tensors skipped by declaration, and every problem."""

    recipes: dict[str, Recipe] = field(default_factory=dict)
    unused: list[Declaration] = field(default_factory=list)
    initialized: list[Declaration] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    grown: dict[str, Grown] = field(default_factory=dict)
    conversions: dict[str, HostConversion] = field(default_factory=dict)
    """Host conversions, by the name of each result that a recipe's tiles take."""


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


@frozen
class Made:
    """A tensor under a module name, made from stored tensors: unchanged, renamed, or converted by tiles."""

    target: str
    dtype: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    sources: tuple[str, ...]
    host: HostConversion | None = None
    """The conversion that makes the tiles' source, if the source is not stored."""


#: From stored tensors to the tensors that they make under module names. May raise UnsupportedConversionError.
Resolve = Callable[[Mapping[str, StoredTensor]], Sequence[Made]]


def renamed(rename: Rename) -> Resolve:
    """Stored tensors, unchanged, under other names."""

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        return [as_stored(stored[name], target) for name, target in rename(sorted(stored)).items()]

    return resolve


def by_key_mapping(key_mapping: Mapping[str, str]) -> Resolve:
    """Stored tensors under other names, as ``from_pretrained(key_mapping=)`` renames: each regex once, in its order."""
    rename = renaming(key_mapping)
    return renamed(lambda stored: {name: rename(name) for name in stored})


def renaming(key_mapping: Mapping[str, str]) -> Callable[[str], str]:
    """The function of one name that ``key_mapping`` describes: each regex once, in its order."""
    patterns = [(re.compile(pattern), text) for pattern, text in key_mapping.items()]

    def rename(name: str) -> str:
        for pattern, text in patterns:
            name = pattern.sub(text, name, count=1)
        return name

    return rename


def as_stored(tensor: StoredTensor, target: str) -> Made:
    """A stored tensor under a module name, unchanged."""
    return Made(target, tensor.dtype, tensor.shape, (identity(tensor.name, tensor.shape),), (tensor.name,))


def same_names(stored: Mapping[str, StoredTensor]) -> list[Made]:
    """Stored tensors under their own names."""
    return [as_stored(t, t.name) for t in stored.values()]


def undeclared(*_: object) -> None:
    """No declaration."""


@frozen
class Rules:
    """How stored tensors become wanted ones, and which tensors may be left over or initialized.

    ``allow_unused(stored name, module name)`` and ``allow_missing(module name)`` return the author of the declaration in
    words, or None if there is no declaration, which is a problem.
    """

    resolve: Resolve = same_names
    allow_unused: Callable[[str, str], str | None] = undeclared
    allow_missing: Callable[[str], str | None] = undeclared
    grow: Grow = undeclared
    """Says for a wanted tensor and its number of rows by which rule those are made that aren't stored; None if all must be."""
    vocab_size: int | None = None
    """Tensors of this length, of which less is stored, are grown by ``"mean"`` where ``grow`` says nothing."""
    caller_declares: bool = False
    """Whether the call takes ``allow_unused=``, ``allow_missing=`` and renames. Only then problems advise them."""
    embeddings: Callable[[], Collection[str]] = tuple
    """Names of wanted tensors with a row for each token, for which a wrong shape means another vocabulary."""
    expected_in: Mapping[str, str] = field(default_factory=dict)
    """Wanted tensor → the adapter's file that must store it. One that is missing there is not new."""


def growth(grow: Mapping[str, GrowRule]) -> Grow:
    """The rule of the first pattern of ``grow`` that matches a tensor's name.

    Raises :class:`TypeError` for anything but a mapping of patterns to rules, :class:`ValueError` for an unknown rule.
    """
    if not isinstance(grow, Mapping):
        raise TypeError(
            f"grow is a {type(grow).__name__}; expected a mapping of patterns to rules: grow={{'score.*': 'mean'}}"
        )
    for pattern, rule in grow.items():
        if rule not in get_args(GrowRule):
            raise ValueError(
                f"grow={{{pattern!r}: {rule!r}}}: there is no such rule; expected 'mean' or 'init'"
            )

    return lambda name, _: next((rule for pattern, rule in grow.items() if fnmatchcase(name, pattern)), None)


def match(
    catalog: Catalog,
    wanted: Sequence[Wanted],
    rename: Rename,
    *,
    allow_unused: Callable[[str, str], str | None] = undeclared,
    allow_missing: Callable[[str], str | None] = undeclared,
) -> Matched:
    """Match a catalog against wanted tensors, by names; see :func:`match_rules`."""
    return match_rules(
        catalog, wanted, Rules(renamed(rename), allow_unused, allow_missing, caller_declares=True)
    )


def match_rules(catalog: Catalog, wanted: Sequence[Wanted], rules: Rules) -> Matched:
    """Match a catalog against wanted tensors.

    Pure; the same on every rank, because it uses only global names and shapes. Collects problems and raises none.
    """
    result = Matched()
    by_name = {name: w for w in wanted for name in (w.name, *w.aliases)}
    made_for: dict[str, list[Made]] = {}
    leftover: list[tuple[str, str]] = []
    for made in rules.resolve(catalog.tensors):
        name = made.target if made.target in by_name else canonical_name(made.target)
        found = by_name.get(name)
        if found is None:
            leftover += [(source, made.target) for source in made.sources]
        else:
            made_for.setdefault(found.name, []).append(
                made if made.target == name else replace(made, target=name)
            )
    missing = []
    for w in wanted:
        if w.name in made_for:
            _add_recipe(result, w, made_for[w.name], catalog, rules)
        elif who := rules.allow_missing(w.name):
            result.initialized.append(Declaration(w.name, who))
        else:
            missing.append(w)
    used = {source for found in made_for.values() for made in found for source in made.sources}
    spare = []
    for stored, target in dict(leftover).items():
        if stored in used:
            continue
        if who := rules.allow_unused(stored, target):
            result.unused.append(Declaration(stored, who))
        else:
            spare.append(stored)
    if missing or spare:
        result.problems += unmatched(
            catalog, missing, spare, caller_declares=rules.caller_declares, expected_in=rules.expected_in
        )
    return result


def _add_recipe(result: Matched, w: Wanted, found: list[Made], catalog: Catalog, rules: Rules) -> None:
    """Make the recipe from stored tensors; further copies must be names of the same (tied) tensor."""
    if len(found) > 1:
        names = [made.target for made in found]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            stored = ", ".join(_origin(m, catalog) for m in found if m.target == repeated[0])
            result.problems.append(
                f"duplicated: {stored} all map to {w.name!r}; rename or remove all but one"
            )
            return
        order = (w.name, *w.aliases)
        found.sort(key=lambda made: order.index(made.target))
    first = found[0]
    grown = _grown(w, first, rules)
    expected = w if grown is None else replace(w, shape=grown.stored)
    problems = [problem for made in found if (problem := _misfit(expected, made, catalog, rules))]
    if problems:
        result.problems += problems
        return
    if grown is not None:
        result.grown[w.name] = grown
    others = tuple([made.tiles for made in found[1:] if not _are_same_bytes(first, made, catalog)])
    result.recipes[w.name] = Recipe(w.name, first.tiles, others, () if first.tiles else first.sources)
    for made in found:
        if made.host:
            result.conversions[made.tiles[0].source] = made.host


def _are_same_bytes(one: Made, other: Made, catalog: Catalog) -> bool:
    """Whether two names stand for the same bytes of the same files, as for tensors that were saved with one storage."""
    return (
        one.dtype == other.dtype
        and len(one.tiles) == len(other.tiles) > 0
        and all(
            a == replace(b, source=a.source)
            and catalog.tensors[a.source].chunks == catalog.tensors[b.source].chunks
            for a, b in zip(one.tiles, other.tiles, strict=True)
        )
    )


def _grown(w: Wanted, made: Made, rules: Rules) -> Grown | None:
    """The growth of a tensor that is declared to have more rows than are stored; None if it has none."""
    dim = _longer_dim(w, made)
    if dim is None or w.dtype not in _FLOATS:
        return None
    size = w.shape[dim]
    are_tokens = size == rules.vocab_size
    if dim and w.kind == "parameter" and not are_tokens:  # other columns aren't new rows
        return None
    named = (rule for name in (w.name, *w.aliases) if (rule := rules.grow(name, size)))
    rule = next(named, "mean" if are_tokens else None)
    if rule is None:
        return None
    return Grown(w.name, made.shape, w.shape, "built" if w.kind == "buffer" else rule)


def _longer_dim(w: Wanted, made: Made) -> int | None:
    """The one dim in which a tensor is longer than the stored one; None if they differ in any other way."""
    if len(made.shape) != len(w.shape):
        return None
    other = [d for d, (stored, n) in enumerate(zip(made.shape, w.shape, strict=True)) if stored != n]
    return other[0] if len(other) == 1 and 0 < made.shape[other[0]] < w.shape[other[0]] else None


def _misfit(w: Wanted, made: Made, catalog: Catalog, rules: Rules) -> str | None:
    if made.shape != w.shape:
        hint = _in_blocks(w, made) + _missing_parts(made, catalog) or _other_rows(w, made, rules)
        return (
            f"shape mismatch: {w.name!r} expects shape {list(w.shape)}, but {_origin(made, catalog)} "
            f"has {list(made.shape)}{hint}"
        )
    if not castable(made.dtype, w.dtype):
        is_coded = any(is_part(source, catalog.tensors) for source in made.sources)
        advice = "quantized codes" if is_coded else "convert it first or load with that dtype"
        return f"dtype mismatch: {w.name!r} expects {w.dtype}, but {_origin(made, catalog)} is {made.dtype}; {advice}"
    return None


def _origin(made: Made, catalog: Catalog) -> str:
    """The stored tensor behind a made one, and its file; for several, their number and the first."""
    first = catalog.tensors[made.sources[0]]
    if len(made.sources) == 1:
        return f"{first.name!r} in {_file_of(first)}"
    return f"the result of {len(made.sources)} stored tensors ({first.name!r} in {_file_of(first)}, …)"


def _other_rows(w: Wanted, made: Made, rules: Rules) -> str:
    """The way on where a model and its weights have another number of rows, which may be tokens."""
    are_tokens = (
        not set(rules.embeddings()).isdisjoint((w.name, *w.aliases)) and made.shape[1:] == w.shape[1:]
    )
    counts = f"; it has {made.shape[0]} tokens, but the model has {w.shape[0]}" if are_tokens else ""
    if are_tokens and made.shape[0] > w.shape[0]:
        return f"{counts}, and a load drops none: load_pretrained(…, vocab_size={made.shape[0]})"
    if _longer_dim(w, made) != 0:
        return counts
    also = f"load_pretrained(…, vocab_size={w.shape[0]}), or " if are_tokens else ""
    return f"{counts}; if its other rows are new: {also}load, load_pretrained or restore with grow={{{w.name!r}: 'mean'}}"


def _in_blocks(w: Wanted, made: Made) -> str:
    """The way to a weight that a checkpoint holds in 4-bit blocks: ⌈n / b⌉ rows of b / 2 bytes of codes and 4 of a scale."""
    if (made.dtype, len(made.shape)) != ("U8", 2) or made.shape[1] <= 4:
        return ""
    block = 2 * (made.shape[1] - 4)
    if made.shape[0] != -(-math.prod(w.shape) // block):
        return ""
    return f": 4-bit codes in blocks of {block}; build the model by load_pretrained(…, quantized='keep')"


# Numbers come from stored names: five digits bound the length of a series.
_NUMBER = re.compile(r"(?<=\.)\d{1,5}(?=\.)")


def _missing_parts(made: Made, catalog: Catalog) -> str:
    """The missing tensors of a numbered series (``experts.37.up_proj``), if it has gaps."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in made.sources:
        for found in _NUMBER.finditer(name):
            key = (name[: found.start()], name[found.end() :])
            series.setdefault(key, set()).add(int(found.group()))
    longest = max((len(numbers) for numbers in series.values()), default=0)
    if longest < 2:
        return ""
    most = max(max(numbers) for numbers in series.values() if len(numbers) > longest // 2) + 1
    lost = [
        f"{begin}{k}{end}"
        for (begin, end), numbers in series.items()
        if len(numbers) > 1
        for k in range(most)
        if k not in numbers and f"{begin}{k}{end}" not in catalog.tensors
    ]
    if not lost:
        return ""
    more = f" and {len(lost) - 20} more" if len(lost) > 20 else ""
    return f"; not stored: {', '.join(map(repr, lost[:20]))}{more}"


def _file_of(stored: StoredTensor) -> str:
    """The file of a tensor (or of its first chunk)."""
    return (
        stored.chunks[0].path.partition("#0")[0] if stored.chunks else "?"
    )  # without the place of one in parts


_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


def castable(stored: str, wanted: str) -> bool:
    """Whether a load may change one dtype into the other: equal, or both plain floating point."""
    return stored == wanted or (stored in _FLOATS and wanted in _FLOATS)


# ----------------------------------------------------------------------------------------------------
# Explains unmatched names: wanted tensors that are not stored, and stored tensors that are not wanted.
#
# Many tensors with one cause get one line: a prefix that is superfluous, missing or different, or a whole part of a
# model (the vision tower of a checkpoint that is loaded into the text model).

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
                "; the checkpoint holds only its digest: load the base, and sw.load the checkpoint into it",
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


# ----------------------------------------------------------------------------------------------------
# Remembers how a live model was made. Export uses it to restore the stored names and shapes.


@frozen
class Origin:
    """The recipes of a load by wanted name, and the shapes of the stored tensors that they read."""

    recipes: Mapping[str, Recipe]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def is_plain(self) -> bool:
        """Whether every tensor was stored whole under its own name."""
        return all(
            r.empty == (name,) or (len(r.tiles) == 1 and r.tiles[0].source == name)
            for name, r in self.recipes.items()
        )


# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_ORIGINS: weakref.WeakKeyDictionary[nn.Module, Origin] = weakref.WeakKeyDictionary()


def remember(
    model: nn.Module,
    recipes: Mapping[str, Recipe],
    stored: Mapping[str, StoredTensor],
    grown: Iterable[Grown] = (),
) -> None:
    """Keep the recipes with which ``model`` was filled, for as long as it lives. Those of ``grown`` tensors get the new shapes.

    Keeps nothing if any tensor was converted whole, or if a grown one was converted at all: such a recipe can't be inverted.
    """
    known = dict(recipes)
    sources = [s for r in recipes.values() for s in (*(t.source for t in r.tiles), *r.empty)]
    shapes = {source: stored[source].shape for source in sources if source in stored}
    for one in grown:
        copies = (known[one.name].tiles, *known[one.name].copies)
        if not all(len(tiles) == 1 and is_identity(tiles[0], one.stored) for tiles in copies):
            shapes.clear()
            break
        first, *others = ((identity(tiles[0].source, one.shape),) for tiles in copies)
        known[one.name] = Recipe(one.name, first, tuple(others))
        shapes |= {tiles[0].source: one.shape for tiles in copies}
    if not shapes.keys() >= set(sources):
        _ORIGINS.pop(unwrap(model), None)
        return
    _ORIGINS[unwrap(model)] = Origin(known, shapes)


def recall(model: nn.Module) -> Origin | None:
    """The origin of a model's last load from a source with other names; None if there was none."""
    return _ORIGINS.get(unwrap(model))


def inherit(model: nn.Module, ancestor: nn.Module) -> None:
    """Note that ``model`` has the same origin as ``ancestor``."""
    own, given = unwrap(model), unwrap(ancestor)
    if given in _ORIGINS:
        _ORIGINS[own] = _ORIGINS[given]
    inherit_home(own, given)
