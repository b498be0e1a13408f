"""What a sweep finds for each architecture: rows, their JSON, and the page of documentation."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Row", "first_cell", "in_order", "read_json", "show", "summary", "write_json", "write_page"]

#: Conversions that cut, join or permute dim 0, as sharding does.
ON_DIM_0 = re.compile(r"(Chunk|Split|Concatenate|Interleave)\(0|Transpose\(0|PermuteForRope")


@dataclass(slots=True)
class Row:
    """What was found for one architecture."""

    model_type: str
    class_name: str
    parameters: int = 0
    conversions: tuple[str, ...] = ()
    ordinary: str = ""
    """Empty if ``from_pretrained`` gives back what ``save_pretrained`` wrote, else what is wrong with it."""
    results: dict[str, str] = field(default_factory=dict)
    """By setting: ``right``, ``wrong: …``, ``failed: …`` or ``-`` where there is nothing to do."""
    bytes_ratio: float = 0.0
    """Bytes that all ranks read, as a multiple of those that they hold."""
    model_bytes_ratio: float = 0.0
    """The same, as a multiple of the model's bytes: more where each rank holds large buffers."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    library: str = "transformers"

    @property
    def verdict(self) -> str:
        """The worst of the settings; ``not built`` or ``not handled`` where the library itself can't."""
        for kind in ("wrong", "failed"):
            if any(r.startswith(kind) for r in self.results.values()):
                return kind
        return self.ordinary.split(":")[0] or "right"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """As in the page: by library, then by what its table starts with."""
    return sorted(
        rows, key=lambda row: (row.library != "transformers", first_cell(row).lower(), row.class_name)
    )


def first_cell(row: Any) -> str:
    """What a row, or an architecture, has in the first column: diffusers knows its models by their classes only."""
    name: str = row.model_type if row.library == "transformers" else row.class_name
    return name


def show(row: Row, done: int, total: int) -> None:
    reasons = [row.ordinary] if row.ordinary else []
    reasons += [f"{s}: {r}" for s, r in row.results.items() if r not in ("right", "-")]
    print(
        f"[{done}/{total}] {row.model_type} ({row.class_name}) {row.verdict} {row.bytes_ratio:.3f} "
        f"{row.seconds:.1f} s {' || '.join(reasons)}",
        flush=True,
    )


def read_json(file: Path) -> list[Row]:
    """The rows of an earlier run."""
    found = json.loads(file.read_text()) if file.exists() else []
    rows = [Row(**{k: v for k, v in each.items() if k != "verdict"}) for each in found]
    for row in rows:
        row.conversions = tuple(row.conversions)
    return rows


def write_json(rows: Sequence[Row], file: Path) -> None:
    document = [asdict(row) | {"verdict": row.verdict} for row in in_order(rows)]
    temporary = file.with_name(file.name + ".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(file)


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[k]} {k}" for k in ("right", "wrong", "failed", "not handled", "not built"))


def write_page(file: Path, rows: Sequence[Row], pending: Sequence[tuple[str, str]] = ()) -> None:
    """Write the page of documentation. The section of a library that has no row here stays as it is in the file.

    ``pending``: libraries and what their tables start with, of what no run has reached.
    """
    text = file.read_text() if file.exists() else ""
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for library in {row.library for row in rows}:
        own = [row for row in rows if row.library == library]
        rest = [name for other, name in pending if other == library]
        sections[library] = "\n".join(["", *_section(library, own, rest), "", ""])
    parts = [
        f"## {library}\n{sections[library].rstrip()}\n"
        for library in ("transformers", "diffusers")
        if library in sections
    ]
    file.write_text("\n".join(["# Supported models\n\n" + _HEAD + "\n", *parts]))


_HEAD = """For each model class of transformers and diffusers, `python benchmarks/sweep.py --table docs/supported-models.md` builds a small model,
loads it onto several ranks, and compares every parameter and buffer with the library's own `from_pretrained`, bit for bit. It wrote this page."""


def _section(library: str, rows: Sequence[Row], pending: Sequence[str]) -> list[str]:
    """The lines of one library."""
    done = [row for row in rows if row.results]
    rest = [row for row in rows if not row.results]
    counts = Counter(row.verdict for row in rows)
    version = importlib.import_module(library).__version__
    lines = [
        f"**{counts['right']} of {len(rows)} {library} classes load bit for bit as `from_pretrained` does**, with",
        f"torch {torch.__version__.split('+')[0]}, {library} {version}, gloo, CPU.",
        "",
    ]
    if pending:
        names = ", ".join(pending)
        lines += [f"Not in this table, because no run has reached them ({len(pending)}): {names}.", ""]
    by_type = library == "transformers"
    columns = ["architecture", "class", "conversions", "TP", "notes"] if by_type else ["class", "notes"]
    lines += ['<div class="filtered" markdown="1">', "", _line(columns), "|---" * len(columns) + "|"]
    for row in done:
        wrong = [f"{s}: {r}" for s, r in row.results.items() if r != "right"]
        notes = "; ".join([*filter(None, [row.ordinary]), *row.notes, *wrong]).replace("|", "/")
        parallel = "yes" if "tp 4" in row.results else "–"
        cells = [row.model_type, row.class_name, ", ".join(row.conversions), parallel, notes]
        lines.append(_line(cells if by_type else [row.class_name, notes]))
    lines += [
        "",
        "</div>",
        "",
        f"### Left out of {library}",
        "",
        f"*not built*: {library} can't build this model here, for example because a package is missing or an argument has no default.",
        f"*not handled*: {library} builds it, but its own `save_pretrained` or `from_pretrained` fails.",
        "",
        _line(["architecture", "class", "reason"] if by_type else ["class", "reason"]),
        "|---|---|---|" if by_type else "|---|---|",
    ]
    for row in rest:
        lines.append(_line([*([row.model_type] if by_type else []), row.class_name, _cell(row.ordinary)]))
    lines += ["", f"### How {library} was tested", ""]
    return lines + (_how_transformers if by_type else _how_diffusers)(rows, done)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _how_transformers(rows: Sequence[Row], done: Sequence[Row]) -> list[str]:
    on_dim_0 = [row for row in done if any(ON_DIM_0.search(c) for c in row.conversions)]
    measured = [row.model_bytes_ratio for row in on_dim_0 if row.model_bytes_ratio]
    converted = [row for row in done if any("(" in c for c in row.conversions)]
    return [
        "Each class is built small, saved with `save_pretrained`, and loaded by `sw.load` on 2 and 3 ranks, with shards of dim 1, and with",
        "FSDP 2 × TP 2 if the class has a plan for tensor parallelism (column *TP*). Every parameter, buffer and tie must be",
        "bit-identical to `from_pretrained`. The files that `export_hf` writes must contain the checkpoint's tensors under its names, and",
        "`from_pretrained` must build the same model from them. All of this is right for every class in the table, unless a note says otherwise.",
        "",
        f"Results: {summary(rows)}. All ranks together read at most {_widest(done):.3f} × the bytes that they hold. {len(converted)} classes have",
        f"conversions other than renames. For the {len(on_dim_0)} whose conversions chunk, split, concatenate, interleave, transpose or permute dim 0, all "
        f"ranks together read at most {max(measured, default=0.0):.3f} × the bytes of the model (measured for {len(measured)}).",
    ]


def _how_diffusers(rows: Sequence[Row], done: Sequence[Row]) -> list[str]:
    return [
        "Each model class that diffusers exports is built small, saved with `save_pretrained` in several files, and loaded by",
        "`sw.load_pretrained` on 2 and 3 ranks in fp32 and bf16, with shards of dim 1, and on one process without a mesh. Names, their order,",
        "and the dtype, bits and `requires_grad` of every parameter and buffer must be those of `from_pretrained`. The notes say which classes",
        "keep parameters in fp32 when they are loaded in bf16.",
        "",
        f"Results: {summary(rows)}. All ranks together read at most {_widest(done):.3f} × the bytes that they hold.",
    ]


def _widest(rows: Sequence[Row]) -> float:
    return max((row.bytes_ratio for row in rows), default=0.0)


def _cell(text: str) -> str:
    text = " ".join(re.sub(r"/\S*/checkpoint\b", "checkpoint", text).replace("|", "/").split())
    text = text.partition(" but it was not found")[0]
    return text if len(text) < 160 else text[:157] + "…"
