"""The table of rules, read from ``rules.toml``, and what they find. Pure: the facts are given."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from importlib.resources import files
from string import Formatter
from typing import Any

from ..objects import frozen
from .conditions import CONDITIONS, SOURCES, Values, some
from .facts import Facts, Finding, Kind, gib, is_version

# ----------------------------------------------------------------------------------------------------
# What a rule is, and how its sentences are made.


class _Sentences(Formatter):
    """``str.format`` with formats for findings."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if "|" in format_spec:  # the verb for one thing, and for several
            return format_spec.split("|")[len(value) != 1]
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        return super().format_field(value, format_spec)


_FORMATS: dict[str, Callable[[Any], str]] = {
    "gib": gib,
    "len": lambda things: str(len(things)),
    "line": lambda text: text.partition("\n")[0],
    "list": ", ".join,
    "mib": lambda nbytes: f"{nbytes / 1024**2:.0f}",
    "some": some,
}
_SENTENCES = _Sentences()


@frozen(kw_only=True)
class Rule:
    """A row of the table."""

    id: str
    source: str
    """The upstream thread, manual or case that it comes from."""
    bites: str
    """What will go wrong, or has gone wrong."""
    why: str
    do: str
    about: str = ""
    """When it fires, for people."""
    where: str = "{it.path}"
    """The file, directory, variable or rank."""
    kind: Kind = "problem"
    applies: Mapping[str, str] = field(default_factory=dict)
    """Versions by package, as in requirements. A package that is not installed does not exclude the rule: the files may
    be for another machine."""
    each: str = ""
    """What it looks at, one after the other; empty: all facts at once."""
    when: str = ""
    """The field that must not be empty."""
    failed: Sequence[str] = ()
    """Steps of a probe; one of them failed."""
    mounted: Sequence[str] = ()
    """How the kind of the file system begins."""
    model_types: Sequence[str] = ()
    """Its config is of one of these architectures."""
    lines: Sequence[str] = ()
    """A line of the log contains one of these texts."""
    also: Sequence[str] = ()
    """Expressions that the same line matches, too. Each takes time in proportion to the line, which may have many MiB."""
    unless: str | None = None
    """A text that the line doesn't have."""
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Sentences that replace the rule's own where the condition's values name them as ``variant``."""

    @property
    def line(self) -> str:
        """The name of the line in :attr:`.Log.lines`."""
        return self.id.removeprefix("log.")

    def findings(self, facts: Facts) -> list[Finding]:
        """What the rule finds. Pure."""
        if not all(is_version(facts, package, wanted) for package, wanted in self.applies.items()):
            return []
        known = {f.name: getattr(facts, f.name) for f in fields(facts)}
        found = []
        things: Iterable[Any] = (facts,)
        if self.each:
            things = SOURCES[self.each](facts) if self.each in SOURCES else known[self.each]
        for it in things:
            for values in self._met(it):
                texts = {name: getattr(self, name) for name in ("where", "bites", "why", "do")}
                texts |= self.variants.get(str(values.get("variant")), {})
                named = {**known, "it": it, **values}
                said = {name: _SENTENCES.vformat(text, (), named) for name, text in texts.items()}
                found.append(Finding(rule=self.id, kind=self.kind, source=self.source, **said))
        return found

    def _met(self, it: Any) -> Iterable[Values]:
        """For each finding of one thing: the values that the sentences name."""
        if self.when and not getattr(it, self.when):
            return ()
        if self.model_types and str(it.config.get("model_type")) not in self.model_types:
            return ()
        if self.lines:
            return [{"line": line}] if (line := it.lines.get(self.line)) else ()
        if self.failed:
            return [{"step": s, "why": it.failures[s]} for s in self.failed if s in it.failures][:1]
        if self.mounted and (it.mount is None or not it.mount.kind.startswith(tuple(self.mounted))):
            return ()
        met = CONDITIONS[self.id](it) if self.id in CONDITIONS else True
        return met if isinstance(met, Iterable) else [{}] * met


def _rule(row: dict[str, Any]) -> Rule:
    if "lines" in row:  # a known line of a log
        row = {"about": row["bites"][:-1], "each": "logs", "where": "{it.path}: {line}", **row}
    return Rule(**row)


#: All rules, in the order of the page that lists them.
RULES = tuple(
    _rule(row)
    for row in tomllib.loads((files(__package__) / "rules.toml").read_text(encoding="utf-8"))["rule"]
)
