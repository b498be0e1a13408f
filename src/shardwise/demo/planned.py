"""The plan of a demo's starts."""

from __future__ import annotations

import json

from rich.console import Console
from transformers import AutoModel

from ..operations.records import size
from ..phases.plan import plan
from ..phases.training import TrainingSpec
from .course import Course
from .embed import MAX_TOKENS

__all__ = ["plan_starts"]


def plan_starts(course: Course, console: Console) -> None:
    """Plan both starts, beside the run, where its report finds the plans; and print what steps of the first take."""
    for ranks in (course.ranks, course.ranks + 1):
        report = plan(
            course.model.directory,
            ranks=ranks,
            dtype="float32",
            auto_class=AutoModel,
            allow_unused=course.model.allow_unused,
            allow_missing=course.model.allow_missing,
            training=TrainingSpec(
                batch_size=2 * course.batch_size // ranks, sequence_length=MAX_TOKENS, device="cpu"
            ),
        )
        text = json.dumps(report.to_json(), indent=2)
        (course.out / f"plan-{ranks}-ranks.json").write_text(f"{text}\n", encoding="utf-8")
        if ranks == course.ranks and report.run is not None:
            steps = report.run.phase("steady state")
            console.print(
                f"planned for a step: {size(steps.nbytes('host'))} of memory for each of {ranks} ranks, at most "
                f"{size(steps.upper_bytes('host'))}",
                highlight=False,
            )
