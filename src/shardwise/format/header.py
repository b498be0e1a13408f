"""Reading one safetensors header, trusting nothing in it.

Format: 8 bytes little-endian header length, JSON header, payload.
https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

from ..dtypes import itemsize
from ..errors import FormatError, SourceError
from ..limits import MAX_COUNT, MAX_HEADER_BYTES, brief, check_name, is_count, numel_of, parse_json
from ..objects import frozen
from ..storage import Stat, counted_here, is_url, read_range, stat_of

__all__ = ["MAX_HEADER_BYTES", "Entry", "Header", "check_regular", "read_header", "read_headers"]

#: Of an object of a store, so many first bytes are asked for: a 128th of it, within these bounds. Most headers are shorter.
_GUESS_PART, _LEAST_GUESS_BYTES, _MOST_GUESS_BYTES = 128, 16 * 1024, 512 * 1024
_INTEGERS = frozenset((int,))  # and not bool, which is one, too
#: Headers of objects that are asked for at a time.
_AT_ONCE = 16


@frozen
class Entry:
    """A tensor in a file. ``offset_bytes`` counts from the start of the file, ``saved_offsets`` is the
    index of its first element in the global tensor (None in files without DCP_SHARDING_INFO)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int
    saved_offsets: tuple[int, ...] | None


@frozen
class Header:
    """A file's header: its entries by name, its free-form metadata, where the payload starts, file size."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    payload_start: int
    file_bytes: int
    version: str | None = None
    """As :attr:`.Stat.version`."""


def read_header(path: str) -> Header:
    """Read and check the header of a safetensors file, local or in a store; payload is not touched.

    Raises :class:`SourceError` if the file can't be read, :class:`FormatError` if the header lies:
    longer than the file, not JSON, repeated names, shapes and byte ranges that do not agree, ranges
    that overlap, leave holes or reach outside the file.
    """
    if is_url(path):
        return _header_of(path, stat_of(path))
    try:
        check_regular(path)
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            raw = _raw_header(file.read(8), file.read, file_bytes, path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    return _checked(raw, file_bytes, path)


def read_headers(paths: Sequence[str]) -> list[Header]:
    """:func:`read_header` of each path. Objects of a store are asked for several at a time."""
    if not any(map(is_url, paths)):
        return [read_header(path) for path in paths]
    stats = [stat_of(path) for path in paths]
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-headers") as pool:
        return list(pool.map(counted_here(_header_of), paths, stats))


def _header_of(url: str, stat: Stat | None) -> Header:
    """The header of an object: one request if its first bytes hold all of the header, else two."""
    if stat is None:
        raise SourceError("can't be read: no such object", path=url)
    size = stat.nbytes
    guess = min(size, max(_LEAST_GUESS_BYTES, min(_MOST_GUESS_BYTES, size // _GUESS_PART)))
    first = read_range(url, 0, guess, version=stat.version)

    def rest(length: int) -> bytes:
        held = first[8 : 8 + length]
        return held + read_range(url, 8 + len(held), 8 + length, version=stat.version)

    return _checked(_raw_header(first[:8], rest, size, url), size, url, stat.version)


def _checked(raw: bytes, file_bytes: int, path: str, version: str | None = None) -> Header:
    start = 8 + len(raw)
    document = _parse(raw, path)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ must map strings to strings", path=path)
    offsets = _saved_offsets(metadata, path)
    kinds: dict[tuple[object, ...], _Kind] = {}
    entries = {name: _entry(name, value, start, offsets, kinds, path) for name, value in document.items()}
    _check_ranges(entries, start, file_bytes, path)
    return Header(entries, metadata, start, file_bytes, version)


def check_regular(path: str) -> None:
    """Refuse pipes, sockets and devices: opening or reading them could block forever.

    Raises :class:`FormatError`, or ``OSError`` if the file does not exist.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(
        mode
    ):  # for a directory open() raises a clear error itself
        raise FormatError("can't be read: not a regular file", path=path)


def _raw_header(prefix: bytes, read: Callable[[int], bytes], file_bytes: int, path: str) -> bytes:
    if len(prefix) < 8:
        raise FormatError(f"truncated: {file_bytes} bytes, a safetensors file has at least 8", path=path)
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"header claims {length} bytes, the limit is {MAX_HEADER_BYTES}", path=path)
    if 8 + length > file_bytes:
        raise FormatError(
            f"header claims {length} bytes, but the file has {file_bytes}: truncated", path=path
        )
    return read(length)


def _parse(raw: bytes, path: str) -> dict[str, object]:
    def no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated = sorted(n for n, times in Counter(k for k, _ in pairs).items() if times > 1)[:3]
            raise FormatError(f"header repeats {', '.join(map(brief, repeated))}", path=path)
        return found

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, endless digits
        raise FormatError(f"header is not JSON ({error}); not a safetensors file?", path=path) from error
    if not isinstance(document, dict):
        raise FormatError("header is not a JSON object", path=path)
    return document


def _saved_offsets(metadata: dict[str, str], path: str) -> dict[str, tuple[int, ...]] | None:
    """The start of each tensor's slice (torch's DCP_SHARDING_INFO), or None if the file has none."""
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return None
    info = parse_json(text, path, "DCP_SHARDING_INFO")
    found = {}
    for name, value in info.items() if isinstance(info, dict) else [("", info)]:
        offsets = value.get("saved_offsets") if isinstance(value, dict) else None
        if not isinstance(offsets, list) or not all(map(is_count, offsets)):
            raise FormatError(
                f"DCP_SHARDING_INFO differs from torch's format: {brief(name)} has saved_offsets {brief(offsets)}",
                path=path,
            )
        found[name] = tuple(offsets)
    return found


#: A dtype and a shape that many tensors of a file have: with the shape as a tuple, and the bytes.
_Kind = tuple[str, tuple[int, ...], int]


def _entry(
    name: str,
    value: object,
    start: int,
    offsets: dict[str, tuple[int, ...]] | None,
    kinds: dict[tuple[object, ...], _Kind],
    path: str,
) -> Entry:
    """One entry of a header. ``kinds`` caches the checked dtypes and shapes, because many tensors share them."""
    check_name(name, "tensor", path)
    try:
        dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]  # type: ignore[index]
        begin, end = span
        is_plain = (
            type(dtype) is str
            and type(shape) is list
            and _INTEGERS.issuperset(map(type, (*shape, begin, end)))
        )
    except (TypeError, KeyError, ValueError):
        is_plain = False
    if not is_plain or not 0 <= begin <= end <= MAX_COUNT:
        raise _malformed(name, value, path)
    kind = kinds.get((dtype, *shape))
    if kind is None:
        kind = kinds[(dtype, *shape)] = _kind(name, dtype, shape, path)
    dtype, sizes, nbytes = kind
    if nbytes != end - begin:
        raise FormatError(
            f"tensor {name!r}: {dtype} of shape {brief(shape)} takes {brief(nbytes)} bytes, but its range has "
            f"{end - begin}",
            path=path,
        )
    saved = None
    if offsets is not None:
        saved = offsets.get(name)
        if saved is None or len(saved) != len(sizes):
            raise FormatError(
                f"tensor {name!r}: expected saved_offsets of {len(sizes)} dims, got {brief(saved)}", path=path
            )
    return Entry(name, dtype, sizes, start + begin, nbytes, saved)


def _kind(name: str, dtype: str, shape: list[int], path: str) -> _Kind:
    try:
        return dtype, tuple(shape), numel_of(shape, "it") * itemsize(dtype)
    except FormatError as error:
        raise FormatError(f"tensor {name!r}: {error}", path=path) from None


def _malformed(name: str, value: object, path: str) -> FormatError:
    """The error for a malformed entry."""
    where = f"tensor {name!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        return FormatError(f"{where}: expected dtype, shape and data_offsets", path=path)
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(span, list) or len(span) != 2 or not all(map(is_count, span)) or span[0] > span[1]:
        return FormatError(f"{where}: data_offsets {brief(span)} are malformed", path=path)
    return FormatError(f"{where}: dtype {brief(dtype)} or shape {brief(shape)} is malformed", path=path)


def _check_ranges(entries: dict[str, Entry], start: int, file_bytes: int, path: str) -> None:
    end = start
    for entry in sorted(entries.values(), key=attrgetter("offset_bytes", "nbytes")):
        if entry.offset_bytes != end:
            kind = "overlaps the tensor before it" if entry.offset_bytes < end else "leaves a hole before it"
            raise FormatError(
                f"tensor {entry.name!r} {kind} (byte {entry.offset_bytes}, expected {end})", path=path
            )
        end += entry.nbytes
    if end > file_bytes:
        raise FormatError(f"truncated: tensors need {end} bytes, the file has {file_bytes}", path=path)
    if end < file_bytes:
        raise FormatError(f"{file_bytes - end} bytes after the last tensor", path=path)
