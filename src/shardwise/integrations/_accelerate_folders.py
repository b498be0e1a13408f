"""Folders of an accelerator's checkpoints: the caller's, local or URLs, or Accelerate's automatic ``checkpoints/checkpoint_N``."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checkpoint.hosts import Hosts
from ..errors import CheckpointError, NoCheckpointError, SourceError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..ranks.patience import patiently
from ..storage import is_directory, is_file, is_url, join, names_in, place_at
from ..store.in_store import refuse_without_conditions
from ..store.marks import is_checkpoint
from ..store.publish import delete_all
from ..store.write import make_directories

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "delete_oldest",
    "first_stored",
    "folder_for",
    "make_room",
    "newest",
    "newest_of",
    "places_of",
    "refuse_unfit",
    "steps_in",
]

_log = logging.getLogger(__name__)
#: Each rank's file in Accelerate's own checkpoints: ``accelerate.utils.RNG_STATE_NAME``, which is not imported for it.
_RANDOM_STATES = "random_states"


def refuse_unfit(fallback: str) -> None:
    """Raise :class:`CheckpointError` or :class:`SourceError` for a fall-back that could take no checkpoint: else the first save that
    fails would find it out. Makes a directory; writes and deletes one small object below a URL. For one rank.
    """
    if is_url(fallback):
        refuse_without_conditions(fallback)
        return
    try:
        patiently(make_directories, fallback)
    except OSError as error:
        raise CheckpointError(f"{fallback}: this fallback can't be created: {error.strerror}") from error


def folder_for(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """The folder that ``accelerator.save_state`` chooses: automatic naming overrules ``output_dir``."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return os.path.join(_root(accelerator), f"checkpoint_{accelerator.save_iteration}")
    if output_dir is None:
        raise CheckpointError(
            "no output_dir, and automatic_checkpoint_naming is off; give save_state(accelerator, output_dir)"
        )
    return place_at(output_dir)


def make_room(folder: str, hosts: Hosts, *, automatic: bool) -> None:
    """Make the parent of ``folder``, and remove ``folder`` if it is empty; a store needs neither. Collective.

    A checkpoint that only some hosts hold, because a save was killed when its parts appeared, is set aside with a warning. Raises
    :class:`CheckpointError` for any other folder that is not empty.
    """
    root = os.path.dirname(folder)
    found = hosts.on_each(root, "make room for the checkpoint", lambda: _in_the_way(folder))
    if set(found) == {"", _CHECKPOINT} and not hosts.holds(folder):
        hosts.on_own(root, "rename an incomplete checkpoint", lambda: _set_aside(folder))
    elif any(found):
        raise CheckpointError(
            f"{folder}: already contains something, and a published checkpoint is never overwritten; "
            + (
                "resume with load_state(accelerator) first, which continues the count, or set project_configuration.iteration"
                if automatic
                else "give each save a folder of its own (f'step-{step}'), or "
                "ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=…) and no output_dir"
            )
        )


_CHECKPOINT = "checkpoint"


def _in_the_way(folder: str) -> str:
    """What is in the way of a new folder, whose parent is made; empty for nothing."""
    if is_url(folder):
        return "objects" if patiently(is_directory, folder) else ""
    if os.path.isdir(folder) and not os.listdir(folder):
        patiently(os.rmdir, folder)
    if os.path.lexists(folder):
        return _CHECKPOINT if os.path.isfile(os.path.join(folder, MANIFEST_NAME)) else "something else"
    patiently(os.makedirs, os.path.dirname(folder), exist_ok=True)
    return ""


def _set_aside(folder: str) -> None:
    """Under a name that no search takes. For one rank of each host."""
    if not os.path.lexists(folder):
        return
    aside = os.path.join(os.path.dirname(folder), f".torn-{os.path.basename(folder)}-{secrets.token_hex(4)}")
    try:
        patiently(os.rename, folder, aside)
    except OSError as error:
        raise CheckpointError(f"{folder}: can't be renamed: {error.strerror}") from error
    _log.warning("%s: only some hosts hold it, of a save that was killed; it is now %s", folder, aside)


def places_of(folder: str, fallback: str | None) -> list[str]:
    """Where a checkpoint may lie: at ``folder``, and under the same name in the fall-back."""
    return [folder, *([] if fallback is None else [join(fallback, os.path.basename(folder))])]


def first_stored(places: Sequence[str]) -> str:
    """The first place at which there is something; the first one if there is nothing at any. For one rank."""
    return next((path for path in places if patiently(is_directory, path)), places[0])


def newest(accelerator: Accelerator, hosts: Hosts, fallback: str | None = None) -> str:
    """The newest checkpoint of automatic naming, there or in the fall-back. Collective. Raises :class:`NoCheckpointError` if there is
    none."""
    root, found = _root(accelerator), None
    if accelerator.project_configuration.automatic_checkpoint_naming:
        roots = [root, *([] if fallback is None else [fallback])]
        found = newest_of(roots, hosts, _numbered_in)
    if found is None:
        raise NoCheckpointError(f"{root}: no checkpoint_N in it, and no input_dir was given")
    return found


def newest_of(roots: Sequence[str], hosts: Hosts, numbered: Callable[[str], Mapping[int, str]]) -> str | None:
    """The checkpoint with the highest number in these directories or URLs, of equal ones that of the first. Collective.

    ``numbered`` returns the names of the checkpoints in a directory, by number.
    """
    hosts.settle(roots[0], is_held=False)

    def look() -> list[list[Any]]:
        return [[number, k, name] for k, root in enumerate(roots) for number, name in numbered(root).items()]

    of_hosts = hosts.on_each(roots[0], "find the newest checkpoint", look)
    found = {(number, k, name) for of_host in of_hosts for number, k, name in of_host}
    for _, k, name in sorted(found, key=lambda one: (-one[0], one[1])):
        path = join(roots[k], name)
        if hosts.holds(path):
            return path
    return None


def steps_in(root: str) -> dict[int, str]:
    """The checkpoints directly below a directory or URL, by step. For one rank.

    A checkpoint whose manifest can't be read does not count, and is logged.
    """
    found: dict[int, str] = {}
    for name in sorted(names_in(root)) if is_directory(root) else ():
        path = join(root, name)
        if name.startswith(".") or not is_file(join(path, MANIFEST_NAME)):
            continue
        try:
            found.setdefault(patiently(read_manifest, path).step, name)
        except SourceError as error:
            _log.warning("skipping %s: %s", path, error)
    return found


def _numbered_in(root: str) -> dict[int, str]:
    return {number: os.path.basename(path) for number, path in _folders(root)}


def delete_oldest(folder: str, limit: int) -> None:
    """Keep the ``limit`` newest beside ``folder``; in a store all stay. Logs what fails.

    A kill leaves remains under another name, which no resume takes.
    """
    if is_url(folder):
        return
    try:
        old = [path for _, path in _folders(os.path.dirname(folder))[:-limit]]
    except OSError as error:  # the new checkpoint is published already
        _log.warning("no checkpoint is deleted: %s", error)
        return
    delete_all(old, _is_checkpoint)


def _is_checkpoint(path: str) -> bool:
    """Whether Accelerate's own ``total_limit`` would delete a folder, or it is a checkpoint of ours."""
    is_accelerates = any(name.startswith(f"{_RANDOM_STATES}_") for name in os.listdir(path))
    return (is_accelerates and not os.path.islink(path)) or is_checkpoint(path)


def _root(accelerator: Accelerator) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir or "", "checkpoints"))


def _folders(root: str) -> list[tuple[int, str]]:
    """Published checkpoints, oldest first."""
    if not is_directory(root):
        return []
    matches = ((re.fullmatch(r"checkpoint_(\d+)", name), name) for name in names_in(root))
    return sorted((int(m[1]), join(root, name)) for m, name in matches if m)
