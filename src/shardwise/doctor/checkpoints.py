"""Looks at a checkpoint, or at a directory of checkpoints, from names, manifests and headers. Opens no pickle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..catalog.kinds import METADATA_NAME
from ..checkpoint.check import check_part
from ..errors import ShardwiseError, SourceError
from ..format.head import HEAD_NAME
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..format.steps import OTHERS_NAME
from ..runs.history import RESUMED, lost_parts
from ..storage import is_url, join
from ..store.line import line_of
from ..store.publish import leftovers, was_ever_published
from .facts import Checkpoint
from .settings import ARGUMENTS_FILE, read_pickled_arguments
from .weights import PICKLES

__all__ = ["holds_checkpoint", "look_at_checkpoint", "look_for_lost"]

#: A directory may hold many steps; a resume takes one of the newest.
_STEPS_CHECKED = 3
#: Of Accelerate (``use_dcp=False``).
_PER_RANK = re.compile(r".*_rank\d+\.(bin|pt)")
_OF_OTHERS = re.compile(
    r"\.metadata|.*\.distcp|(pytorch_model_fsdp|optimizer)(_\d+)?(\.bin|\.pt)?|trainer_state\.json|"
    r"random_states_\d+\.pkl|rng_state.*\.pth|scheduler\.(bin|pt)"
)
#: Files that no resume reads.
_TEXTS = re.compile(r"\..*|.*\.(md|txt|log)")
_NUMBERS = re.compile(r"\d+")


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


def look_for_lost(found: Checkpoint, names: Sequence[str], neighbors: Sequence[Sequence[str]]) -> Checkpoint:
    """Add what ``found``, a numbered checkpoint of the HF Trainer, Accelerate or a ShardwiseTrainer, lacks; also by its neighbors' files.

    A directory without a number may be a finished model, and no run resumes from that. Rank-local; reads names, and the
    Trainer's arguments.
    """
    if not OTHERS_NAME.fullmatch(os.path.basename(found.path)) or found.kind == "steps":
        return found
    if found.kind == "step":  # of a ShardwiseTrainer; the manifest lists its files
        only = "optimizer" not in names and _says_model_only(os.path.join(found.path, ARGUMENTS_FILE))
        return replace(found, lost=("optimizer", "scheduler"), is_model_only=True) if only else found
    lost = lost_parts(names)
    return replace(
        found,
        lost=lost,
        lost_files=_lost_files(names, neighbors),
        is_model_only=bool(lost) and _says_model_only(os.path.join(found.path, ARGUMENTS_FILE)),
    )


def _lost_files(names: Sequence[str], others: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Files of all ``others``, if there are at least two, that ``names`` lacks. Numbers in names may differ: they count ranks, parts and steps."""
    if len(others) < 2:
        return ()
    by_form = [{_NUMBERS.sub("N", name): name for name in other} for other in others]
    shared = set(by_form[0]).intersection(*by_form[1:]) - {_NUMBERS.sub("N", name) for name in names}
    found = sorted(by_form[0][form] for form in shared)
    told = [*RESUMED.values(), _TEXTS]
    return tuple(name for name in found if not any(one.fullmatch(name) for one in told))


def _says_model_only(path: str) -> bool:
    try:
        return read_pickled_arguments(path).values.get("save_only_model") is True
    except SourceError:
        return False
