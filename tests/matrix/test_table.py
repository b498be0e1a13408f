"""The page of compatibility is what the table of gates says; a gate is asked by the code or tests; no test is skipped in the project's own environment."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from shardwise.gates import GATES
from tests.harness.versions import lacking
from tests.matrix.__main__ import RANKS
from tests.matrix.environments import ROOT
from tests.matrix.pairs import PAIRS
from tests.matrix.table import PAGE, page, results


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results()), "python -m tests.matrix.table"


def test_folders_of_the_ranks_check_exist() -> None:
    assert [name for name in RANKS if not any((ROOT / "tests" / name).glob("test_*.py"))] == []


@pytest.mark.needs("transformers>=5.23", "is not the project's own")
def test_gates_are_of_use() -> None:
    """Each is closed in some environment of the matrix, open in the project's own, and some code or test asks for it."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("src", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    for name, gate in GATES.items():
        tried = {str(pair.pins.get(gate.package)) for pair in PAIRS if pair.pins.get(gate.package)}
        assert any(not SpecifierSet(gate.needs).contains(version) for version in tried), name
        assert lacking(name) is None, "the project's own environment has all"
        assert re.search(rf"(require|needs|is_open)\(\"{name}\"", sources), f"nothing asks for {name}"
        if gate.error is not None:
            assert f'require("{name}"' in sources, f"nothing raises the error of {name}"
