"""A plan beside what was measured: each load's shards and reads, and the peak of each phase with its error bar."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..operations.records import OperationName
from .ledger_files import Phase, Process, Start
from .plots import Planned, draw_plan
from .records import Cell, Part, Section, Table, bytes_cell, cells
from .text import counted, plain

__all__ = ["plan_section"]

_MOST_ROWS = 200
#: A phase of a plan -> the phases of a ledger.
_OPERATIONS = {
    "load": ("load",),
    "save, sync": ("save",),
    "save, async": ("background save",),
    "resume": ("resume", "restore"),
    "export": ("export",),
}
_STEPS = ("first step", "steady step")
#: Of operations.
_NAMES = {*get_args(OperationName), "clone"}
#: Of the memory that a plan tells of at a place, what a ledger measures.
_MEASURED = {"host": "anonymous", "device": "allocated"}


@dataclass(frozen=True, slots=True)
class _Peak:
    """The highest that a rank held in a phase, at one place."""

    phase: str
    where: str
    nbytes: int
    start: Start
    process: Process


def plan_section(starts: Sequence[Start], plan: Mapping[str, Any] | None) -> Section | None:
    """The plan beside the starts that have its number of ranks; None without a plan."""
    if plan is None:
        return None
    model = f"{plain(str(plan.get('model_class', '')), 60)} on {counted(plan.get('ranks'), 'rank')}"
    same = [s for s in starts if all(p.world_size == plan.get("ranks") for p in s.processes)]
    parts = [*_phases(same, plan, model), *_loads(same, plan, model)]
    if not parts:
        parts = [Part(text=f"No start of {model} is in the ledgers.")]
    about = (
        "What shardwise plan said before, beside the highest that any rank of a start with as many ranks held. A plan gives each "
        "number an error bar, from what it expects to what it takes for the most; above that it was wrong."
    )
    return Section("plan", "Plan against measured", about, parts)


# ----------------------------------------------------------------------------------------------------
# Phases


def _phases(starts: Sequence[Start], plan: Mapping[str, Any], model: str) -> Iterator[Part]:
    planned = {(one.phase, one.where): one for one in _planned(plan)}
    found = [(planned[p.phase, p.where], p) for p in _peaks(starts) if (p.phase, p.where) in planned]
    if not found:
        if planned and starts:
            yield Part(text="No phase of the plan is in the ledgers.")
        return
    yield Part(drawn=draw_plan([(one, peak.nbytes) for one, peak in found]))
    head = cells("phase", "memory", ">planned", ">at most", ">measured", ">error", "", ">start", ">rank")
    yield Part(table=Table(f"Phases of {model}", head, [_row(one, peak) for one, peak in found][:_MOST_ROWS]))
    seen = {one.phase for one, _ in found}
    missing = [name for name in dict.fromkeys(phase for phase, _ in planned) if name not in seen]
    about = (
        "Host memory is anonymous memory of the process, by looks of its ledger; device memory what torch's allocator gave out. "
        "Steps are the time outside of loads, saves and other operations, once a model was loaded."
    )
    if missing:
        about += f" Planned, and not measured: {'; '.join(plain(name, 40) for name in missing)}."
    yield Part(text=about)


def _row(planned: Planned, peak: _Peak) -> list[Cell]:
    error = f"{peak.nbytes / planned.nbytes - 1:+.1%}" if planned.nbytes else "–"
    fits = peak.nbytes <= planned.upper_bytes
    verdict = Cell("within the bar", tone="good") if fits else Cell("above the bar", tone="bad")
    return cells(
        planned.phase, f"{peak.where}, {_MEASURED[peak.where]}", bytes_cell(planned.nbytes), bytes_cell(planned.upper_bytes),
        bytes_cell(peak.nbytes), Cell(error, number=True), verdict, peak.start.number, peak.process.rank,
    )  # fmt: skip


def _planned(plan: Mapping[str, Any]) -> Iterator[Planned]:
    """What a rank holds in each phase, from the plan's document; what does not fit is skipped. The larger of both steps is "steps"."""
    run = plan.get("run")
    phases = run.get("phases") if isinstance(run, Mapping) else None
    steps: dict[str, Planned] = {}
    for entry in phases if isinstance(phases, list) else ():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("amounts"), list):
            continue
        name = str(entry.get("name", ""))
        for where in _MEASURED:
            amounts = [a for a in entry["amounts"] if isinstance(a, Mapping) and a.get("where") == where]
            nbytes, upper = (sum(_count(a.get(key)) for a in amounts) for key in ("nbytes", "upper_bytes"))
            if not nbytes:
                continue
            if name not in _STEPS:
                yield Planned(name, where, nbytes, upper)
            elif where not in steps or upper > steps[where].upper_bytes:
                steps[where] = Planned("steps", where, nbytes, upper)
    yield from steps.values()


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
    order = {name: k for k, name in enumerate(("load", "steps", *_OPERATIONS))}
    return sorted(highest.values(), key=lambda p: (order[p.phase], p.where != "host"))


def _in_operations(process: Process) -> Iterator[tuple[str, str, int]]:
    names = {ledger: name for name, ledgers in _OPERATIONS.items() for ledger in ledgers}
    if any(p.name == "background save" for p in process.phases.values()):
        names["save"] = "save, async"  # what an async save does before it returns
    for phase in process.phases.values():
        if phase.name in names and phase.ended is not None and phase.error is None:
            yield names[phase.name], "host", phase.ended.get("peak_anonymous_bytes")
            yield names[phase.name], "device", _device_peak(phase)


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


def _loads(starts: Iterable[Start], plan: Mapping[str, Any], model: str) -> Iterator[Part]:
    """Shards, reads and staging of each load beside those planned for its rank."""
    planned = {one.get("rank"): one for one in plan["per_rank"] if isinstance(one, dict)}
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
        head = cells(">start", ">rank", *(h for name in measured for h in (f">{name} planned", ">measured")))
        yield Part(table=Table(f"Loads of {model}", head, rows[:_MOST_ROWS]))
