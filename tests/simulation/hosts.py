"""What only hosts with directories of their own use: reads from another host, and files that Python's ``open`` makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from shardwise.errors import CheckpointError
from tests.simulation.files import Files, Hands
from tests.simulation.world import Process, World

__all__ = ["Network", "opened_new"]

#: The kind of message, as a mutation drops it.
_LABEL = "read from another host"


@dataclass(slots=True, eq=False)
class _Served:
    """What one process lets other hosts read."""

    ring: Any
    secret: bytes
    process: Process
    files: Files
    is_closed: bool = False


class Network:
    """Stands for the sockets of :mod:`shardwise.publish.hosts`. Connections take time, break, and wait for who is stopped."""

    def __init__(self, world: Callable[[], World], files: Callable[[], Files]) -> None:
        self._world, self._files = world, files
        self._served: dict[int, _Served] = {}

    def server(self, ring: Any, secret: bytes, address: str, timeout_s: float) -> Any:
        """As ``Server``."""
        world = self._world()
        world.operation()
        one = _Served(ring, secret, world.process, self._files())
        port = len(self._served) + 1
        self._served[port] = one
        return _Server(one, port)

    def reader(self, host: str, address: str, port: int, secret: bytes, timeout_s: float) -> Any:
        """As ``Reader``."""
        return _Reader(self._world(), host, self._served[port], secret, timeout_s)

    def forget(self) -> None:
        """A schedule begins."""
        self._served.clear()


class _Server:
    def __init__(self, one: _Served, port: int) -> None:
        self._one, self.port = one, port

    def close(self) -> None:
        self._one.is_closed = True


class _Reader:
    def __init__(self, world: World, host: str, one: _Served, secret: bytes, timeout_s: float) -> None:
        self._world, self._host, self._one = world, host, one
        self._secret, self._timeout_s = secret, timeout_s

    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        world, one = self._world, self._one
        world.operation()
        until = max(world.process.cut_until, one.process.cut_until, one.process.paused_until)
        if until > world.now:
            world.wait(min(until - world.now, self._timeout_s))
            if until > world.now:
                raise CheckpointError(f"host {self._host}: timed out")
        if one.is_closed or one.process.is_dead or one.secret != self._secret:
            raise CheckpointError(f"host {self._host}: connection refused")
        world.note(f"reads {name} from host {self._host}")
        try:
            content = bytes(one.files.node(one.files.inner(one.ring.readable(name)) or "").content)
        except OSError as error:
            raise CheckpointError(f"host {self._host}: doesn't have {name}") from error
        found = bytearray(content[start : start + nbytes])
        if one.files.labels is not None:
            one.files.labels.add(_LABEL)
        if one.files.dropped == _LABEL:
            return  # the file keeps what it had
        if len(found) != nbytes:
            raise CheckpointError(f"host {self._host}: {name} is shorter than expected")
        if world.garbled_reads:
            world.garbled_reads -= 1
            if not world.garbled_reads:
                world.note(f"{name} arrives damaged")
                found[world.draw.randrange(len(found))] ^= 1
        yield memoryview(found)

    def close(self) -> None:
        """Nothing is open."""


def opened_new(hands: Hands) -> Callable[[str, str], Any]:
    """Stands for ``open(path, "xb")``."""

    def call(path: str, mode: str) -> _Stream:
        assert mode == "xb"
        return _Stream(hands.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    return call


class _Stream:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
