"""One host's ring: a private directory on tmpfs with slots, each a part of a checkpoint directory in the ordinary format."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator

from ..errors import CheckpointError, LowSpaceError
from ..format.manifest import MANIFEST_NAME
from ..format.places import rank_of_file
from ..limits import inside, read_small
from ..ranks.patience import remove_tree
from .below import open_below

__all__ = ["Ring", "Slot", "unwritten", "write_whole"]

_SLOTS = re.compile(r"(own|held)-[01]")
_MAX_LINES_BYTES = 10_000


class Ring:
    """The directory of one run on one host. Every rank of the host makes one; they share it.

    Raises :class:`CheckpointError` if it can't be made, or if another user has made it.
    """

    def __init__(self, root: str, name: str) -> None:
        self.path = os.path.join(root, f"shardwise-{name}")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            found = os.lstat(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: can't be made: {error.strerror}; give InMemoryCheckpoints a directory on tmpfs"
            ) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise CheckpointError(
                f"{self.path}: is not a directory, belongs to another user, or is readable by other users; remove it"
            )

    def slot(self, name: str) -> Slot:
        """A slot, whether it is there or not."""
        return Slot(os.path.join(self.path, name))

    def slots(self) -> list[str]:
        """Names of the slots that hold a manifest. A link is no slot."""
        with os.scandir(self.path) as entries:
            names = [e.name for e in entries if _SLOTS.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        return sorted(name for name in names if self.slot(name).has_manifest)

    @property
    def lines(self) -> list[str]:
        """The lines of the run to which the slots belong."""
        try:
            return read_small(os.path.join(self.path, "lines"), "lines", _MAX_LINES_BYTES).decode().split()
        except Exception:  # lost or damaged: then nothing here counts
            return []

    def set_lines(self, lines: Collection[str]) -> None:
        """Say to which lines the slots belong. For the first rank of a host."""
        write_whole(os.path.join(self.path, "lines"), "\n".join(lines).encode())

    def readable(self, name: str) -> str:
        """The path of a file that other hosts may read. Raises :class:`CheckpointError`, :class:`FormatError` for any other."""
        if not _SLOTS.fullmatch(name.partition("/")[0].removesuffix(".files")):
            raise CheckpointError(f"{name}: is no file of a slot")
        return inside(self.path, name)

    def sweep_views(self) -> None:
        """Delete views that a killed resume left."""
        for name in os.listdir(self.path):
            if name.startswith("view-"):
                remove_tree(os.path.join(self.path, name))

    def new_view(self) -> str:
        """Path of a directory for a resume."""
        return os.path.join(self.path, f"view-{secrets.token_hex(8)}")

    def remove(self) -> None:
        """Give the memory back."""
        remove_tree(self.path)


class Slot:
    """Some files of one step, under their names in a checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def has_manifest(self) -> bool:
        return os.path.isfile(os.path.join(self.path, MANIFEST_NAME))

    def clear(self) -> None:
        """The step is no longer held; its files stay for the next one to write over, which spares new pages."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, MANIFEST_NAME))

    def remove(self) -> None:
        """Give the slot's memory back."""
        if os.path.isdir(self.path):
            self.clear()
            remove_tree(self.path)

    def files(self) -> Iterator[str]:
        """Names of all files but the manifest."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                found = os.path.relpath(os.path.join(folder, name), self.path)
                if found != MANIFEST_NAME:
                    yield found

    def keep_only(self, ranks: Collection[int], names: Collection[str]) -> None:
        """Delete files of ``ranks`` that are not among ``names``."""
        for name in list(self.files()):
            if rank_of_file(name) in ranks and name not in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))

    def room_for(self, name: str, nbytes: int) -> str:
        """Path of a file of exactly so many bytes with pages of its own. Raises :class:`LowSpaceError`, :class:`CheckpointError`."""
        path = inside(self.path, name)
        try:
            ring, slot = os.path.split(self.path)
            fd = open_below(ring, f"{slot}/{name}", os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(fd).st_size != nbytes:
                    os.ftruncate(fd, 0)
                    if nbytes:
                        os.posix_fallocate(fd, 0, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise LowSpaceError(f"{path}: no room for {nbytes:,} bytes", needed_bytes=nbytes) from error
            raise CheckpointError(f"{path}: can't be written: {error.strerror}") from error
        return path


def unwritten(path: str, error: OSError) -> CheckpointError:
    """The error of a file on tmpfs that can't be written: :class:`LowSpaceError` where it is full."""
    kind = LowSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else CheckpointError
    return kind(f"{path}: can't be written: {error.strerror}")


def write_whole(path: str, content: bytes) -> None:
    """Replace a small file. Raises :class:`CheckpointError`."""
    temporary = f"{path}.{secrets.token_hex(4)}"
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise unwritten(path, error) from error
