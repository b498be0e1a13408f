"""The record of a run's memory, beside its steps on disk: the name of its rings, and the line whose steps count.

A resume begins a new line. Hosts that are there take it over; slices on a host that was away stay with the line before, and can never
bring back a step that the run has given up.

The name belongs to one directory. It is made of what a copy of the directory does not have, and a directory that is moved, or mounted
elsewhere, keeps: the numbers that the file system gives the directory and a file in it that is written once, and the time of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat

from ..errors import CheckpointError, FormatError
from ..limits import is_word, read_json, read_small
from ..objects import frozen
from ..ranks.patience import patiently
from ..store.lock import check_held
from ..store.write import fsync_directory, write_file

__all__ = ["Record", "new_word", "read_or_make_record", "write_record"]

_log = logging.getLogger(__name__)
#: The mark has no dot: whoever deletes all that a listing shows begins another run.
_NAME, _MARK = ".memory.json", "memory-id"
_FORMAT, _VERSION = "shardwise-memory", 2
_WORD_BYTES = 16


@frozen
class Record:
    """What rank 0 reads and writes."""

    name: str
    """Of the rings: no other directory has it, and no other user can guess it."""
    line: str


def new_word() -> str:
    """A name that was never used."""
    return secrets.token_hex(_WORD_BYTES)


def read_or_make_record(root: str) -> Record:
    """The record in a run's directory; a new one if there is none, if it is damaged, or if it is another directory's, whose rings
    are left alone. For rank 0, which holds the directory.

    Raises :class:`SourceError` if it can't be read, :class:`CheckpointError` if it can't be written.
    """
    name, found = _name_of(root), _read(root)
    if found is not None and found.name == name:
        return found
    if found is not None:
        _log.warning(
            "%s: is a copy of another run's directory, or came from another file system, or its %s was changed: the steps in memory under "
            "the name shardwise-%s are left to that run; a resume takes a step on disk",
            root,
            _MARK,
            found.name,
        )
    record = Record(name, new_word())
    write_record(root, record)
    return record


def _read(root: str) -> Record | None:
    path = os.path.join(root, _NAME)
    if patiently(os.path.lexists, path):
        # Damaged: a resume then finds no step in memory, and takes one on disk.
        with contextlib.suppress(FormatError, KeyError, TypeError):
            found = read_json(path, "record of the memory tier", 10_000)
            name, line = found["name"], found["line"]
            is_known = found["format"] == _FORMAT and found["version"] == _VERSION
            if is_known and is_word(name) and is_word(line):
                return Record(name, line)
    return None


def _name_of(root: str) -> str:
    """The name of this very directory, under any path and on any host that sees it. Makes its mark if there is none.

    Not a copy's, even one with all times or of hard links: the time at which a file's entry changed (``st_ctime``) can't be set. A snapshot
    is another file system.
    """
    path = os.path.join(root, _MARK)
    try:
        word = _word_in(path)
        if word is None:
            check_held(root)
            with contextlib.suppress(FileNotFoundError):
                patiently(os.unlink, path)
            write_file(path, new_word().encode())  # a temporary name would be a change after it
            word = _word_in(path)
        mark, folder = patiently(os.lstat, path), patiently(os.stat, root)
        system = patiently(os.statvfs, root).f_fsid
    except OSError as error:
        raise CheckpointError(
            f"{path}: the memory tier can't mark the directory as this run's: {error.strerror}"
        ) from error
    parts = (word, system, folder.st_ino, mark.st_ino, mark.st_ctime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[: 2 * _WORD_BYTES]


def _word_in(path: str) -> bytes | None:
    """The word of a mark; None if it is lost or is not a file. Reads it, so that a network file system asks for its times again."""
    if not patiently(os.path.lexists, path) or not stat.S_ISREG(patiently(os.lstat, path).st_mode):
        return None
    return read_small(path, "mark of the memory tier", 10_000)


def write_record(root: str, record: Record) -> None:
    """Replace the record; durable on return. For rank 0, which holds the directory.

    Raises :class:`CheckpointError`; :class:`LockedError` if another run has taken the directory.
    """
    check_held(root)
    content = {"format": _FORMAT, "version": _VERSION, "name": record.name, "line": record.line}
    path = os.path.join(root, _NAME)
    temporary = os.path.join(root, f".tmp-memory-{secrets.token_hex(8)}")
    write_file(temporary, json.dumps(content).encode())
    try:
        patiently(os.replace, temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from error
    fsync_directory(root)
