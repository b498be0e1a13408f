"""The sections of docs/errors.md, for people at a terminal."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from .. import errors

__all__ = ["ERRORS", "anchor_of", "doctors_rules", "helps", "rows_of", "section_of"]

#: The types that have a section.
ERRORS = tuple(name for name in errors.__all__ if name.endswith("Error"))

_PAGE = "docs/errors.md"  # errors.md of the package is a link to it, and a copy of it in a wheel
#: A row of a table: cause and fix.
_ROW = re.compile(r"^\| (`.+?) \| (.+) \|$", re.MULTILINE)
#: Characters of a part of an error's text that says more than a word.
_LEAST_PART = 8
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")


def anchor_of(name: str) -> str:
    """The page and anchor of an error's section in the documentation."""
    return f"{_PAGE}#{name.lower()}"


def section_of(name: str) -> str:
    """The section of an error, as Markdown. Links are text: ``words (docs/howto/own-loop.md)``."""
    return _LINK.sub(_as_text, f"## {_sections()[name].rstrip()}\n")


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """The rows of all sections whose cause is in the text of an error: the section, the cause and the fix, as Markdown."""
    return [(name, *row) for name, section in _sections().items() for row in _matching(section, text)]


def doctors_rules(name: str) -> str:
    """What doctor's check of this name looks for, or those that mention this setting, as Markdown; empty if there are none."""
    from ..doctor.table import RULES

    is_setting = re.fullmatch(r"[a-z]+(_[a-z]+)+", name) is not None
    found = [
        r for r in RULES if r.id == name or (is_setting and name in re.findall(r"\w+", f"{r.id} {r.about}"))
    ]
    return "\n\n".join(
        f"**{r.id}**: {r.about}\n\nshardwise doctor PATH… checks for it, and says why it happened and what to do "
        f"(docs/howto/doctor.md). Source: {r.source}"
        for r in found
    )


def helps(error: errors.ShardwiseError) -> bool:
    """Whether the section of an error says something of this one: a row of its table, or the section has none."""
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    causes = getattr(error, "causes", None)
    section = _sections()[name]
    return not _ROW.search(section) or bool(causes) or bool(_matching(section, str(error)))


def _sections() -> dict[str, str]:
    page = Path(errors.__file__).with_name("errors.md").read_text(encoding="utf-8")
    found = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {section.partition("\n")[0]: section for section in found if section.partition("\n")[0] in ERRORS}


def _matching(section: str, text: str) -> list[tuple[str, str]]:
    words = " ".join(text.split())
    return [
        (row[1], _LINK.sub(_as_text, row[2]))
        for row in _ROW.finditer(section)
        if any(
            _pattern(cause).search(words) or (len(words) > _LEAST_PART and words in cause)
            for cause in re.findall(r"`([^`]+)`", row[1])
        )
    ]


def _pattern(cause: str) -> re.Pattern[str]:
    """A text of the table, in which ``…``, a quoted name, a word in capitals and a number stand for any."""
    parts = re.split(r"…|'[^']*'|\b\d+\b", cause)
    return re.compile(".*?".join(re.escape(part.strip()) for part in parts), re.DOTALL)


def _as_text(link: re.Match[str]) -> str:
    target = link[2].partition("#")[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_PAGE), target))
    return f"{link[1]} ({path})" if target else link[1]
