"""Directories of steps: what readers of one checkpoint say of the directory in which a run keeps them all."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Container
from typing import Any

from ..errors import StateError
from ..limits import MAX_COUNT, brief

__all__ = ["STEP_NAME", "checked_step", "misnamed", "of_steps"]

#: What a published step's directory is called: one name for each step, and no other for the same one.
STEP_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,18})")
#: What the HF Trainer calls it, and the file that tells its checkpoints from a user's own of that name.
_TRAINER_NAME, _TRAINER_FILE = re.compile("checkpoint-([0-9]{1,19})"), "trainer_state.json"


def checked_step(step: Any) -> int:
    """``step`` as a number. Raises :class:`StateError` for one that no manifest can hold, and no name can say."""
    is_bool = isinstance(step, bool)  # an integer to Python, and none to JSON
    if is_bool or not hasattr(step, "__index__") or not 0 <= (found := operator.index(step)) <= MAX_COUNT:
        raise StateError(f"step must be an integer from 0 to 2^62, got {brief(step)}")
    return found


def misnamed(root: str, step: int, files: Container[str]) -> str | None:
    """What is wrong if a directory has the name of another step than its manifest holds; None otherwise.

    A directory of any other name may hold any step: the caller says which one is meant by naming the directory.
    """
    name = os.path.basename(os.path.abspath(root))
    found = STEP_NAME.fullmatch(name) or (_TRAINER_NAME.fullmatch(name) if _TRAINER_FILE in files else None)
    if found is None or int(found[1]) == step:
        return None
    return (
        f"holds step {step}, not {int(found[1])} as its name says: an old manifest, or a step under another's name. If it "
        f"was renamed, give it the name that it was published under"
    )


def of_steps(root: str) -> str | None:
    """That ``root`` holds steps, and what to give instead, for an error; None where it holds none."""
    try:
        names = os.listdir(root)
    except OSError:
        return None
    steps = {int(m[1]): name for name in names if (m := STEP_NAME.fullmatch(name))}
    if not steps:
        return None
    newest = sorted(steps)[-3:]
    path = os.path.join(root, steps[newest[-1]])
    if len(steps) == 1:
        return f"holds step {newest[0]}; give {path}"
    listed = ", ".join(map(str, newest))
    some = f"{len(steps)} steps, the newest {listed}" if len(steps) > len(newest) else f"steps {listed}"
    return f"holds {some}; give one of them, e.g. {path}"
