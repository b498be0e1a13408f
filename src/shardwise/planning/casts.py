"""Casts of a load that round values: none happens without a line in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ..catalog.records import StoredTensor
from ..dtypes import is_lossless
from ..layout.wanted import Wanted
from ..objects import frozen
from ..recipe.match import Recipe

__all__ = ["Cast", "casts_of", "rounded_between", "rounded_in"]

_SOME = 20


@frozen
class Cast:
    """Tensors whose stored values the new dtype can't hold exactly."""

    source: str
    """Stored code of the dtype before: "F32"."""
    target: str
    tensors: int
    names: tuple[str, ...]
    """The first 20 of them."""
    kept_in_fp32: int = 0
    """Number of those that the model's class keeps in fp32 (``_keep_in_fp32_modules``): ``from_pretrained`` does not cast them, and a
    load fills the dtype that the model has. Give these parameters fp32 before the load."""

    def in_words(self) -> str:
        """A line of a report."""
        more = f" and {self.tensors - 3} more" if self.tensors > 3 else ""
        return f"{self.source} when saved, {self.target} now: {', '.join(self.names[:3])}{more}"


def rounded_in(
    stored: Mapping[str, StoredTensor], wanted: Sequence[Wanted], recipes: Mapping[str, Recipe]
) -> dict[tuple[str, str], tuple[str, ...]]:
    """The wanted tensors whose values a load can't hold exactly, by dtype before and after. The same on every rank. Pure."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for w in wanted:
        recipe = recipes.get(w.name)
        for source in {tile.source for tile in recipe.tiles} if recipe is not None else ():
            before = stored[source].dtype
            if before != w.dtype and not is_lossless(before, w.dtype):
                found.setdefault((before, w.dtype), {})[w.name] = None
    return {dtypes: tuple(names) for dtypes, names in found.items()}


class _HasDtype(Protocol):
    @property
    def dtype(self) -> str: ...


def rounded_between(
    before: Mapping[str, _HasDtype], after: Mapping[str, _HasDtype]
) -> dict[tuple[str, str], list[str]]:
    """The same of tensors that keep their names."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, one in after.items():
        if name in before and not is_lossless(before[name].dtype, one.dtype):
            found.setdefault((before[name].dtype, one.dtype), []).append(name)
    return found


def casts_of(
    rounded: Mapping[tuple[str, str], Iterable[str]], is_kept: Callable[[str], bool] = lambda _: False
) -> tuple[Cast, ...]:
    """The records for a report, those of most tensors first. ``is_kept``: whether the model's class keeps a tensor in fp32."""
    found = []
    for (before, after), names in rounded.items():
        all_ = tuple(names)
        kept = [name for name in all_ if is_kept(name)]
        shown = tuple(dict.fromkeys([*kept, *all_]))[:_SOME]
        found.append(Cast(before, after, len(all_), shown, len(kept)))
    return tuple(sorted(found, key=lambda one: -one.tensors))
