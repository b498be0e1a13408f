"""Directories of steps: names of steps, and the errors for a run's directory given in place of one step."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Container
from typing import Any

from ..errors import SourceError, StateError
from ..limits import MAX_COUNT, brief
from ..storage import is_url, join, names_in, read_whole
from .head import HEAD_NAME, MOST_HEAD_BYTES, parse_head, stored_step

__all__ = ["OTHERS_NAME", "STEP_NAME", "TRAINER_FILE", "checked_step", "describe_steps", "misnamed"]

#: The name of a published step's directory: exactly one for each step.
STEP_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,18})")
#: The names of the HF Trainer (``-``) and of Accelerate (``_``) for it.
OTHERS_NAME = re.compile("checkpoint[-_]([0-9]{1,19})")
#: The file that tells a checkpoint of the HF Trainer from a user's directory of that name.
TRAINER_FILE = "trainer_state.json"


def checked_step(step: Any) -> int:
    """``step`` as a number. Raises :class:`StateError` for one that no manifest and no name can hold."""
    is_bool = isinstance(step, bool)  # an integer in Python, but not in JSON
    if is_bool or not hasattr(step, "__index__") or not 0 <= (found := operator.index(step)) <= MAX_COUNT:
        raise StateError(f"step must be an integer from 0 to 2^62, got {brief(step)}")
    return found


def misnamed(root: str, step: int, files: Container[str]) -> str | None:
    """The text of an error if the directory's name says another step than its manifest; otherwise None.

    A directory whose name says no step may hold any step.
    """
    name = os.path.basename(os.path.abspath(root))
    found = STEP_NAME.fullmatch(name) or (OTHERS_NAME.fullmatch(name) if TRAINER_FILE in files else None)
    named = stored_step(name) if found is None else int(found[1])
    if named is None or named == step:
        return None
    return (
        f"contains step {step}, but step {named} was expected: either the manifest is old or the directory was renamed. If it "
        f"was renamed, restore its original name"
    )


def describe_steps(root: str) -> str | None:
    """The text of an error if ``root`` holds steps, with the path to give instead; otherwise None."""
    try:
        names = names_in(root)
    except (OSError, SourceError):
        return None
    steps = {int(m[1]): name for name in names if (m := STEP_NAME.fullmatch(name))}
    if is_url(root) and HEAD_NAME in names:
        try:
            url = join(root, HEAD_NAME)
            steps = dict(parse_head(read_whole(url, MOST_HEAD_BYTES), url).steps)
        except SourceError:
            return None
    if not steps:
        return None
    newest = sorted(steps)[-3:]
    path = os.path.join(root, steps[newest[-1]])
    if len(steps) == 1:
        return f"contains step {newest[0]}; give {path}"
    listed = ", ".join(map(str, newest))
    some = f"{len(steps)} steps, the newest {listed}" if len(steps) > len(newest) else f"steps {listed}"
    return f"contains {some}; give one of them, e.g. {path}"
