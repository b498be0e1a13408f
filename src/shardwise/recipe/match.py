"""Matches stored names to wanted names: a recipe for each wanted tensor, and a list of problems."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ..catalog.quantized import is_part
from ..catalog.records import Catalog, StoredTensor
from ..layout.wanted import Wanted
from ..names import canonical_name
from ..objects import frozen
from .host_convert import HostConversion
from .tiles import Tile, identity

__all__ = [
    "Declaration",
    "Made",
    "Matched",
    "Recipe",
    "Rename",
    "Resolve",
    "Rules",
    "as_stored",
    "match",
    "match_rules",
    "matches_any",
    "renamed",
    "renaming",
    "same_names",
    "undeclared",
]

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


@dataclass(slots=True)
class Matched:
    """Outcome of matching: recipes by wanted name, tensors skipped by declaration, and every problem."""

    recipes: dict[str, Recipe] = field(default_factory=dict)
    unused: list[Declaration] = field(default_factory=list)
    initialized: list[Declaration] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
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


def undeclared(*_: str) -> None:
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
    caller_declares: bool = False
    """Whether the call takes ``allow_unused=``, ``allow_missing=`` and renames. Only then problems advise them."""
    embeddings: Callable[[], Collection[str]] = tuple
    """Names of wanted tensors with a row for each token, for which a wrong shape means another vocabulary."""
    expected_in: Mapping[str, str] = field(default_factory=dict)
    """Wanted tensor → the adapter's file that must store it. One that is missing there is not new."""


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
        from .explain import unmatched

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
    problems = [problem for made in found if (problem := _misfit(w, made, catalog, rules))]
    if problems:
        result.problems += problems
        return
    first = found[0]
    others = tuple([made.tiles for made in found[1:]]) if len(found) > 1 else ()
    result.recipes[w.name] = Recipe(w.name, first.tiles, others, () if first.tiles else first.sources)
    for made in found:
        if made.host:
            result.conversions[made.tiles[0].source] = made.host


def _misfit(w: Wanted, made: Made, catalog: Catalog, rules: Rules) -> str | None:
    if made.shape != w.shape:
        hint = _in_blocks(w, made) + _missing_parts(made, catalog) or _other_vocabulary(w, made, rules)
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


def _other_vocabulary(w: Wanted, made: Made, rules: Rules) -> str:
    """The way on where a model and its weights have another number of tokens."""
    if set(rules.embeddings()).isdisjoint((w.name, *w.aliases)) or made.shape[1:] != w.shape[1:]:
        return ""
    rows, stored = w.shape[0], made.shape[0]
    if stored > rows:
        return f"; it has {stored} tokens, but the model has {rows}: pass config= with vocab_size={stored}"
    return (
        f"; it has {stored} tokens, but the model has {rows}: to add tokens, load the stored model in one process, call "
        f"model.resize_token_embeddings({rows}) and model.save_pretrained(…), and load that"
    )


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
