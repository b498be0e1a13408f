"""What must be equal in the plans of all ranks: a hash of it, and words for ranks that disagree."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from ..planning import Plan
from ..recipe.match import Recipe
from ..recipe.tiles import is_identity

__all__ = ["fingerprint", "in_words"]


def fingerprint(plan: Plan, recorded: Mapping[str, int]) -> str:
    """What must be equal on all ranks: of the plan names, shapes, dtypes and recipes of the whole model, not boxes; and the digests that
    the source records of its tensors, which ranks compare together."""
    digest = hashlib.blake2b(digest_size=16)
    known: dict[int, str] = {}
    for w in plan.wanted:
        recipe = plan.recipes.get(w.name)
        short = None if recipe is None else _short_form(recipe, w.shape, known)
        digest.update(repr((w.name, w.aliases, w.shape, w.dtype, short, recorded.get(w.name))).encode())
    return digest.hexdigest()


def _short_form(recipe: Recipe, shape: tuple[int, ...], known: dict[int, str]) -> object:
    """A recipe in what ``repr`` is quick with; of a tensor stored as it is wanted, its stored name.

    ``known``: loops in words by their id. Thousands of experts share them.
    """
    if len(recipe.tiles) == 1 and not recipe.copies and is_identity(recipe.tiles[0], shape):
        return recipe.tiles[0].source
    parts = []
    for tiles in (recipe.tiles, *recipe.copies):
        for t in tiles:
            loops = known.get(id(t.loops))
            if loops is None:
                loops = known[id(t.loops)] = repr(t.loops)
            parts.append((t.source, t.source_start, t.target_start, loops))
        parts.append(("", (), (), "end"))
    return parts, recipe.empty


def in_words(plan: Plan, recorded: Mapping[str, int]) -> str:
    """A plan in words, for ranks that disagree: number of tensors, bytes, dtypes, and a hash of the digests that the source records."""
    counts = Counter(w.dtype for w in plan.wanted)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(counts.items()))
    nbytes = sum(w.nbytes for w in plan.wanted)
    content = ""
    if recorded:
        content = (
            "; content " + hashlib.blake2b(repr(sorted(recorded.items())).encode(), digest_size=4).hexdigest()
        )
    return f"a model of {len(plan.wanted)} tensors ({kinds}; {nbytes} bytes{content})"
