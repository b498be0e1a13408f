"""What the rows of ``benchmarks/phases.py`` come to: which promises hold, and the table of docs/notes/measurements.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ACTIVATIONS", "PHASES", "broken", "summary", "table"]

PHASES = ("load", "first step", "steady state", "save, sync", "save, async", "resume", "export")
ACTIVATIONS = "activations"
#: The largest error of a plan that is promised.
_PHASES_GOAL, _ACTIVATIONS_GOAL = 0.05, 0.15
_MIB = 2**20

Row = dict[str, Any]


def broken(rows: Sequence[Row]) -> list[str]:
    """A sentence for each promise that does not hold; none if all do."""
    found = [
        f"{r['case']}, {r['phase']}: planned {r['planned'] / _MIB:.1f} MiB, measured {r['measured'] / _MIB:.1f} "
        f"({r['error']:+.1%}), more than {_goal(r):.0%}"
        for r in rows
        if not _is_near(r)
    ]
    found += [
        f"{r['case']}, {r['phase']}: measured {r['measured'] / _MIB:.1f} MiB, above the bar's end of {r['upper'] / _MIB:.1f}"
        for r in rows
        if _is_above(r)
    ]
    killed = dict.fromkeys(r["case"] for r in rows if r["killed"])
    return found + [f"{case}: killed under the limit of its plan" for case in killed]


def summary(rows: Sequence[Row]) -> str:
    """The counts over all configurations, and the largest errors of each phase."""
    phases, activations = (
        [r for r in rows if (r["phase"] == ACTIVATIONS) is wanted] for wanted in (False, True)
    )
    cases = {r["case"] for r in rows}
    killed = len({r["case"] for r in rows if r["killed"]})
    lines = [
        f"{len(cases)} configurations: {_count(phases, _is_near)} phases within {_PHASES_GOAL:.0%}, activations of "
        f"{_count(activations, _is_near)} within {_ACTIVATIONS_GOAL:.0%}; measured above the bar: {sum(map(_is_above, rows))}; "
        f"killed under the limit of their plans: {killed}"
    ]
    for phase in (*PHASES, ACTIVATIONS):
        own = [r for r in rows if r["phase"] == phase]
        errors = sorted(abs(r["error"]) for r in own)
        if own:
            lines.append(
                f"{phase:12} |error|: median {errors[len(errors) // 2]:5.1%}, largest {errors[-1]:5.1%}; within the goal: "
                f"{_count(own, _is_near)}; nearest to its bar: {max(r['measured'] / r['upper'] for r in own):.0%}"
            )
    return "\n".join([*lines, *(f"NOT MET: {text}" for text in broken(rows))])


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each configuration, MiB of a rank, planned / measured (error of the plan)."""
    columns = (*PHASES, ACTIVATIONS)
    lines = [f"| configuration | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case in dict.fromkeys(r["case"] for r in rows):
        own = {r["phase"]: r for r in rows if r["case"] == case}
        cells = [
            f"{own[c]['planned'] / _MIB:.0f} / {own[c]['measured'] / _MIB:.0f} ({_percent(own[c]['error'])})"
            for c in columns
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(error: float) -> str:
    return f"{error * 100:+.0f} %" if abs(error) >= 0.005 else "0 %"


def _goal(row: Row) -> float:
    return _ACTIVATIONS_GOAL if row["phase"] == ACTIVATIONS else _PHASES_GOAL


def _is_near(row: Row) -> bool:
    return bool(abs(row["error"]) <= _goal(row))


def _is_above(row: Row) -> bool:
    return bool(row["measured"] > row["upper"])


def _count(rows: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    return f"{sum(map(holds, rows))} of {len(rows)}"
