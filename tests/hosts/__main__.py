"""Every case on hosts, as a table: `python -m tests.hosts [NAME …]`. Exit status 0: all hold; a machine without namespaces says so."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.hosts.adapter_cases import ADAPTER_CASES, IMPORTS
from tests.hosts.cases import CASES, LONG_CASES
from tests.hosts.hosts import Hosts, why_not
from tests.hosts.job import Agents
from tests.hosts.local_cases import LOCAL_CASES, THREE_HOSTS
from tests.hosts.odd_cases import SKEWED, SLOW, skew, why_no_skew, why_no_slow
from tests.launchers.rows import Row


def _alike(hosts: Hosts) -> Mapping[int, Mapping[str, str]]:
    return {}


def rows_of(
    cases: Sequence[Callable[[Agents], Row]],
    count: int = 2,
    variables: Callable[[Hosts], Mapping[int, Mapping[str, str]]] = _alike,
    imports: Sequence[str] = (),
) -> list[Row]:
    """Run cases one after the other on the same hosts. ``variables`` of the environment of some hosts, by number.
    ``imports``: modules that ranks have from the start."""
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(count, Path(folder)) as hosts,
        Agents(hosts, env=variables(hosts), imports=imports) as agents,
    ):
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
    groups = [(CASES, 2, _alike), (LOCAL_CASES, 2, _alike), (THREE_HOSTS, 3, _alike)]

    groups += [([case], 2, _alike) for case in LONG_CASES]
    for why, cases, variables in ((why_no_skew(), SKEWED, skew), (why_no_slow(), SLOW, _alike)):
        if why:
            print(f"not run: {', '.join(case.__name__ for case in cases)}: {why}")
        else:
            groups.append((cases, 2, variables))
    rows = [
        row
        for group, count, variables in groups
        if (some := [c for c in group if not names or c.__name__ in names])
        for row in rows_of(some, count, variables)
    ]
    if some := [c for c in ADAPTER_CASES if not names or c.__name__ in names]:
        rows += rows_of(some, imports=IMPORTS)
    print("| case | figure | holds |\n|---|---|---|")
    for row in rows:
        print(f"| {row.case} | {row.figure} | {'yes' if row.ok else '**no**'} |")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
