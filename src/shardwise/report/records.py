"""The parts of a page, before they become HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..objects import frozen
from .drawing import Drawn
from .text import size

__all__ = ["Cell", "Page", "Part", "Section", "Table", "bytes_cell", "cells", "facts"]


@frozen
class Cell:
    """A value of a table."""

    text: str
    number: bool = False
    tone: str = ""
    """``good`` or ``bad``."""


@frozen
class Table:
    """A table; without ``head``, one of facts: a name and a value in each row."""

    caption: str
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]


@frozen(kw_only=True)
class Part:
    """A piece of a section: what is given of these, in this order."""

    heading: str = ""
    text: str = ""
    key: bool = False
    """The colors of phases."""
    drawn: Drawn | None = None
    table: Table | None = None


@frozen
class Section:
    """A section with its heading."""

    anchor: str
    title: str
    about: str
    parts: Sequence[Part]


@frozen
class Page:
    """The whole report."""

    title: str
    conclusion: Cell
    """What happened, in a few sentences."""
    cards: Sequence[tuple[str, Cell]]
    sections: Sequence[Section]
    version: str


def cells(*values: object) -> list[Cell]:
    """A row. A head's name that begins with ``>`` stands over numbers; numbers and cells stay what they are."""
    found = []
    for value in values:
        if isinstance(value, Cell):
            found.append(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append(Cell(str(value), number=True))
        else:
            text = str(value)
            found.append(Cell(text.removeprefix(">"), number=text.startswith(">")))
    return found


def bytes_cell(nbytes: object) -> Cell:
    """Bytes from a file, which may hold anything."""
    return Cell(size(nbytes) if isinstance(nbytes, int) and 0 <= nbytes < 2**62 else "–", number=True)


def facts(caption: str, rows: Iterable[tuple[str, object]]) -> Table:
    """A table of names and values."""
    return Table(caption, (), [cells(name, value) for name, value in rows])
