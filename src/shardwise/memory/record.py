"""The record of a run's memory, beside its steps on disk: the name of its rings, and the line whose steps count.

A resume begins a new line. Hosts that are there take it over; slices on a host that was away stay with the line before, and can never
bring back a step that the run has given up.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass

from ..errors import CheckpointError, FormatError
from ..limits import is_word, read_json
from ..ranks.patience import patiently
from ..store.lock import check_held
from ..store.write import fsync_directory, write_file

__all__ = ["Record", "new_word", "read_or_make_record", "write_record"]

_NAME = ".memory.json"
_FORMAT, _VERSION = "shardwise-memory", 1


@dataclass(frozen=True, slots=True)
class Record:
    """What rank 0 reads and writes."""

    name: str
    """Of the rings: drawn by lot, so that no other run or user can take it before."""
    line: str


def new_word() -> str:
    """A name that was never used."""
    return secrets.token_hex(16)


def read_or_make_record(root: str) -> Record:
    """The record in a run's directory; a new one if there is none, or if it is damaged. For rank 0.

    Raises :class:`SourceError` if it can't be read, :class:`CheckpointError` if it can't be written.
    """
    path = os.path.join(root, _NAME)
    if patiently(os.path.lexists, path):
        try:
            found = read_json(path, "record of the memory tier", 10_000)
            name, line = found["name"], found["line"]
            if (
                found["format"] == _FORMAT
                and found["version"] == _VERSION
                and is_word(name)
                and is_word(line)
            ):
                return Record(name, line)
        except (FormatError, KeyError, TypeError):
            pass  # damaged: a resume then finds no step in memory, and takes one on disk
    record = Record(new_word(), new_word())
    write_record(root, record)
    return record


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
