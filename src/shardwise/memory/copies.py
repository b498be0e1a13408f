"""Brings units of another host into files or memory of this one. Each is compared with its checksum as it arrives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial

import xxhash

from ..errors import IntegrityError
from .link import Reader
from .ring import unwritten
from .units import Unit

__all__ = ["copy_units", "receive_bytes", "receive_unit"]

#: A unit that arrives damaged is read again: a resume takes what stays damaged for damage on the disk, and goes on from an older step.
_ATTEMPTS = 3


def copy_units(
    reader: Reader,
    name: str,
    units: Iterable[Unit],
    path: str,
    on_progress: Callable[[], object],
) -> int:
    """Copy units of the file ``name`` of another ring into the file at ``path``, which has its size. Returns their bytes.

    Memory: a piece of 256 KiB; bytes go to their place before the unit is whole. Raises :class:`IntegrityError` for a unit that
    arrived damaged: the file then holds its damaged bytes. :class:`CheckpointError` if the other host does not send it, :class:`LowSpaceError`
    if the file's pages find no room.
    """
    done = 0
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise unwritten(path, error) from error
    try:
        for unit in units:
            _until_whole(partial(_bring, reader, name, unit, fd, path), name, unit.start, unit.stop)
            done += unit.nbytes
            on_progress()
    finally:
        os.close(fd)
    return done


def receive_unit(reader: Reader, name: str, unit: Unit, memory: memoryview) -> None:
    """Fill ``memory``, which has its bytes, with a unit of the file ``name`` of another ring.

    Raises :class:`IntegrityError` for a unit that arrived damaged, :class:`CheckpointError` if the other host does not send it.
    """

    def receive() -> bool:
        found = xxhash.xxh3_64()
        for piece in reader.pieces_into(name, unit.start, memory):
            found.update(piece)
        return found.hexdigest() == unit.xxh3

    _until_whole(receive, name, unit.start, unit.stop)


def receive_bytes(reader: Reader, name: str, start: int, memory: memoryview) -> None:
    """Fill ``memory`` with bytes of the file ``name`` of another ring, which has proved the unit that they are part of.

    Raises as :func:`receive_unit`: each piece that arrives has the tag that the other host gave it.
    """

    def receive() -> bool:
        return all(piece.nbytes for piece in reader.pieces_into(name, start, memory))

    _until_whole(receive, name, start, start + memory.nbytes)


def _until_whole(is_whole: Callable[[], bool], name: str, start: int, stop: int) -> None:
    """Bring bytes until they arrive as they are there; ``_ATTEMPTS`` times at most."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(IntegrityError):
            if is_whole():
                return
    raise IntegrityError(f"bytes {start} to {stop} arrived damaged", path=name)


def _bring(reader: Reader, name: str, unit: Unit, fd: int, path: str) -> bool:
    """Write a unit to its place. Returns whether what arrived has its checksum."""
    at, found = unit.start, xxhash.xxh3_64()
    for piece in reader.pieces(name, unit.start, unit.nbytes):
        found.update(piece)
        _write(fd, piece, at, path)
        at += piece.nbytes
    return found.hexdigest() == unit.xxh3


def _write(fd: int, content: memoryview, start: int, path: str) -> None:
    at = 0
    try:
        while at < content.nbytes:
            at += os.pwrite(fd, content[at:], start + at)
    except OSError as error:
        raise unwritten(path, error) from error
