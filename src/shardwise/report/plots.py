"""What a report concludes and plots: losses, memory against the plan."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ..limits import is_count
from ..objects import frozen
from ..operations.operation import OperationName, size
from .records import (
    AREA_ALPHA,
    BAD,
    BAR_ALPHAS,
    BY_NAME,
    SERIES,
    SMALLEST_TEXT,
    TEXT,
    WIDTHS,
    Cell,
    Drawn,
    LossLog,
    Material,
    Note,
    Part,
    Phase,
    Process,
    Sample,
    Section,
    Start,
    Table,
    bytes_cell,
    cells,
    counted,
    drawn,
    legend,
    plain,
)

# ----------------------------------------------------------------------------------------------------
# The plots of a report, drawn with matplotlib.

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
    outer = Counter(plain(phase.name, 40) for phase in process.phases.values() if phase.parent is None)
    words = ", ".join(f"{name} × {count}" for name, count in list(outer.items())[:12]) or "none"
    if (stopped := process.stopped_in) is not None:
        words += f"; it stopped in {plain(stopped.name, 40)}"
    description = (
        f"Resident memory over {start.seconds:.0f} seconds: at most {size(process.peak('resident'))}, of it anonymous at most "
        f"{size(process.peak('anonymous'))}. Phases below: {words}."
    )
    offset = process.began_s - start.began_s
    samples = _thinned(process.samples)

    def draw(figure: Any, form: str) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1.1))
        times = [offset + s.t for s in samples]
        stacked = [_mib(s.get(f"{kind}_bytes") for s in samples) for kind in ("anonymous", "shared", "file")]
        kinds = ("anonymous", "shared", "file-backed")
        above.stackplot(times, *stacked, colors=SERIES[:3], labels=kinds, alpha=AREA_ALPHA, linewidth=0)
        held = [sum(s.get(f"{k}_bytes") for k in ("anonymous", "shared", "file")) for s in samples]
        peaks = _mib(max(s.get("peak_resident_bytes"), n) for s, n in zip(samples, held, strict=True))
        above.plot(times, peaks, color=TEXT, linewidth=0.8, label="peak")
        if any(device := _mib(s.get("device_allocated_bytes") for s in samples)):
            above.plot(times, device, color=SERIES[3], linewidth=1.4, label="device, allocated")
        _over_time(above, start, form)
        _phase_bars(below, process, start, form)
        below.set_xlabel("seconds since the launch")

    return drawn(f"memory-{start.number}-{process.rank}", title, description, 3.1, draw)


def _mib(values: Iterable[float]) -> list[float]:
    return [nbytes / 1024**2 for nbytes in values]


def _over_time(axes: Any, start: Start, form: str) -> None:
    """Axes of memory over the time of a start."""
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(start.seconds, 1e-3))
    legend(axes, form)


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


def _length(phase: Phase, process: Process) -> float:
    return (process.last_t if phase.ended is None else phase.ended.t) - phase.began.t


def _phase_bars(axes: Any, process: Process, start: Start, form: str) -> None:
    offset, seconds = process.began_s - start.began_s, start.seconds
    # Outer phases, and in a second row those directly within. The longest, if there are too many.
    outer = {n for n, p in process.phases.items() if p.parent is None}
    found = [(p, int(n not in outer)) for n, p in process.phases.items() if n in outer or p.parent in outer]
    found.sort(key=lambda one: -_length(one[0], process))
    for phase, row in sorted(found[:_MOST_BARS], key=lambda one: one[0].number):
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
        cache = _mib(s.get("page_cache_bytes") for s in samples)
        charged = _mib(s.get("cgroup_bytes") for s in samples)
        rest = [max(0.0, n - c) for n, c in zip(charged, cache, strict=True)]
        style: dict[str, Any] = {"colors": (SERIES[0], SERIES[2]), "alpha": AREA_ALPHA, "linewidth": 0}
        axes.stackplot(times, rest, cache, labels=("all else", "page cache"), **style)
        axes.set_xlabel("seconds since the launch")
        _over_time(axes, start, form)

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
            look: dict[str, Any] = {"color": SERIES[k % 4], "markersize": 4, "linewidth": 1.2}
            axes.plot(*zip(*shown, strict=True), shape, label=names[k], **look)
        for kind, label, color, style, width in (
            ("crash", "crashed", BAD, "--", 1.4),
            ("resume", "resumed from", BY_NAME["resume"], ":", 1.8),
        ):
            for k, step in enumerate(told[kind]):
                named = label if k == 0 else None
                axes.axvline(step, color=color, linestyle=style, linewidth=width, label=named)
        saved = told["save"][:: -(-max(1, len(told["save"])) // _MOST_POINTS)]
        if saved:
            low = axes.get_ylim()[0]
            mark: dict[str, Any] = {"color": BY_NAME["save"], "markersize": 12, "label": "saved"}
            axes.plot(saved, [low] * len(saved), "|", clip_on=False, **mark)
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
        axes.bar(places, _mib(nbytes for _, nbytes in shown), color=BY_NAME["save"], width=0.7)
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
        planned = _mib(p.nbytes for p, _ in found)
        bars = _mib(p.upper_bytes - p.nbytes for p, _ in found)
        baseline = _mib(p.baseline_bytes for p, _ in found)
        bar: dict[str, Any] = {"height": 0.5, "color": SERIES[2], "linewidth": 0}
        axes.barh(rows, baseline, alpha=0.35, label="process before the model", **bar)
        axes.barh(rows, bars, left=planned, label="planned range", **bar)
        measured = _mib(nbytes for _, nbytes in found)
        axes.plot(measured, rows, "D", color=SERIES[0], markersize=6, label="measured")
        axes.set_yticks(rows, names)
        axes.set_xlim(left=0)
        axes.set_xlabel("MiB per rank")
        legend(axes, form)

    return drawn(
        key, "Memory of each phase: planned and measured", description, 1.3 + 0.28 * len(found), draw
    )


# ----------------------------------------------------------------------------------------------------
# A plan beside what was measured: each load's shards and reads, and the peak of each phase with its error bar.

_MOST_ROWS, _MOST_PLANS = 200, 8
#: A phase of a plan -> the phases of a ledger.
_OPERATIONS = {
    "load": ("load",),
    "save, sync": ("save",),
    "save, async": ("background save",),
    "resume": ("resume", "restore"),
    "export": ("export",),
}
_STEPS = ("first step", "steady state")
#: Of operations.
_NAMES = {*get_args(OperationName), "clone"}
_PLACES = ("host", "device")
#: Phases of a ledger after which there is a model.
_FIRST = ("load", "resume", "restore")
#: Amounts of the process and its device's context, which are there before the model: measured, not planned.
_BEFORE = ("process", "context")


@frozen
class _Peak:
    """The highest that a rank held in a phase, at one place."""

    phase: str
    where: str
    nbytes: int
    start: Start
    process: Process


def plan_section(starts: Sequence[Start], plans: Sequence[Mapping[str, Any]]) -> Section | None:
    """Each plan beside the starts that have its number of ranks; None without a plan."""
    if not plans:
        return None
    parts: list[Part] = []
    for k, plan in enumerate(plans[:_MOST_PLANS], 1):
        model = f"{plain(str(plan.get('model_class', '')), 60)} on {counted(plan.get('ranks'), 'rank')}"
        same = [s for s in starts if all(p.world_size == plan.get("ranks") for p in s.processes)]
        found = [*_phases(same, plan, f"plan-{k}"), *_loads(same, plan)]
        parts += [
            Part(heading=f"Plan of {model}"),
            *(found or [Part(text="The ledgers have no launch with this number of ranks.")]),
        ]
    about = (
        "For each phase, the planned memory and the highest peak measured on any rank. Process is the memory that the process used "
        "before it loaded a model: Python, torch, and other imports. The bar runs from that plus the phase's expected memory to the "
        "maximum that the plan allows for, including later imports. A point above the bar means that the plan was wrong; a point below "
        "it means that the run used less."
    )
    return Section("plan", "Planned vs. measured", about, parts)


# ----------------------------------------------------------------------------------------------------
# Phases


def _phases(starts: Sequence[Start], plan: Mapping[str, Any], key: str) -> Iterator[Part]:
    planned = {(one.phase, one.where): one for one in _planned(plan)}
    found = []
    for peak in _peaks(starts):
        if one := planned.get((peak.phase, peak.where)):  # on top of what the process took before its model
            loads = [p for p in peak.process.phases.values() if p.name in _FIRST]
            first = min(loads, key=lambda p: p.began.t, default=None)
            before = first.began.get("anonymous_bytes") if first and peak.where == "host" else 0
            low = min(before + one.nbytes, one.upper_bytes)
            found.append((replace(one, nbytes=low, baseline_bytes=before), peak))
    if not found:
        if planned and starts:
            yield Part(text="No phase of the plan is in the ledgers.")
        return
    yield Part(drawn=draw_plan([(one, peak.nbytes) for one, peak in found], key))
    head = cells("phase", ">process", ">planned", ">at most", ">measured", "verdict", ">launch", ">rank")
    rows = []
    for one, peak in found:
        verdict = Cell("below the plan") if peak.nbytes < one.nbytes else Cell("within the plan", tone="good")
        if peak.nbytes > one.upper_bytes:
            verdict = Cell("ABOVE the plan", tone="bad")
        sizes = map(bytes_cell, (one.baseline_bytes, one.nbytes, one.upper_bytes, peak.nbytes))
        rows.append(cells(one.label, *sizes, verdict, peak.start.number, peak.process.rank))
    yield Part(
        table=Table(
            "Phases (the highest peak of any rank)",
            head,
            rows[:_MOST_ROWS],
        )
    )
    seen = {one.phase for one, _ in found}
    missing = [name for name in dict.fromkeys(phase for phase, _ in planned) if name not in seen]
    about = (
        "Measured: the process's anonymous memory, as its ledger sampled it; on devices, the memory allocated by torch. Steps are the "
        "time outside of loads, saves, and other operations after a model was loaded."
    )
    if missing:
        about += f" Planned but not measured: {'; '.join(plain(name, 40) for name in missing)}."
    yield Part(text=about)


def _planned(plan: Mapping[str, Any]) -> Iterator[Planned]:
    """What a rank holds in each phase in addition to the process itself, and in all at most, from the plan's document. The larger
    of both steps is "steps"."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for amount in _amounts(plan):
        key = amount["phase"], str(amount.get("where"))
        nbytes, upper = sums.get(key, (0, 0))
        sizes = [amount.get(name, 0) for name in ("nbytes", "upper_bytes")]
        more, most = (n if is_count(n) else 0 for n in sizes)
        if amount.get("what") in _BEFORE:
            more, most = 0, most if key[1] == "host" else 0  # an allocator does not see its device's context
        sums[key] = nbytes + more, upper + most
    steps: dict[str, Planned] = {}
    for (name, where), (nbytes, upper) in sums.items():
        if where not in _PLACES or not upper:
            continue
        if name not in _STEPS:
            yield Planned(name, where, nbytes, upper)
        elif where not in steps or upper > steps[where].upper_bytes:
            steps[where] = Planned("steps", where, nbytes, upper)
    yield from steps.values()


def _amounts(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The amounts of all phases, each with its ``phase``; what does not fit is skipped: the file may be any."""
    run = plan.get("run")
    phases = run.get("phases") if isinstance(run, Mapping) else None
    for entry in phases if isinstance(phases, list) else ():
        amounts = entry.get("amounts") if isinstance(entry, Mapping) else None
        for amount in amounts if isinstance(amounts, list) else ():
            if isinstance(amount, Mapping):
                yield {**amount, "phase": str(entry.get("name", ""))}


def _peaks(starts: Iterable[Start]) -> list[_Peak]:
    """The highest of all starts and ranks, for each phase and place."""
    highest: dict[tuple[str, str], _Peak] = {}
    for start in starts:
        for process in start.processes:
            for phase, where, nbytes in (*_in_operations(process), *_in_steps(process)):
                before = highest.get((phase, where))
                if nbytes and (before is None or nbytes > before.nbytes):
                    highest[phase, where] = _Peak(phase, where, nbytes, start, process)
    order = ["load", "steps", *list(_OPERATIONS)[1:]]
    return sorted(highest.values(), key=lambda p: (order.index(p.phase), p.where != "host"))


def _in_operations(process: Process) -> Iterator[tuple[str, str, int]]:
    names = {ledger: name for name, ledgers in _OPERATIONS.items() for ledger in ledgers}
    if any(p.name == "background save" for p in process.phases.values()):
        names["save"] = "save, async"  # what an async save does before it returns
    for phase in process.phases.values():
        if (
            phase.name in names
            and phase.ended is not None
            and phase.error is None
            and _has_done(process, phase)
        ):
            yield names[phase.name], "host", phase.ended.get("peak_anonymous_bytes")
            yield names[phase.name], "device", _device_peak(phase)


def _has_done(process: Process, phase: Phase) -> bool:
    """Whether a phase that ended did something: a resume that found no step has no report."""
    if phase.name not in ("resume", "restore") or phase.ended is None:
        return True
    later = [p.ended.t for p in process.phases.values() if p.name == phase.name and p.ended is not None]
    until = min((t for t in later if t > phase.ended.t), default=math.inf)
    return any(n.name == phase.name and phase.ended.t <= n.t < until for n in process.notes)


def _device_peak(phase: Phase) -> int:
    """The allocator's peak, if this phase raised it; else the more of both ends."""
    assert phase.ended is not None
    high = phase.ended.get("device_high_water_bytes")
    if high > phase.began.get("device_high_water_bytes"):
        return high
    return max(one.get("device_allocated_bytes") for one in (phase.began, phase.ended))


def _in_steps(process: Process) -> Iterator[tuple[str, str, int]]:
    """Records whose time since the one before lies in no operation, after the first load, resume or restore."""
    phases = list(process.phases.values())
    ready = [p.ended.t for p in phases if p.name in _FIRST and p.ended is not None]
    if not ready:
        return
    operations = [p for p in phases if p.name.removeprefix("background ") in _NAMES]
    busy = [(p.began.t, process.last_t if p.ended is None else p.ended.t) for p in operations]
    ends = {
        p.ended.t: p.began.t for p in phases if p.ended is not None
    }  # a peak there is that of the whole phase
    ordered = sorted(process.samples, key=lambda s: s.t)
    for before, sample in itertools.pairwise(ordered):
        since = ends.get(sample.t, before.t)
        if since >= min(ready) and not any(a < sample.t and since < b for a, b in busy):
            yield "steps", "host", max(sample.get("peak_anonymous_bytes"), sample.get("anonymous_bytes"))
            yield "steps", "device", sample.get("device_allocated_bytes")
            if sample.get("device_high_water_bytes") > before.get("device_high_water_bytes"):
                yield "steps", "device", sample.get("device_high_water_bytes")


# ----------------------------------------------------------------------------------------------------
# Loads


def _loads(starts: Iterable[Start], plan: Mapping[str, Any]) -> Iterator[Part]:
    """Shards, reads and staging of each load beside those planned for its rank."""
    planned = {
        rank: one
        for one in plan["per_rank"]
        if isinstance(one, dict) and isinstance(rank := one.get("rank"), int)
    }
    pairs = (
        ("shard_bytes", "local_bytes"),
        ("bytes_read", "bytes_read"),
        ("staging_bytes", "staging_peak_bytes"),
    )
    rows = [
        cells(
            start.number,
            process.rank,
            *(bytes_cell(of) for a, b in pairs for of in (planned[process.rank].get(a), note.report.get(b))),
        )
        for start in starts
        for process, note in start.notes("load")
        if process.rank in planned
    ]
    if rows:
        measured = ("shards", "reads", "staging")
        head = cells(">launch", ">rank", *(h for name in measured for h in (f">{name} planned", ">measured")))
        yield Part(table=Table("Loads, by launch and rank", head, rows[:_MOST_ROWS]))


# ----------------------------------------------------------------------------------------------------
# The conclusion of a report: what happened to the run, in a few sentences for the top of the page.

#: Crashes that are told of, the last ones.
_MOST_CRASHES = 3
_VERBS = {
    "load": "loading",
    "save": "saving",
    "background save": "saving in the background",
    "resume": "resuming",
    "restore": "restoring",
    "export": "exporting",
}


def conclusion(material: Material) -> Cell:
    """What became of the run. Its tone is ``bad`` if the last start crashed, or if a stored step is damaged."""
    damaged = [step.step for run in material.runs for step in run.steps if step.ok is False]
    told = [*_crashes(material.starts), *_losses(material), *_steps(material, damaged)]
    is_bad = bool(damaged) or (bool(material.starts) and not material.starts[-1].is_whole)
    return Cell(" ".join(told), tone="bad" if is_bad else "good")


def ending(process: Process, start: Start) -> str:
    """How a process ended."""
    if process.has_ended and process.error is None:
        return "finished"
    phase, doing = process.stopped_in, ""
    if phase is not None:
        verb = f"while {_VERBS[phase.name]}" if phase.name in _VERBS else f"in {plain(phase.name, 40)}"
        doing = f" {verb}" + ("" if phase.step is None else f" step {phase.step}")
    if process.error is not None:
        return f"failed{doing}: {plain(process.error)}"
    return f"{'died' if process is start.culprit else 'was stopped'}{doing}"


def _crashes(starts: Sequence[Start]) -> Iterator[str]:
    """A sentence for each crash, and one for what the next start resumed from."""
    crashed = [start for start in starts if start.culprit is not None]
    if len(crashed) > _MOST_CRASHES:
        yield f"The run crashed {len(crashed)} times; the last {_MOST_CRASHES} follow."
    for start in crashed[-_MOST_CRASHES:]:
        assert start.culprit is not None
        still = " or is still running" if start is starts[-1] and start.culprit.error is None else ""
        yield f"Rank {start.culprit.rank} {ending(start.culprit, start).rstrip('.')}{still}."
        if start is not starts[-1]:
            yield _resumed(starts[starts.index(start) + 1])
    if starts and starts[-1].is_whole:
        yield "The last launch finished." if len(starts) > 1 else "The run finished."


def _resumed(start: Start) -> str:
    notes: list[tuple[Process, Note]] = [one for name in ("resume", "restore") for one in start.notes(name)]
    if not notes:
        return f"Launch {start.number} didn't resume from a checkpoint."
    report = notes[0][1].report
    saved, now = report.get("saved_world_size"), report.get("world_size")
    ranks = f"on {counted(now, 'rank')}" + (
        "" if saved in (now, 0) else f" instead of {plain(str(saved), 20)}"
    )
    damaged = report.get("damaged")
    lost = "; no saved step was lost" if not damaged else "; damaged steps were skipped"
    return f"The run resumed from step {plain(str(report.get('step')), 20)} {ranks}{lost}."


def trained_twice(logs: Sequence[LossLog]) -> tuple[list[int], float]:
    """The steps that two logs have, and the largest difference of their losses.

    A text that prints the losses of another file is that run's, not a second one. Neither are steps compared that a log doesn't name.
    """
    seen: dict[int, float] = {}
    steps: set[int] = set()
    largest = 0.0
    for log in logs:
        if not log.names_steps or any(log.prints(other) for other in logs):
            continue
        points = log.points
        for step in points.keys() & seen.keys():
            steps.add(step)
            largest = max(largest, abs(points[step] - seen[step]))
        seen |= points
    return sorted(steps), largest


def _losses(material: Material) -> Iterator[str]:
    steps, largest = trained_twice(material.losses)
    if len(steps) == 1:
        yield f"Step {steps[0]} was trained twice; the losses agree to {largest:.1g}."
    elif steps:
        yield f"{len(steps)} steps ({steps[0]} to {steps[-1]}) were trained twice; their losses agree to {largest:.1g}."


def _steps(material: Material, damaged: Sequence[int]) -> Iterator[str]:
    sound = [step.step for run in material.runs for step in run.steps if step.ok]
    if sound:
        yield f"The newest valid checkpoint is step {max(sound)}."
    elif unchecked := [step.step for run in material.runs for step in run.steps if step.ok is None]:
        yield f"The newest checkpoint is step {max(unchecked)}, which was not checked."
    elif material.runs:
        yield "No valid checkpoint is stored."
    if damaged:
        some = ", ".join(map(str, sorted(damaged)[:8]))
        yield f"{'Step' if len(damaged) == 1 else 'Steps'} {some} {'is' if len(damaged) == 1 else 'are'} damaged."
