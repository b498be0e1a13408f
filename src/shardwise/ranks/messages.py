"""Messages between ranks as bytes: plain values as JSON, bytes unchanged."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["pack", "unpack"]

_JSON, _BYTES, _FILES = b"j", b"b", b"f"


def pack(value: Any) -> bytes:
    """A value as bytes, for :func:`unpack`; None becomes no bytes.

    Takes bytes, mappings of text to bytes, and values that JSON gives back equal: text, numbers, booleans, None, and
    lists and text-keyed mappings of these. Raises :class:`TypeError` otherwise (a tuple would come back as a list).
    """
    if value is None:
        return b""
    if isinstance(value, bytes):
        return _BYTES + value
    if isinstance(value, dict) and value and all(isinstance(part, bytes) for part in value.values()):
        head = json.dumps([[name, len(part)] for name, part in value.items()]).encode()
        return b"".join((_FILES, len(head).to_bytes(8, "little"), head, *value.values()))
    text = json.dumps(value)
    if json.loads(text) != value:
        raise TypeError(f"JSON does not give back {text[:200]} as it was: use lists, and text as keys")
    return _JSON + text.encode()


def unpack(payload: bytes) -> Any:
    """The value that :func:`pack` was given."""
    kind, content = payload[:1], payload[1:]
    if not payload:
        return None
    if kind == _BYTES:
        return content
    if kind == _JSON:
        return json.loads(content)
    end = 8 + int.from_bytes(content[:8], "little")
    files = {}
    for name, size in json.loads(content[8:end]):
        files[name] = content[end : end + size]
        end += size
    return files
