"""What changed between two versions of the same elements, in as few bytes as that takes. Pure; numpy alone.

A training step changes few of a model's bf16 values, nearly all of them to a neighboring one. So a changed element costs about two
bytes: its distance from the one before it, and its difference as an integer. Both are written as LEB128 (7 bits a byte, as in protobuf).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

#: Elements that are compared at a time: temporary memory is a few MiB.
_BLOCK = 1024**2
#: Of a block: how many elements changed, and the bytes of their distances and of their differences.
_HEAD = struct.Struct("<III")

Words = NDArray[np.unsignedinteger]


def words_of(content: NDArray[np.uint8], itemsize: int) -> Words:
    """Elements as unsigned integers. Those of 16 bytes count as two."""
    return content.view(f"u{min(itemsize, 8)}")


def encoded(before: Words, after: Words, most_bytes: int) -> bytes | None:
    """The changes, or None where they take more than ``most_bytes``."""
    found = bytearray()
    for at in range(0, before.size, _BLOCK):
        old, new = before[at : at + _BLOCK], after[at : at + _BLOCK]
        where = np.flatnonzero(old != new)
        if where.size * 2 > most_bytes:
            return None
        gaps = _leb128(np.diff(where, prepend=-1).astype(np.uint64) - 1)
        steps = _leb128(_zigzag(new[where] - old[where]))
        found += _HEAD.pack(where.size, gaps.size, steps.size) + gaps.tobytes() + steps.tobytes()
        if len(found) > most_bytes:
            return None
    return bytes(found)


def apply(changes: memoryview, words: Words) -> None:
    """Make the later version of the earlier one, in place. Raises :class:`FormatError` for bytes that :func:`encoded` didn't write."""
    for at in range(0, words.size, _BLOCK):
        block = words[at : at + _BLOCK]
        if len(changes) < _HEAD.size:
            raise FormatError("changes end early")
        count, gap_bytes, step_bytes = _HEAD.unpack(changes[: _HEAD.size])
        body = changes[_HEAD.size : _HEAD.size + gap_bytes + step_bytes]
        if len(body) != gap_bytes + step_bytes or count > block.size:
            raise FormatError("changes end early, or there are more of them than elements")
        where = np.cumsum(_numbers(body[:gap_bytes], count) + np.uint64(1)) - np.uint64(1)
        if count and int(where[-1]) >= block.size:
            raise FormatError("changes reach beyond the last element")
        block[where] += _unzigzag(_numbers(body[gap_bytes:], count)).astype(words.dtype)
        changes = changes[_HEAD.size + len(body) :]
    if len(changes):
        raise FormatError("bytes follow the last change")


def _zigzag(difference: Words) -> NDArray[np.uint64]:
    """Differences modulo the range of the dtype as small numbers: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    bits = difference.dtype.itemsize * 8
    signed = difference.view(f"i{difference.dtype.itemsize}").astype(np.int64)
    found = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    return found if bits == 64 else found & np.uint64((1 << (bits + 1)) - 1)


def _unzigzag(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (numbers >> np.uint64(1)) ^ (np.uint64(0) - (numbers & np.uint64(1)))


def _leb128(numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Numbers in as few bytes as each needs, lowest seven bits first; all but the last byte of one have the high bit."""
    if not numbers.size:
        return np.zeros(0, np.uint8)
    if int(numbers.max()) < 0x80:  # most are: one byte each
        return numbers.astype(np.uint8)
    lengths = np.ones(numbers.size, np.int64)
    for shift in _shifts():
        more = numbers >> np.uint64(shift)
        if not more.any():
            break
        lengths += more != 0
    found = np.zeros(int(lengths.sum()), np.uint8)
    first = np.cumsum(lengths) - lengths
    for k in range(int(lengths.max())):
        has = lengths > k
        byte = (numbers[has] >> np.uint64(7 * k)) & np.uint64(0x7F)
        found[first[has] + k] = byte.astype(np.uint8) | np.where(lengths[has] > k + 1, 0x80, 0).astype(
            np.uint8
        )
    return found


def _numbers(content: memoryview, count: int) -> NDArray[np.uint64]:
    """The inverse of :func:`_leb128`. Raises :class:`FormatError` unless there are so many numbers, each of at most 10 bytes."""
    stored = np.frombuffer(content, np.uint8)
    last = np.flatnonzero(stored < 0x80)
    if last.size != count or (count and last[-1] != stored.size - 1) or (not count and stored.size):
        raise FormatError("changes hold another number of elements than their head says")
    if not count:
        return np.zeros(0, np.uint64)
    if count == stored.size:  # one byte each
        return stored.astype(np.uint64)
    first = np.concatenate(([0], last[:-1] + 1))
    lengths = last - first + 1
    if int(lengths.max()) > 10:
        raise FormatError("a number in the changes has more than 64 bits")
    found = np.zeros(count, np.uint64)
    for k in range(int(lengths.max())):
        has = lengths > k
        found[has] |= (stored[first[has] + k].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * k)
    return found


def _shifts() -> Iterator[int]:
    yield from range(7, 64, 7)
