"""Finds what a report can tell of: steps, ledgers and loss logs, in the places that the caller names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..doctor.logs import losses_of_log
from ..errors import FormatError, SourceError
from ..limits import MAX_VALUE_BYTES, read_small
from ..objects import frozen
from ..runs.history import (
    RootContents,
    is_root,
    losses_in,
    losses_of_trainer,
    numbered_steps,
    steps_below,
)
from ..storage import absolute, is_url
from .ledger_files import Start, json_lines, json_object, read_process, starts_of

__all__ = ["LossLog", "Material", "find_material"]


@frozen
class LossLog:
    """Losses by step, from one file."""

    file: str
    points: Mapping[int, float]
    names_steps: bool = True
    """False: the losses are numbered, because the file names no steps."""
    resumes: tuple[int, ...] = ()
    """The last logged step before each resume that the file tells of."""
    digits: tuple[int, int] | None = None
    """Of a text: the most significant digits and the most decimals that a loss is printed with. None: losses in full."""

    def prints(self, other: LossLog) -> bool:
        """Whether it is a text that prints the losses of the other file: each that both have, to the printed digits."""
        both = self.points.keys() & other.points.keys()
        if self.digits is None or other.digits is not None or not both:
            return False
        significant, decimals = self.digits
        pairs = [(self.points[step], other.points[step]) for step in both]
        return all(float(f"{full:.{significant}g}") == text for text, full in pairs) or all(
            round(full, decimals) == text for text, full in pairs
        )


@dataclass(slots=True)
class Material:
    """All that was found."""

    paths: Sequence[str]
    """As given."""
    runs: list[RootContents] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    losses: list[LossLog] = field(default_factory=list)
    plans: list[Mapping[str, Any]] = field(default_factory=list)
    """Documents of ``shardwise plan --json``."""


def find_material(paths: Sequence[str], plan: str | None = None) -> Material:
    """Look at each path: a directory of checkpoints, or one that holds ``checkpoints``, ``ledger`` or ``loss.jsonl``; a URL of
    checkpoints; a ledger, a loss log, a ``trainer_state.json`` or the text that a run printed. Without ``plan``, those are taken that lie in a directory of ``paths`` as ``plan*.json``.

    Raises :class:`SourceError` for a path that holds none of these, and for a ``plan`` that is none.
    """
    material = Material(paths, plans=[] if plan is None else [_read_plan(Path(plan))])
    files: dict[Path, Path] = {}  # real path -> as the caller reaches it
    for path in paths:
        if is_url(path):
            material.runs.append(steps_below(absolute(path)))
            continue
        place = Path(path)
        if place.is_dir():
            roots = [
                str(one) for one in (place, place / "checkpoints") if one.is_dir() and _has_steps(str(one))
            ]
            found = _files_of(place)
            material.runs += [steps_below(root) for root in roots]
            if logged := losses_of_trainer(str(place)):
                roots.append(logged[0])
                material.losses.append(LossLog(*logged))
            if plan is None:
                material.plans += _plans_in(place)
        elif place.is_file():
            roots, found = [], [place]
        else:
            raise SourceError("no such file or directory", path=path)
        if not roots and not found:
            raise SourceError(
                "holds nothing to report: no steps of a Checkpointer (here or in checkpoints/), no ledger (in ledger/), "
                "no loss.jsonl and no trainer_state.json; give the directory of a run, of its checkpoints or of its ledger, or a log",
                path=path,
            )
        files.update({one.resolve(): one for one in found})
    processes = []
    for file in files.values():
        if (process := read_process(file)) is not None:
            processes.append(process)
        elif points := _losses(file):
            material.losses.append(LossLog(str(file), points))
        elif str(file) in map(str, map(Path, paths)):
            material.losses.append(_log_given(file))
    material.starts = starts_of(processes)
    return material


def _files_of(place: Path) -> list[Path]:
    ledgers = [*place.glob("rank-*.jsonl"), *place.glob("ledger/rank-*.jsonl")]
    return sorted(ledgers) + sorted([*place.glob("loss.jsonl"), *place.glob("*/loss.jsonl")])


def _has_steps(path: str) -> bool:
    """Whether a directory has steps, a model next to them or not."""
    return is_root(path) or bool(numbered_steps(path))


def _log_given(file: Path) -> LossLog:
    """The losses of the Trainer's state, or of the text that a run printed. Raises :class:`SourceError` if there are none."""
    if file.suffix == ".json":
        found = LossLog(str(file), losses_in(str(file)))
    else:
        logged = losses_of_log(str(file))
        found = LossLog(str(file), logged.points, logged.names_steps, logged.resumes, logged.digits)
    if not found.points:
        raise SourceError(
            "holds no losses: expected a ledger, JSON lines with step and loss, a trainer_state.json, or a log whose lines have a loss",
            path=str(file),
        )
    return found


def _losses(file: Path) -> dict[int, float]:
    points = {}
    for record in json_lines(file):
        step, loss = (record or {}).get("step"), (record or {}).get("loss")
        if isinstance(step, int) and isinstance(loss, int | float) and 0 <= step < 2**53:
            points[step] = float(loss) if abs(loss) < 2**62 else math.nan
    return points


def _plans_in(place: Path) -> Iterator[Mapping[str, Any]]:
    for file in sorted(place.glob("plan*.json")):
        with suppress(SourceError, FormatError):  # another program's plan
            yield _read_plan(file)


def _read_plan(file: Path) -> Mapping[str, Any]:
    found = json_object(read_small(str(file), "plan", MAX_VALUE_BYTES))
    if found is None or not isinstance(found.get("per_rank"), list):
        raise SourceError("is not what `shardwise plan PATH --ranks N --json` prints", path=str(file))
    return found
