"""Reports as people read them: a table of two columns."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from .operation import size

#: Entries of a list that are shown; its number is shown, too.
_SHOWN = 8
_WIDTH = 100
#: Of fields whose name is no label.
_LABELS = {"nbytes": "size", "seconds": "took"}


class Printed:
    """A report: ``print`` shows a table of two columns, and so do a notebook and the command line. ``repr`` shows all fields unchanged."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def rows(self) -> Mapping[str, str]:
        """Rows of the table: the fields, without empty ones."""
        found: dict[str, str] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if shown := _shown(one.name, value):
                name = one.name.removesuffix("_bytes").removeprefix("bytes_").replace("_", " ")
                found[_LABELS.get(name, name)] = shown
        return found

    def __str__(self) -> str:
        rows = self.rows()
        width = max(map(len, rows), default=0) + 2
        lines = [type(self).__name__]
        for name, value in rows.items():
            first, *more = textwrap.wrap(value, _WIDTH - width - 2, break_on_hyphens=False) or [""]
            lines += [f"  {name:{width}}{first}", *(" " * (width + 2) + line for line in more)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.rows().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{cells}</table>"


def _shown(name: str, value: Any) -> str:
    """A field as text; empty if it says nothing."""
    if value is None or value == "" or (isinstance(value, Collection) and not value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size(value) if "bytes" in name else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f} s" if "seconds" in name else f"{value:g}"
    if isinstance(value, Mapping):
        return some([f"{key}: {entry}" for key, entry in value.items()])
    if isinstance(value, Collection) and not isinstance(value, str):
        return some(map(str, value))
    return str(value)


def some(entries: Iterable[str]) -> str:
    """The first few entries, and how many more there are; empty if there are none."""
    found = list(entries)
    rest = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *rest])
