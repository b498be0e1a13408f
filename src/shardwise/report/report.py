"""``shardwise report``: the sections of a page, and the page."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ShardwiseError
from ..limits import is_count
from ..operations.operation import size
from ..runs.history import RootContents, StepSummary
from ..storage.records import is_url
from .plots import (
    Mark,
    conclusion,
    draw_host,
    draw_losses,
    draw_memory,
    draw_sizes,
    ending,
    names_of,
    plan_section,
    trained_twice,
)
from .records import (
    Cell,
    LossLog,
    Material,
    Note,
    Page,
    Part,
    Process,
    Section,
    Start,
    Table,
    bytes_cell,
    cells,
    counted,
    facts,
    find_material,
    number,
    plain,
    plotting,
    seconds_text,
    time_text,
)

# ----------------------------------------------------------------------------------------------------
# The sections of a report that tell of a run: its starts, losses, resumes, loads, memory and phases.

#: Ranks whose memory is drawn, for each start: the first, and those with the highest peaks.
_DRAWN_RANKS = 6
_DRAWN_IN_ALL = 16
_DRAWN_STARTS = 6
_MOST_ROWS = 200


def _ratio(part: object, whole: object) -> Cell:
    ok = is_count(part) and is_count(whole) and whole != 0
    return number(f"{part / whole:.3f} ×" if ok else None)  # type: ignore[operator]


def _words(values: object) -> str:
    """A list from a report as one text."""
    if isinstance(values, Mapping):
        return "; ".join(f"{plain(str(k))}: {plain(str(v))}" for k, v in values.items()) or "none"
    if isinstance(values, Sequence) and not isinstance(values, str):
        return "; ".join(plain(str(v)) for v in values) or "none"
    return plain(str(values))


# ----------------------------------------------------------------------------------------------------
# Starts


def _ending(process: Process, start: Start) -> Cell:
    """Only the rank that a crash began with is red."""
    tone = (
        "bad" if process is start.culprit else "good" if process.has_ended and process.error is None else ""
    )
    return Cell(ending(process, start), tone=tone)


def starts_section(starts: Sequence[Start]) -> Section:
    """Each process of each start, and how it ended."""
    rows = [
        cells(
            start.number, p.rank, _ending(p, start), number(seconds_text(p.last_t)), bytes_cell(p.peak("resident")),
            bytes_cell(p.peak("anonymous")), plain(p.host, 40), number(time_text(p.began_s)),
        )
        for start in starts
        for p in start.processes
    ]  # fmt: skip
    head = cells(">launch", ">rank", "end", ">lasted", ">peak resident", ">peak anonymous", "host", ">began")
    about = (
        'A process that "died" left no error message: it was killed, or was still running when this '
        "report was made. When one rank dies, the launcher stops the others."
    )
    parts = [_table("Processes, by launch and rank", head, rows)]
    for start in starts:
        if start.culprit is not None and start.culprit.error is None and len(start.processes) > 1:
            # How far the records of the rank that died first end before those of the others.
            first, second, *_ = sorted(start.processes, key=lambda p: (p.began_s + p.last_t, p.rank))
            ahead_s = second.began_s + second.last_t - first.began_s - first.last_t
            text = (
                f"the records of rank {first.rank} end first, {seconds_text(ahead_s)} before the next rank's."
            )
            parts.append(Part(text=f"Launch {start.number}: {text}"))
    return Section("starts", "Launches", about, parts)


def _table(caption: str, head: Sequence[Cell], rows: Sequence[Sequence[Cell]]) -> Part:
    if len(rows) > _MOST_ROWS:
        caption = f"{caption}: the first {_MOST_ROWS} of {len(rows)}"
    return Part(table=Table(caption, head, rows[:_MOST_ROWS]))


# ----------------------------------------------------------------------------------------------------
# Losses and resumes


def marks_of(material: Material) -> list[Mark]:
    """Saves, stops and resumes by step."""
    found = {Mark(s.step, "save") for run in material.runs for s in (*run.steps, *run.set_aside)}
    saved = {m.step for m in found}
    found |= {
        Mark(_resumed_from(step, log, saved), "resume") for log in material.losses for step in log.resumes
    }
    for start in material.starts:
        for name, kind in (("save", "save"), ("resume", "resume"), ("restore", "resume")):
            for _, note in start.notes(name):
                step = note.report.get("step")
                if isinstance(step, int) and 0 <= step < 2**53 and note.report.get("is_published", True):
                    found.add(Mark(step, kind))
        if not start.is_whole:
            steps = [p.step for one in start.processes for p in one.phases.values() if p.step is not None]
            open_ones = [one.stopped_in for one in start.processes if one.stopped_in is not None]
            stopped = [p.step for p in open_ones if p.step is not None] or steps
            if stopped:
                found.add(Mark(max(stopped), "crash"))
    return sorted(found, key=lambda m: (m.step, m.kind))


def _resumed_from(step: int, log: LossLog, saved: Collection[int]) -> int:
    """The newest checkpoint from the last logged ``step`` before a resume up to the first one after it; without one, ``step``."""
    after = min((one for one in log.points if one > step), default=step + 1)
    return max((one for one in saved if step <= one < after), default=step)


def loss_section(material: Material) -> Section | None:
    """The losses, with what happened to the run."""
    losses = [log for log in material.losses if log.points]
    if not losses:
        return None
    marks = marks_of(material)
    rows = [
        cells(
            name, plain(log.file), len(log.points), min(log.points), max(log.points),
            number(f"{log.points[min(log.points)]:.4g}"), number(f"{log.points[max(log.points)]:.4g}"),
        )
        for name, log in zip(names_of(losses), losses, strict=True)
    ]  # fmt: skip
    head = cells("name", "file", ">steps", ">first step", ">last step", ">first loss", ">last loss")
    parts = [Part(drawn=draw_losses(losses, marks)), _table("Loss logs", head, rows)]
    for log in losses:
        told = ["names no steps: its losses are numbered in their order"] * (not log.names_steps)
        told += [f"tells of a resume after step {', '.join(map(str, log.resumes))}"] * bool(log.resumes)
        told += [f"prints the losses in {plain(one.file)}" for one in losses if log.prints(one)][:1]
        parts += [Part(text=f"{plain(log.file)} {'; it '.join(told)}.")] * bool(told)
    steps, largest = trained_twice(losses)
    if steps:
        was = "step was" if len(steps) == 1 else "steps were"
        parts.append(
            Part(text=f"{len(steps)} {was} trained twice; the losses differ by at most {largest:.2g}.")
        )
    return Section("loss", "Loss", "", parts)


def resume_section(starts: Sequence[Start]) -> Section | None:
    """What each resume proved, by rank 0's report; and whether all ranks say the same."""
    parts = []
    for start in starts:
        by_step: dict[tuple[str, str], list[tuple[Process, Note]]] = {}
        for process, note in (*start.notes("resume"), *start.notes("restore")):
            by_step.setdefault((note.name, str(note.report.get("step"))), []).append((process, note))
        parts += [_resume(start, found) for found in by_step.values()]
    if not parts:
        return None
    about = "A resume compares the hash of every restored tensor with the one that the save recorded, before training continues."
    return Section("resumes", "Proof of each resume", about, parts)


def _resume(start: Start, found: Sequence[tuple[Process, Note]]) -> Part:
    process, note = found[0]
    r = note.report
    is_exact = r.get("exact") is True
    digests = {str(other.report.get("digest")) for _, other in found}
    for_what = f", for the state you passed (no {_words(r['not_given'])})" if r.get("not_given") else ""
    exact = Cell(f"yes{for_what}", tone="good") if is_exact else f"no: {_words(r.get('differences', ()))}"
    tensors = (
        f"{_words(r.get('tensors'))} model tensors, {_words(r.get('optimizer_tensors'))} optimizer tensors"
    )
    has_digests = digests != {""}
    alike = (
        Cell(
            f"{plain(next(iter(digests)), 64)}, the same on every rank that reports it ({len(found)})",
            tone="good",
        )
        if len(digests) == 1 and has_digests
        else "–"
        if not has_digests
        else Cell("DIFFERENT between ranks", tone="bad")
    )
    step = plain(str(r.get("step")), 20)
    rows: list[tuple[str, object]] = [
        ("checkpoint", plain(str(r.get("path", "")))),
        ("saved by", f"{counted(r.get('saved_world_size') or 'an unknown number of', 'rank')} ({plain(str(r.get('saved_mesh', '')), 80)})"),
        ("resumed on", f"{counted(r.get('world_size'), 'rank')} ({plain(str(r.get('mesh', '')), 80)})"),
        ("hashes compared", tensors if has_digests else f"none: the checkpoint has none; restored unchecked: {tensors}"),
        ("hash of everything", alike),
        ("bit-exact resume", exact),
        ("also restored", _words(r.get("documents", ()))),
        ("skipped", _words(r.get("skipped", ()))),
        ("caveats", _words(r.get("caveats", ()))),
        ("RNG state", _words(r.get("rng", ""))),
        ("damaged steps skipped", _words(r.get("damaged", ()))),
        ("newer steps quarantined", _words(r.get("superseded", ()))),
        ("run", plain(str(r.get("run_id", "")), 64)),
        ("read by rank 0", f"{bytes_cell(r.get('bytes_read')).text} in {_seconds(r.get('seconds'))}"),
    ]  # fmt: skip
    heading = f"Launch {start.number}: {plain(note.name, 20)} from step {step}"
    return Part(heading=heading, table=facts(f"Report of rank {process.rank}", rows))


def _seconds(value: object) -> str:
    return seconds_text(float(value)) if isinstance(value, int | float) and 0 <= value < 2**40 else "–"


# ----------------------------------------------------------------------------------------------------
# Loads


def load_section(starts: Sequence[Start]) -> Section | None:
    """Bytes and memory of each load, compared with the least that it needs."""
    rows = [_load_row(start, process, note) for start in starts for process, note in start.notes("load")]
    if not rows:
        return None
    head = cells(
        ">launch", ">rank", ">shards", ">memory added", ">of the shards", ">read", ">of the model", ">staging", ">plan",
        ">read in", ">rate", "strategy",
    )  # fmt: skip
    parts = [_table("Loads, by launch and rank", head, rows), *_totals(starts)]
    about = (
        "At best, a load adds no more memory than the rank's shards, and the ranks read the model once in total. Memory added is the "
        "peak anonymous memory during the load minus the memory before it; a process's first load also imports code."
    )
    return Section("load", "Load efficiency", about, parts)


def _load_row(start: Start, process: Process, note: Note) -> list[Cell]:
    r = note.report
    seconds = r.get("seconds_read")
    rate = "–"
    if isinstance(seconds, int | float) and seconds > 0 and is_count(r.get("bytes_read")):
        rate = f"{size(int(r['bytes_read'] / seconds))}/s"
    added = memory_added(process, note)
    return cells(
        start.number, process.rank, bytes_cell(r.get("local_bytes")), bytes_cell(added), _ratio(added, r.get("local_bytes")),
        bytes_cell(r.get("bytes_read")), _ratio(r.get("bytes_read"), r.get("model_bytes")), bytes_cell(r.get("staging_peak_bytes")),
        number(_seconds(r.get("seconds_plan"))), number(_seconds(seconds)), number(rate),
        plain(str(r.get("strategy", "")).partition(":")[0], 20),
    )  # fmt: skip


def memory_added(process: Process, note: Note) -> int | None:
    """Anonymous memory that the load of a note added at its peak: its phase is the last that ended before the note. None if unknown."""
    loads = [(p.ended, p.began) for p in process.phases.values() if p.name == "load" and p.ended is not None]
    before = [(ended, began) for ended, began in loads if ended.t <= note.t]
    if not before:
        return None
    ended, began = max(before, key=lambda pair: pair[0].t)
    if not began.get("anonymous_bytes"):
        return None
    return max(0, ended.get("peak_anonymous_bytes") - began.get("anonymous_bytes"))


def _totals(starts: Iterable[Start]) -> Iterator[Part]:
    for start in starts:
        notes = [note.report for _, note in start.notes("load")]
        read = [r["bytes_read"] for r in notes if is_count(r.get("bytes_read"))]
        model = notes[0].get("model_bytes") if notes else None
        if read and is_count(model) and model and len(read) == len(start.processes):
            yield Part(
                text=f"Launch {start.number}: in total, the ranks read {size(sum(read))}, {sum(read) / model:.3f} × the model."
            )


# ----------------------------------------------------------------------------------------------------
# Memory and phases


def memory_section(starts: Sequence[Start]) -> Section | None:
    """Memory over time of each start, and its phases."""
    parts: list[Part] = [Part(key=True)] if starts else []
    most = min(_DRAWN_RANKS, _DRAWN_IN_ALL // max(1, min(len(starts), _DRAWN_STARTS)))
    for start in starts[-_DRAWN_STARTS:]:
        parts.append(
            Part(
                heading=f"Launch {start.number}: {counted(len(start.processes), 'rank')}, {seconds_text(start.seconds)}"
            )
        )
        by_peak = sorted(start.processes[1:], key=lambda p: (-p.peak("resident"), p.rank))
        shown = [*start.processes[:1], *by_peak[: most - 1]]
        if len(shown) < len(start.processes):
            parts.append(
                Part(
                    text=f"Drawn: rank {shown[0].rank}, and the {len(shown) - 1} other ranks with the highest peaks."
                )
            )
        parts += [Part(drawn=draw_memory(start, p)) for p in sorted(shown, key=lambda p: p.rank)]
        by_host: dict[tuple[str, str], list[Process]] = {}
        for process in start.processes:
            if process.peak("cgroup"):
                by_host.setdefault((process.host, process.cgroup), []).append(process)
        parts += [Part(drawn=draw_host(start, host, ranks)) for (host, _), ranks in list(by_host.items())[:2]]
        parts.append(Part(table=_phase_table(start)))
    if not parts:
        return None
    about = (
        "Each rank's resident memory: anonymous (allocated by the program), shared, and file-backed (mapped files, whose pages the "
        "kernel can reclaim). Below it, the phases in two rows: outer phases, and the phases directly inside them."
    )
    if len(starts) > _DRAWN_STARTS:
        about += f" The last {_DRAWN_STARTS} of {len(starts)} launches are shown."
    return Section("memory", "Memory over time", about, parts)


def _phase_table(start: Start) -> Table:
    found: dict[str, list[tuple[Process, Any]]] = {}
    for process in start.processes:
        for phase in process.phases.values():
            found.setdefault(phase.name, []).append((process, phase))
    rows = []
    for name, ones in list(found.items())[:_MOST_ROWS]:
        ended = [(p, one) for p, one in ones if one.ended is not None]
        lengths = [one.ended.t - one.began.t for _, one in ended]

        def most(kind: str, ended: Sequence[tuple[Process, Any]] = ended) -> Cell:
            return bytes_cell(max((one.ended.get(f"peak_{kind}_bytes") for _, one in ended), default=None))

        def total(kind: str, ended: Sequence[tuple[Process, Any]] = ended) -> Cell:
            return bytes_cell(sum(max(0, one.ended.get(kind) - one.began.get(kind)) for _, one in ended))

        cut = len(ones) - len(ended)
        rows.append(
            cells(
                plain(name, 60), len(ones), cut,
                number(seconds_text(max(lengths)) if lengths else None), most("anonymous"), most("resident"),
                most("cgroup"), total("requested_read_bytes"), total("requested_written_bytes"),
            )
        )  # fmt: skip
    head = cells(
        "phase", ">times, all ranks", ">not ended", ">longest", ">peak anonymous", ">peak resident", ">peak cgroup", ">read",
        ">written",
    )  # fmt: skip
    return Table(
        f"Phases of launch {start.number}: peaks are the highest of any rank; bytes are summed over ranks and include the page cache",
        head,
        rows,
    )


# ----------------------------------------------------------------------------------------------------
# ``shardwise report``: from what was found to one HTML file.

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
    return cells(
        step.step, step.fate, state, (step.written or "–").replace("T", " "), number(step.parent_step),
        number(step.world_size), bytes_cell(step.file_bytes), plain(step.run_id or "–", 32),
    )  # fmt: skip


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
