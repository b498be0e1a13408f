"""docs/errors.md quotes messages: each is one that the package still writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.blocks import DOCS, ROOT

#: What stands for values in a quoted message: dots, numbers, quoted names, names of classes, the text of an errno.
_VALUES = re.compile(
    r"…|\d[\d,]*|'[^']*'|\b[A-Z]\w*[A-Z]\w*|Permission denied|Too many open files|No space left on device"
)


@cache
def _written() -> str:
    """Every text in the sources, with a mark for each value in it."""
    texts = []
    for file in (ROOT / "src/shardwise").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    texts += [file.read_text("utf-8") for file in (ROOT / "src/shardwise").rglob("*.toml")]
    return "\n".join(texts)


def _quoted() -> Iterator[str]:
    """The messages in the first columns of the page's tables."""
    for line in (DOCS / "errors.md").read_text().splitlines():
        if line.startswith("| "):
            yield from re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[1])


def _runs(message: str) -> list[str]:
    """Three words each that stand together in a message without a value between them."""
    found = []
    for part in _VALUES.split(message):
        words = part.split()
        found += [" ".join(words[k : k + 3]).strip(",.:;()") for k in range(len(words) - 2)]
    return found


MESSAGES = [m for m in dict.fromkeys(_quoted()) if _runs(m) and "==" not in m]  # code is no message


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_written(message: str) -> None:
    runs = _runs(message)
    lost = [run for run in runs if run not in _written()]
    assert len(lost) * 2 < len(runs), f"no error says {lost}: the row is out of date"


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 60
    assert _runs("holds something else entirely than that")[0] == "holds something else"


@pytest.mark.parametrize("family", ["local=True", "in memory", "should_stop", "max_failures", "fallback"])
def test_families_have_rows(family: str) -> None:
    rows = [line for line in (DOCS / "errors.md").read_text().splitlines() if line.startswith("| ")]
    assert any(family in row for row in rows)
