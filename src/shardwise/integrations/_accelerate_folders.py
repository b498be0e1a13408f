"""Folders of an accelerator's checkpoints: the caller's, local or URLs, or Accelerate's automatic ``checkpoints/checkpoint_N``."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ..errors import CheckpointError, NoCheckpointError
from ..ranks.patience import patiently
from ..storage import absolute, is_directory, is_url
from ..store.publish import delete_all

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["delete_oldest", "folder_for", "make_room", "newest", "place_at"]


def place_at(path: str | os.PathLike[str]) -> str:
    """A caller's path without ``~`` and ``..``, or its URL."""
    path = os.fspath(path)
    return absolute(path if is_url(path) else os.path.expanduser(path))


def folder_for(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """The folder that ``accelerator.save_state`` chooses: automatic naming overrules ``output_dir``."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return os.path.join(_root(accelerator), f"checkpoint_{accelerator.save_iteration}")
    if output_dir is None:
        raise CheckpointError(
            "no output_dir, and automatic_checkpoint_naming is off; give save_state(accelerator, output_dir)"
        )
    return place_at(output_dir)


def make_room(folder: str, *, automatic: bool) -> None:
    """Make the parent of ``folder``, and remove ``folder`` if it is empty; a store needs neither. For one rank.

    Raises :class:`CheckpointError` if the folder is not empty.
    """
    if not is_url(folder) and os.path.isdir(folder) and not os.listdir(folder):
        patiently(os.rmdir, folder)
    if patiently(is_directory, folder) if is_url(folder) else os.path.lexists(folder):
        raise CheckpointError(
            f"{folder}: holds something already, and a published checkpoint is never overwritten; "
            + (
                "resume with load_state(accelerator) first, which goes on counting, or set project_configuration.iteration"
                if automatic
                else "give each save a folder of its own (f'step-{step}'), or "
                "ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=…) and no output_dir"
            )
        )
    if not is_url(folder):
        patiently(os.makedirs, os.path.dirname(folder), exist_ok=True)


def newest(accelerator: Accelerator) -> str:
    """The newest checkpoint of automatic naming. Raises :class:`NoCheckpointError` if there is none."""
    root = _root(accelerator)
    found = _folders(root) if accelerator.project_configuration.automatic_checkpoint_naming else []
    if not found:
        raise NoCheckpointError(f"{root}: no checkpoint_N in it, and no input_dir was given")
    return found[-1][1]


def delete_oldest(folder: str, limit: int) -> None:
    """Keep the ``limit`` newest beside ``folder``. A kill leaves remains under another name, which no resume takes."""
    root = os.path.dirname(folder)
    delete_all(old for _, old in _folders(root)[:-limit])


def _root(accelerator: Accelerator) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir or "", "checkpoints"))


def _folders(root: str) -> list[tuple[int, str]]:
    """Published checkpoints, oldest first."""
    if not os.path.isdir(root):
        return []
    matches = ((re.fullmatch(r"checkpoint_(\d+)", name), name) for name in os.listdir(root))
    return sorted((int(m[1]), os.path.join(root, name)) for m, name in matches if m)
