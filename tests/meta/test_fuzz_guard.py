"""The fuzzer's guard finds what it is there to find: each of these is a finding, and an error of ours is none."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.errors import FormatError
from tests.fuzz.guard import Guard, canary

_OUTSIDE = Path(__file__)
_MOST_BYTES = 50_000_000


def _raise(error: Exception) -> None:
    raise error


def _hidden_memory_error() -> None:
    try:
        bytearray(2**34)
    except MemoryError as error:
        raise FormatError("damaged", path="x") from error


def _use_memory() -> None:
    """Pages that the process did not have: a large ``bytes`` may lie in memory that the fork's parent had freed."""
    fresh = mmap.mmap(-1, 2 * _MOST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, len(fresh), mmap.PAGESIZE):
        fresh[start] = 1


def _busy() -> None:
    number = 0
    while number < 2 * 10**7:
        number += 1


_FINDINGS: dict[str, tuple[Callable[[str], object], str]] = {
    "an exception of Python's": (lambda root: _raise(KeyError("a")), "raw KeyError"),
    "a huge allocation": (lambda root: bytearray(2**34), "memory"),
    "a huge allocation behind an error of ours": (lambda root: _hidden_memory_error(), "memory"),
    "memory that is used": (lambda root: _use_memory(), "memory"),
    "a file read outside": (lambda root: Path("/etc/passwd").read_bytes(), "open reads"),
    "a file written outside": (lambda root: (Path(root).parent / "x").write_text("x"), "open writes"),
    "a folder made outside": (lambda root: os.mkdir(f"{root}/../y"), "os.mkdir writes"),
    "a process": (lambda root: os.system("true"), "os.system"),
    "code of the input": (lambda root: canary(), "code of the input"),
    "a long error": (lambda root: _raise(FormatError("x" * 30_000)), "error text"),
    "a loop": (lambda root: _busy(), "time"),
}
_FINE: dict[str, Callable[[str], object]] = {
    "an error of ours": lambda root: _raise(FormatError("damaged", path="x")),
    "a file in the input's directory": lambda root: Path(root, "x").write_text("x"),
    "a file of the package": lambda root: _OUTSIDE.read_bytes(),
}


def _in_a_fork(work: Callable[[str], object], root: Path, cpu_s: float = 10.0) -> str:
    """The guard's verdict. A fork, because an audit hook stays for the life of a process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            guard = Guard(str(root), cpu_s=cpu_s, memory_bytes=_MOST_BYTES)
            os.write(writer, (guard.run(lambda: work(str(root))) or "no finding").encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()


@pytest.mark.parametrize("case", _FINDINGS)
def test_is_found(case: str, tmp_path: Path) -> None:
    work, expected = _FINDINGS[case]
    root = tmp_path / "input"
    root.mkdir()
    cpu_s = 0.2 if expected == "time" else 10.0  # a busy machine needs longer for the others
    assert _in_a_fork(work, root, cpu_s).startswith(expected)


@pytest.mark.parametrize("case", _FINE)
def test_is_fine(case: str, tmp_path: Path) -> None:
    assert _in_a_fork(_FINE[case], tmp_path) == "no finding"
