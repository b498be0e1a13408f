"""docs/compatibility.md: the table of gates, and what came of the matrix. ``python -m tests.matrix.table`` writes it again with the results that it has."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from shardwise.gates import GATES

from .environments import ROOT
from .pairs import PAIRS, Pair

__all__ = ["PAGE", "Row", "page", "results", "write"]

PAGE = ROOT / "docs" / "compatibility.md"
CHECKS = ("imports", "program", "demo", "quick", "ranks")
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")

HEAD = """# Compatibility

shardwise requires torch 2.9 or newer and transformers 5.0 or newer. With transformers 5.3 or newer, everything works except for
some of the features in the first table. With 5.0 to 5.2, you can load, save, resume, and export in your own loop or with Accelerate.
`shardwise doctor` tells you which rows apply to your installed packages.

## What needs newer packages

| name | feature | needs | because | with an older release |
|---|---|---|---|---|
"""

TRIED = """
## What has been tested

Each row is one environment. *program* loads an MoE model on two ranks, trains it, resumes the run, and exports the model, once in a
plain training loop and once with Accelerate. It checks that every parameter equals what `from_pretrained` loads, that the resumed run matches an uninterrupted run bit
for bit, and that each rank reads at most 1.02 times the bytes it needs. *demo* runs `shardwise demo`. *quick* runs the single-process
tests, and *ranks* runs the multi-process tests.

Skipped tests are broken down in parentheses by the name of the feature they need (see the table above). *upstream* means that another
package lacks a class or behaves differently; shardwise isn't involved. All other skipped tests need a package or
a server that isn't installed in these environments.

"""


@dataclass
class Row:
    """One environment: its packages, and what each check said and when."""

    packages: dict[str, str]
    checks: dict[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""

    @classmethod
    def of(cls, pair: Pair, python: Path) -> tuple[str, dict[str, str]]:
        """The pair's name, and the versions that its environment has."""
        asked = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PACKAGES!r}}}))"
        found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
        return pair.name, {
            name: version.partition("+")[0] for name, version in json.loads(found.stdout).items()
        }


def results() -> dict[str, Row]:
    """The rows that the page has, by the pair's name."""
    found: dict[str, Row] = {}
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    _, _, table = text.partition(TRIED)
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        packages = dict(zip(PACKAGES, cells, strict=False))
        checks = {
            check: cell for check, cell in zip(CHECKS, cells[len(PACKAGES) :], strict=False) if cell != "–"
        }
        found[name] = Row(packages, checks, *cells[-2:])
    return found


def page(rows: dict[str, Row]) -> str:
    """The text of the page."""
    lines = [HEAD.rstrip("\n")]
    for name, gate in GATES.items():
        lines.append(
            f"| {name} | {gate.feature} | {gate.package} {gate.needs.removeprefix('>=')} | {gate.why} | {gate.instead} |"
        )
    lines += [TRIED.rstrip("\n"), ""]
    lines.append("| environment | " + " | ".join((*PACKAGES, *CHECKS)) + " | date | commit |")
    lines.append("|" + "---|" * (3 + len(PACKAGES) + len(CHECKS)))
    for pair in PAIRS:
        if (row := rows.get(pair.name)) is None:
            continue
        cells = [
            *(row.packages.get(name, "–") for name in PACKAGES),
            *(row.checks.get(c, "–") for c in CHECKS),
        ]
        lines.append(f"| {pair.name} | {' | '.join(cells)} | {row.date} | {row.commit} |")
    return "\n".join(lines) + "\n"


def write(found: tuple[str, dict[str, str]], check: str, said: str) -> None:
    """Put one check's result into the page."""
    name, packages = found
    rows = results()
    row = rows.get(name)
    if row is None or row.packages != packages:
        row = rows[name] = Row(packages)
    row.checks[check] = said
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=True
    )
    row.date, row.commit = datetime.now(UTC).strftime("%Y-%m-%d"), head.stdout.strip()
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(results()), encoding="utf-8")
