"""The error tree. Every error says what, where, expected, got, and what to do next.

::

    ShardwiseError
    ├── SourceError            a source can't be read or is damaged (names the file)
    │   ├── VersionError       a checkpoint of a format version that this release does not read
    │   ├── FormatError        header, index or manifest is not what its format says
    │   └── IntegrityError     bytes are there but checksum, digest or size is wrong
    ├── LayoutError            a parallelized module whose shards we can't describe
    ├── PlanError              a load that can't be proved complete; lists everything at once
    │   └── UnsupportedConversionError   stored tensors need a conversion that is not supported
    ├── ShardError             a model can't be wrapped as asked
    ├── StateError             training state can't be expressed or matched
    ├── CheckpointError        save, publish or resume failed
    │   ├── NoCheckpointError  steps exist and none is valid
    │   ├── LowSpaceError      the file system has less room than the save takes
    │   └── LockedError        another run holds the directory
    └── RankError              some rank failed; raised on every living rank

docs/errors.md has a section for each, with causes and fixes, which ``shardwise explain TYPE`` prints; a note below each
error's text says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "FormatError",
    "IntegrityError",
    "LayoutError",
    "LockedError",
    "LowSpaceError",
    "NoCheckpointError",
    "PlanError",
    "RankError",
    "ShardError",
    "ShardwiseError",
    "SourceError",
    "StateError",
    "UnsupportedConversionError",
    "VersionError",
    "is_damage",
    "is_unreadable",
]


#: Address of the documentation; ``site_url`` of mkdocs.yml is the same. Empty while there is none.
DOCS_URL = ""


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose.

    A note (``__notes__``), which tracebacks print below the text, says how to see causes and fixes.
    ``str(error)`` is the text alone: ranks compare it, and errors quote each other.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        section = self._section()
        page = f", or {DOCS_URL}/errors/#{section.lower()}" if DOCS_URL else ""
        self.add_note(f"Causes and fixes: shardwise explain {section}{page}")

    def _section(self) -> str:
        """The heading of docs/errors.md that tells of this error; a subclass of a user has that of its base."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)


class SourceError(ShardwiseError):
    """A source can't be read. ``path`` names the file."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class VersionError(SourceError):
    """A checkpoint has a format version that this release does not read. It is not damaged."""


class FormatError(SourceError):
    """A header, index or manifest does not follow its format."""


class IntegrityError(SourceError):
    """Content is there, but its size, checksum or digest is not the recorded one."""


class LayoutError(ShardwiseError):
    """The shards of a parameter can't be described, or differ from what torch allocated."""


class PlanError(ShardwiseError):
    """A load can't be proved complete. ``problems`` holds one line per finding."""

    def __init__(self, summary: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join((summary, *(f"  - {p}" for p in problems))))
        self.problems = problems


class UnsupportedConversionError(PlanError):
    """Stored tensors need a conversion that this version can't compile."""


class ShardError(ShardwiseError):
    """A model can't be wrapped as asked."""


class StateError(ShardwiseError):
    """Training state can't be expressed, stored or matched with the live objects."""


class CheckpointError(ShardwiseError):
    """A save, publish or resume failed."""


class NoCheckpointError(CheckpointError):
    """Steps were published, but none of them is valid."""


class LockedError(CheckpointError):
    """Another run holds the checkpoint directory."""


class LowSpaceError(CheckpointError):
    """The file system of a checkpoint has less room than the save takes. Nothing was written.

    ``needed_bytes`` and ``free_bytes`` are those of the rank that looked; None on ranks that another rank told.
    """

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class RankError(ShardwiseError):
    """Work failed on some rank. Raised with the same text on every living rank.

    ``causes`` maps each failing rank to a one-paragraph cause; ``missing`` names ranks that made
    no progress for the timeout.
    """

    def __init__(
        self, label: str, causes: Mapping[int, str], missing: tuple[int, ...] = (), timeout_s: float = 0.0
    ) -> None:
        self.label = label
        self.causes = dict(causes)
        self.missing = missing
        self._timeout_s = timeout_s
        lines = [f"'{label}' failed"]
        lines += [f"  rank {rank}: {cause}" for rank, cause in sorted(causes.items())]
        if missing:
            names = ", ".join(map(str, missing))
            lines.append(f"  rank {names}: no progress for {timeout_s:g} s (killed, stopped or hanging)")
        super().__init__("\n".join(lines))

    def _section(self) -> str:
        """That of the cause, if all failing ranks have one: its cures are the ones that help."""
        kinds = {cause.partition(":")[0] for cause in self.causes.values()}
        return kinds.pop() if len(kinds) == 1 and kinds < set(__all__) and not self.missing else "RankError"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its own arguments: the inherited way calls the type with the text alone, and fails."""
        return type(self), (self.label, self.causes, self.missing, self._timeout_s), self.__dict__


def is_damage(error: ShardwiseError) -> bool:
    """Whether an error means that stored bytes are lost or wrong, on any rank.

    Not damage: a file that can't be read for another reason (too many open files, permissions, an unreachable
    server), a later format version, or a valid state that the live objects do not fit. No step may be moved aside for
    these.
    """
    return _is_all(error, IntegrityError, FormatError)


def is_unreadable(error: ShardwiseError) -> bool:
    """Whether an error means that a source can't be read, for whatever reason, on any rank."""
    return _is_all(error, SourceError)


def _is_all(error: ShardwiseError, *kinds: type[ShardwiseError]) -> bool:
    """Whether it is one of these kinds: for a :class:`RankError`, on all ranks that failed."""
    if isinstance(error, RankError):
        names = tuple(kind.__name__ for kind in kinds)
        return bool(error.causes) and all(cause.startswith(names) for cause in error.causes.values())
    return isinstance(error, kinds)
