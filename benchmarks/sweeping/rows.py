"""What a sweep finds for each architecture: rows, their JSON, and the page of documentation."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

__all__ = ["Row", "in_order", "read_json", "show", "summary", "table", "write_json"]

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

    @property
    def verdict(self) -> str:
        """The worst of the settings; ``not built`` or ``not handled`` where the library itself can't."""
        for kind in ("wrong", "failed"):
            if any(r.startswith(kind) for r in self.results.values()):
                return kind
        return self.ordinary.split(":")[0] or "right"


def in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.model_type.lower(), row.class_name))


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


def table(rows: Sequence[Row], pending: Sequence[str] = ()) -> str:
    """The rows as a page of documentation; ``pending`` are the model types that no run has reached."""
    import transformers

    done = [row for row in rows if row.results]
    rest = [row for row in rows if not row.results]
    widest = max((row.bytes_ratio for row in done), default=0.0)
    on_dim_0 = [row for row in done if any(ON_DIM_0.search(c) for c in row.conversions)]
    measured = [row.model_bytes_ratio for row in on_dim_0 if row.model_bytes_ratio]
    converted = [row for row in done if any("(" in c for c in row.conversions)]
    lines = [
        "# Supported models",
        "",
        "Written by `python benchmarks/sweep.py --table docs/supported-models.md`, which says how; not by hand.",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, gloo, CPU.",
        "",
        f"**{summary(rows)}**, of {len(rows)} classes. *right*: every parameter, buffer and tie of the sharded load is,",
        "bit for bit, that of `from_pretrained` on the same files. *export*: the files that `export_hf` writes hold the",
        "checkpoint's tensors under its names, bit for bit, and `from_pretrained` makes the same model of them. A dash:",
        f"nothing to do there (no plan for tensor parallelism). Bytes read over all ranks are at most {widest:.3f} × those",
        f"that the ranks hold. {len(converted)} have conversions other than renames; of {len(on_dim_0)} these act on dim 0 by",
        "chunk, split, concatenate, interleave, transpose or permute: bytes read are at most "
        f"{max(measured, default=0.0):.3f} × the model's there (measured for {len(measured)}).",
        "",
        "| architecture | class | conversions | 2 ranks | 3 ranks | dim 1, 2 ranks | FSDP 2 × TP 2 | export | notes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    if pending:
        names = ", ".join(pending)
        lines[-2:-2] = [f"Not in this table, because no run has reached them ({len(pending)}): {names}.", ""]
    for row in done:
        marks = [_mark(row, setting) for setting in ("load 2", "load 3", "dim 1 2", "tp 4", "export 2")]
        reasons = [f"{s}: {r}" for s, r in row.results.items() if r != "right"]
        notes = "; ".join([*filter(None, [row.ordinary]), *row.notes, *reasons]).replace("|", "/")
        conversions = ", ".join(row.conversions)
        lines.append(
            f"| {row.model_type} | {row.class_name} | {conversions} | {' | '.join(marks)} | {notes} |"
        )
    lines += [
        "",
        "## Left out",
        "",
        "*not built*: the library itself makes no model here (a package that is not there, a config without a default).",
        "*not handled*: the library makes one, but `save_pretrained` or `from_pretrained` of it fails.",
        "",
        "| architecture | class | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {r.model_type} | {r.class_name} | {_cell(r.ordinary)} |" for r in rest]
    return "\n".join(lines) + "\n"


def _mark(row: Row, setting: str) -> str:
    return row.results.get(setting, "–").split(":")[0]


def _cell(text: str) -> str:
    text = " ".join(re.sub(r"/\S*/checkpoint\b", "checkpoint", text).replace("|", "/").split())
    return text if len(text) < 160 else text[:157] + "…"
