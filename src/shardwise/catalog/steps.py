"""Directories of steps: what readers of one checkpoint say of the directory in which a run keeps them all."""

from __future__ import annotations

import os
import re

__all__ = ["STEP_NAME", "of_steps"]

#: What a published step's directory is called.
STEP_NAME = re.compile(r"step-(\d{8,})")


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
