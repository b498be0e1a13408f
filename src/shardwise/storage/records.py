"""What a store says of its objects, and the verbs that it must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Protocol

from ..errors import IntegrityError
from ..objects import frozen

__all__ = ["Cut", "Held", "Listing", "Moved", "ObjectFile", "Stat", "Store"]


@frozen
class Stat:
    """A file or an object."""

    nbytes: int
    version: str | None = None
    """What changes when an object is replaced: its ETag, or the time of its last change. None for local files."""
    changed_s: float | None = None
    """When it was last written, by the store's clock, in seconds since 1970. None where the store does not say, and for local files."""


@frozen
class Held:
    """A small object, whole, as :meth:`Store.get` found it."""

    content: bytes
    version: Mapping[str, str]
    """What :meth:`Store.replace` compares."""


@frozen
class Listing:
    """The names directly below a prefix."""

    files: Mapping[str, Stat] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()


class Moved(IntegrityError):
    """An object was replaced after it was first looked at."""


class Cut(Exception):
    """A body ended, or its connection did, before all bytes came: the rest may be asked for."""


class ObjectFile(Protocol):
    """An object that is being written. Every method raises :class:`CheckpointError`."""

    def write(self, data: memoryview) -> None:
        """Append bytes; they may be changed after the return."""

    def close(self) -> None:
        """Let the object appear, whole."""


class Store(Protocol):
    """The objects of one bucket, by key. Thread-safe. Every method raises :class:`SourceError` where the store refuses."""

    def list(self, folder: str) -> Listing:
        """The names directly below ``folder`` ('' for the root); empty if there are none."""

    def list_below(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Every object below ``folder``, by its name from there; a request for each 1,000."""

    def stat(self, key: str) -> Stat | None:
        """An object; None if there is none of that name."""

    def read(self, key: str, start: int, stop: int) -> tuple[Stat | None, Iterator[bytes]]:
        """Bytes ``start`` to ``stop`` of an object, as they come, and the object as this reply describes it (None: the
        store does not say). Raises ``FileNotFoundError``; the iterator raises :class:`Cut`."""

    def write(self, key: str, pieces: Iterator[memoryview], nbytes: int) -> None:
        """Write an object of ``nbytes`` bytes; it appears whole, or not at all. Holds a few pieces.

        Raises :class:`CheckpointError`, and what ``pieces`` raises.
        """

    def writer(self, key: str, nbytes: int) -> ObjectFile:
        """Write an object from front to back, of about ``nbytes`` bytes. One that is not closed never appears."""

    def create(self, key: str, content: bytes) -> bool:
        """Write a small object if there is none; whether it has this content then. Raises :class:`CheckpointError`.

        ``content`` is unlike that of any other writer: so a reply that was lost is found out by reading back.
        """

    def get(self, key: str, most_bytes: int) -> Held | None:
        """A small object; None if there is none. Raises :class:`FormatError` if it has more than ``most_bytes`` bytes."""

    def replace(self, key: str, content: bytes, held: Held) -> bool:
        """Replace an object if it is still the one that ``held`` is; whether it has this content then. Raises :class:`CheckpointError`.

        ``content`` is unlike that of any other writer, as for :meth:`create`.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if there is one. Raises :class:`CheckpointError`."""
