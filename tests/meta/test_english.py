"""The words of :mod:`.english` come neither in docstrings of the interface, nor in messages, nor on pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.meta import english

#: But for records of how decisions and measurements came about.
_PAGES = [
    english.ROOT / "README.md",
    english.ROOT / "CHANGELOG.md",
    *(page for page in sorted((english.ROOT / "docs").rglob("*.md")) if page.parent.name != "notes"),
]


def found(texts: list[tuple[str, str]]) -> list[str]:
    return [str(one) for where, text in texts for one in english.found_in(where, text)]


@pytest.mark.needs("trainer")
def test_docstrings_of_the_interface() -> None:
    texts = list(english.texts_of_the_interface())
    assert len(texts) > 200
    assert found(texts) == []


def test_messages() -> None:
    """With a space in them: others are names."""
    texts = [(where, text) for where, text in english.texts_of_messages() if " " in text]
    assert len(texts) > 2_000
    assert found(texts) == []


def test_spelling_in_code() -> None:
    assert [str(one) for one in english.british_in_code()] == []


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(english.ROOT)))
def test_pages(page: Path) -> None:
    assert found(list(english.texts_of_pages([page]))) == []


def test_what_it_finds() -> None:
    assert [
        one.match for one in english.found_in("here", "The files lie beside it. What is new is `beside` it.")
    ] == ["beside", "lie", "What"]
    words = "Initialised neighbours; raise promises otherwise, in `colour`."
    assert [one.match for one in english.found_in("here", words)] == ["Initialised", "neighbour"]
