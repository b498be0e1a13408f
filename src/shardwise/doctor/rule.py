"""What a rule is: a pure function over the facts, with an id, the versions it applies to, and where it was met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, field
from typing import Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet  # transformers and huggingface_hub require it
from packaging.version import InvalidVersion, Version

from ..objects import frozen
from .facts import Facts

__all__ = ["Bite", "Finding", "Kind", "Rule", "count", "each", "gib", "is_on", "is_version", "number"]

T = TypeVar("T")
#: ``bites``: the run will fail, or cost time, memory or data; the exit status is 1. ``note``: worth knowing, no more.
Kind = Literal["problem", "note"]


@frozen
class Bite:
    """What a rule says of one place: one sentence each."""

    where: str
    """The file, directory, variable or rank."""
    bites: str
    """What will go wrong, or has gone wrong."""
    why: str
    do: str


@frozen(kw_only=True)
class Finding:
    """A bite, with the rule that says so."""

    rule: str
    kind: Kind
    where: str
    bites: str
    why: str
    do: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@frozen
class Rule:
    """A row of the table."""

    id: str
    about: str
    """When it fires, for people."""
    source: str
    """The upstream thread, manual or case that it comes from."""
    check: Callable[[Facts], Iterable[Bite]]
    applies: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Versions by package, as in requirements. A package that is not installed does not exclude the rule: the files may
    be for another machine."""
    kind: Kind = field(default="problem", kw_only=True)

    def findings(self, facts: Facts) -> list[Finding]:
        """What the rule finds. Pure."""
        if not all(is_version(facts, package, wanted) for package, wanted in self.applies.items()):
            return []
        return [
            Finding(
                rule=self.id,
                kind=self.kind,
                where=b.where,
                bites=b.bites,
                why=b.why,
                do=b.do,
                source=self.source,
            )
            for b in self.check(facts)
        ]


def each(
    items: Callable[[Facts], Iterable[T]],
    row: tuple[str, str, str],
    *,
    when: Callable[[T], object],
    bites: str | Callable[[T], str],
    why: str | Callable[[T], str],
    do: str | Callable[[T], str],
    where: Callable[[T], str] = lambda item: str(item.path),  # type: ignore[attr-defined]
    applies: Mapping[str, str] | None = None,
    kind: Kind = "problem",
) -> Rule:
    """A rule that looks at one thing at a time, and has one thing to say of it.

    ``row``: its id, when it fires and its source. ``where``: by default the thing's path.
    """

    def check(facts: Facts) -> Iterable[Bite]:
        for item in items(facts):
            if when(item):
                bitten, because, then = (t if isinstance(t, str) else t(item) for t in (bites, why, do))
                yield Bite(where(item), bitten, because, then)

    return Rule(*row, check, applies=applies or {}, kind=kind)


def is_version(facts: Facts, package: str, wanted: str) -> bool:
    """Whether an installed package is of the versions ``wanted``; True if it is not installed."""
    installed = facts.software.get(package)
    if installed is None:
        return True
    try:
        return SpecifierSet(wanted).contains(Version(installed), prereleases=True)
    except InvalidVersion:
        return True


def number(value: object) -> int | None:
    """A whole number, as a number or as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def is_on(value: object) -> bool:
    """Whether a setting or variable says yes, as Accelerate reads it."""
    return str(value).strip().lower() in ("1", "true", "yes", "y", "on", "t")


def gib(nbytes: float) -> str:
    """Bytes for a sentence."""
    return f"{nbytes / 1024**3:.1f} GiB" if nbytes >= 0.1 * 1024**3 else f"{nbytes / 1024**2:.1f} MiB"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
