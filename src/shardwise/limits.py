"""What a file may ask of its reader, in one place; each limit is named in the error that it causes.

Files come from strangers. Reading one costs time and memory in proportion to its bytes, whatever it says.
"""

from __future__ import annotations

import json
import os
import stat
from reprlib import repr as brief
from typing import Any

from .errors import FormatError, SourceError

#: Dims of a tensor: torch's own limit. It also keeps products of sizes small enough to multiply and print.
MAX_DIMS = 64
#: Header of a safetensors file: the limit of the reference implementation (100 MB).
MAX_HEADER_BYTES = 100_000_000
#: JSON that a person or a library writes beside weights: config.json, an index, trainer_state.json.
MAX_JSON_BYTES = 256 * 1024**2
#: Any count in a file: sizes, offsets, steps. Two of them can be added without leaving 64 bits.
MAX_COUNT = 2**62


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
        with open(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError("can't be read: not a regular file", path=path)
            if status.st_size > max_bytes:
                raise FormatError(f"{what} has {status.st_size} bytes, the limit is {max_bytes}", path=path)
            return stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: NUL or a lone surrogate in the path
        raise SourceError(f"can't be read: {getattr(error, 'strerror', None) or error}", path=path) from error


def inside(root: str, *parts: str) -> str:
    """``root`` joined with names that a file gave. Raises :class:`FormatError` if they would leave ``root``.

    Every path that is made of stored text is made here. Refused: parts that are empty, absolute, hold ``..``, ``.``,
    a backslash, NUL or text that no file system takes. Links inside ``root`` are followed: the owner of the
    directory made them, no file's content can.
    """
    for part in parts:
        names = part.split("/") if isinstance(part, str) else [""]
        try:
            os.fsencode(part)
        except (UnicodeEncodeError, TypeError):
            names = [""]
        if any(name in ("", ".", "..") or "\\" in name or "\0" in name for name in names):
            raise FormatError(f"{brief(part)} is not a path inside the directory", path=root)
    return os.path.join(root, *parts)
