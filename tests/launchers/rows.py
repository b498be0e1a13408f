"""What a launcher's run hands back."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NotHere", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One case that was run: what was done, what came of it in figures, and whether what must hold held."""

    case: str
    figure: str
    ok: bool


class NotHere(Exception):
    """The launcher, or what it needs of this machine, is missing. Raised by `version` or `run`; says what is missing."""
