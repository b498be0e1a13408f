"""Local folders that Trainer opens in place of checkpoints in a store, or in parts on several hosts: with the small files, without
the state."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..checkpoint.hosts import Hosts, Opened
from ..checkpoint.stored_documents import read_checked
from ..errors import FormatError
from ..format.manifest import Manifest, read_manifest
from ..format.steps import TRAINER_FILE
from ..limits import inside, parse_json
from ..ranks.ranks import Ranks
from ..storage import absolute, is_url
from ._trainer_files import MAX_FILES_BYTES

__all__ = ["StandIns"]


@dataclass(slots=True)
class _StandIn:
    path: str
    """The checkpoint."""
    opened: Opened | None
    best: str | None
    """The best checkpoint that its ``trainer_state.json`` names: Trainer would look for a directory, on each rank."""
    stack: ExitStack
    """Closes the checkpoint, which is then None; it may be opened again."""


class StandIns:
    """The folders of one call of ``train``, on this rank."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._found: dict[str, _StandIn] = {}

    def folder_for(self, path: str | os.PathLike[str], hosts: Hosts) -> str:
        """The folder that Trainer opens for a checkpoint: one that all ranks see itself, else a new one with its small files. Collective.

        Raises as :func:`.read_manifest` and :meth:`.Hosts.opened`; :class:`FormatError` for a checkpoint that no ``ShardwiseTrainer``
        has written, :class:`IntegrityError` for a damaged file.
        """
        path = os.fspath(path)
        if not is_url(path) and not hosts.is_local:
            return path
        path = absolute(path)
        stack = self._stack.enter_context(ExitStack())
        opened = stack.enter_context(hosts.opened(path, also=_is_small))
        with Ranks.current().agree("fetch Trainer's files"):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-resumed-"))
            best = _fetch(opened.path, read_manifest(opened.path), folder)
            self._found[folder] = _StandIn(path, opened, best, stack)
        return folder

    @contextmanager
    def opened(self, folder: str, hosts: Hosts) -> Iterator[Opened]:
        """The checkpoint for which a folder stands, for the block; it is closed with it. Collective."""
        found = self._found.get(folder)
        if found is None:
            with hosts.opened(folder) as opened:
                yield opened
            return
        with found.stack:
            try:
                yield self._again(found, hosts)
            finally:
                found.opened = None

    def reading_place(self, folder: str, hosts: Hosts) -> str:
        """Where this rank reads the checkpoint for which a folder stands, until :meth:`opened` has closed it. Collective."""
        found = self._found.get(folder)
        return folder if found is None else self._again(found, hosts).path

    def _again(self, found: _StandIn, hosts: Hosts) -> Opened:
        """The checkpoint. It is closed if Trainer trains again from the same folder, as with ``auto_find_batch_size``."""
        if found.opened is None:
            found.opened = found.stack.enter_context(hosts.opened(found.path, also=_is_small))
        return found.opened

    def path_of(self, folder: str) -> str:
        """The checkpoint for which a folder stands; for any other folder itself."""
        found = self._found.get(folder)
        return folder if found is None else found.path

    def best_of(self, folder: str) -> str | None:
        """The best checkpoint that the stored state of a stand-in names: a URL, or a path on the host of rank 0 of then."""
        found = self._found.get(folder)
        return None if found is None else found.best

    def close(self) -> None:
        """Delete the folders."""
        self._stack.close()


def _fetch(path: str, manifest: Manifest, folder: str) -> str | None:
    """Copy the files at the top, but weights and documents, into ``folder``. Returns the best checkpoint, if one is named."""
    if TRAINER_FILE not in manifest.files:
        raise FormatError(
            f"holds no {TRAINER_FILE}, which checkpoints of a ShardwiseTrainer have; restore it with shardwise.restore",
            path=path,
        )
    best = None
    for name in manifest.files:
        if not _is_small(name):
            continue
        content = read_checked(path, manifest, name, MAX_FILES_BYTES)
        if name == TRAINER_FILE:
            best, content = _without_best(content, inside(path, name))
        with open(inside(folder, name), "wb") as file:
            file.write(content)
    return best


def _is_small(name: str) -> bool:
    """Whether a file at the top is one of Trainer's."""
    return not ("/" in name or name == "state.json" or name.endswith(".safetensors"))


def _without_best(content: bytes, path: str) -> tuple[str | None, bytes]:
    """The best checkpoint in Trainer's state, if there is one, and the state without it."""
    state = parse_json(content, path, "Trainer's state")
    if not isinstance(state, dict):
        raise FormatError("is not Trainer's state: not a JSON object", path=path)
    best = state.get("best_model_checkpoint")
    if not isinstance(best, str):
        return None, content
    return best, json.dumps({**state, "best_model_checkpoint": None}, indent=2).encode()
