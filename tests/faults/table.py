"""Faults and what they lead to: ``python -m tests.faults.table`` tries them all and prints a table.

``--short`` tries a sample of each, ``--only NAME …`` some of them. With ``--serve`` it says which there are, reads a
name a line from stdin and answers each with its rows in a line of JSON, which is how the tests run them. Exit status 1 if anything went
undetected or hung.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.damage import beside_rows, damage_rows
from tests.faults.directories import late_rows, lock_rows, retention_rows
from tests.faults.failures import eio_rows, full_disk_rows, limit_rows, short_write_rows
from tests.faults.forks import Forks
from tests.faults.kills import kill_rows
from tests.faults.lost_locks import lost_lock_rows
from tests.faults.lost_writes import lost_write_rows
from tests.faults.rows import Context, Row, render
from tests.faults.slow import slow_rows
from tests.faults.stops import stop_rows
from tests.faults.store_races import race_rows
from tests.faults.store_ranks import store_rank_rows
from tests.faults.store_requests import store_rows

__all__ = ["FAULTS", "main"]

FAULTS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "kill": kill_rows,
    "lost writes": lost_write_rows,
    "eio": eio_rows,
    "short writes": short_write_rows,
    "limit": limit_rows,
    "full disk": full_disk_rows,
    "damage": damage_rows,
    "beside": beside_rows,
    "stop": stop_rows,
    "slow": slow_rows,
    "lock": lock_rows,
    "lost lock": lost_lock_rows,
    "late": late_rows,
    "retention": retention_rows,
    "store": store_rows,
    "store ranks": store_rank_rows,
    "store races": race_rows,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try faults and print what they lead to.")
    parser.add_argument("--short", action="store_true", help="a sample of each")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--serve", action="store_true", help="read names from stdin, answer in JSON")
    parser.add_argument("--directory", type=Path, help="where to work; by default in memory")
    options = parser.parse_args(argv)
    base = Path(tempfile.mkdtemp(prefix="faults-", dir=options.directory or _quick_directory()))
    forks = Forks(base)
    context = Context(forks, base, short=options.short)
    try:
        return _serve(context) if options.serve else _print(context, options.only)
    finally:
        context.close()
        forks.close()
        shutil.rmtree(base, ignore_errors=True)


def _quick_directory() -> Path | None:
    """Memory, where fsync takes no time: what a disk would lose is computed, not left to chance."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 * 1024**3 else None


def _print(context: Context, names: list[str]) -> int:
    started = time.monotonic()
    rows: list[Row] = []
    for name in names:
        began = time.monotonic()
        for row in FAULTS[name](context):
            rows.append(row)
            for problem in row.problems:
                print(f"{row.fault}, {problem}", file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(render(rows, time.monotonic() - started), flush=True)
    return int(any(row.undetected or row.hangs for row in rows))


def _serve(context: Context) -> int:
    print(json.dumps(list(FAULTS)), flush=True)
    for line in sys.stdin:
        try:
            answer: object = [row.to_json() for row in FAULTS[line.strip()](context)]
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
