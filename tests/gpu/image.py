"""What an image's own Python may lack: xxhash, for which hashlib stands in, and transformers, without which less is checked."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import types

__all__ = ["complete", "transformers_problem"]

_LEAST_TRANSFORMERS = (5, 0)


class _Hash:
    """One of xxhash's objects, by blake2b."""

    def __init__(self, data: bytes, size: int) -> None:
        self._size = size
        self.reset()
        self.update(data)

    def reset(self) -> None:
        """Begin again."""
        self._found = hashlib.blake2b(digest_size=self._size)

    def update(self, data: bytes) -> None:
        """Hash more bytes."""
        self._found.update(data)

    def hexdigest(self) -> str:
        """Of all bytes since the beginning."""
        return self._found.hexdigest()

    def digest(self) -> bytes:
        """The same as bytes."""
        return self._found.digest()

    def intdigest(self) -> int:
        """The same as a number."""
        return int.from_bytes(self.digest(), "big")


def complete() -> list[str]:
    """Make shardwise importable here; what stands in for what, for the report. Call it before importing shardwise."""
    if importlib.util.find_spec("xxhash") is not None:
        return []
    module = types.ModuleType("xxhash")
    for bits in (64, 128):

        def start(data: bytes = b"", *, size: int = bits // 8) -> _Hash:
            return _Hash(data, size)

        def hexdigest(data: bytes, *, size: int = bits // 8) -> str:
            return hashlib.blake2b(data, digest_size=size).hexdigest()

        def intdigest(data: bytes, *, size: int = bits // 8) -> int:
            return int(hexdigest(data, size=size), 16)

        setattr(module, f"xxh3_{bits}", start)
        setattr(module, f"xxh3_{bits}_intdigest", intdigest)
        setattr(module, f"xxh3_{bits}_hexdigest", hexdigest)
    sys.modules["xxhash"] = module
    return ["xxhash is not installed: blake2b of hashlib stands in, slower"]


def transformers_problem() -> str | None:
    """Why models of transformers can't be loaded here, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    found = importlib.metadata.version("transformers")
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    return None if numbers >= _LEAST_TRANSFORMERS else f"transformers {found} is older than 5.0"
