"""On a shared file system ranks may see new files late. Rank 0's view decides; other ranks wait until theirs matches."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import xxhash

from ..errors import CheckpointError, ShardwiseError, SourceError
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..limits import read_small
from ..ranks.ranks import Ranks
from ..storage import is_url, names_in
from ..store.lock import holder_of

__all__ = ["SeenByFirst", "manifest_seen_by_first", "open_for_all", "wait_for_folders"]

#: Network file systems cache a directory for at most this long (NFS: acdirmax).
_MOST_PATIENCE_S = 60.0
#: On a disk of a host's own nothing comes late.
_PATIENCE_OF_DISK_S = 2.0
_PAUSE_S = 0.05


class SeenByFirst:
    """Rank 0's view of a checkpoint. Made by :func:`manifest_seen_by_first` on every rank."""

    def __init__(self, path: str, ranks: Ranks, view: list[Any] | None, manifest: Manifest | None) -> None:
        self._path = path
        self._ranks = ranks
        self._view = view
        self._manifest = manifest

    def manifest(self) -> Manifest:
        """The manifest, read by this rank once it sees the directory as rank 0 does. Rank-local.

        Does not wait if rank 0 could not read it. Raises as ``read_manifest``; :class:`SourceError` if this rank's view
        still differs from rank 0's after a minute or the time limit.
        """
        if self._manifest is not None:
            return self._manifest
        if self._view is None:
            return read_manifest(self._path)
        checksum, lost = self._view
        _wait(self._ranks, lambda: self._is_manifest(checksum), self._path, MANIFEST_NAME)
        manifest = read_manifest(self._path)
        names = set(manifest.files) - set(lost)
        _wait(self._ranks, lambda: not _unseen(self._path, names), self._path, "files of its manifest")
        return manifest

    def _is_manifest(self, checksum: str) -> bool:
        try:
            return _checksum(self._path) == checksum
        except SourceError:
            return False


def manifest_seen_by_first(path: str, ranks: Ranks) -> SeenByFirst:
    """Rank 0 reads a checkpoint and tells the other ranks its view. Collective."""
    manifest: Manifest | None = None

    def look() -> list[Any] | None:
        nonlocal manifest
        try:
            checksum = _checksum(path)
            manifest = read_manifest(path)
            return [checksum, sorted(_unseen(path, manifest.files))]
        except (OSError, ShardwiseError):  # every rank then finds the error itself
            return None

    view = None if ranks.world_size == 1 else ranks.on_first("look at manifest", look)
    return SeenByFirst(path, ranks, view, manifest)


def open_for_all(root: str, open_first: Callable[[], str], ranks: Ranks) -> str:
    """Rank 0 locks a run's directory by ``open_first``; every other rank checks that it sees the same directory.
    Returns on every rank what ``open_first`` returned on rank 0. Collective.

    Raises what ``open_first`` raises, and :class:`RankError` naming ranks and hosts that have no directory in common with rank 0.
    """

    def opened() -> list[str]:
        found = open_first()
        return [found, "" if is_url(root) else holder_of(root), f"{root} on host {socket.gethostname()}"]

    found, holder, first = ranks.on_first("lock checkpoint directory", opened)
    if holder and ranks.world_size > 1:  # on a full disk no holder is noted
        with ranks.agree("look at checkpoint directory"):
            _wait_for_directory(root, holder, first, ranks)
    return str(found)


def _wait_for_directory(root: str, holder: str, first: str, ranks: Ranks) -> None:
    """Wait until this rank sees in ``root`` what rank 0 has noted in its lock file there. Rank-local.

    ``first``: the directory and host of rank 0, for the error. Raises :class:`CheckpointError` after a minute or the time limit, on
    a local file system after two seconds: the ranks have no directory in common, and no save could succeed.
    """
    if holder_of(root) == holder:
        return
    from ..loading.strategy import on_network  # and with it what loads, for which no first save waits

    patience_s = min(_MOST_PATIENCE_S if on_network(root) else _PATIENCE_OF_DISK_S, ranks.timeout_s)
    end = time.monotonic() + patience_s
    while (found := holder_of(root)) != holder:
        if time.monotonic() > end:
            there = "another directory than rank 0's" if os.path.isdir(root) else "no such directory"
            seen = f"; its lock was noted by {found}" if found else ""
            raise CheckpointError(
                f"{root}: rank {ranks.rank} on host {socket.gethostname()} sees {there} after {patience_s:g} s; rank 0 has locked "
                f"{first}{seen}. Give every rank the same path on a file system that all hosts share, or the URL of an object "
                f"store (if the path contains the time, rank 0 must make it and send it to all ranks)"
            )
        ranks.tick()
        time.sleep(_PAUSE_S)


def wait_for_folders(path: str, folders: Sequence[str], ranks: Ranks) -> None:
    """Wait until this rank sees a directory that rank 0 has just made, with its folders. Rank-local.

    Raises :class:`CheckpointError` after a minute or the time limit.
    """
    missing = [f for f in folders if not os.path.isdir(os.path.join(path, f))]
    try:
        for folder in missing:
            _wait(ranks, lambda folder=folder: os.path.isdir(os.path.join(path, folder)), path, folder)  # type: ignore[misc]
    except SourceError as error:
        raise CheckpointError(str(error)) from error


def _checksum(path: str) -> str:
    return xxhash.xxh3_64_hexdigest(read_small(os.path.join(path, MANIFEST_NAME), "manifest"))


def _unseen(path: str, names: Collection[str]) -> set[str]:
    """The files that are not listed. Lists each folder once instead of asking for every file of every rank.

    None below a URL: objects are read by name, and a listing may be late.
    """
    if is_url(path):
        return set()
    seen = set()
    for folder in {os.path.dirname(name) for name in names}:
        try:
            seen |= {os.path.join(folder, name) for name in names_in(os.path.join(path, folder))}
        except (FileNotFoundError, NotADirectoryError):
            continue
    return set(names) - seen


def _wait(ranks: Ranks, is_there: Callable[[], bool], path: str, what: str) -> None:
    patience_s = min(_MOST_PATIENCE_S, ranks.timeout_s)
    end = time.monotonic() + patience_s
    while not is_there():
        if time.monotonic() > end:
            raise SourceError(
                f"rank 0 sees {what}, rank {ranks.rank} does not after {patience_s:g} s; every rank needs the same "
                f"shared file system under this path",
                path=path,
            )
        ranks.tick()
        time.sleep(_PAUSE_S)
