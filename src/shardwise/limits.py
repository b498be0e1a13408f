"""Every limit on the time and memory that a file can cost its reader. The error that a limit causes names it.

Files come from strangers. Reading one costs time and memory in proportion to its bytes, for any content.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Sequence
from reprlib import Repr
from typing import Any, TypeGuard

from .errors import FormatError, SourceError
from .storage import read_whole
from .storage.records import is_url

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
#: Name of a tensor, a file or a class: names stand in every record and every error.
MAX_NAME_CHARS = 1024
#: A pickle that describes tensors (``data.pkl``, ``.metadata``): about 150 bytes a chunk.
MAX_PICKLE_BYTES = 1024**3
#: Text, bytes and whole numbers in a pickle.
MAX_PICKLED_TEXT_BYTES, MAX_PICKLED_INT_BYTES = 1024**2, 32
#: Nested containers in a pickle. Real ones nest nine deep.
MAX_PICKLE_DEPTH = 32
#: Values that a walk through a pickle meets, for each of its bytes: a shared part is met once per reference.
MAX_VISITS_PER_BYTE = 16
#: Values and characters that calls in a pickle take as arguments, for each byte read: a call copies a shared argument.
MAX_ARGUMENTS_PER_BYTE = 4
#: The list of members of a zip file, at about 100 bytes a tensor.
MAX_ZIP_DIRECTORY_BYTES = 64 * 1024**2
#: A value that is not a weight and is read whole: a setting, a scheduler's state, a step.
MAX_VALUE_BYTES = 64 * 1024**2
#: JSON that describes one quantized tensor: bitsandbytes writes about 200 bytes.
MAX_QUANT_STATE_BYTES = 64 * 1024
#: Bytes of all tensors of a torch file, for each byte of the file: tied tensors lie in one storage.
MAX_BYTES_PER_BYTE = 64
#: Comparisons that find overlapping chunks, for each chunk of a tensor.
MAX_COMPARISONS_PER_CHUNK = 64
#: A number in config.json that counts layers, labels, heads and so on. Config classes make lists of this length.
MAX_CONFIG_COUNT = 2**20
#: Nested values in a config. Real ones nest six deep; transformers writes each out again, indented by its depth.
MAX_CONFIG_DEPTH = 32
#: Modules, parameters and buffers that a config may build: a base number, plus a number for each stored tensor.
MAX_MODULES, MAX_MODULES_PER_TENSOR = 2_000, 64
#: Bytes of one tensor that a config may build: a multiple of the stored bytes, or the minimum if that is more.
MAX_BYTES_PER_STORED, MIN_TENSOR_BYTES = 8, 256 * 1024**2
#: Steps that the regular expressions of one setting may take, over the names of all modules: a second or two.
MAX_PATTERN_STEPS = 2**28
#: Matches of one regular expression with one name, for all of a setting: about a minute.
MAX_PATTERN_MATCHES = 2**26
#: Rank of an adapter: PEFT allocates two tensors of it for each module.
MAX_ADAPTER_RANK = 2**16

_brief = Repr()
_brief.maxlevel, _brief.maxother, _brief.maxstring = 2, 80, 80


def brief(value: Any) -> str:
    """A few hundred characters of any value's ``repr``, for an error. Never walks the whole of it, and never fails."""
    if isinstance(value, bytes | bytearray) and len(value) > _brief.maxstring:  # Repr would print all of it
        return f"{bytes(value[: _brief.maxstring // 2])!r}… ({len(value)} bytes)"
    try:
        return _brief.repr(value)
    except Exception:  # integers of more than 4,300 digits; any class of typed JSON may print badly
        return f"<{type(value).__name__}>"


def parse_json(raw: bytes | str, path: str, what: str = "file") -> Any:
    """The value of a JSON text. Raises :class:`FormatError` naming ``path`` if it can't be parsed."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, endless digits
        raise FormatError(f"{what} is not JSON ({brief(str(error))})", path=path) from error


def read_json(path: str, what: str = "file", max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file. Rank-local.

    Raises :class:`SourceError` if it can't be read, :class:`FormatError` if it is not a regular file, is longer than
    ``max_bytes`` or is not JSON.
    """
    return parse_json(read_small(path, what, max_bytes), path, what)


def read_shallow_json(path: str, what: str = "config") -> Any:
    """As :func:`read_json`; values nested deeper than ``MAX_CONFIG_DEPTH`` are a :class:`FormatError`, too."""
    return refuse_deep(read_json(path, what), path, what)


def refuse_deep(document: Any, path: str, what: str = "config") -> Any:
    """A JSON value. Raises :class:`FormatError` naming ``path`` if its values are nested deeper than ``MAX_CONFIG_DEPTH``."""
    if not is_shallow(document):
        raise FormatError(
            f"{what} has values nested deeper than {MAX_CONFIG_DEPTH}, which is the limit", path=path
        )
    return document


def is_shallow(document: Any) -> bool:
    """Whether values of JSON are nested at most ``MAX_CONFIG_DEPTH`` deep."""
    waiting = [(document, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_CONFIG_DEPTH:
            return False
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            waiting += [(one, depth + 1) for one in inner]
    return True


def read_small(path: str, what: str = "file", max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file or of an object of at most ``max_bytes``. Raises as :func:`read_json`; never blocks on a
    pipe."""
    if is_url(path):
        return read_whole(path, max_bytes, what)
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
                return stream.read(min(status.st_size, max_bytes) + 1)  # read(n) makes room for n
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: NUL or a lone surrogate in the path
        raise SourceError(f"can't be read: {getattr(error, 'strerror', None) or error}", path=path) from error


def inside(root: str, *parts: str) -> str:
    """``root`` joined with names from a file. Raises :class:`FormatError` if they would leave ``root``.

    Every path made of stored text goes through this function. Refused: parts that are empty, absolute, hold ``..``,
    ``.``, a backslash, NUL or text that no file system takes. Links are followed: a file whose content is written elsewhere
    goes through :func:`leads_out` first.
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


#: A snapshot in the cache of the Hugging Face hub. A repository's folder that was moved may have any name.
_SNAPSHOT = re.compile(r"(?P<cache>.*)/(?P<repository>[^/]+)/snapshots/[^/]+(/.*)?")


def leads_out(root: str, path: str) -> bool:
    """Whether a link takes a path below ``root`` to a file outside it.

    The links of the hub's cache don't: a snapshot's files are links to the blobs of their repository, which may be links to
    those that the whole cache shares.
    """
    real, base = os.path.realpath(path), os.path.realpath(root)
    if real.startswith(f"{base.rstrip('/')}/"):
        return False
    snapshot = _SNAPSHOT.fullmatch(base)
    if snapshot is None:
        return True
    cache, folder = snapshot["cache"], os.path.dirname(real)
    if folder == f"{cache}/{snapshot['repository']}/blobs":
        return False
    shared = re.escape(f"{cache}/blobs/") + "[0-9a-f]{2}/[0-9a-f]{64}"
    return re.fullmatch(shared, real) is None


def refuse_link_out(root: str, path: str) -> None:
    """Raise :class:`SourceError` for a path that :func:`leads_out`."""
    if leads_out(root, path):
        raise SourceError(
            f"is a link to a file outside its directory ({os.path.realpath(path)}), and is not read: what it says could get into what "
            f"is written for this model. Replace the link by the file",
            path=path,
        )


def refuse_foreign_config(root: str, path: str, document: Any) -> None:
    """Raise :class:`SourceError` for a config that is a link out of ``root`` and says nothing that a model's config says.

    Its fields get into every config that is written for the model: the link may lead to any JSON file of the reader.
    """
    if not (isinstance(document, dict) and isinstance(document.get("model_type"), str)):
        refuse_link_out(root, path)


def is_text(value: object) -> TypeGuard[str]:
    """Whether a value is text that UTF-8 can hold. Half a surrogate pair is not; no file system takes it."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def is_word(value: object) -> TypeGuard[str]:
    """Whether a value may name a model or an optimizer: letters, digits, '_' and '-'. It becomes a folder."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w-]*", value) is not None


def fits(shape: Sequence[int], itemsize: int = 1) -> bool:
    """Whether torch can describe a tensor of that shape. A dim of 0 does not excuse the rest: strides multiply them."""
    return len(shape) <= MAX_DIMS and math.prod([n or 1 for n in shape]) * itemsize <= MAX_COUNT


def cause(error: BaseException) -> str:
    """The text of an exception, cut to a length that an error can repeat."""
    try:
        text = str(error)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "an integer of too many digits"
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    return f"{type(error).__name__}: {text}"


def numel_of(shape: Sequence[int], what: str, path: str | None = None) -> int:
    """Number of elements of a shape from a file. Raises :class:`FormatError` if no tensor can have this shape.

    Refused: more than :data:`MAX_DIMS` dims, dims that are not counts, a product above :data:`MAX_COUNT` / 16 (bytes
    of any dtype then stay counts). A dim of 0 does not excuse the other dims, because torch multiplies them too.
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
    """``name`` if it is valid. Raises :class:`FormatError`: not text, too long, or half a surrogate pair."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
        limit = f"; the limit is {MAX_NAME_CHARS} characters" if isinstance(name, str) else ""
        raise FormatError(f"{what} {brief(name)} is not a name{limit}", path=path)
    if not is_text(name):
        raise FormatError(f"{what} {brief(name)} is no Unicode text", path=path)
    return name
