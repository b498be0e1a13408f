"""A simulated ``torch.distributed.Store``: one server, and a client in each process, with what networks do to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.simulation.world import Process, World

__all__ = ["Server", "Store", "labels_of"]

#: How long torch's client waits for a key that does not come.
_GET_TIMEOUT_S = 300.0
_AGREEMENT = re.compile(rb'^\{[^\n]*"label":"([^"]*)"')


class Server:
    """The keys. It may die, and take them with it."""

    def __init__(self, world: World, dropped: str | None = None) -> None:
        self.world = world
        self.data: dict[str, bytes] = {}
        self.is_dead = False
        self.host: Process | None = None
        """The rank whose process it is a thread of; else the launcher's agent has it."""
        self.duplicates = 0.0
        """Share of requests that arrive twice. Not of ``add``: torch's client never sends one again."""
        self.dropped = dropped
        self.labels: set[str] | None = None
        self.most_keys = 0

    def die(self) -> None:
        """Every later request fails."""
        self.is_dead = True


def label_of(method: str, key: str) -> str:
    """A kind of message: what is sent under which key, whatever the round and, but for rank 0, the rank."""
    key = re.sub(r"^attempt\d+/", "", key)
    key = re.sub(
        r"^shardwise/[^/]*?(generation|\d+)/", lambda m: "generation/" if m[1] == "generation" else "", key
    )
    key = re.sub(r"^shardwise/stop/[0-9a-f]+/", "stop/", key)
    key = re.sub(r"^\d+/", "", key)
    key = re.sub(r"^(payload/[0-9]+|reply)/[0-9]+", r"\1/part", key)
    return f"{method} {re.sub(r'/[1-9][0-9]*', '/n', key)}"


def labels_of(method: str, key: str, value: bytes) -> tuple[str, ...]:
    """The kind of a message, and where its value names the agreement, the kind in that agreement."""
    label = label_of(method, key)
    if (found := _AGREEMENT.search(value)) is None:
        return (label,)
    return label, f"{label} in '{re.sub('[0-9]+', 'N', found[1].decode())}'"


class Store:
    """A client. Prefixes are part of it."""

    def __init__(self, server: Server, process: Process, prefix: str = "") -> None:
        self._server, self._process, self._prefix = server, process, prefix

    def clone(self) -> Store:
        return Store(self._server, self._process, self._prefix)

    def under(self, prefix: str) -> Store:
        """As ``torch.distributed.PrefixStore``."""
        return Store(self._server, self._process, f"{self._prefix}{prefix}/")

    def _ask(
        self,
        method: str,
        key: str,
        answer: Callable[[dict[str, bytes]], Any],
        lost: Any,
        value: bytes = b"",
    ) -> Any:
        server, world, process = self._server, self._server.world, self._process
        world.operation()
        self._reach(process)
        labels: tuple[str, ...] = ()
        if server.labels is not None or server.dropped is not None:
            labels = labels_of(method, key, value)
            if server.labels is not None:
                server.labels.update(labels)
        if labels and server.dropped in labels:
            result = lost(server.data) if callable(lost) else lost
        else:
            result = answer(server.data)
            if server.duplicates and method != "add" and world.draw.random() < server.duplicates:
                result = answer(server.data)
        if world.trace is not None:
            world.note(f"{method} {key} = {result!r:.120}")
        server.most_keys = max(server.most_keys, len(server.data))
        if world.draw.random() < 0.25:
            world.wait(world.latency_s * world.draw.random())
            self._reach(process)
        return result

    def _reach(self, process: Process) -> None:
        """Wait until the network lets the server be reached. Raises as torch's client does where it is gone."""
        server, world = self._server, self._server.world
        if process.cut_until > world.now:
            world.wait(process.cut_until - world.now)
        host = server.host
        if host is not None and host.paused_until > world.now and host is not process:
            world.wait(host.paused_until - world.now)
        if server.is_dead or (host is not None and host.is_dead):
            raise RuntimeError("Connection reset by peer")

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: bytes) -> None:
        full = self._key(key)
        self._ask("set", full, lambda data: data.__setitem__(full, bytes(value)), None, bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        full = [self._key(key) for key in keys]
        world = self._server.world
        end = world.now + _GET_TIMEOUT_S
        while True:
            found: Any = self._ask("get", full[0], lambda data: [data.get(k) for k in full], None)
            if found is not None and None not in found:
                return list(found)
            if world.now > end:
                raise RuntimeError(f"wait timeout after {_GET_TIMEOUT_S} s, keys: {full}")
            world.wait(1.0)

    def add(self, key: str, value: int) -> int:
        full = self._key(key)

        def answer(data: dict[str, bytes]) -> int:
            total = int(data.get(full, b"0")) + value
            data[full] = str(total).encode()
            return total

        def lost(data: dict[str, bytes]) -> int:
            return int(data.get(full, b"0"))

        method = "add" if value else "add nothing to"
        return int(self._ask(method, full, answer, lost))

    def check(self, keys: list[str]) -> bool:
        full = [self._key(key) for key in keys]
        return bool(self._ask("check", full[0], lambda data: all(k in data for k in full), True))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        full = self._key(key)

        def answer(data: dict[str, bytes]) -> bytes:
            if full not in data:
                if expected:
                    return expected
                data[full] = desired
            elif data[full] == expected:
                data[full] = desired
            return data[full]

        return bytes(self._ask("compare_set", full, answer, desired, desired))

    def delete_key(self, key: str) -> bool:
        full = self._key(key)
        return bool(self._ask("delete_key", full, lambda data: data.pop(full, None) is not None, True))
