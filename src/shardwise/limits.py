"""What a file may ask of its reader, in one place; each limit is named in the error that it causes.

Files come from strangers. Reading one costs time and memory in proportion to its bytes, whatever it says.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any, TypeGuard

from .errors import FormatError, SourceError

#: Dims of a tensor: torch's own limit. It also keeps products of sizes small enough to multiply and print.
MAX_DIMS = 64
#: Header of a safetensors file: the limit of the reference implementation (100 MB).
MAX_HEADER_BYTES = 100_000_000
#: JSON that a person or a library writes beside weights: config.json, an index, trainer_state.json.
MAX_JSON_BYTES = 256 * 1024**2
#: Any count in a file: sizes, offsets, steps. Two of them can be added without leaving 64 bits.
MAX_COUNT = 2**62
#: Blocks into which all strided cuts of one geometry may cut a tensor. Each is a file on some rank.
MAX_BLOCKS = 2**16
#: Keys of one set or dict that may have one hash: more make it quadratic. Python's own numbers collide a few times.
MAX_COLLISIONS = 64
#: Text of another error, or of a value, that an error repeats.
MAX_TEXT_CHARS = 300


def parse_json(raw: bytes | str, path: str, what: str = "file") -> Any:
    """The value of a JSON text. Raises :class:`FormatError` naming ``path`` for whatever is wrong with it."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, endless digits
        raise FormatError(f"{what} is not JSON ({brief(str(error))})", path=path) from error


def read_json(path: str, what: str = "file", max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file. Rank-local.

    Raises :class:`SourceError` if it can't be read, :class:`FormatError` if it is no regular file, is longer than
    ``max_bytes`` or is not JSON.
    """
    return parse_json(read_small(path, what, max_bytes), path, what)


def read_small(path: str, what: str = "file", max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file of at most ``max_bytes``. Raises as :func:`read_json`; never blocks on a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                is_folder = stat.S_ISDIR(status.st_mode)
                why = "is a directory, not a file" if is_folder else "can't be read: not a regular file"
                raise FormatError(why, path=path)
            if status.st_size > max_bytes:
                raise FormatError(f"{what} has {status.st_size} bytes, the limit is {max_bytes}", path=path)
            with open(fd, "rb", closefd=False) as stream:
                return stream.read(max_bytes + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: NUL or a lone surrogate in the path
        raise SourceError(f"can't be read: {getattr(error, 'strerror', None) or error}", path=path) from error


def inside(root: str, *parts: str) -> str:
    """``root`` joined with names that a file gave. Raises :class:`FormatError` if they would leave ``root``.

    Every path that is made of stored text is made here. Refused: parts that are empty, absolute, hold ``..``, ``.``,
    a backslash, NUL or text that no file system takes. Links inside ``root`` are followed: the owner of the
    directory made them, no file's content can.
    """
    for part in parts:
        if not is_inside(part):
            raise FormatError(f"{brief(part)} is not a path inside the directory", path=root)
    return os.path.join(root, *parts)


def is_inside(part: object) -> bool:
    """Whether a name from a file is a relative path that :func:`inside` takes."""
    if not is_text(part) or "\\" in part or "\0" in part:
        return False
    return not {"", ".", ".."} & set(part.split("/"))


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text that UTF-8 can hold: half a surrogate pair is none, and no file system takes it."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def is_word(value: object) -> TypeGuard[str]:
    """Whether a value may name a model or an optimizer: letters, digits, '_' and '-'. It becomes a folder."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w-]*", value) is not None


def fits(shape: Sequence[int], itemsize: int = 1) -> bool:
    """Whether torch can describe a tensor of that shape. An empty dim does not excuse the rest: strides multiply them."""
    return len(shape) <= MAX_DIMS and math.prod([n or 1 for n in shape]) * itemsize <= MAX_COUNT


def cause(error: BaseException) -> str:
    """What an exception says, cut to a length that an error can repeat."""
    try:
        text = str(error)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "an integer of too many digits"
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    return f"{type(error).__name__}: {text}"


def shown(value: object) -> str:
    """A value for an error: cut, and printable whatever it is."""
    try:
        return brief(value)
    except Exception:  # integers of 4,300 digits; any class of the closed list may print badly
        return f"<{type(value).__name__}>"
