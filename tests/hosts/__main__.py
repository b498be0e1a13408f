"""Every case on hosts, as a table: `python -m tests.hosts [NAME …]`. Exit status 0: all hold; a machine without namespaces says so."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hosts.cases import CASES, LONG_CASES
from tests.hosts.hosts import Hosts, why_not
from tests.hosts.job import Agents
from tests.launchers.rows import Row


def rows_of(cases: Sequence[Callable[[Agents], Row]]) -> list[Row]:
    """Run cases one after the other on the same two hosts."""
    found = []
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts, Agents(hosts) as agents:
        for case in cases:
            try:
                found.append(case(agents))
            except Exception as error:  # the other cases still run
                traceback.print_exc()
                found.append(Row(case.__name__, f"{type(error).__name__}: {error}".splitlines()[0], False))
    return found


def main(names: Sequence[str]) -> int:
    if why := why_not():
        print(f"not run: {why}")
        return 0
    groups = [CASES, *([case] for case in LONG_CASES)]
    rows = [
        row
        for group in groups
        if (some := [c for c in group if not names or c.__name__ in names])
        for row in rows_of(some)
    ]
    print("| case | figure | holds |\n|---|---|---|")
    for row in rows:
        print(f"| {row.case} | {row.figure} | {'yes' if row.ok else '**no**'} |")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
