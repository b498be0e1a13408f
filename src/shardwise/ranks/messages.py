"""Messages between ranks as bytes: plain values as JSON, bytes and arrays of numbers unchanged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["pack", "unpack"]

_JSON, _BYTES, _NUMBERS, _PARTS = b"j", b"b", b"n", b"p"


def pack(value: Any) -> bytes:
    """A value as bytes, for :func:`unpack`; None becomes no bytes.

    Takes bytes, 1-D arrays of uint64, mappings of text to these two, and values that JSON gives back equal: text,
    numbers, booleans, None, and lists and text-keyed mappings of these. Raises :class:`TypeError` otherwise (a tuple
    would come back as a list).
    """
    if value is None:
        return b""
    if isinstance(value, bytes):
        return _BYTES + value
    if _are_numbers(value):
        return _NUMBERS + bytes(value)
    if isinstance(value, dict) and any(
        isinstance(part, bytes) or _are_numbers(part) for part in value.values()
    ):
        parts = {name: pack(part) for name, part in value.items()}
        head = json.dumps([[name, len(part)] for name, part in parts.items()]).encode()
        return b"".join((_PARTS, len(head).to_bytes(8, "little"), head, *parts.values()))
    text = json.dumps(value)
    if json.loads(text) != value:
        raise TypeError(f"JSON does not give back {text[:200]} as it was: use lists, and text as keys")
    return _JSON + text.encode()


def _are_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint64 and value.ndim == 1


def unpack(payload: bytes) -> Any:
    """The value that :func:`pack` was given. Arrays can't be written to."""
    kind, content = payload[:1], payload[1:]
    if not payload:
        return None
    if kind == _BYTES:
        return content
    if kind == _NUMBERS:
        return np.frombuffer(content, dtype=np.uint64)
    if kind == _JSON:
        return json.loads(content)
    end = 8 + int.from_bytes(content[:8], "little")
    parts = {}
    for name, size in json.loads(content[8:end]):
        parts[name] = unpack(content[end : end + size])
        end += size
    return parts
