"""Run every check of the project, one after another, and write what came of them to docs/notes/nightly.md.

``make nightly`` runs it in the project's environment. Arguments are names of steps; without any, all steps run. A step that
fails stops no other. The exit status is 1 if one failed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.matrix.pairs import PAIRS  # noqa: E402 - the tests aren't installed

NOTE = ROOT / "docs" / "notes" / "nightly.md"
LOGS = ROOT / "build" / "nightly"

#: Name of a step → how it is run: arguments of make, or of the environment's Python.
STEPS: dict[str, list[str]] = {
    "check": ["make", "check"],
    "docs": ["make", "docs"],
    "tests": [
        sys.executable,
        "-m",
        "pytest",
        "--numprocesses",
        "3",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--durations=60",
    ],
    "mutations": ["make", "mutations", "MUTATIONS=--trust"],
    "fuzz": ["make", "fuzz", "FUZZ_SECONDS=3600"],
    "faults": ["make", "faults"],
    "simulate": ["make", "simulate", "SIMULATE=--schedules 200000 --jobs 2"],
    "schedules": ["make", "schedules"],
    "servers": ["make", "servers"],
    "hosts": ["make", "hosts"],
    "launchers": ["make", "launchers"],
    "loggers": ["make", "loggers"],
    "engines": ["make", "engines"],
    # One step for each pair of versions, so that a pair that failed can run again alone.
    **{
        f"matrix-{pair.name}": ["make", "matrix", f"MATRIX=--pairs {pair.name} --checks all --write"]
        for pair in PAIRS
    },
    "dist": ["make", "dist"],
    "sweep": ["make", "sweep"],
}

_ROW = re.compile(r"^\| ([\w.-]+) \|.*\|$", re.MULTILINE)

HEAD = """# Last result of `make nightly`

Written by `make nightly`. Each row says when, at which commit and on what machine a step last ran.

| step | result | last line of its output | minutes | date | commit | machine |
|---|---|---|---|---|---|---|
"""


def main(names: list[str]) -> int:
    """Run the steps of these names, or all. Exit status 0: all passed; 1: one failed; 2: no step has such a name."""
    if unknown := set(names) - STEPS.keys():
        print(f"no such step: {', '.join(sorted(unknown))}; steps are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or STEPS:
        began = time.monotonic()
        status, last = run(name)
        minutes = (time.monotonic() - began) / 60
        result = "passed" if status == 0 else f"**failed** ({status})"
        note(name, f"| {name} | {result} | {last} | {minutes:.0f} | {today()} | {commit()} | {machine()} |")
        print(f"{name}: {result}, {minutes:.1f} minutes, {last}", flush=True)
        failed += status != 0
    return int(failed > 0)


def run(name: str) -> tuple[int, str]:
    """Exit status of a step, and the last line that it wrote, without make's own. All of its output goes into a file of ``build/nightly``."""
    environment = os.environ | {"EVERY_EXAMPLE": "1", "OMP_NUM_THREADS": "1"}
    log = LOGS / f"{name}.log"
    with log.open("wb") as output:
        status = subprocess.run(
            STEPS[name], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines() if line.strip(" =")]
    lines = [line for line in lines if not line.startswith("make: ***")]
    return status, lines[-1].replace("|", "\\|")[:160] if lines else ""


def note(name: str, row: str) -> None:
    """Replace one step's row, and keep the other ones."""
    text = NOTE.read_text(encoding="utf-8") if NOTE.is_file() else ""
    rows = {found.group(1): found.group(0) for found in _ROW.finditer(text) if found.group(1) in STEPS}
    rows[name] = row
    NOTE.write_text(HEAD + "".join(f"{rows[step]}\n" for step in STEPS if step in rows), encoding="utf-8")


def today() -> str:
    """The date in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str:
    """The commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.strip()


def machine() -> str:
    """The processor and its number of cores."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    return f"{os.cpu_count()} × {models[0] if models else platform.processor() or platform.machine()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
