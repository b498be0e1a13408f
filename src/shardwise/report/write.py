"""``shardwise report``: from what was found to one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from .. import __version__
from ..errors import ShardwiseError
from ..runs.history import RootContents, StepSummary
from ..storage import is_url
from .against_plan import plan_section
from .conclusion import conclusion
from .drawing import plotting
from .material import Material, find_material
from .plots import draw_sizes
from .records import Cell, Page, Part, Section, Table, cells
from .sections import load_section, loss_section, marks_of, memory_section, resume_section, starts_section
from .text import counted, plain, seconds_text, size

__all__ = ["render", "write_report"]

_MOST_STEPS = 200


def write_report(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, plan: str | None = None
) -> Path:
    """Write one HTML file about runs, from their steps, ledgers and loss logs.

    ``plan``: a file that holds what ``shardwise plan --json`` printed. Default: each ``plan*.json`` in a directory of ``paths``.

    Reads manifests, headers and logs, no payload; the same input gives the same file. Raises :class:`SourceError` naming a path with
    nothing to report, :class:`ShardwiseError` without matplotlib (extra ``plot``) or if ``out`` can't be written.
    """
    text = render(find_material([os.fspath(p) for p in paths], plan))
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardwiseError(f"{os.fspath(out)}: can't be written: {error.strerror or error}") from error
    return Path(out)


def render(material: Material) -> str:
    """The page as text."""
    with plotting():
        page = _page(material)
    from jinja2 import Environment  # comes with torch

    template = (files(__package__) / "page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(template).render(page=page)


def _page(material: Material) -> Page:
    starts = material.starts
    found = [
        starts_section(starts) if starts else None,
        loss_section(material),
        resume_section(starts),
        load_section(starts),
        plan_section(starts, material.plans),
        memory_section(starts),
        _history(material.runs),
        _read(material),
    ]
    names = ", ".join(plain(Path(p).absolute().name if not is_url(p) else p, 60) for p in material.paths)
    return Page(
        f"Run {names}",
        conclusion(material),
        _cards(material),
        [s for s in found if s is not None],
        __version__,
    )


def _cards(material: Material) -> list[tuple[str, Cell]]:
    marks = {kind: [m for m in marks_of(material) if m.kind == kind] for kind in ("save", "crash", "resume")}
    cards = []
    steps = [s.step for run in material.runs for s in run.steps if s.ok]
    if steps:
        cards.append(("newest valid step", Cell(str(max(steps)))))
    if material.starts:
        crashed = sum(not start.is_whole for start in material.starts)
        resumed = [
            note.report.get("exact")
            for s in material.starts
            for n in ("resume", "restore")
            for _, note in s.notes(n)
        ]
        cards += [
            ("launches", Cell(str(len(material.starts)))),
            ("crashed", Cell(str(crashed), tone="bad" if crashed else "good")),
            ("resumes", Cell(str(len(marks["resume"])) + (" (exact)" if resumed and all(resumed) else ""))),
            (
                "peak resident memory",
                Cell(size(max(p.peak("resident") for s in material.starts for p in s.processes))),
            ),
            ("total time", Cell(seconds_text(sum(s.seconds for s in material.starts)))),
        ]
    elif marks["save"]:
        cards.append(("saved steps", Cell(str(len(marks["save"])))))
    return cards


def _history(runs: Sequence[RootContents]) -> Section | None:
    parts = []
    for k, run in enumerate(runs):
        if len(runs) > 1:
            parts.append(Part(heading=plain(run.path)))
        ordered = sorted((*run.steps, *run.set_aside), key=lambda s: (s.step, s.fate, s.path))
        sizes = [
            (s.step, s.file_bytes) for s in ordered if s.file_bytes is not None and s.fate == "published"
        ]
        if sizes:
            parts.append(Part(drawn=draw_sizes(sizes, f"sizes-{k}")))
        shown = ordered[-_MOST_STEPS:]
        caption = "Steps, oldest first" + (
            f": the last {_MOST_STEPS} of {len(ordered)}" if len(shown) < len(ordered) else ""
        )
        head = cells(">step", "fate", "state", "written", ">resumed from", ">ranks", ">size", "run")
        parts.append(Part(table=Table(caption, head, [_step_row(s) for s in shown])))
        if run.missing:
            parts.append(Part(text=plain(f"{run.missing}.", 400)))
        if run.leftovers:
            left = ", ".join(plain(name, 60) for name in run.leftovers[:10])
            parts.append(Part(text=f"Leftovers of {counted(len(run.leftovers), 'killed save')}: {left}"))
    if not parts:
        return None
    about = "Checked by manifests and file sizes; shardwise verify checks every byte. Steps that retention deleted are not listed."
    return Section("checkpoints", "Checkpoints", about, parts)


def _step_row(step: StepSummary) -> list[Cell]:
    without = ", without an optimizer" if step.has_optimizer is False else ""
    if step.ok is None:
        state = Cell(f"not checked{without}")
    elif not step.ok:
        state = Cell(plain(step.problem or "damaged"), tone="bad")
    elif step.part:
        state = Cell(plain(step.part))
    else:
        state = Cell(f"valid{without}") if without else Cell("whole", tone="good")
    nbytes = Cell("–" if step.file_bytes is None else size(step.file_bytes), number=True)
    return cells(
        step.step,
        step.fate,
        state,
        (step.written or "–").replace("T", " "),
        Cell("–" if step.parent_step is None else str(step.parent_step), number=True),
        Cell("–" if step.world_size is None else str(step.world_size), number=True),
        nbytes,
        plain(step.run_id or "–", 32),
    )


def _read(material: Material) -> Section:
    """The files that the report was made from."""
    rows = [
        cells(f"launch {s.number}, rank {p.rank}", plain(p.file, 400), p.skipped_lines)
        for s in material.starts
        for p in s.processes
    ]
    rows += [cells("losses", plain(log.file, 400), "") for log in material.losses]
    rows += [cells("checkpoints", plain(run.path, 400), "") for run in material.runs]
    table = Table("Sources of this report", cells("what", "file", ">lines skipped"), rows[:_MOST_STEPS])
    return Section("sources", "Sources", "", [Part(table=table)])
