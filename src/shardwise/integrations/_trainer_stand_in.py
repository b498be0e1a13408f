"""Local folders that Trainer opens in place of checkpoints in a store: with the small files, without the state."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from ..checkpoint.stored_documents import read_checked
from ..errors import FormatError
from ..format.manifest import Manifest, read_manifest
from ..limits import inside
from ..ranks.ranks import Ranks
from ..storage import absolute, is_url
from ._trainer_files import MAX_FILES_BYTES

__all__ = ["STATE_NAME", "StandIns"]

STATE_NAME = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class _StandIn:
    path: str
    """The checkpoint."""
    best: str | None
    """The best checkpoint that its ``trainer_state.json`` names, if that is a URL: Trainer would look for a directory."""


class StandIns:
    """The folders of one call of ``train``, on this rank."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._found: dict[str, _StandIn] = {}

    def folder_for(self, path: str | os.PathLike[str]) -> str:
        """The folder that Trainer opens for a checkpoint: a local one itself, for a URL a new one with its small files. Collective.

        Raises as :func:`.read_manifest`; :class:`FormatError` for a checkpoint that no ``ShardwiseTrainer`` has written,
        :class:`IntegrityError` for a damaged file.
        """
        path = os.fspath(path)
        if not is_url(path):
            return path
        path = absolute(path)
        with Ranks.current().agree("fetch Trainer's files"):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-resumed-"))
            self._found[folder] = _StandIn(path, _fetch(path, read_manifest(path), folder))
        return folder

    def path_of(self, folder: str) -> str:
        """The checkpoint for which a folder stands; for any other folder itself."""
        found = self._found.get(folder)
        return folder if found is None else found.path

    def best_of(self, folder: str) -> str | None:
        """The URL of the best checkpoint that the stored state of a stand-in names."""
        found = self._found.get(folder)
        return None if found is None else found.best

    def close(self) -> None:
        """Delete the folders."""
        self._stack.close()


def _fetch(path: str, manifest: Manifest, folder: str) -> str | None:
    """Copy the files at the top, but weights and documents, into ``folder``. Returns the URL of the best checkpoint, if it is one."""
    if STATE_NAME not in manifest.files:
        raise FormatError(
            f"holds no {STATE_NAME}, which checkpoints of a ShardwiseTrainer have; restore it with shardwise.restore",
            path=path,
        )
    best = None
    for name in manifest.files:
        if "/" in name or name == "state.json" or name.endswith(".safetensors"):
            continue
        content = read_checked(path, manifest, name, MAX_FILES_BYTES)
        if name == STATE_NAME:
            best, content = _without_best(content, inside(path, name))
        with open(inside(folder, name), "wb") as file:
            file.write(content)
    return best


def _without_best(content: bytes, path: str) -> tuple[str | None, bytes]:
    """The best checkpoint in Trainer's state, if it is a URL, and the state without it."""
    try:
        state = json.loads(content)
        best = state.get("best_model_checkpoint")
    except (ValueError, AttributeError) as error:
        raise FormatError(f"is not Trainer's state: {error}", path=path) from error
    if not isinstance(best, str) or not is_url(best):
        return None, content
    return best, json.dumps({**state, "best_model_checkpoint": None}, indent=2).encode()
