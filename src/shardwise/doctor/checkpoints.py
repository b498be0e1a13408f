"""Looks at a checkpoint, or at a directory of checkpoints, from names, manifests and headers. Opens no pickle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from ..catalog.dcp import METADATA_NAME
from ..checkpoint.check import check_part
from ..errors import ShardwiseError
from ..format.head import HEAD_NAME
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..storage import is_url, join
from ..store.line import line_of
from ..store.publish import leftovers, was_ever_published
from .facts import Checkpoint
from .weights import PICKLES

__all__ = ["holds_checkpoint", "look_at_checkpoint"]

#: A directory may hold many steps; a resume takes one of the newest.
_STEPS_CHECKED = 3
#: Of Accelerate (``use_dcp=False``).
_PER_RANK = re.compile(r".*_rank\d+\.(bin|pt)")
_OF_OTHERS = re.compile(
    r"\.metadata|.*\.distcp|(pytorch_model_fsdp|optimizer)(_\d+)?(\.bin|\.pt)?|trainer_state\.json|"
    r"random_states_\d+\.pkl|rng_state.*\.pth|scheduler\.(bin|pt)"
)


def holds_checkpoint(path: str, names: Iterable[str]) -> bool:
    """Whether a directory with these names holds training state, or steps of a run."""
    known = set(names)
    if MANIFEST_NAME in known or HEAD_NAME in known:
        return True
    if any(_PER_RANK.fullmatch(n) or _OF_OTHERS.fullmatch(n) for n in known):
        return True
    return not is_url(path) and (was_ever_published(path) or bool(leftovers(path)))


def look_at_checkpoint(path: str, names: Iterable[str]) -> Checkpoint:
    """Facts of the directory or URL ``path``. Rank-local; reads no payload."""
    known = set(names)
    if MANIFEST_NAME in known:
        return Checkpoint(path=path, kind="step", damaged=_damage({_step_of(path): path}))
    if HEAD_NAME in known or (not is_url(path) and (was_ever_published(path) or leftovers(path))):
        return _of_line(path)
    return _of_others(path)


def _step_of(path: str) -> int:
    try:
        return read_manifest(path).step
    except ShardwiseError:
        return 0  # the check says why


def _of_line(path: str) -> Checkpoint:
    line = line_of(path)
    try:
        steps = line.seen_steps()
        aside, left = line.set_aside(), line.leftovers()
    except ShardwiseError as error:
        return Checkpoint(path=path, kind="steps", damaged={os.path.basename(path): str(error)})
    newest = {step: join(path, name) for step, name in list(steps.items())[:_STEPS_CHECKED]}
    return Checkpoint(
        path=path,
        kind="steps",
        steps=tuple(steps),
        set_aside=tuple(one.name for one in aside),
        leftovers=tuple(left),
        damaged=_damage(newest),
    )


def _damage(steps: dict[int, str]) -> dict[str, str]:
    found = {}
    for step, place in steps.items():
        try:
            check_part(place, step)
        except ShardwiseError as error:
            found[os.path.basename(place)] = str(error)
    return found


def _of_others(path: str) -> Checkpoint:
    files = sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    )
    per_rank = tuple(n for n in files if _PER_RANK.fullmatch(os.path.basename(n)))
    parts = {os.path.dirname(n) for n in files if n.endswith(".distcp")}
    described = {os.path.dirname(n) for n in files if os.path.basename(n) == METADATA_NAME}
    return Checkpoint(
        path=path,
        kind="per-rank" if per_rank else "dcp" if parts or described else "full",
        per_rank=per_rank,
        pickles=tuple(n for n in files if n.endswith(PICKLES) or os.path.basename(n) == METADATA_NAME),
        nbytes=sum(os.path.getsize(os.path.join(path, n)) for n in files),
        lacks_metadata=bool(parts - described),
    )
