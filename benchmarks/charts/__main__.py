"""Draw the charts of the site from what was measured.

    python -m benchmarks.charts            # into docs/assets/charts

``crash.json`` and ``host_memory.json`` say which command made them. The other charts read the tables of
docs/notes/measurements.md. The same data gives the same files: a test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.charts.svg import Bar, Curve, bars, curves, points

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
OUT = DOCS / "assets" / "charts"

#: Where the curves begin: the first steps' losses would leave no room for the rest.
FIRST_STEP = 20


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for name, picture in pictures():
        (OUT / name).write_text(picture, encoding="utf-8")


def pictures() -> Iterator[tuple[str, str]]:
    """Each chart's file name and text."""
    yield "crash.svg", crash()
    yield "host-memory.svg", host_memory()
    yield "load.svg", load()
    yield "save.svg", save()
    yield "plan.svg", plan()


def measured(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((HERE / f"{name}.json").read_text())


def table(heading: str, first: str) -> list[list[str]]:
    """The cells of the table whose head begins with ``first``, in a section of the measurements; the head's are the first row."""
    text = (DOCS / "notes" / "measurements.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"\n## {heading}")[2], maxsplit=1, flags=re.MULTILINE)[0]
    head, _, *lines = section[section.index(f"\n| {first}") :].strip().split("\n\n")[0].split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]


def crash() -> str:
    found = measured("crash")
    shown = {
        name: [(int(step), loss) for step, loss in run.items() if int(step) >= FIRST_STEP]
        for name, run in found["losses"].items()
    }
    stop, start = found["killed in the save of step"], found["resumed from step"]
    before = [(step, loss) for step, loss in shown["killed"] if step <= start]
    return curves(
        "Training loss before and after a crash",
        f"killed during a save at step {stop}, resumed from step {start}",
        [
            Curve("uninterrupted", shown["never stopped"], "other"),
            Curve("resumed without optimizer state", shown["resumed without optimizer state"], "bad"),
            Curve("killed and resumed by shardwise", before + shown["resumed"], "ours"),
        ],
        y_ticks=(1.5, 2, 2.5, 3, 3.5),
        x_ticks=(30, 60, 90, 120, 150, 180),
        x_label="training step",
        mark=(stop, "SIGKILL"),
    )


def host_memory() -> str:
    peaks = measured("host_memory")["peak of a rank, MiB"]
    rows = []
    for ranks in peaks["shardwise"]:
        plain, ours = (peaks[way][ranks] for way in ("from_pretrained", "shardwise"))
        group = f"{ranks} rank{'s' if ranks != '1' else ''}"
        rows += [
            Bar("from_pretrained", plain, _gib(plain), group=group),
            Bar("shardwise", ours, _gib(ours), "ours"),
        ]
    return bars(
        "Peak host memory per rank while loading", "376M parameters, loaded in fp32 and sharded", rows
    )


def _gib(mib: float) -> str:
    return f"{mib / 1024:.2f} GiB"


def load() -> str:
    head, *rows = table("Loads beside peers", "model, layout, ranks")
    cells = next(row for row in rows if row[0] == "dense, 4")
    seconds = {
        name: float(re.findall(r"[\d.]+", cell)[0]) for name, cell in zip(head[1:], cells[1:], strict=True)
    }
    filled, whole = "into an existing sharded model", "from a path"
    shown = [
        ("sw.load", "shardwise", filled),
        ("torch DCP", "torch DCP", ""),
        ("torch broadcast", "torch broadcast", ""),
        ("Accelerate", "Accelerate", ""),
        ("transformers", "transformers*", whole),
        ("sw.load_pretrained", "load_pretrained*", ""),
    ]
    return bars(
        "Time to load 1.7 GiB onto 4 ranks",
        "seconds, warm page cache, fastest of several rounds",
        [
            Bar(
                name,
                seconds[key],
                f"{seconds[key]:.2f} s",
                "ours" if name.startswith("sw.") else "other",
                group,
            )
            for name, key, group in shown
        ],
        label_width=136,
    )


def save() -> str:
    rows = {
        cells[0]: float(cells[1].split()[0])
        for cells in table("Saving beside writing the same bytes", "|")
        if re.match(r"[\d.]+ s ", cells[1])
    }
    names = {
        "shardwise": "synchronous save, median (min, max)",
        "O_DIRECT + fsync": "O_DIRECT writes + fsync",
        "write + fsync": "ordinary writes + fsync",
    }
    shown = [
        Bar(name, rows[key], f"{rows[key]:.2f} s", "ours" if name == "shardwise" else "other")
        for name, key in names.items()
    ]
    return bars(
        "Time to save 5 GiB from 4 ranks", "compared with raw writes of the same size", shown, label_width=136
    )


def plan() -> str:
    pairs = [
        (float(said), float(found))
        for cells in table("Phases of a run", "configuration")
        for said, found in re.findall(r"(\d+) / (\d+) \(", " ".join(cells[1:]))
    ]
    return points(
        "Planned vs. measured memory per rank (MiB)",
        f"{len(pairs)} phases in 53 training configurations, on CPU",
        pairs,
        ticks=(20, 50, 100, 200, 500, 1000, 2000),
        labels=("planned", "measured"),
    )


if __name__ == "__main__":
    main()
