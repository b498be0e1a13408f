"""Finds what a report can tell of: steps, ledgers and loss logs, in the places that the caller names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FormatError, SourceError
from ..limits import MAX_VALUE_BYTES, read_small
from ..objects import frozen
from ..runs.history import RootContents, is_root, losses_of_trainer, steps_below
from ..storage import absolute, is_url
from .ledger_files import Start, json_lines, json_object, read_process, starts_of

__all__ = ["LossLog", "Material", "find_material"]


@frozen
class LossLog:
    """Losses by step, from one file."""

    file: str
    points: Mapping[int, float]


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
    checkpoints; a ledger or a loss log. Without ``plan``, those are taken that lie in a directory of ``paths`` as ``plan*.json``.

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
            roots = [str(one) for one in (place, place / "checkpoints") if one.is_dir() and is_root(str(one))]
            found = _files_of(place)
            material.runs += [steps_below(root) for root in roots]
            if logged := losses_of_trainer(str(place)):
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
                "no loss.jsonl; give the directory of a run, of its checkpoints or of its ledger",
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
            raise SourceError(
                "is neither a ledger nor a loss log: JSON lines with step and loss", path=str(file)
            )
    material.starts = starts_of(processes)
    return material


def _files_of(place: Path) -> list[Path]:
    ledgers = [*place.glob("rank-*.jsonl"), *place.glob("ledger/rank-*.jsonl")]
    return sorted(ledgers) + sorted([*place.glob("loss.jsonl"), *place.glob("*/loss.jsonl")])


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
