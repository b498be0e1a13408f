"""Every block of code and every command on the site is run by a test, and what it shows is compared; or it is listed with the reason why not."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.every_block import (
    DRAWN,
    ELSEWHERE,
    EXAMPLES,
    NOT_RUN,
    OUTPUTS,
    RUN_BY,
    Row,
    examples,
    is_named,
    rows,
)

ROWS = rows()
BLOCKS = [row.block for row in ROWS]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests/docs" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.block))
def test_a_test_runs_and_compares_it(row: Row) -> None:
    assert row.kind != "unknown", f"{row.block}: {row.why}"
    if row.kind in ("compared", "no output shown"):
        file, _, name = row.why.partition("::")
        assert name in functions(file), row.why


def test_every_row_has_a_block() -> None:
    for row in (*ELSEWHERE, *NOT_RUN, *OUTPUTS, *DRAWN):
        assert any(is_named(block, row) for block in BLOCKS), f"no block is {row}"
    for page in RUN_BY:
        assert any(block.page == page for block in BLOCKS if block.language in ("python", "diff")), page


@pytest.mark.parametrize("file", examples(), ids=lambda file: file.name)
def test_a_test_runs_the_example(file: Path) -> None:
    """The site shows it whole."""
    test = ROOT / "tests" / EXAMPLES[file.name]
    assert file.stem in test.read_text()
