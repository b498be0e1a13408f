"""What a demo's report says, from the files that its ranks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .course import Course
from .summary import records

__all__ = ["Losses", "report_of"]

Losses = dict[int, float]
"""By step."""


def report_of(
    course: Course, crash: dict[str, Any], resume: dict[str, Any], losses: tuple[Losses, Losses]
) -> dict[str, Any]:
    """The outcome of load, crash and resume; ``losses``: of both starts."""
    return {
        "model": {
            "path": str(course.model.directory),
            "class": course.model.kind,
            "allow_unused": course.model.allow_unused,
            "allow_missing": course.model.allow_missing,
        },
        "ranks": course.ranks,
        "steps": course.steps,
        "pass_steps": course.pass_steps,
        "load": _load_report(course),
        "crash": crash,
        "resume": resume,
        "digests": _compare_digests(course, resume["step"]),
        "trained_twice": _trained_twice(*losses),
        "loss": _loss_report(*losses),
    }


def _load_report(course: Course) -> dict[str, Any]:
    ranks = records(course.out / "run-1", "load")
    bytes_read = sum(r["bytes_read"] for r in ranks)
    return {
        "seconds": max(r["seconds_plan"] + r["seconds_read"] for r in ranks),
        "model_bytes": ranks[0]["model_bytes"],
        "bytes_read": bytes_read,
        "bytes_read_ratio": bytes_read / ranks[0]["model_bytes"],
        "ranks": [
            {k: r[k] for k in ("rank", "local_bytes", "bytes_read", "memory_added", "memory_kept")}
            for r in ranks
        ],
    }


def _compare_digests(course: Course, step: int) -> dict[str, Any]:
    """Compare live weights at the save and after the restore, and the last live weights with the export."""
    saved = _digests(course.out / "run-1" / f"digests-saving-{step}.json")
    restored = _digests(course.out / "run-2" / f"digests-resumed-{step}.json")
    live = _digests(course.out / "run-2" / f"digests-exported-{course.steps}.json")
    return {
        "step": step,
        "tensors": len(restored),
        "resume_equal": saved == restored,
        "export_equal": set(live.values()) == _stored_digests(course.out / "export"),
    }


def _digests(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _stored_digests(directory: Path) -> set[str]:
    """Digests of the tensors in safetensors files; a digest covers dtype and shape, but not the name."""
    from safetensors import safe_open

    from ..digests.digest import tensor_digest

    found = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {f"{tensor_digest(file.get_tensor(name)):016x}" for name in file.keys()}  # noqa: SIM118
    return found


def _trained_twice(before: Losses, after: Losses) -> dict[str, Any]:
    """The losses of the steps after the last good save, which were lost and trained again."""
    steps = sorted(before.keys() & after.keys())
    return {
        "steps": steps,
        "largest_difference": max((abs(before[s] - after[s]) for s in steps), default=0.0),
    }


def _loss_report(before: Losses, after: Losses) -> dict[str, Any]:
    """Training loss at the beginning and at the end, averaged over a few steps because batches differ."""
    curve = {**before, **after}
    values = [curve[step] for step in sorted(curve)]
    over = min(5, len(values) // 2)
    return {"first": sum(values[:over]) / over, "last": sum(values[-over:]) / over, "over": over}
