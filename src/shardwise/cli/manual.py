"""The sections of docs/errors.md, for people at a terminal."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from .. import errors

__all__ = ["ERRORS", "anchor_of", "section_of"]

#: The types that have a section.
ERRORS = tuple(name for name in errors.__all__ if name.endswith("Error"))

_PAGE = "docs/errors.md"  # errors.md of the package is a link to it, and a copy of it in a wheel
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")


def anchor_of(name: str) -> str:
    """The page and anchor of an error's section in the documentation."""
    return f"{_PAGE}#{name.lower()}"


def section_of(name: str) -> str:
    """The section of an error, as Markdown. Links are text: ``words (docs/howto/own-loop.md)``."""
    page = Path(errors.__file__).with_name("errors.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = next(section for section in sections if section.partition("\n")[0] == name)
    return _LINK.sub(_as_text, f"## {found.rstrip()}\n")


def _as_text(link: re.Match[str]) -> str:
    target = link[2].partition("#")[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_PAGE), target))
    return f"{link[1]} ({path})" if target else link[1]
