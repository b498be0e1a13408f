"""shardwise's exceptions. Each message says what is wrong and where, what was expected and found, and what to do next.

::

    ShardwiseError
    ├── SourceError            a source can't be read or is damaged (with the file's name)
    │   ├── VersionError       a checkpoint has a format version that this release can't read
    │   ├── FormatError        a header, index or manifest violates its format
    │   └── IntegrityError     a checksum, digest or size is wrong
    ├── LayoutError            the shards of a parallelized module can't be described
    ├── PlanError              a load wouldn't be complete; lists all problems at once
    │   └── UnsupportedConversionError   stored tensors need a conversion that is not supported
    ├── ShardError             a model can't be wrapped as requested
    ├── StateError             training state can't be stored or doesn't match
    ├── CheckpointError        a save or resume failed
    │   ├── NoCheckpointError  there are steps, but none is valid
    │   ├── LowSpaceError      the file system has less space than the save needs
    │   └── LockedError        another run is using the directory
    └── RankError              a rank failed; raised on every surviving rank

docs/errors.md has a section for each type, with causes and fixes. ``shardwise explain TYPE`` prints it, as the note below each error's
text says.
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
    "is_corruption",
    "is_unreadable",
]


#: Address of the documentation; ``site_url`` of mkdocs.yml is the same. Empty while there is none.
DOCS_URL = ""


class ShardwiseError(Exception):
    """Base class of every error that shardwise raises on purpose.

    Tracebacks also print a note (``__notes__``) that says how to look up causes and fixes. ``str(error)`` is the message without the note,
    because ranks compare messages and errors quote each other.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        section = self._section()
        page = f", or {DOCS_URL}/errors/#{section.lower()}" if DOCS_URL else ""
        self.add_note(f"Causes and fixes: shardwise explain {section}{page}")

    def _section(self) -> str:
        """The error's heading in docs/errors.md. Subclasses defined elsewhere use that of their base."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__)


class SourceError(ShardwiseError):
    """A source can't be read. ``path`` is the file."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class VersionError(SourceError):
    """A checkpoint has a format version that this release can't read. It isn't damaged."""


class FormatError(SourceError):
    """A header, index or manifest violates its format."""


class IntegrityError(SourceError):
    """Stored content has a different size, checksum or digest than the recorded one."""


class LayoutError(ShardwiseError):
    """The shards of a parameter can't be described, or differ from what torch allocated."""


class PlanError(ShardwiseError):
    """A load wouldn't be complete. ``problems`` has one line per problem."""

    def __init__(self, summary: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join((summary, *(f"  - {p}" for p in problems))))
        self.problems = problems


class UnsupportedConversionError(PlanError):
    """Stored tensors need a conversion that this version doesn't support."""


class ShardError(ShardwiseError):
    """A model can't be wrapped as requested."""


class StateError(ShardwiseError):
    """Training state can't be stored, or doesn't match the live objects."""


class CheckpointError(ShardwiseError):
    """A save or resume failed."""


class NoCheckpointError(CheckpointError):
    """Steps were published, but none of them is valid."""


class LockedError(CheckpointError):
    """Another run is using the checkpoint directory."""


class LowSpaceError(CheckpointError):
    """The checkpoint's file system has less space than the save needs. Nothing was written.

    ``needed_bytes`` and ``free_bytes`` are set on the rank that checked, and None on ranks that learned of the failure from it.
    """

    def __init__(
        self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class RankError(ShardwiseError):
    """Work failed on at least one rank. Raised with the same message on every surviving rank.

    ``causes`` maps each failed rank to a one-paragraph cause. ``missing`` lists ranks that made no progress within the timeout.
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
            lines.append(
                f"  rank {names}: no progress for {timeout_s:g} s (killed, stopped, hanging, or it never made this call; all ranks must)"
            )
        super().__init__("\n".join(lines))

    def _section(self) -> str:
        """The cause's heading, if all failed ranks have the same one: its fixes are the ones that help."""
        kinds = {cause.partition(":")[0] for cause in self.causes.values()}
        return kinds.pop() if len(kinds) == 1 and kinds < set(__all__) and not self.missing else "RankError"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its own arguments: the inherited way calls the type with the text alone, and fails."""
        return type(self), (self.label, self.causes, self.missing, self._timeout_s), self.__dict__


def is_corruption(error: ShardwiseError) -> bool:
    """Whether an error means that stored bytes are missing or corrupted, on any rank.

    These don't count as corruption: a file that can't be read for another reason (too many open files, permissions, an unreachable server), a newer
    format version, and valid state that doesn't fit the live objects. They never justify moving a step out of the way.
    """
    return _is_all(error, IntegrityError, FormatError)


def is_unreadable(error: ShardwiseError) -> bool:
    """Whether an error means that a source can't be read, for any reason, on any rank."""
    return _is_all(error, SourceError)


def _is_all(error: ShardwiseError, *kinds: type[ShardwiseError]) -> bool:
    """Whether it is one of these kinds: for a :class:`RankError`, on all ranks that failed."""
    if isinstance(error, RankError):
        names = tuple(kind.__name__ for kind in kinds)
        return bool(error.causes) and all(cause.startswith(names) for cause in error.causes.values())
    return isinstance(error, kinds)
