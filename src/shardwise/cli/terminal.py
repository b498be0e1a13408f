"""The console of a command, and text of our own documents on it. Needs no torch."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markdown import Markdown

__all__ = ["console", "show_markdown"]

#: Width without a terminal: wide enough for tensor names.
_WIDTH_WITHOUT_TERMINAL = 140


def console(*, err: bool = False) -> Console:
    """The console of a command: stdout, or stderr."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def show_markdown(out: Console, text: str) -> None:
    """Print a part of our own documents."""
    out.print(Markdown(text, hyperlinks=False))
