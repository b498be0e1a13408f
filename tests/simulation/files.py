"""A simulated file system under ``/simulated``: the disk of ``tests.faults``, as the functions of ``os`` reach it.

What was not fsynced may be lost, in any part and any order, when the power fails; a killed process loses nothing but its
locks. Files that are open for reading are copies in memory of the real system, so that every real call can read them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.faults.disk import CRASHES, Disk, Link
from tests.simulation.world import Killed, Process, World

__all__ = ["ROOT", "Files", "Hands", "label_of"]

ROOT = "/simulated"
_REAL = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
_RANDOM = re.compile(r"-[0-9a-f]{8,16}\b")


def label_of(call: str, path: str, target: str = "") -> str:
    """A kind of call: names without their numbers."""

    def plain(text: str) -> str:
        text = re.sub(r"(\.tmp-probe-\*)-\d+", r"\1-n", _RANDOM.sub("-*", text))
        text = re.sub(r"^\.(tmp|trash)-step-\d+", r".\1-step-N", re.sub(r"step-\d+", "step-N", text))
        return re.sub(r"/0*[1-9][0-9]*\.", "/n.", re.sub(r"/0+\.", "/0.", text)) or "."

    return f"{call} {plain(path)}" + (f" -> {plain(target)}" if target else "")


@dataclass(slots=True)
class _Open:
    node: Any
    path: str
    handle: int
    process: Process | None
    is_folder: bool
    inode: int


class Files:
    """The disk that all processes of one schedule see, and their open files."""

    def __init__(self, world: World, dropped: str | None = None) -> None:
        self.world = world
        self.disk = Disk({})
        self.opened: dict[int, _Open] = {}
        self.locks: dict[int, int] = {}
        """By node, the descriptor that holds its lock."""
        self.dropped = dropped
        self.labels: set[str] | None = None
        self.on_rename: Callable[[str, str], None] | None = None
        """Told of each rename, before it is made."""
        self.on_scan: Callable[[str], None] | None = None
        """Told of each directory, before it is walked."""
        self.on_mkdir: Callable[[str], None] | None = None
        """Told of each directory, before it is made."""
        self.failing: tuple[int, int] | None = None
        """Which changing call fails from now on, and with which error number."""
        self._handles = 0
        world.on_death.append(self._close_all)

    # -- faults -----------------------------------------------------------------------------------------

    def lose_power(self) -> str:
        """All processes are dead: the disk is what a crash leaves."""
        kind = self.world.draw.choice(list(CRASHES))
        self.disk = Disk(self.disk.crash(kind, self.world.draw))
        return kind

    def _close_all(self, process: Process) -> None:
        for fd in [fd for fd, one in self.opened.items() if one.process is process]:
            self._close(fd)

    def _close(self, fd: int) -> None:
        one = self.opened.pop(fd)
        if self.locks.get(one.inode) == fd:
            del self.locks[one.inode]
        _REAL.close(fd)

    def end(self) -> None:
        """Close what is left open."""
        for fd in list(self.opened):
            self._close(fd)

    # -- helpers ----------------------------------------------------------------------------------------

    def inner(self, path: Any) -> str | None:
        """The path on the disk; None for a path of the real system."""
        if not isinstance(path, str) or not path.startswith(ROOT):
            return None
        return os.path.normpath(path[len(ROOT) :].lstrip("/") or ".")

    def node(self, path: str) -> Any:
        """What a path leads to. Only files are linked to, and only by their whole path."""
        node = self.entry(path)
        return self.node(self.inner(node.target) or ".") if isinstance(node, Link) else node

    def entry(self, path: str) -> Any:
        """As :meth:`node`; a link is not followed."""
        try:
            return self.disk._node(path)
        except (KeyError, AttributeError) as error:
            code = errno.ENOENT if isinstance(error, KeyError) else errno.ENOTDIR
            raise OSError(code, os.strerror(code), path) from None

    def has(self, path: str) -> bool:
        try:
            self.disk._node(path)
        except (KeyError, AttributeError):
            return False
        return True

    def _changes(self, call: str, path: str, target: str = "") -> bool:
        """Let time pass for a call that changes the disk. False: it is lost in this schedule."""
        self.world.operation()
        world = self.world
        if self.failing is not None:
            left, code = self.failing
            self.failing = (left - 1, code)
            if left <= 0:
                self.failing = None
                world.note(f"{call} {path}: {os.strerror(code)}")
                raise OSError(code, os.strerror(code), path)
        if self.labels is not None or self.dropped is not None:
            label = label_of(call, path, target)
            if self.labels is not None:
                self.labels.add(label)
            if label == self.dropped:
                return False
        if world.trace is not None:
            world.note(f"{call} {path}" + (f" -> {target}" if target else ""))
        return True

    def replay(
        self, call: str, path: str, target: str = "", handle: int = -1, data: bytes = b"", offset: Any = None
    ) -> None:
        """A call on the disk, in the form in which ``tests.faults`` records it."""
        self.disk.replay((call, path, target, handle, data, offset, call == "open", False))

    def status(self, node: Any) -> os.stat_result:
        is_folder = hasattr(node, "entries")
        mode = stat.S_IFDIR | 0o755 if is_folder else stat.S_IFREG | 0o644
        if isinstance(node, Link):
            mode = stat.S_IFLNK | 0o777
        size = 0 if is_folder else len(node.content)
        return os.stat_result((mode, id(node), 1, 1, 0, 0, size, 0, 0, 0))


class _Entries:
    """What ``os.scandir`` gives."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing is open."""


def _entry(path: str, name: str, child: Any) -> Any:
    is_folder = hasattr(child, "entries")
    return SimpleNamespace(
        name=name,
        path=os.path.join(path, name),
        is_dir=lambda **_: is_folder,
        is_symlink=lambda: isinstance(child, Link),
        is_file=lambda **_: not is_folder,
    )


class Hands:
    """The functions of ``os`` and ``fcntl`` in which paths of the disk go to the present schedule's files."""

    def __init__(self, files: Callable[[], Files]) -> None:
        self._files = files

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By name, those of ``os``."""
        by_path = ("stat", "lstat", "listdir", "mkdir", "rmdir", "unlink")
        by_fd = ("close", "write", "pwrite", "pread", "fsync", "fstat", "ftruncate")
        found: dict[str, Callable[..., Any]] = {n: self._by_path(n) for n in by_path}
        found |= {n: self._by_fd(n) for n in by_fd}
        return found | {
            "open": self.open,
            "scandir": self.scandir,
            "rename": self.rename,
            "replace": self.replace,
            "symlink": self.symlink,
        }

    def _by_path(self, name: str) -> Callable[..., Any]:
        own, real = getattr(self, name), getattr(_REAL, name)

        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, str) or not path.startswith(ROOT):
                return real(path, *args, **kwargs)
            files = self._files()
            return own(files, files.inner(path))

        return call

    def _by_fd(self, name: str) -> Callable[..., Any]:
        own, real = getattr(self, name), getattr(_REAL, name)

        def call(fd: int, *args: Any) -> Any:
            files = self._files()
            one, task = files.opened.get(fd), files.world.task
            if (
                task is not None and task.process.is_dead
            ):  # its files are closed, and their numbers may be others' now
                raise Killed
            return real(fd, *args) if one is None else own(files, fd, one, *args)

        return call

    # -- by path ----------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        files = self._files()
        inner = files.inner(path)
        if inner is None:
            return int(_REAL.open(path, flags, mode, dir_fd=dir_fd))
        if flags & os.O_CREAT:
            files._changes("open", inner)
            if flags & os.O_EXCL and files.has(inner):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if not files.has(inner) and not files.has(os.path.dirname(inner) or "."):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        else:
            files.world.operation()
        if not flags & os.O_CREAT:
            files.node(inner)
        files._handles += 1
        handle = files._handles
        files.replay("open" if flags & os.O_CREAT else "open for reading", inner, handle=handle)
        node = files.node(inner)
        is_folder = hasattr(node, "entries")
        fd = os.memfd_create("simulated", os.MFD_CLOEXEC)
        if not is_folder and not flags & os.O_WRONLY:
            _REAL.write(fd, bytes(node.content))
            os.lseek(fd, 0, os.SEEK_SET)
        task = files.world.task
        files.opened[fd] = _Open(node, inner, handle, task.process if task else None, is_folder, id(node))
        return fd

    def stat(self, files: Files, path: str) -> os.stat_result:
        return files.status(files.node(path))

    def lstat(self, files: Files, path: str) -> os.stat_result:
        return files.status(files.entry(path))

    def listdir(self, files: Files, path: str) -> list[str]:
        files.world.operation()
        node = files.node(path)
        if not hasattr(node, "entries"):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return list(node.entries)

    def scandir(self, path: Any = ".") -> Any:
        if not isinstance(path, str) or not path.startswith(ROOT):
            return _REAL.scandir(path)
        files = self._files()
        files.world.operation()
        inner = files.inner(path) or "."
        node = files.node(inner)
        if files.on_scan is not None:
            files.on_scan(inner)
        return _Entries([_entry(path, name, child) for name, child in node.entries.items()])

    def mkdir(self, files: Files, path: str) -> None:
        if files.on_mkdir is not None:
            files.on_mkdir(path)
        if files._changes("mkdir", path):
            if files.has(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            files.node(os.path.dirname(path) or ".")
            files.replay("mkdir", path)

    def unlink(self, files: Files, path: str) -> None:
        if files._changes("unlink", path):
            files.entry(path)
            files.replay("unlink", path)

    def rmdir(self, files: Files, path: str) -> None:
        if files._changes("rmdir", path):
            if files.node(path).entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            files.replay("rmdir", path)

    def symlink(self, source: Any, target: Any) -> None:
        files = self._files()
        new = files.inner(target)
        if new is None:
            _REAL.symlink(source, target)
        elif files._changes("symlink", new):
            if files.has(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            files.replay("symlink", new, source)

    def rename(self, source: Any, target: Any) -> None:
        self._renamed("rename", source, target)

    def replace(self, source: Any, target: Any) -> None:
        self._renamed("replace", source, target)

    def _renamed(self, call: str, source: Any, target: Any) -> None:
        files = self._files()
        old, new = files.inner(source), files.inner(target)
        if old is None or new is None:
            getattr(_REAL, call)(source, target)
        elif files._changes(call, old, new):
            node = files.node(old)
            if files.has(new) and hasattr(node, "entries") and files.node(new).entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
            if files.on_rename is not None:
                files.on_rename(old, new)
            files.replay(call, old, new)

    # -- by descriptor ----------------------------------------------------------------------------------

    def close(self, files: Files, fd: int, one: _Open) -> None:
        if fd in files.opened:
            files._close(fd)

    def write(self, files: Files, fd: int, one: _Open, data: Any) -> int:
        view = bytes(data)
        if files._changes("write", one.path):
            files.replay("write", one.path, handle=one.handle, data=view)
        return len(view)

    def pwrite(self, files: Files, fd: int, one: _Open, data: Any, offset: int) -> int:
        view = bytes(data)
        if files._changes("pwrite", one.path):
            files.replay("pwrite", one.path, handle=one.handle, data=view, offset=offset)
        return len(view)

    def pread(self, files: Files, fd: int, one: _Open, count: int, offset: int) -> bytes:
        files.world.operation()
        return bytes(one.node.content[offset : offset + count])

    def fsync(self, files: Files, fd: int, one: _Open) -> None:
        if files._changes("fsync", one.path):
            files.replay("fsync", one.path, handle=one.handle)

    def fstat(self, files: Files, fd: int, one: _Open) -> os.stat_result:
        return files.status(one.node)

    def ftruncate(self, files: Files, fd: int, one: _Open, size: int) -> None:
        if files._changes("ftruncate", one.path):
            files.replay("ftruncate", one.path, handle=one.handle, offset=size)

    # -- fcntl ------------------------------------------------------------------------------------------

    def fcntl(self, fd: int, command: int, argument: Any) -> None:
        """The lock of an open file; there are no others."""
        files = self._files()
        one = files.opened[fd]
        files.world.operation()
        if files.locks.setdefault(one.inode, fd) != fd:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
