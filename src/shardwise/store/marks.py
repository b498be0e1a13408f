"""Which unfinished files and directories shardwise made, and may delete: a name never proves that.

* A name of ours ends with a nonce, as ``.tmp-step-00000005-0123456789abcdef``.
* A directory under such a name holds a note with the same nonce before anything else, or a manifest that belongs to its name. Without
  either it is ours only while nothing else is in it. The note goes when the manifest is on the disk.
* A file under such a name holds what its kind may hold, or the beginning of it, or zeros, as a power loss leaves it.

So a deletion takes the note last, or the manifest where there is no note: what it leaves when it is cut, also by a power loss, can be told
again. Links are never ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable

from ..errors import CheckpointError, SourceError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..format.steps import misnamed
from ..limits import read_json, read_small
from ..ranks.patience import patiently, remove_tree
from .write import fsync_directory, write_file

__all__ = ["NOTE_NAME", "has_note", "is_checkpoint", "is_ours", "mark", "remove_ours", "run_of", "unmark"]

NOTE_NAME = ".shardwise"
_PROOFS = (NOTE_NAME, MANIFEST_NAME)
_MOST_BYTES = 1000
_NONCE = "(?P<nonce>[0-9a-f]{16})"
_FOLDER = re.compile(rf"\.(?:tmp|trash)-(?P<of>.+)-{_NONCE}|\.tmp-(?P<view>[0-9a-f]{{16}})-view")
_COPYING = re.compile(rf".+\.copying-{_NONCE}")
#: Files that appear by a rename, by the beginning of their names, and what they may hold.
_FILES = {
    "latest": re.compile(rb"(s|st|ste|step|step-\d*\n?)?"),
    "place": re.compile(rb"[0-9a-f]{0,16}\n?"),
    "memory": re.compile(rb'(\{"format": .*)?', re.DOTALL),
}
_FILE = re.compile(rf"\.tmp-(?P<kind>{'|'.join(_FILES)})-{_NONCE}")
_PROBE = re.compile(r"\.tmp-probe-[0-9a-f]{16}-\d+")


def mark(path: str) -> None:
    """Write the note into a new directory and sync both, so that no file can survive a power loss without it.

    Raises :class:`CheckpointError`.
    """
    note = {
        "shardwise": "unfinished or deleted: shardwise may delete this directory",
        "nonce": _nonce_of(path),
    }
    write_file(os.path.join(path, NOTE_NAME), json.dumps(note).encode())
    fsync_directory(path)


def unmark(path: str) -> None:
    """Delete the note, durably, before a directory gets its final name. Raises ``OSError``, :class:`CheckpointError`."""
    with contextlib.suppress(FileNotFoundError):
        patiently(os.unlink, os.path.join(path, NOTE_NAME))
        fsync_directory(path)


def has_note(path: str) -> bool:
    """Whether a directory, and no link to one, holds the note with the nonce of its name."""
    nonce = _nonce_of(path)
    if not nonce or not _is(stat.S_ISDIR, path) or not _is(stat.S_ISREG, os.path.join(path, NOTE_NAME)):
        return False
    try:
        note = read_json(os.path.join(path, NOTE_NAME), "note", _MOST_BYTES)
    except SourceError:
        return False
    return isinstance(note, dict) and "shardwise" in note and note.get("nonce") == nonce


def run_of(path: str) -> str | None:
    """The run of a checkpoint: of a directory, and no link to one, with an intact manifest that belongs to its name. None for anything else."""
    if not _is(stat.S_ISDIR, path) or not _is(stat.S_ISREG, os.path.join(path, MANIFEST_NAME)):
        return None
    try:
        manifest = patiently(read_manifest, path)
    except SourceError:
        return None
    unfinished = _FOLDER.fullmatch(os.path.basename(path))
    final = path if unfinished is None else unfinished["of"] or ""
    return None if misnamed(final, manifest.step, manifest.files) else manifest.run_id


def is_checkpoint(path: str) -> bool:
    """Whether a directory is a checkpoint of ours, of whatever run: see :func:`run_of`."""
    return run_of(path) is not None


def is_ours(path: str) -> bool:
    """Whether shardwise made this unfinished file or directory, so that it may be deleted. Rank-local."""
    name = os.path.basename(path)
    if _FOLDER.fullmatch(name) and _is(stat.S_ISDIR, path):
        return has_note(path) or is_checkpoint(path) or _has_no_content(path)
    if not _is(stat.S_ISREG, path):
        return False
    if _PROBE.fullmatch(name):
        return os.lstat(path).st_size == 0
    found = _FILE.fullmatch(name)
    try:
        return found is not None and bool(
            _FILES[found["kind"]].fullmatch(patiently(read_small, path, "file", _MOST_BYTES).rstrip(b"\0"))
        )
    except SourceError:
        return False


def remove_ours(path: str) -> None:
    """Delete a file or a directory of ours, what proves it to be ours last. What can't be deleted stays; links are not followed."""
    if not _is(stat.S_ISDIR, path):
        with contextlib.suppress(OSError):
            patiently(os.unlink, path)
        return
    # Not both: a power loss could take the note alone, and leave a manifest that never came to the disk.
    proofs = (NOTE_NAME,) if has_note(path) else _PROOFS
    remove_tree(path, spared=proofs)
    with contextlib.suppress(OSError, CheckpointError):
        if all(name in proofs for name in patiently(os.listdir, path)):
            fsync_directory(path)  # a power loss must not bring back what they prove without them
            for name in proofs:
                with contextlib.suppress(FileNotFoundError):
                    patiently(os.unlink, os.path.join(path, name))
            patiently(os.rmdir, path)


def _nonce_of(path: str) -> str:
    name = os.path.basename(path)
    found = _FOLDER.fullmatch(name) or _COPYING.fullmatch(name)
    return "" if found is None else found["nonce"] or found["view"]


def _is(kind: Callable[[int], bool], path: str) -> bool:
    """Whether there is something of this kind, which is no link."""
    try:
        return kind(patiently(os.lstat, path).st_mode)
    except OSError:
        return False


def _has_no_content(path: str) -> bool:
    """Whether a directory is empty, but for a note that never came to the disk."""
    try:
        return all(name == NOTE_NAME for name in patiently(os.listdir, path))
    except OSError:
        return False
