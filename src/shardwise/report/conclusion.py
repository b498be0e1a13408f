"""The conclusion of a report: what happened to the run, in a few sentences for the top of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .ledger_files import Note, Process, Start
from .material import LossLog, Material
from .records import Cell
from .text import counted, plain

__all__ = ["conclusion", "ending", "trained_twice"]

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
    doing = _doing(process)
    if process.error is not None:
        return f"failed{doing}: {plain(process.error)}"
    return f"{'died' if process is start.culprit else 'was stopped'}{doing}"


def _doing(process: Process) -> str:
    phase = process.stopped_in
    if phase is None:
        return ""
    step = "" if phase.step is None else f" step {phase.step}"
    verb = _VERBS.get(phase.name)
    return f" in {plain(phase.name, 40)}{step}" if verb is None else f" while {verb}{step}"


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
