"""Every block of code and every command on the site is run by a test, or listed with the reason why none can."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.docs.blocks import ROOT, Block, blocks, pages
from tests.docs.every_block import ELSEWHERE, NOT_RUN, RUN_BY, is_code, runner

CODE = [block for page in pages() if "notes" not in page.parts for block in blocks(page) if is_code(block)]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests/docs" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_named(block: Block, row: tuple[str, str]) -> bool:
    return block.page == row[0] and row[1] in block.text


@pytest.mark.parametrize("block", CODE, ids=str)
def test_a_test_runs_it(block: Block) -> None:
    if any(is_named(block, row) for row in NOT_RUN):
        return
    test = runner(block)
    assert test is not None, f"{block}: add its page to RUN_BY, or the block to NOT_RUN with a reason"
    file, _, name = test.partition("::")
    assert name in functions(file), test


def test_every_row_has_a_block() -> None:
    for row in (*ELSEWHERE, *NOT_RUN):
        assert any(is_named(block, row) for block in CODE), f"no block is {row}"
    for page in RUN_BY:
        assert any(block.page == page for block in CODE if block.language in ("python", "diff")), page
