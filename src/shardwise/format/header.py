"""Headers and names: one safetensors header, read trusting nothing in it; the head of a run; the names of steps."""

from __future__ import annotations

import json
import operator
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from operator import attrgetter
from typing import Any, Literal

from ..dtypes import itemsize
from ..errors import FormatError, SourceError, StateError, VersionError
from ..limits import (
    MAX_COUNT,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARS,
    brief,
    check_name,
    is_count,
    numel_of,
    parse_json,
)
from ..objects import frozen
from ..storage import names_in, read_range, read_whole, stat_of
from ..storage.records import Stat, counted_here, is_url, join

__all__ = [
    "Entry",
    "Fate",
    "HEAD_NAME",
    "Head",
    "Header",
    "MAX_HEADER_BYTES",
    "MOST_HEAD_BYTES",
    "OTHERS_NAME",
    "STEP_NAME",
    "SetAside",
    "TRAINER_FILE",
    "check_regular",
    "checked_step",
    "describe_steps",
    "misnamed",
    "parse_head",
    "read_header",
    "read_headers",
    "stored_name",
    "stored_step",
]


# ----------------------------------------------------------------------------------------------------
# Reading one safetensors header, trusting nothing in it.
#
# Format: 8 bytes little-endian header length, JSON header, payload.
# https://huggingface.co/docs/safetensors/index#format

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
        raise FormatError(
            f"isn't a safetensors file: its header would have {length} bytes, the limit is {MAX_HEADER_BYTES}",
            path=path,
        )
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


# ----------------------------------------------------------------------------------------------------
# ``head.json`` of a run's steps in an object store: which steps belong to the run. It is replaced only by compare-and-swap.
#
# Source: docs/format.md.

HEAD_NAME = "head.json"
#: About 100 bytes a step.
MOST_HEAD_BYTES = 64 * 1024**2
_FORMAT, _VERSION = "shardwise-head", 1
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})\.([0-9a-f]{16})")
_NONCE = re.compile("[0-9a-f]{16}")

Fate = Literal["superseded", "damaged"]


def stored_name(step: int) -> str:
    """A fresh name for the directory of a step in a store, where nothing can be renamed: no other save has it."""
    return f"step-{step:08d}.{secrets.token_hex(8)}"


def stored_step(name: str) -> int | None:
    """The step whose directory in a store has this name; None for another name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


@frozen
class SetAside:
    """A step that a resume set aside: its directory stays, and no resume or retention counts it."""

    step: int
    name: str
    why: Fate


@frozen
class Head:
    """The steps of a run, by number, and the names of their directories."""

    steps: Mapping[int, str] = field(default_factory=dict)
    aside: tuple[SetAside, ...] = ()
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at each write: two writes of one content differ."""
    writer: str = ""
    """Host, process and time of the last write, for people."""

    @property
    def names(self) -> frozenset[str]:
        """All directories that belong to the run."""
        return frozenset((*self.steps.values(), *(one.name for one in self.aside)))

    def followed_by(self, steps: Mapping[int, str], aside: tuple[SetAside, ...]) -> Head:
        """The next head, by this process, now."""
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return Head(steps, aside, writer=f"process {os.getpid()} on {socket.gethostname()}, {now}")

    def to_bytes(self) -> bytes:
        """The text of ``head.json``."""
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "nonce": self.nonce,
            "writer": self.writer,
            "steps": {str(step): name for step, name in sorted(self.steps.items())},
            "aside": [{"name": one.name, "why": one.why} for one in self.aside],
        }
        return (json.dumps(document, indent=1) + "\n").encode()


def parse_head(raw: bytes, url: str) -> Head:
    """Parse the text of a head and check everything in it.

    Raises :class:`FormatError`; :class:`VersionError` for one of a later release. Both name ``url``.
    """
    document = parse_json(raw, url, "not a run's head: it")
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(f"not a run's head: expected the format {_FORMAT!r}", path=url)
    if document.get("version") != _VERSION:
        raise VersionError(
            f"head version {brief(document.get('version'))}, this release reads {_VERSION}; update shardwise",
            path=url,
        )
    try:
        return _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"malformed head: {brief(str(error))}", path=url) from error


def _from_document(document: dict[str, Any]) -> Head:
    steps = {int(step): name for step, name in document["steps"].items()}
    for step, name in steps.items():
        if not isinstance(name, str) or stored_step(name) != step:
            raise ValueError(f"step {step} has the name {brief(name)}")
    aside = tuple(_set_aside(one["name"], one["why"]) for one in document["aside"])
    names = [*steps.values(), *(one.name for one in aside)]
    if len(set(names)) != len(names):
        raise ValueError("two steps have one name")
    nonce, writer = document["nonce"], document["writer"]
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise ValueError(f"the nonce is {brief(nonce)}")
    if not isinstance(writer, str) or len(writer) > MAX_NAME_CHARS:
        raise ValueError("the writer is no short text")
    return Head(steps, aside, nonce, writer)


def _set_aside(name: Any, why: Any) -> SetAside:
    step = stored_step(name) if isinstance(name, str) else None
    if step is None:
        raise ValueError(f"a quarantined step has the name {brief(name)}")
    if why not in ("superseded", "damaged"):
        raise ValueError(f"a step was quarantined as {brief(why)}")
    return SetAside(step, name, why)


# ----------------------------------------------------------------------------------------------------
# Directories of steps: names of steps, and the errors for a run's directory given in place of one step.

#: The name of a published step's directory: exactly one for each step.
STEP_NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,18})")
#: The names of the HF Trainer (``-``) and of Accelerate (``_``) for it.
OTHERS_NAME = re.compile("checkpoint[-_]([0-9]{1,19})")
#: The file that tells a checkpoint of the HF Trainer from a user's directory of that name.
TRAINER_FILE = "trainer_state.json"


def checked_step(step: Any) -> int:
    """``step`` as a number. Raises :class:`StateError` for one that no manifest and no name can hold."""
    is_bool = isinstance(step, bool)  # an integer in Python, but not in JSON
    if is_bool or not hasattr(step, "__index__") or not 0 <= (found := operator.index(step)) <= MAX_COUNT:
        raise StateError(f"step must be an integer from 0 to 2^62, got {brief(step)}")
    return found


def misnamed(root: str, step: int, files: Container[str]) -> str | None:
    """The text of an error if the directory's name says another step than its manifest; otherwise None.

    A directory whose name says no step may hold any step.
    """
    name = os.path.basename(os.path.abspath(root))
    found = STEP_NAME.fullmatch(name) or (OTHERS_NAME.fullmatch(name) if TRAINER_FILE in files else None)
    named = stored_step(name) if found is None else int(found[1])
    if named is None or named == step:
        return None
    return (
        f"contains step {step}, but step {named} was expected: either the manifest is old or the directory was renamed. If it "
        f"was renamed, restore its original name"
    )


def describe_steps(root: str) -> str | None:
    """The text of an error if ``root`` holds steps, with the path to give instead; otherwise None."""
    try:
        names = names_in(root)
    except (OSError, SourceError):
        return None
    steps = {int(m[1]): name for name in names if (m := STEP_NAME.fullmatch(name))}
    if is_url(root) and HEAD_NAME in names:
        try:
            url = join(root, HEAD_NAME)
            steps = dict(parse_head(read_whole(url, MOST_HEAD_BYTES), url).steps)
        except SourceError:
            return None
    if not steps:
        return None
    newest = sorted(steps)[-3:]
    path = os.path.join(root, steps[newest[-1]])
    if len(steps) == 1:
        return f"contains step {newest[0]}; give {path}"
    listed = ", ".join(map(str, newest))
    some = f"{len(steps)} steps, the newest {listed}" if len(steps) > len(newest) else f"steps {listed}"
    return f"contains {some}; give one of them, e.g. {path}"
