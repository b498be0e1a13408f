"""Pickled messages over a socket pair, where every read and write of the parent has a deadline."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

__all__ = ["Channel"]

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of a socket pair. ``timeout_s`` bounds a whole message; ``None`` waits for ever."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def close(self) -> None:
        self.sock.close()

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Write one message. Raises TimeoutError, or OSError when the other end is gone."""
        body = pickle.dumps(message)
        self.sock.settimeout(timeout_s)
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Read one message. Raises TimeoutError, or EOFError when the other end is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return pickle.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float | None) -> bytes:
        buffer = bytearray()
        while len(buffer) < size:
            if deadline is not None:
                self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            else:
                self.sock.settimeout(None)
            try:
                part = self.sock.recv(min(size - len(buffer), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other end is gone")
            buffer += part
            if deadline is not None and time.monotonic() > deadline and len(buffer) < size:
                raise TimeoutError("message incomplete at its deadline")
        return bytes(buffer)
