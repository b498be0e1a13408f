"""A plan beside what was measured: each load's shards and reads, and the peak of each phase with its error bar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ..objects import frozen
from ..operations.records import OperationName
from .ledger_files import Phase, Process, Start
from .plots import Planned, draw_plan
from .records import Cell, Part, Section, Table, bytes_cell, cells
from .text import counted, plain

__all__ = ["plan_section"]

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
        "Planned memory of each phase and the peak that was measured on any rank. Process is what the rank's process took before it "
        "loaded a model: Python, torch and other imports. The bar goes from that plus what the plan expects of the phase to the most "
        "that the plan allows for, later imports included. A point above the bar means that the plan was wrong, a point below it that "
        "the run took less."
    )
    return Section("plan", "Planned vs. measured", about, parts)


# ----------------------------------------------------------------------------------------------------
# Phases


def _phases(starts: Sequence[Start], plan: Mapping[str, Any], key: str) -> Iterator[Part]:
    planned = {(one.phase, one.where): one for one in _planned(plan)}
    found = [
        (_from_baseline(planned[p.phase, p.where], p), p)
        for p in _peaks(starts)
        if (p.phase, p.where) in planned
    ]
    if not found:
        if planned and starts:
            yield Part(text="No phase of the plan is in the ledgers.")
        return
    yield Part(drawn=draw_plan([(one, peak.nbytes) for one, peak in found], key))
    head = cells("phase", ">process", ">planned", ">at most", ">measured", "verdict", ">launch", ">rank")
    yield Part(
        table=Table(
            "Phases: the highest of any rank", head, [_row(one, peak) for one, peak in found][:_MOST_ROWS]
        )
    )
    seen = {one.phase for one, _ in found}
    missing = [name for name in dict.fromkeys(phase for phase, _ in planned) if name not in seen]
    about = (
        "Anonymous memory of the process, as its ledger sampled it; on devices, what torch's allocator gave out. Steps are the time "
        "outside of loads, saves and other operations, once a model was loaded."
    )
    if missing:
        about += f" Planned but not measured: {'; '.join(plain(name, 40) for name in missing)}."
    yield Part(text=about)


def _from_baseline(planned: Planned, peak: _Peak) -> Planned:
    """The bar of a plan on top of what the measured process took before its model."""
    baseline = _baseline(peak.process) if peak.where == "host" else 0
    low = min(baseline + planned.nbytes, planned.upper_bytes)
    return replace(planned, nbytes=low, baseline_bytes=baseline)


def _row(planned: Planned, peak: _Peak) -> list[Cell]:
    return cells(
        planned.label, bytes_cell(planned.baseline_bytes), bytes_cell(planned.nbytes), bytes_cell(planned.upper_bytes),
        bytes_cell(peak.nbytes), _verdict(planned, peak.nbytes), peak.start.number, peak.process.rank,
    )  # fmt: skip


def _verdict(planned: Planned, nbytes: int) -> Cell:
    """Where a measurement is in relation to its bar."""
    if nbytes > planned.upper_bytes:
        return Cell("ABOVE the plan", tone="bad")
    return Cell("below the plan") if nbytes < planned.nbytes else Cell("within the plan", tone="good")


def _planned(plan: Mapping[str, Any]) -> Iterator[Planned]:
    """What a rank holds in each phase in addition to the process itself, and in all at most, from the plan's document. The larger
    of both steps is "steps"."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for amount in _amounts(plan):
        key = amount["phase"], str(amount.get("where"))
        nbytes, upper = sums.get(key, (0, 0))
        more, most = (_count(amount.get(name)) for name in ("nbytes", "upper_bytes"))
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


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else 0


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


def _baseline(process: Process) -> int:
    """Anonymous memory of a process before it loads or resumes for the first time; 0 if it does neither."""
    loads = [p for p in process.phases.values() if p.name in ("load", "resume", "restore")]
    return min(loads, key=lambda p: p.began.t).began.get("anonymous_bytes") if loads else 0


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
    ready = [p.ended.t for p in phases if p.name in ("load", "resume", "restore") and p.ended is not None]
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
