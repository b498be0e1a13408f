"""Run checks with other versions of other packages: ``python -m tests.matrix`` (``make matrix``).

    python -m tests.matrix                                  # what CI runs: the oldest pair, and one of the others by turns
    python -m tests.matrix --pairs 2.10-5.3 --checks quick ranks
    python -m tests.matrix --pairs newest --checks all --write      # all checks on one pair, into docs/compatibility.md
    python -m tests.matrix --pairs all --checks all --write         # all checks on all pairs (hours)

Each pair is an environment of its own (:mod:`tests.matrix.environments`), below build/matrix, where logs are, too. Exit status 1: a
check failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .environments import PLACE, ROOT, environment
from .pairs import PAIRS, Pair
from .table import Row, write

PYTEST = (
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    "--numprocesses",
    "3",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    "-q",
)
#: Folders whose tests start ranks: what touches torch's and transformers' own classes.
RANKS = (
    "loading",
    "sharding",
    "tensors",
    "export",
    "checkpoint",
    "integrations",
    "cases",
    "diffusion",
    "others",
)
SHAPE = ("imports", "exports", "internals", "mutations")


def check_imports(python: Path, log: Path) -> str:
    """Every module of the package can be imported, but for those whose gate is closed; and what it uses of other packages is there."""
    said = _run(log, python, "-m", "tests.matrix.imports")
    own = ("tests/meta/test_internals.py", "tests/test_gates.py")
    return said and (_run(log, python, "-m", "pytest", "-p", "no:cacheprovider", "-q", *own) and said)


def check_program(python: Path, log: Path) -> str:
    """The founders' program: two ranks, twice."""
    folder = log.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program = str(ROOT / "tests" / "matrix" / "founders.py")
    said = _run(log, python, program, str(folder), "make")
    for how in ("train", "resume"):
        said = said and _run(
            log,
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            program,
            str(folder),
            how,
        )
    return said


def check_demo(python: Path, log: Path) -> str:
    """``shardwise demo`` of a real model."""
    folder = log.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    return _run(log, python, "-m", "shardwise", "demo", "--out", str(folder))


def check_quick(python: Path, log: Path) -> str:
    """The tests of one process."""
    ignored = (f"--ignore=tests/meta/test_{name}.py" for name in SHAPE)
    marks = "not ranks and not processes and not faults and not slow and not nightly and not hypothesis"
    return _run(log, python, *PYTEST, *ignored, "-m", marks)


def check_ranks(python: Path, log: Path) -> str:
    """The tests that start ranks."""
    folders = (f"tests/{name}" for name in RANKS)
    return _run(log, python, *PYTEST, "-m", "(ranks or processes) and not slow and not nightly", *folders)


CHECKS: dict[str, Callable[[Path, Path], str]] = {
    "imports": check_imports,
    "program": check_program,
    "demo": check_demo,
    "quick": check_quick,
    "ranks": check_ranks,
}
SHORT = ("imports", "program")

_LAST = re.compile(r"=* ?((?:\d+ \w+,? ?)+) in [\d.]+s")
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] .*?: (?:gate ([\w-]+);|(upstream):)", re.MULTILINE)


def _run(log: Path, python: Path, *words: str) -> str:
    """What a command's end says in a cell of the table; empty if it failed. Its output is added to the log."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("a") as output:
        done = subprocess.run(
            [python, *words], cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        return ""
    text = log.read_text(errors="replace")
    found = _LAST.findall(text)
    if not found:
        return "passed"
    because: Counter[str] = Counter()
    for count, gate, upstream in _SKIPPED.findall(text):
        because[gate or upstream] += int(count)
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(because.items()))
    return f"{found[-1].strip()}" + (f" ({reasons})" if reasons else "")


def short() -> list[Pair]:
    """The oldest pair, and one of the others: another one for each commit."""
    count = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    others = [pair for pair in PAIRS[1:] if pair.pins]
    return [PAIRS[0], others[int(count.stdout) % len(others)]]


def main() -> int:
    names = [pair.name for pair in PAIRS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--pairs", nargs="+", choices=[*names, "all"], metavar="PAIR", help=f"of {', '.join(names)}, or all"
    )
    parser.add_argument(
        "--checks",
        nargs="+",
        choices=[*CHECKS, "all"],
        metavar="CHECK",
        help=f"of {', '.join(CHECKS)}, or all",
    )
    parser.add_argument("--write", action="store_true", help="write the results to docs/compatibility.md")
    given = parser.parse_args()
    pairs = [p for p in PAIRS if {p.name, "all"} & set(given.pairs)] if given.pairs else short()
    checks = [c for c in CHECKS if {c, "all"} & set(given.checks or SHORT)]
    failed = 0
    for pair in pairs:
        began = time.monotonic()
        python = environment(pair)
        print(f"{pair.name}: environment, {time.monotonic() - began:.0f} s", flush=True)
        for check in checks:
            began, log = time.monotonic(), PLACE / "logs" / f"{pair.name}-{check}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            said = CHECKS[check](python, log)
            print(f"{pair.name}: {check}: {said or 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
            if not said:
                failed += 1
                print(log.read_text(errors="replace")[-6000:], flush=True)
            if given.write:
                write(Row.of(pair, python), check, said or "**failed**")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
