"""A sample of every fault of the table (``make faults`` tries them all): nothing goes undetected, nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.process import ROOT, worker_env

pytestmark = pytest.mark.faults

#: Those of ``tests.faults.table``, which is not imported here because it imports torch.
NAMES = (
    *("kill", "lost writes", "eio", "short writes", "limit", "full disk"),
    *("damage", "beside", "stop", "slow", "lock", "lost lock", "late", "retention"),
    *("store", "store ranks", "store races"),
)


@pytest.fixture(scope="module")
def rows_of() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Asks one process, which has imported everything, for the rows of a fault."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.table", "--short", "--serve"],
        cwd=ROOT,
        env=worker_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        names = json.loads(process.stdout.readline())
        assert tuple(names) == NAMES

        def ask(name: str) -> list[dict[str, Any]]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert isinstance(answer, list), answer["error"]
            return answer

        try:
            yield ask
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()  # its ranks end with it


#: Those that each change runs; the others run nightly.
CORE = {"kill", "lost writes", "full disk", "damage", "stop", "lock", "late", "store"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in CORE else pytest.mark.nightly) for n in NAMES]
)
def test_fault(rows_of: Callable[[str], list[dict[str, Any]]], name: str) -> None:
    rows = rows_of(name)
    assert rows
    found = [problem for row in rows for problem in row["problems"]]
    assert not found, "\n".join(found)
    assert not any(row["undetected"] or row["hangs"] for row in rows)
    reasons = {row["not_run"] for row in rows if row["not_run"]}
    if reasons:
        pytest.skip("; ".join(reasons))
    assert all(row["cases"] == row["previous"] + row["new"] + row["error"] for row in rows)
    assert all(row["cases"] for row in rows)
