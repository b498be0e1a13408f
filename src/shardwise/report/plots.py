"""The plots of a report, drawn with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..objects import frozen
from .drawing import (
    AREA_ALPHA,
    BAD,
    BAR_ALPHAS,
    BY_NAME,
    SERIES,
    SMALLEST_TEXT,
    TEXT,
    WIDTHS,
    Drawn,
    drawn,
    legend,
)
from .ledger_files import Phase, Process, Sample, Start
from .material import LossLog
from .text import counted, plain, size

__all__ = [
    "Mark",
    "Planned",
    "draw_host",
    "draw_losses",
    "draw_memory",
    "draw_plan",
    "draw_sizes",
    "names_of",
]

_KINDS = {
    "load": "load",
    "save": "save",
    "background save": "save",
    "resume": "resume",
    "restore": "resume",
    "export": "export",
}
_MOST_POINTS = 400
_MOST_BARS = 400


@frozen
class Mark:
    """Something that happened at a step."""

    step: int
    kind: str
    """``save``, ``crash`` or ``resume``."""


@frozen
class Planned:
    """What a plan says that a rank holds in a phase, at one place."""

    phase: str
    where: str
    nbytes: int
    upper_bytes: int
    """The upper end of the error bar."""
    baseline_bytes: int = 0
    """What the process took before the model, which ``nbytes`` contains."""

    @property
    def label(self) -> str:
        """For a row."""
        return plain(self.phase, 40) + ("" if self.where == "host" else f", {self.where}")


# ----------------------------------------------------------------------------------------------------
# Memory over time


def draw_memory(start: Start, process: Process) -> Drawn:
    """Memory of one rank over the time of its start, above its phases."""
    title = f"Memory of rank {process.rank} in launch {start.number}"
    description = (
        f"Resident memory over {start.seconds:.0f} seconds: at most {size(process.peak('resident'))}, of it anonymous at most "
        f"{size(process.peak('anonymous'))}. Phases below: {_phases_in_words(process)}."
    )
    offset = process.began_s - start.began_s
    samples = _thinned(process.samples)

    def draw(figure: Any, form: str) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1.1))
        times = [offset + s.t for s in samples]
        stacked = [
            [s.get(f"{kind}_bytes") / 1024**2 for s in samples] for kind in ("anonymous", "shared", "file")
        ]
        kinds = ("anonymous", "shared", "file-backed")
        above.stackplot(times, *stacked, colors=SERIES[:3], labels=kinds, alpha=AREA_ALPHA, linewidth=0)
        peaks = [
            max(
                s.get("peak_resident_bytes"),
                *(sum(s.get(f"{k}_bytes") for k in ("anonymous", "shared", "file")),),
            )
            / 1024**2
            for s in samples
        ]
        above.plot(times, peaks, color=TEXT, linewidth=0.8, label="peak between records")
        if any(s.get("device_allocated_bytes") for s in samples):
            device = [s.get("device_allocated_bytes") / 1024**2 for s in samples]
            above.plot(times, device, color=SERIES[3], linewidth=1.4, label="device, allocated")
        above.set_ylabel("MiB")
        above.set_ylim(bottom=0)
        legend(above, form)
        _phase_bars(below, process, start, form)
        below.set_xlim(0, max(start.seconds, 1e-3))
        below.set_xlabel("seconds since the launch")

    return drawn(f"memory-{start.number}-{process.rank}", title, description, 3.1, draw)


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """At most so many records, of each run of neighbors the highest."""
    ordered = sorted(samples, key=lambda s: s.t)
    if len(ordered) <= _MOST_POINTS:
        return ordered
    every = -(-len(ordered) // _MOST_POINTS)
    parts = [ordered[k : k + every] for k in range(0, len(ordered), every)]
    return [
        max(part, key=lambda s: max(s.get("peak_resident_bytes"), s.get("anonymous_bytes"))) for part in parts
    ]


def _bars_of(process: Process) -> list[tuple[Phase, int]]:
    """Phases to show, with their row: outer ones, then those directly within. The longest, if there are too many."""
    outer = {n for n, p in process.phases.items() if p.parent is None}
    found = [
        (p, 0 if n in outer else 1) for n, p in process.phases.items() if n in outer or p.parent in outer
    ]
    found.sort(key=lambda one: -_length(one[0], process))
    return sorted(found[:_MOST_BARS], key=lambda one: one[0].number)


def _length(phase: Phase, process: Process) -> float:
    return (process.last_t if phase.ended is None else phase.ended.t) - phase.began.t


def _phase_bars(axes: Any, process: Process, start: Start, form: str) -> None:
    offset, seconds = process.began_s - start.began_s, start.seconds
    for phase, row in _bars_of(process):
        length = _length(phase, process)
        is_cut = phase.ended is None and not process.has_ended
        has_died = is_cut and process is start.culprit
        color = BAD if has_died or phase.error else BY_NAME[_KINDS.get(phase.name, "other")]
        shown = max(length, seconds / 400)
        axes.barh(
            -row,
            shown,
            left=offset + phase.began.t,
            height=0.8,
            color=color,
            alpha=BAR_ALPHAS[row],
            linewidth=0,
        )
        words = plain(phase.name, 24) + (" (died)" if has_died else " (stopped)" if is_cut else "")
        if length / max(seconds, 1e-9) * WIDTHS[form] > 0.095 * len(words):
            on = TEXT if row else BY_NAME["on-bar"]
            middle = offset + phase.began.t + length / 2
            axes.text(middle, -row, words, ha="center", va="center", fontsize=SMALLEST_TEXT - 1, color=on)
    axes.set_ylim(-1.5, 0.5)
    axes.set_yticks([])
    axes.spines.left.set_visible(False)


def _phases_in_words(process: Process) -> str:
    found: dict[str, int] = {}
    for phase in process.phases.values():
        if phase.parent is None:
            found[plain(phase.name, 40)] = found.get(plain(phase.name, 40), 0) + 1
    words = ", ".join(f"{name} × {count}" for name, count in list(found.items())[:12]) or "none"
    stopped = process.stopped_in
    return words if stopped is None else f"{words}; it stopped in {plain(stopped.name, 40)}"


def draw_host(start: Start, host: str, processes: Sequence[Process]) -> Drawn:
    """Charge and page cache of a host's cgroup, as the lowest of its ranks saw it."""
    first = processes[0]
    title = f"Cgroup of {plain(host, 40)} in launch {start.number}"
    description = (
        f"Charge of {plain(first.cgroup, 120)}, all its processes together: at most {size(first.peak('cgroup'))}; page cache in it "
        f"at most {size(first.peak('page_cache'))}."
    )
    samples = _thinned([s for s in first.samples if "cgroup_bytes" in s.values])
    offset = first.began_s - start.began_s

    def draw(figure: Any, form: str) -> None:
        axes = figure.subplots()
        times = [offset + s.t for s in samples]
        cache = [s.get("page_cache_bytes") / 1024**2 for s in samples]
        rest = [max(0.0, s.get("cgroup_bytes") / 1024**2 - c) for s, c in zip(samples, cache, strict=True)]
        colors = (SERIES[0], SERIES[2])
        axes.stackplot(
            times,
            rest,
            cache,
            colors=colors,
            labels=("all else", "page cache"),
            alpha=AREA_ALPHA,
            linewidth=0,
        )
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, max(start.seconds, 1e-3))
        axes.set_xlabel("seconds since the launch")
        legend(axes, form)

    return drawn(f"host-{start.number}-{first.rank}", title, description, 2.2, draw)


# ----------------------------------------------------------------------------------------------------
# Losses and checkpoints


def names_of(losses: Sequence[LossLog]) -> list[str]:
    """A short name for each loss log: that of its directory, or a number where two are alike."""
    names = [plain(os.path.basename(os.path.dirname(os.path.abspath(log.file))), 24) for log in losses]
    return names if len({*names}) == len(names) else [f"log {k}" for k in range(1, len(names) + 1)]


def draw_losses(losses: Sequence[LossLog], marks: Sequence[Mark]) -> Drawn:
    """Losses by step, with what happened to the run."""
    steps = [step for log in losses for step in log.points]
    told = {kind: sorted({m.step for m in marks if m.kind == kind}) for kind in ("save", "crash", "resume")}
    description = (
        f"Losses from {counted(len(losses), 'log')}, from step {min(steps)} to {max(steps)}. "
        + ". ".join(
            f"{what} {', '.join(map(str, told[kind][:40])) or 'none'}"
            for kind, what in (
                ("save", "Saved steps:"),
                ("crash", "Crashed at step:"),
                ("resume", "Resumed from step:"),
            )
        )
    )
    names = names_of(losses)
    shapes = ("o-", "x-", "s-", "^-", "v-", "d-")

    def draw(figure: Any, form: str) -> None:
        axes = figure.subplots()
        for k, log in enumerate(losses):
            points = sorted(log.points.items())
            every = -(-len(points) // _MOST_POINTS)
            shown = points[::every]
            shape = shapes[k % len(shapes)] if len(points) < 100 else "-"
            color = (SERIES[0], SERIES[1], SERIES[2], SERIES[3])[k % 4]
            axes.plot(
                *zip(*shown, strict=True),
                shape,
                color=color,
                markersize=4,
                linewidth=1.2,
                label=names[k],
            )
        styles: Mapping[str, tuple[str, str, float]] = {
            "crash": (BAD, "--", 1.4),
            "resume": (BY_NAME["resume"], ":", 1.8),
        }
        for kind, (color, style, width) in styles.items():
            for k, step in enumerate(told[kind]):
                label = {"crash": "crashed", "resume": "resumed from"}[kind] if k == 0 else None
                axes.axvline(step, color=color, linestyle=style, linewidth=width, label=label)
        saved = told["save"][:: -(-max(1, len(told["save"])) // _MOST_POINTS)]
        if saved:
            low = axes.get_ylim()[0]
            axes.plot(
                saved,
                [low] * len(saved),
                "|",
                color=BY_NAME["save"],
                markersize=12,
                label="saved",
                clip_on=False,
            )
            axes.set_ylim(bottom=low)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        legend(axes, form)

    return drawn("loss", "Loss by step, with saves, crashes and resumes", description, 3.2, draw)


def draw_sizes(steps: Sequence[tuple[int, int]], key: str) -> Drawn:
    """Bytes of the checkpoints of a run, by step."""
    description = "; ".join(f"step {step}: {size(nbytes)}" for step, nbytes in steps[:40])

    def draw(figure: Any, form: str) -> None:
        axes = figure.subplots()
        shown = steps[-_MOST_BARS:]
        places = range(len(shown))
        axes.bar(places, [nbytes / 1024**2 for _, nbytes in shown], color=BY_NAME["save"], width=0.7)
        every = max(1, -(-len(shown) // (16 if form == "wide" else 7)))
        axes.set_xticks(list(places)[::every], [str(step) for step, _ in shown][::every])
        axes.set_xlim(-0.7, max(len(shown), 10) - 0.3)  # few bars stay narrow
        axes.set_xlabel("step")
        axes.set_ylabel("MiB")

    return drawn(key, "Size of each stored checkpoint", description, 2.0, draw)


def draw_plan(found: Sequence[tuple[Planned, int]], key: str) -> Drawn:
    """Planned amounts with their error bars, and the measured ones, by phase."""
    names = [p.label for p, _ in found]
    description = "; ".join(
        f"{name}: process {size(p.baseline_bytes)}, planned {size(p.nbytes)}, at most {size(p.upper_bytes)}, measured {size(nbytes)}"
        for name, (p, nbytes) in zip(names, found, strict=True)
    )

    def draw(figure: Any, form: str) -> None:
        axes = figure.subplots()
        rows = [-k for k in range(len(found))]
        planned, upper = (
            [n / 1024**2 for n in of]
            for of in zip(*((p.nbytes, p.upper_bytes) for p, _ in found), strict=True)
        )
        bars = [u - n for n, u in zip(planned, upper, strict=True)]
        baseline = [p.baseline_bytes / 1024**2 for p, _ in found]
        axes.barh(
            rows,
            baseline,
            height=0.5,
            color=SERIES[2],
            alpha=0.35,
            linewidth=0,
            label="process before the model",
        )
        axes.barh(
            rows, bars, left=planned, height=0.5, color=SERIES[2], linewidth=0, label="planned, to at most"
        )
        measured = [nbytes / 1024**2 for _, nbytes in found]
        axes.plot(measured, rows, "D", color=SERIES[0], markersize=6, label="measured")
        axes.set_yticks(rows, names)
        axes.set_xlim(left=0)
        axes.set_xlabel("MiB of a rank")
        legend(axes, form)

    return drawn(
        key, "Memory of each phase: planned and measured", description, 1.3 + 0.28 * len(found), draw
    )
