"""The code blocks of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?: +title=\"(?P<title>[^\"]*)\")?\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every Markdown file that a user reads."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def after_diff(block: Block) -> Block:
    """The program that a block of a diff leads to."""
    kept = [line[2:] for line in block.text.split("\n") if not line.startswith("-")]
    return replace(block, language="python", text="\n".join(kept))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page``, in order, without what indents them."""
    opened, lines = None, []
    for number, line in enumerate(page.read_text().split("\n"), start=1):
        found = _FENCE.match(line)
        if found is None:
            lines.append(line)
        elif opened is None:
            opened, lines = (number, found), []
        else:
            begin, fence = opened
            indent = len(fence["indent"])
            text = "\n".join(text[indent:] for text in lines) + "\n"
            name = str(page.relative_to(ROOT))
            yield Block(name, begin + 1, fence["language"], fence["title"] or "", text)
            opened = None
    assert opened is None, f"{page}: a block is not closed"
