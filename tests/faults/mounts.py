"""A small disk of its own for some ranks: a tmpfs in a mount namespace that ends with the processes in it."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["NEW_NAMES", "CanNotMount", "mount", "mount_tmpfs", "unshare", "with_own_mounts"]

T = TypeVar("T")
#: A host name of its own.
NEW_NAMES = 0x04000000
_NEW_MOUNTS, _NEW_USER, _PRIVATE_RECURSIVE = 0x20000, 0x10000000, (1 << 18) | (1 << 14)


class CanNotMount(Exception):
    """This machine lets us mount nothing; says why."""


def with_own_mounts(work: Callable[[], T], result: Path) -> T:
    """Call ``work`` in a fork of this process in which :func:`mount_tmpfs` works; its result, through a file.

    As root, or in a user namespace where those are allowed. Raises :class:`CanNotMount`.
    """
    if sys.platform != "linux":
        raise CanNotMount("mount namespaces are Linux's")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _leave_mounts()
            result.write_bytes(pickle.dumps(work()))
            status = 0
        except CanNotMount as error:
            result.write_text(str(error))
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 2:
        raise CanNotMount(result.read_text())
    assert status == 0, f"exit status {status}"
    value: T = pickle.loads(result.read_bytes())
    return value


def _leave_mounts() -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_MOUNTS | (_NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE_RECURSIVE), None)


def mount_tmpfs(path: Path, options: str) -> None:
    """Mount an empty file system in memory, as ``size=1m,nr_inodes=100`` says."""
    mount("tmpfs", path, options)


def mount(kind: str, path: Path, options: str) -> None:
    """Mount a file system that has no device."""
    _call("mount", kind.encode(), os.fsencode(path), kind.encode(), ctypes.c_ulong(0), options.encode())


def unshare(what: int) -> None:
    """Give this process a namespace of its own; for ``work`` of :func:`with_own_mounts`."""
    _call("unshare", what)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise CanNotMount(f"{name}: {os.strerror(ctypes.get_errno())}")
