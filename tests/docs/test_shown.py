"""That an output on a page which isn't what is printed is noticed: what the other tests of the pages rest on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.blocks import Block
from tests.docs.every_block import rows, shows
from tests.docs.shown import is_alike, run_and_check, values


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb", "a  \nb\n\n"),
        ("a\n…", "a\nb\nc"),
        ("…\nc", "a\nb\nc"),
        ("a\n…\nc", "a\nc"),
        ("a … d", "a b c d"),
        ("a …\nd", "a b\n  c\nd"),
        ("done in 0.1 s, 15.8 MiB/s", "done in 21.0 s, 1 KiB/s"),
        ("step-1.5f0c7a91b2e4d638", "step-1.0123456789abcdef"),
        (
            "this host  23.1 GiB free of 24.0 GiB (/sys/fs/cgroup/memory.max)",
            "this host  1 MiB free of 2 GiB (x)  ",
        ),
    ],
)
def test_alike(shown: str, printed: str) -> None:
    assert is_alike(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb", "a\nb\nc"),
        ("a\nb", "b\na"),
        ("a\nc", "a\nb\nc"),
        ("3 files", "4 files"),
        ("1.00 MiB to do", "1.01 MiB to do"),
        ("a …", "b"),
        ("a\n…\nc", "a\nb"),
        ("rank  holds", "rank holds"),
    ],
)
def test_not_alike(shown: str, printed: str) -> None:
    assert not is_alike(shown, printed)


CODE = """
import sys
x = {"a": 1}  # {'a': 1}; of all
print(x)
# {'a': …}
x  # {'a': 1}
for _ in range(1):
    print("b", 2)  # b 2
int("c")  # ValueError that names it
y = 3  # 1: a remark
sys.exit(x["a"] + y)  # 4: the end
"""


def test_values_are_compared() -> None:
    assert list(values(CODE).values()) == [
        "{'a': 1}; of all",
        "{'a': …}",
        "{'a': 1}",
        "ValueError that names it",
        "4: the end",
        "b 2",
    ]
    with pytest.raises(SystemExit) as caught:
        run_and_check("here", CODE, {})
    assert caught.value.code == 4


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{'a': 1}; of", "{'a': 2}; of"),
        ("# {'a': …}", "# {'b': …}"),
        ("# b 2", "# b 3"),
        ("# ValueError", "# TypeError"),
        ("# 4: the", "# 5: the"),
        ("range(1)", "range(0)"),
    ],
)
def test_a_wrong_value_fails(right: str, wrong: str) -> None:
    assert right in CODE
    names: dict[str, Any] = {}
    with pytest.raises((AssertionError, ValueError)):
        run_and_check("here", CODE.replace(right, wrong).replace("sys.exit", "int"), names)


def test_a_path_must_be_there() -> None:
    with pytest.raises(AssertionError, match="writes no nowhere/at_all"):
        run_and_check("here", "x = 1\n# nowhere/at_all, and so on\n", {})


@pytest.mark.parametrize(
    ("language", "text"),
    [("console", "$ shardwise plan x\nranks 2\n"), ("python", "print(1)  # 1\n"), ("python", "x  # (1,)\n")],
)
def test_a_block_that_shows_something_is_known(language: str, text: str) -> None:
    assert shows(Block("x.md", 1, language, "", text))


def test_there_are_outputs_of_each_kind() -> None:
    compared = [row.block.language for row in rows() if row.kind == "compared"]
    assert compared.count("text") > 10
    assert compared.count("python") > 5
