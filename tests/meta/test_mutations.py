"""The table of seeded mutations fits the sources and the tests; ``python -m tests.mutations`` tries them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

from tests.meta.test_imports import FILES, ORDER
from tests.mutations.table import MUTATIONS

_NOT_IN_TEST = re.compile(r"pytest\.mark\.(slow|nightly)\b")
ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardwise"
#: Rooms that hold no behavior of their own that could be wrong unnoticed.
WITHOUT = {"errors", "reports", "objects", "host", "dtypes", "internals", "api", "", "demo", "__main__"}


def test_every_old_text_occurs_once() -> None:
    found = [(m.path, m.old) for m in MUTATIONS if (SOURCE / m.path).read_text("utf-8").count(m.old) != 1]
    assert not found


def test_every_mutation_changes_what_the_program_does() -> None:
    """Not only a comment or a text; and Python can read it."""
    same = []
    for mutation in MUTATIONS:
        text = (SOURCE / mutation.path).read_text("utf-8")
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(mutation.mutated(text))):
            same.append(mutation.about)
    assert not same


def test_no_two_are_equal() -> None:
    for what in ((m.path, m.old, m.new) for m in MUTATIONS), (m.about for m in MUTATIONS):
        assert [one for one, count in Counter(what).items() if count > 1] == []


def test_every_room_has_some() -> None:
    rooms = {m.room for m in MUTATIONS}
    assert set(ORDER) - WITHOUT == rooms
    assert len(MUTATIONS) >= 72
    assert FILES.keys() >= {
        m.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for m in MUTATIONS
    }


def test_their_tests_are_run_by_make_test() -> None:
    assert [m.about for m in MUTATIONS if not m.caught_by] == []
    tests = {test for mutation in MUTATIONS for test in mutation.caught_by}
    assert [f"{test}: name the test without parameters" for test in tests if "[" in test] == []
    assert [f"`make test` does not run {test}" for test in tests if not _is_selected(test)] == []


def _is_selected(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in _selected(file) if name else bool(_selected(file))


@lru_cache
def _selected(file: str) -> frozenset[str]:
    """The tests of a file that `make test` runs, read from its source."""
    assert Path(file).parts[0] == "tests"
    assert Path(file).name.startswith("test_")
    module = ast.parse((ROOT / file).read_text("utf-8"))
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark":
            assert not _NOT_IN_TEST.search(ast.unparse(statement)), f"`make test` runs nothing of {file}"
    functions = [f for f in module.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")]
    return frozenset(f.name for f in functions if not any(map(_leaves_out, f.decorator_list)))


def _leaves_out(decorator: ast.expr) -> bool:
    """Whether a decorator takes a test, or all of its parameters, out of `make test`."""
    if not isinstance(decorator, ast.Call):
        return bool(_NOT_IN_TEST.fullmatch(ast.unparse(decorator)))
    if not ast.unparse(decorator.func).endswith("parametrize") or len(decorator.args) < 2:
        return False
    values = decorator.args[1]
    each = values.elts if isinstance(values, ast.List | ast.Tuple) else []
    return bool(each) and all(_NOT_IN_TEST.search(ast.unparse(one)) for one in each)
