"""Runs every launcher and prints what came of it, with versions: `python -m tests.launchers.table [--only NAME …]`.

A launcher is a module of this folder with

* `NAME`: the launcher's name, for people,
* `version() -> str`: its version; raises `NotHere` where it is not installed,
* `run(out: Path) -> list[Row]`: runs every case; logs and curves go into `out`. Raises `NotHere` where it can't run.

Exit status 0: every row holds; 1: one does not, or a launcher raised. A launcher that is not here is said, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from .rows import NotHere, Row

__all__ = ["launchers", "main", "markdown"]


def launchers() -> Iterator[ModuleType]:
    """Every module of this folder that has `NAME`, `version` and `run`, by file name."""
    folder = str(Path(__file__).parent)
    package = __package__ or "tests.launchers"
    for found in sorted(pkgutil.iter_modules([folder]), key=lambda found: found.name):
        if found.name.startswith(("_", "test_")) or found.name in ("rows", "table"):
            continue
        module = importlib.import_module(f"{package}.{found.name}")
        if all(hasattr(module, name) for name in ("NAME", "version", "run")):
            yield module


def run_one(module: ModuleType, out: Path) -> tuple[str, list[Row]]:
    """The launcher's version and its rows. One that raises is one row that does not hold."""
    version = "not here"
    try:
        version = module.version()
        out.mkdir(parents=True, exist_ok=True)
        return version, list(module.run(out))
    except NotHere as why:
        return version, [Row("not run", str(why), True)]
    except Exception as error:  # the other launchers still run
        traceback.print_exc()
        return version, [Row("raised", f"{type(error).__name__}: {error}".splitlines()[0], False)]


def markdown(name: str, version: str, rows: Sequence[Row]) -> list[str]:
    """The lines of the table for one launcher."""
    return [f"| {name} {version} | {r.case} | {r.figure} | {'yes' if r.ok else '**no**'} |" for r in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launchers, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=None, metavar="NAME", help="file names of launchers, without .py"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/launchers"), help="logs, curves and table.md go here"
    )
    options = parser.parse_args(arguments)
    lines = ["| launcher | case | figure | holds |", "|---|---|---|---|"]
    holds = True
    for module in launchers():
        name = module.__name__.rpartition(".")[2]
        if options.only is not None and name not in options.only:
            continue
        start = time.monotonic()
        version, rows = run_one(module, options.out / name)
        print(f"{name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        lines += markdown(module.NAME, version, rows)
        holds = holds and bool(rows) and all(row.ok for row in rows)
    text = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(text)
    print(text, end="")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
