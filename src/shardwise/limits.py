"""What a file may ask of its reader, in one place; each limit is named in the error that it causes.

Files come from strangers. Reading one costs time and memory in proportion to its bytes, whatever it says.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from reprlib import Repr
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
#: Name of a tensor, a file or a class: names stand in every record and every error.
MAX_NAME_CHARS = 1024
#: A pickle that describes tensors (``data.pkl``, ``.metadata``): about 150 bytes a chunk.
MAX_PICKLE_BYTES = 1024**3
#: Text, bytes and whole numbers in a pickle.
MAX_PICKLED_TEXT_BYTES, MAX_PICKLED_INT_BYTES = 1024**2, 32
#: Containers in one another in a pickle. Real ones nest nine deep.
MAX_PICKLE_DEPTH = 32
#: Values that a walk through a pickle meets, for each of its bytes: what refers to shared parts is met again.
MAX_VISITS_PER_BYTE = 16
#: The list of members of a zip file, at about 100 bytes a tensor.
MAX_ZIP_DIRECTORY_BYTES = 64 * 1024**2
#: A value that is no weight and is read whole: a setting, a scheduler's state, a step.
MAX_VALUE_BYTES = 64 * 1024**2
#: Bytes of all tensors of a torch file, for each byte of the file: tied tensors lie in one storage.
MAX_BYTES_PER_BYTE = 64
#: Comparisons that find overlapping chunks, for each chunk of a tensor.
MAX_COMPARISONS_PER_CHUNK = 64
#: A number in config.json that counts layers, labels, heads and the like. Config classes make lists so long.
MAX_CONFIG_COUNT = 2**20
#: Modules, parameters and buffers that a config may build: so many, and so many more for each tensor that is stored.
MAX_MODULES, MAX_MODULES_PER_TENSOR = 2_000, 64

_brief = Repr()
_brief.maxlevel, _brief.maxother, _brief.maxstring = 2, 80, 80


def brief(value: Any) -> str:
    """A few hundred characters of any value's ``repr``, for an error. Never walks the whole of it."""
    return _brief.repr(value)


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
            return stream.read(min(status.st_size, max_bytes) + 1)  # read(n) makes room for n
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


def numel_of(shape: Sequence[int], what: str, path: str | None = None) -> int:
    """Elements of a shape that a file gave. Raises :class:`FormatError` for one that no tensor has.

    Refused: more than :data:`MAX_DIMS` dims, dims that are no counts, a product above :data:`MAX_COUNT` / 16 (so that
    bytes of any dtype stay counts) even where another dim is 0, because torch multiplies those, too.
    """
    if not isinstance(shape, Sequence) or len(shape) > MAX_DIMS:
        got = f"{len(shape)} dims" if isinstance(shape, Sequence) else brief(shape)
        raise FormatError(f"{what}: shape has {got}, the limit is {MAX_DIMS}", path=path)
    product, numel = 1, 1
    for n in shape:
        if not is_count(n):
            raise FormatError(f"{what}: shape {brief(shape)} is malformed", path=path)
        product, numel = product * max(n, 1), numel * n
    if product > MAX_COUNT // 16:
        raise FormatError(
            f"{what}: shape {brief(shape)} is too large; the limit is {MAX_COUNT // 16} elements", path=path
        )
    return numel


def is_count(value: object) -> bool:
    """Whether a value of a file is a whole number from 0 to :data:`MAX_COUNT`."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def check_name(name: object, what: str, path: str | None = None) -> str:
    """``name`` if it can be one. Raises :class:`FormatError`: no text, too long, or no Unicode (half a surrogate)."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
        limit = f"; the limit is {MAX_NAME_CHARS} characters" if isinstance(name, str) else ""
        raise FormatError(f"{what} {brief(name)} is no name{limit}", path=path)
    if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
        raise FormatError(f"{what} {brief(name)} is no Unicode text", path=path)
    return name
