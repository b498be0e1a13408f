"""One host's ring: a private directory on tmpfs with slots, each a part of a checkpoint directory in the ordinary format."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ..errors import CheckpointError, FormatError, LowSpaceError
from ..format.manifest import MANIFEST_NAME, rank_of_file
from ..limits import inside, is_word, read_json, read_small
from ..objects import frozen
from ..ranks.ranks import patiently, remove_tree
from .lock import check_held
from .write import replace_file, tensor_bytes, write_file

# ----------------------------------------------------------------------------------------------------
# Opens files below a directory without following a link on the way.

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_below(root: str, name: str, flags: int = os.O_RDONLY) -> int:
    """Open the regular file ``name``, which :func:`.limits.inside` has checked, below ``root``. Returns its descriptor.

    With ``O_CREAT`` folders that are not there are made, for this user alone. Never waits for a pipe. Raises ``OSError``, also for a link
    in place of the file or of a folder on the way.
    """
    *folders, last = name.split("/")
    folder = os.open(root, _FOLDER)
    try:
        for one in folders:
            if flags & os.O_CREAT:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one, 0o700, dir_fd=folder)
            inner = os.open(one, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        found = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "is not a regular file", name)
    return found


# ----------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------
# Files of a ring as memory of this process, kept from one step to the next.

#: A tensor, memory, and the first byte there.
Copy = tuple[torch.Tensor, torch.Tensor, int]


def copy_tensors(copies: Sequence[Copy]) -> int:
    """Copy elements of CPU tensors in row-major order into memory. Returns their bytes.

    The C library copies: it writes past the caches, which ``Tensor.copy_`` does not. Memory: at most 4 MiB for a tensor that is not
    contiguous; for one whose conjugate or negative is only marked (``is_conj``, ``is_neg``) that of the tensor.
    """
    moves, others = [], []
    for tensor, target, at in copies:
        assert at + tensor.nbytes <= target.numel()
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            moves.append((target.data_ptr() + at, tensor.data_ptr(), tensor.nbytes))
        else:
            others.append((tensor, target, at))
    for move in moves:  # nothing else between two of them: Python would find the caches full of the tensors
        ctypes.memmove(*move)
    for tensor, target, at in others:
        for view in tensor_bytes(tensor):
            target[at : at + view.nbytes] = torch.frombuffer(view, dtype=torch.uint8)
            at += view.nbytes
    return sum(tensor.nbytes for tensor, _, _ in copies)


class Maps:
    """What one rank has mapped. A slot's files keep their pages from step to step, and here the process keeps its way to them: to meet
    a page for the first time costs several times what it takes to copy into it."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[str, tuple[int, torch.Tensor]]] = {}

    def has(self, slot: Slot, sizes: Mapping[str, int]) -> bool:
        """Whether the files of a slot were mapped last with these names and sizes."""
        return {n: memory.numel() for n, (_, memory) in self._slots.get(slot.path, {}).items()} == sizes

    def of(self, slot: Slot, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Files of a slot, with room for so many bytes (at least one), as memory by name. Lets go of other files of the slot.

        Raises as :meth:`Slot.room_for`.
        """
        before, found = self._slots.pop(slot.path, {}), {}
        for name, nbytes in sizes.items():
            path = slot.room_for(name, nbytes)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                inode = os.fstat(fd).st_ino
                known = before.pop(name, None)
                if known is None or known[0] != inode or known[1].numel() != nbytes:
                    known = inode, torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
                found[name] = known
            finally:
                os.close(fd)
        self._slots[slot.path] = found
        return {name: memory for name, (_, memory) in found.items()}

    def forget(self) -> None:
        """Let go of all files: those that are deleted give their memory back."""
        self._slots.clear()


# ----------------------------------------------------------------------------------------------------
# The record of a run's memory, beside its steps on disk: the name of its rings, and the line whose steps count.
#
# A resume begins a new line. Hosts that are there take it over; slices on a host that was away stay with the line before, and can never
# bring back a step that the run has given up.
#
# The name belongs to one directory. It is made of what a copy of the directory does not have, and a directory that is moved, or mounted
# elsewhere, keeps: the numbers that the file system gives the directory and a file in it that is written once, and the time of that.

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
            "%s: is a copy of another run's directory, was moved from another file system, or had its %s changed: the steps in memory under "
            "the name shardwise-%s belong to that run, so a resume uses a step on disk",
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
    replace_file(path, temporary, json.dumps(content).encode())
