"""What an input may do: the audit hook, the limits, and what counts as a finding.

A finding is: an exception that is none of :class:`shardwise.errors.ShardwiseError`; more than 2 s of CPU time, or 30 s
without an end; more than 500 MB of memory; a file opened or changed outside of the input's own directory; a process, a
connection, but to a peer that the target itself made; code of the input that runs; an error text of more than 20,000 characters (but that of a ``PlanError``, which
lists every tensor); a path left behind in OUT by a call
that failed; and whatever the target itself asserts.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any, ClassVar

import shardwise
from shardwise.errors import PlanError, ShardwiseError

__all__ = ["CPU_S", "MEMORY_BYTES", "WALL_S", "Guard", "canary"]

CPU_S = 2.0
WALL_S = 30.0
MEMORY_BYTES = 500_000_000
_MOST_TEXT = 20_000

_CHANGES = {
    *(
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "os.chown",
    ),
    *("os.utime", "os.mkfifo", "shutil.rmtree", "shutil.move", "shutil.copyfile", "os.setxattr"),
}
#: Events whose last argument is the open folder that a path is relative to, or -1.
_WITH_FOLDER = {"os.mkdir", "os.remove", "os.rmdir", "os.chmod"}
_FORBIDDEN = {
    *(
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "pty.spawn",
    ),
    *(
        "socket.connect",
        "socket.bind",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendto",
        "os.putenv",
    ),
    *("ctypes.dlopen", "os.kill", "webbrowser.open", "urllib.Request", "ftplib.connect", "marshal.loads.x"),
}
_READABLE = tuple(
    os.path.realpath(p)
    for p in (
        *{sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()},
        os.path.join(os.path.dirname(__file__), "..", ".."),
        os.path.dirname(shardwise.__file__),
        *("/proc", "/sys", "/dev", "/usr", "/etc/ssl", "/etc/localtime", "/etc/mime.types", "/lib"),
    )
)


def canary(*_: object, **__: object) -> str:
    """What the gadgets of the mutations call. It must never run."""
    Guard.violations.append("code of the input ran: tests.fuzz.guard.canary was called")
    return "canary"


class Guard:
    """Limits around one input at a time, in this process, which a parent watches for time."""

    violations: ClassVar[list[str]] = []
    peers: ClassVar[set[tuple[str, int]]] = set()
    """Addresses at which a target itself listens: a call may connect to these."""
    _root: ClassVar[str | None] = None
    _is_hooked: ClassVar[bool] = False

    def __init__(self, root: str, *, cpu_s: float = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        """``root`` is where inputs lie and OUT may be: all that may be written, and all that may be read beside code."""
        self.cpu_s, self.memory_bytes = cpu_s, memory_bytes
        Guard._root = os.path.realpath(root)
        self.is_spent = False
        if not Guard._is_hooked:
            sys.addaudithook(_audit)
            Guard._is_hooked = True

    def run(self, work: Callable[[], object]) -> str | None:
        """Run one input. The finding, or None."""
        _limit_address_space(self.memory_bytes + 150_000_000)
        peak, cpu = _reset_peak(), time.process_time()
        Guard.violations.clear()
        raised: BaseException | None = None
        try:
            work()
        except ShardwiseError as error:
            raised = error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raised = error
        finally:
            violations = list(Guard.violations)
            _limit_address_space(None)
        grown, spent = _peak_bytes() - peak, time.process_time() - cpu
        if violations:
            return violations[0]
        if _ran_out_of_memory(raised) or grown > self.memory_bytes:
            self.is_spent = True
            return f"memory: more than {self.memory_bytes} bytes (peak grew by {grown})"
        if raised is not None and not isinstance(raised, ShardwiseError):
            return f"raw {type(raised).__name__} at {_place(raised)}: {str(raised)[:300]}"
        if raised is not None and len(str(raised)) > _MOST_TEXT and not isinstance(raised, PlanError):
            return f"error text of {len(str(raised))} characters: {str(raised)[:200]}"
        if spent > self.cpu_s:
            return f"time: {spent:.1f} s of CPU"
        return None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    root = Guard._root
    if root is None:
        return
    if event == "open":
        path, _, flags = args
        if not isinstance(path, (str, bytes)) or not path:
            return
        wants_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        _check(os.fsdecode(path), bool(wants_write), event)
    elif event in _CHANGES:
        folder = args[-1] if isinstance(args[-1], int) and event in _WITH_FOLDER else -1
        for path in args[:2]:
            if isinstance(path, (str, bytes)) and path:
                _check(os.path.join(_folder_of(folder), os.fsdecode(path)), True, event)
    elif event in _FORBIDDEN and not _leads_to_a_peer(event, args):
        Guard.violations.append(f"{event} {str(args)[:200]}")


def _leads_to_a_peer(event: str, args: tuple[Any, ...]) -> bool:
    if event == "socket.connect":
        return tuple(args[1][:2]) in Guard.peers
    if event == "urllib.Request":
        return any(str(args[0]).startswith(f"http://{host}:{port}/") for host, port in Guard.peers)
    return event == "socket.getaddrinfo" and (args[0], args[1]) in Guard.peers


def _folder_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""


def _check(path: str, wants_write: bool, event: str) -> None:
    if "\0" in path:
        return
    full = os.path.abspath(path)
    if full == Guard._root or full.startswith(f"{Guard._root}{os.sep}") or full == "/dev/null":
        return
    if not wants_write and os.path.realpath(full).startswith(_READABLE):
        return
    if wants_write and (full.startswith("/dev/shm/") or "__pycache__" in full):
        return  # torch's own shared memory; the interpreter's own cache
    Guard.violations.append(
        f"{event} {'writes' if wants_write else 'reads'} {full} outside of the input's directory"
    )


def _limit_address_space(more_bytes: int | None) -> None:
    """Let this process map so much more than now. One huge allocation then fails at once instead of being paged in."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if more_bytes is not None:
        with open("/proc/self/statm") as stream:
            soft = int(stream.read().split()[0]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _reset_peak() -> int:
    """Let the peak of this process begin anew at what it uses now, in bytes: an earlier peak would hide growth below it."""
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("VmHWM:"))


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Also where the library made another error of it, which would hide how much was asked for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if isinstance(error, MemoryError) or "can't allocate memory" in text or "MemoryError" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(error: BaseException) -> str:
    """The innermost line of the package in the traceback."""
    found, trace = "?", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}shardwise{os.sep}" in code.co_filename:
            name = code.co_filename.rpartition(f"{os.sep}shardwise{os.sep}")[2]
            found = f"{name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return found
