"""Locates the tensors in files written by ``torch.save``, without unpickling anything but plain records."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..dtypes import itemsize
from ..errors import FormatError
from ..limits import (
    MAX_BYTES_PER_BYTE,
    MAX_COUNT,
    MAX_NAME_CHARS,
    MAX_VISITS_PER_BYTE,
    MAX_ZIP_DIRECTORY_BYTES,
    brief,
    check_name,
    inside,
    is_count,
    numel_of,
)
from ..objects import frozen
from ..storage.records import is_url
from ..tensors.boxes import Box, whole
from .pickles import AnyNames, Name, Names, Record, check_key, unpickled
from .quantized import OpenFile, each, open_file
from .records import FULL_STATE_STEM, Catalog, Chunk, StoredFile, StoredTensor, stem_of_ranks
from .weights import Choice, Weights, listed

__all__ = [
    "ANY_NAMES",
    "Archive",
    "DTYPE_NAMES",
    "Dtype",
    "Member",
    "MemberReader",
    "Names",
    "Saved",
    "TENSOR_NAMES",
    "TorchZip",
    "catalog_of_torch_file",
    "catalog_of_torch_files",
    "located",
    "plain_args",
    "read_torch_file",
    "refuse_overlap",
    "to_dict",
    "to_tuple",
]


# ----------------------------------------------------------------------------------------------------
# Lists the members of ``torch.save``'s zip container and locates their bytes. Supports nothing else of zip.
#
# torch (1.6-2.14) stores members uncompressed and writes zip64 records and no comment. The last 22 bytes therefore
# locate the directory. Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_BYTES = 30
_16, _32 = 2**16 - 1, 2**32 - 1


@frozen
class Member:
    """A member: whether it is uncompressed, its size, its CRC, the offset of its own header."""

    is_stored: bool
    nbytes: int
    crc: int
    header_at: int


class TorchZip:
    """The members of one container in a byte range of an open file, by name without the archive's folder.

    Raises :class:`FormatError` for anything that torch does not write, :class:`SourceError` if reading fails. Reads
    the directory only: at most :data:`~shardwise.limits.MAX_ZIP_DIRECTORY_BYTES`.
    """

    def __init__(self, file: OpenFile, begin: int, nbytes: int) -> None:
        self._file, self.begin, self._nbytes = file, begin, nbytes
        self._offsets: dict[int, int] = {}  # of members, by that of their header
        self.folder = ""
        """The archive's folder: the name, without its suffix, under which torch saved the file."""
        count, at, length = self._find_directory()
        if length > MAX_ZIP_DIRECTORY_BYTES:
            raise self.wrong(f"its directory has {length} bytes, the limit is {MAX_ZIP_DIRECTORY_BYTES}")
        self.members = dict(self._entries(self.read(at, length)))
        if len(self.members) != count:
            raise self.wrong(f"its directory holds {len(self.members)} names, but says {count}")

    def offset_of(self, member: Member) -> int:
        """Offset of a member's bytes in the file. Checks that all of them lie in the container."""
        if member.header_at in self._offsets:
            return self._offsets[member.header_at]
        local = self.read(member.header_at, _LOCAL_BYTES)  # the header holds its own length
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        at = member.header_at + _LOCAL_BYTES + lengths
        if local[:4] != b"PK\3\4" or at + member.nbytes > self._nbytes:
            raise self.wrong("a member ends outside it: damaged or truncated")
        self._offsets[member.header_at] = self.begin + at
        return self.begin + at

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the container. Raises :class:`FormatError` if it is too short."""
        if not 0 <= at <= self._nbytes - nbytes:
            raise self.wrong("it is truncated")
        found = self._file.read(self.begin + at, nbytes)
        if len(found) != nbytes:
            raise self.wrong("it is truncated")
        return found

    def _find_directory(self) -> tuple[int, int, int]:
        """The directory's number of entries, offset and length."""
        tail = self._nbytes - _END.size
        mark, _, _, _, count, length, at, comment = _END.unpack(self.read(tail, _END.size))
        if mark != b"PK\5\6" or comment:
            raise self.wrong(
                "it does not end as a zip file does (before torch 1.6 torch wrote another format)"
            )
        if count == _16 or _32 in (length, at):
            mark, _, end, _ = _LOCATOR.unpack(self.read(tail - _LOCATOR.size, _LOCATOR.size))
            if mark != b"PK\6\7":
                raise self.wrong("it has no zip64 locator")
            mark, *_, count, length, at = _END64.unpack(self.read(end, _END64.size))
            if mark != b"PK\6\6":
                raise self.wrong("it has no zip64 record")
        return count, at, length

    def _entries(self, directory: bytes) -> Iterator[tuple[str, Member]]:
        at = 0
        while at < len(directory):
            if at + _ENTRY.size > len(directory):
                raise self.wrong("its directory is truncated")
            fields = _ENTRY.unpack_from(directory, at)
            mark, method, crc, packed, nbytes, header_at = (fields[k] for k in (0, 4, 7, 8, 9, 16))
            lengths = fields[10:13]  # of the name, the extra fields, a comment
            begin = at + _ENTRY.size
            at = begin + sum(lengths)
            if mark != b"PK\1\2" or at > len(directory):
                raise self.wrong("its directory is damaged")
            try:
                self.folder, _, name = directory[begin : begin + lengths[0]].decode().partition("/")
            except UnicodeDecodeError:
                raise self.wrong("a name in its directory is not text") from None
            more = directory[begin + lengths[0] : begin + lengths[0] + lengths[1]]
            large = _zip64(more)
            nbytes, packed, header_at = (
                next(large, -1) if n == _32 else n for n in (nbytes, packed, header_at)
            )
            if not all(0 <= n <= MAX_COUNT for n in (nbytes, packed, header_at)):
                raise self.wrong(f"its directory gives {brief(name)} no size")
            yield name, Member(method == 0 and nbytes == packed, nbytes, crc, header_at)

    def wrong(self, what: str) -> FormatError:
        """The error for this container."""
        return FormatError(f"not a torch.save file: {what}", path=self._file.stored.path)


def _zip64(more: bytes) -> Iterator[int]:
    """The numbers in the zip64 field among an entry's extra fields, in order."""
    at = 0
    while at + 4 <= len(more):
        kind, length = struct.unpack_from("<2H", more, at)
        if kind == 1:
            for k in range(at + 4, min(at + 4 + length, len(more)) - 7, 8):
                yield int.from_bytes(more[k : k + 8], "little")
            return
        at += 4 + length


class MemberReader:
    """Reads a stored member from its beginning, piece by piece, and checks its CRC at the end."""

    def __init__(self, archive: TorchZip, member: Member) -> None:
        self._archive, self._member = archive, member
        self._at = archive.offset_of(member) - archive.begin
        self._left, self._crc = member.nbytes, 0

    def __call__(self, nbytes: int) -> bytes:
        found = self._archive.read(self._at, min(nbytes, self._left))
        self._at, self._left = self._at + len(found), self._left - len(found)
        self._crc = zlib.crc32(found, self._crc)
        return found

    def finish(self) -> None:
        """Read the rest. Raises :class:`FormatError` if the content does not match its CRC."""
        while self._left:
            self(1024**2)
        if self._crc != self._member.crc:
            raise self._archive.wrong("its description differs from its CRC: damaged")


# ----------------------------------------------------------------------------------------------------
# Locates the tensors in files of ``torch.save``, without unpickling anything but plain records.
#
# The format is torch's zip container (torch 1.6-2.14): ``data.pkl`` describes tensors, each ``data/<key>`` holds the
# elements of one storage, uncompressed. :mod:`.pickles` reads the pickle with plain records for its names and refuses
# any other name.

DTYPE_NAMES = {
    "float32": "F32",
    "float64": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
_STORAGES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": None,
}


@frozen
class Dtype:
    """A dtype, or the class of its storage; None for bytes of any dtype."""

    code: str | None


def plain_args(*args: Any) -> Any:
    """Stands for a function: gives its arguments."""
    return args


def to_tuple(values: Any = ()) -> tuple[Any, ...]:
    """Stands for ``torch.Size``."""
    return tuple(values)


def to_dict() -> dict[Any, Any]:
    """Stands for ``OrderedDict``."""
    return {}


@frozen
class Shard:
    """What a rank holds of a tensor of ``shape``."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@frozen
class Saved:
    """The description of one tensor in ``data.pkl``."""

    key: str
    code: str | None
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shard: Shard | None = None
    """Of which tensor it is a rank's part, if it is one."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What it holds of its tensor, in the order of its elements."""
        if self.shard is not None:
            return self.shard.boxes
        return (whole(self.sizes),) if 0 not in self.sizes else ()


def _rebuilt(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Saved:
    kind, dtype, key, *_ = storage
    if kind != "storage" or type(dtype) is not Dtype or type(key) is not str:
        raise ValueError(f"a tensor of {brief(kind)}")
    if metadata:
        raise ValueError(f"a tensor that is a view of its storage as {brief(metadata)} (negated, conjugated)")
    if not is_count(offset) or type(sizes) is not tuple or type(strides) is not tuple:
        raise ValueError(f"a tensor at {brief(offset)} of shape {brief(sizes)} and strides {brief(strides)}")
    numel_of(sizes, "a tensor")
    if len(strides) != len(sizes) or not all(map(is_count, strides)):
        raise ValueError(f"a tensor of shape {brief(sizes)} and strides {brief(strides)}")
    return Saved(key, dtype.code, offset, sizes, strides)


def _parameter(data: Any, *_: Any) -> Saved:
    if type(data) is not Saved:
        raise ValueError("a parameter that is not a tensor")
    return data


def _rebuilt_typed(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Saved:
    """``_rebuild_tensor_v3``: dtypes without a storage class."""
    if type(dtype) is not Dtype:
        raise ValueError(f"a tensor of dtype {brief(dtype)}")
    return replace(_rebuilt(storage, offset, sizes, strides, metadata=metadata), code=dtype.code)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Stands for ``_codecs.encode``, by which protocol 2 stores bytes."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError(f"bytes of {brief(text)} in {brief(encoding)}")
    return text.encode("latin1")


def _bytes(content: Any = b"") -> bytes:
    """Stands for ``bytes`` and ``bytearray``, but refuses a size, which would allocate that much."""
    if type(content) is not bytes:
        raise ValueError(f"bytes of {brief(content)}")
    return content


def _set(values: Any = ()) -> set[Any]:
    return {check_key(value) for value in values}


def _counter(counts: Any = None) -> Counter[Any]:
    if counts is not None and type(counts) is not dict:
        raise ValueError(f"a Counter of {brief(counts)}")
    return Counter(counts)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError(f"a complex number of {brief(real)} and {brief(imaginary)}")
    return complex(real, imaginary)


_BUILTINS: dict[str, Callable[..., Any]] = {
    "bytes": _bytes,
    "bytearray": _bytes,
    "set": _set,
    "complex": _complex,
}

#: The names of tensors and plain values, as ``torch.save`` writes them for a state dict and DCP for each item.
TENSOR_NAMES: Names = {
    ("torch._utils", "_rebuild_tensor_v2"): Name(_rebuilt),
    ("torch._utils", "_rebuild_tensor_v3"): Name(_rebuilt_typed),
    ("torch._utils", "_rebuild_parameter"): Name(_parameter),
    ("collections", "OrderedDict"): Name(to_dict),
    ("torch", "Size"): Name(to_tuple),
    **{("torch", name): Dtype(code) for name, code in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Dtype(None),
    **{("torch", name): Dtype(code) for name, code in DTYPE_NAMES.items()},
    ("collections", "Counter"): Name(_counter),
    ("_codecs", "encode"): Name(_encoded),
    # Protocol 2 uses Python 2's name of the module.
    **{(m, n): Name(work) for n, work in _BUILTINS.items() for m in ("builtins", "__builtin__")},
}


#: The same for a whole file, in which values of other classes may be stored next to the tensors: they become records.
ANY_NAMES: Names = AnyNames(TENSOR_NAMES)
#: Functions of torch by which tensors that are not plain ones are pickled.
_REBUILDS = ("torch._utils._rebuild", "torch._tensor._rebuild", "torch.distributed._shard.")


class Archive:
    """One ``torch.save``d object in a byte range of an open file: its description and its storages."""

    def __init__(self, file: OpenFile, offset_bytes: int, nbytes: int, names: Names = TENSOR_NAMES) -> None:
        """Reads the zip's directory and ``data.pkl``, with ``names`` for its classes. Raises :class:`FormatError`."""
        self._path = file.stored.path
        self._zip = TorchZip(file, offset_bytes, nbytes)
        described = self._zip.members.get("data.pkl")
        if described is None or not described.is_stored:
            raise self._zip.wrong("its description (data.pkl) is lost or compressed")
        reader = MemberReader(self._zip, described)
        self.content = unpickled(reader, described.nbytes, names, self._path)
        reader.finish()
        self._name_chars_left = described.nbytes * MAX_VISITS_PER_BYTE
        self.saved_as = self._zip.folder
        """As :attr:`TorchZip.folder`."""
        self.checksums: dict[int, int] = {}
        """The CRC-32 of each storage that :meth:`payload` gave as one whole tensor, by its offset in the file."""
        order = self._zip.members.get("byteorder")
        self._is_little = order is None or MemberReader(self._zip, order)(16) == b"little"

    def name_of(self, path: Iterable[Any]) -> str:
        """The name of a tensor at ``path``. Raises :class:`FormatError` if it is too long, or all names together are."""
        name = check_name(".".join(map(str, path)), "the place of a tensor", self._path)
        self._name_chars_left -= len(name)
        if self._name_chars_left < 0:
            raise FormatError(
                "rejected: its pickle repeats shared parts, and the names of their tensors are far longer than it",
                path=self._path,
            )
        return name

    def look_ahead(self, saved: Iterable[Saved]) -> None:
        """Look up where the storages of tensors lie: several at a time in a store, before :meth:`payload` is asked for each."""
        if is_url(self._path):
            named = [self._zip.members.get(f"data/{key}") for key in dict.fromkeys(one.key for one in saved)]
            each(self._path, self._zip.offset_of, [data for data in named if data is not None])

    def payload(self, saved: Saved, code: str, name: str) -> int:
        """Offset in the file of a tensor's elements. Raises :class:`FormatError` if they are not row-major."""
        size = itemsize(code)
        data = self._zip.members.get(f"data/{saved.key}")
        if (
            data is None
            or not data.is_stored
            or not self._is_little
            or not _is_row_major(saved.sizes, saved.strides)
            or (saved.offset + math.prod(saved.sizes)) * size > data.nbytes
        ):
            raise FormatError(
                f"{brief(name)} is not row-major (shape {brief(list(saved.sizes))}, strides "
                f"{brief(list(saved.strides))}); save it from a contiguous tensor",
                path=self._path,
            )
        at = self._zip.offset_of(data) + saved.offset * size
        if math.prod(saved.sizes) * size == data.nbytes and data.crc:  # 0: torch was told to compute none
            self.checksums[at] = data.crc
        return at


def catalog_of_torch_files(root: str, weights: Weights, choice: Choice) -> Catalog:
    """Catalog of the pickled files of a directory that :func:`.weights_in` chose.

    Raises as :func:`catalog_of_torch_file`; :class:`FormatError` if two files hold a tensor.
    """
    found = listed(root, weights, is_asked=choice.is_asked)
    tensors: dict[str, StoredTensor] = {}
    files: list[StoredFile] = []
    ignored: list[str] = []
    for name in found.names:
        part = catalog_of_torch_file(inside(root, name))
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            where = os.path.join(root, weights.name)
            raise FormatError(f"{twice[0]!r} is stored twice, in {name} and in a file before it", path=where)
        tensors |= part.tensors
        ignored += part.ignored_entries
        files += part.files
    return Catalog(
        "torch",
        root,
        tensors,
        tuple(files),
        ignored_files=found.ignored,
        passed_over=found.passed_over,
        unheld=found.unheld(tensors),
        ignored_entries=tuple(dict.fromkeys(ignored)),
    )


def catalog_of_torch_file(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of a state dict in one ``torch.save``d file: a dict of tensors by name, or such a dict under ``model``.

    Reads and raises as :func:`read_torch_file`; :class:`FormatError` if there is no such dict.
    """
    ignored: list[str] = []

    def pick(content: Any) -> Any:
        return _state_dict_in(content, ignored)

    content, files = read_torch_file(path, pick, names=ANY_NAMES)
    root = files[0].path
    tensors = {str(n): replace(t, name=str(n)) for n, t in content.items()}
    if len(tensors) != len(content):
        raise FormatError("two of its names differ only in type (1 and '1')", path=root)
    refuse_overlap(tensors.values(), files, root)
    has_module_names = os.path.basename(root).startswith(FULL_STATE_STEM) or stem_of_ranks(root) is not None
    return Catalog(
        "full state" if has_module_names else "torch", root, tensors, files, ignored_entries=tuple(ignored)
    )


def refuse_overlap(tensors: Iterable[StoredTensor], files: Iterable[StoredFile], root: str) -> None:
    """Refuse tensors that have far more bytes than the files: a description may name the same bytes any number of times."""
    if sum(t.nbytes for t in tensors) > MAX_BYTES_PER_BYTE * sum(file.nbytes for file in files):
        raise FormatError(
            f"its tensors overlap: together they have more than {MAX_BYTES_PER_BYTE} times the bytes of the file",
            path=root,
        )


def _state_dict_in(content: Any, ignored: list[str]) -> dict[Any, Saved]:
    """The dict of tensors in a file's content. Names each entry that isn't one of them in ``ignored``.

    Raises :class:`FormatError` if there is no tensor, and for tensors that are not plain.
    """
    for key in ("model", "state_dict", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            ignored += [_entry(k, v) for k, v in content.items() if k != key]
            content = content[key]
    if isinstance(content, Record):
        raise FormatError(f"{_asks_for(content)}; save the state_dict() of the object")
    if not isinstance(content, dict):
        raise FormatError("contains no dict of tensors")
    for name, value in content.items():
        if isinstance(value, Record) and value.kind.startswith(_REBUILDS):
            raise FormatError(_not_plain(name, value))
    found = {k: v for k, v in content.items() if isinstance(v, Saved)}
    objects = [v for v in content.values() if isinstance(v, Record)]
    if objects and not found:
        raise FormatError(f"{_asks_for(objects[0])}, and contains no tensors by name")
    ignored += [_entry(k, v) for k, v in content.items() if k not in found]
    return found


def _entry(key: Any, value: Any) -> str:
    return f"{brief(key)} ({value.kind})" if isinstance(value, Record) else brief(key)


def _asks_for(value: Record) -> str:
    kind = value.kind if value.kind.isprintable() else brief(value.kind)
    return f"rejected: its pickle asks for {kind}, which is not part of the format"


def _not_plain(name: Any, value: Record) -> str:
    """Why a tensor of another class can't be read, by the class that its pickle names."""
    classes = [a.make.args[0] for a in value.args if isinstance(a, Name) and isinstance(a.make, partial)]
    kind = next((c for c in reversed(classes) if not c.startswith(_REBUILDS)), value.kind)
    if "DTensor" in kind or "ShardedTensor" in kind:
        what = (
            f"is one rank's part of a sharded model ({kind.rpartition('.')[2]}), saved by torch.save on each rank. Merge the "
            f"files with the tool of the program that wrote them, or save with DCP or shardwise"
        )
    elif "torchao" in kind:
        what = (
            f"is quantized by torchao ({kind.rpartition('.')[2]}), which can't be read. Load the model from which it was quantized, or "
            f"save plain tensors: {{n: t.dequantize() for n, t in state_dict.items()}}"
        )
    else:
        what = f"is a tensor of {kind}, which is not part of the format; save plain, dense tensors"
    return f"{brief(name)} {what}"


def read_torch_file(
    path: str | os.PathLike[str],
    pick: Callable[[Any], Any] = lambda content: content,
    *,
    names: Names = TENSOR_NAMES,
) -> tuple[Any, tuple[StoredFile, ...]]:
    """The content of one ``torch.save``d file: its dicts and lists, with a place in the file for each tensor.

    The path of one rank's file (:mod:`.rank_files`) stands for those of all ranks; the content is then that of all. ``pick`` selects a part before
    tensors are located; ``names`` stand for its classes. Rank-local; reads the zip's directory, the description and 30 bytes per tensor, no
    payload. Raises :class:`SourceError`, :class:`FormatError` (names other than those of tensors and plain values, elements not in row-major
    order, a file from before torch 1.6), and as :func:`.read_rank_files`.
    """
    if stem_of_ranks(os.fspath(path)):
        from .rank_files import read_rank_files

        return read_rank_files(os.fspath(path), pick)
    content, file, _ = read_one_file(os.fspath(path), pick, names)
    return content, (file,)


def read_one_file(path: str, pick: Callable[[Any], Any], names: Names) -> tuple[Any, StoredFile, Archive]:
    """As :func:`read_torch_file`, of one file; and the archive in it, for its :attr:`~Archive.checksums` and its name."""
    with open_file(path) as file:
        archive = Archive(file, 0, file.stored.nbytes, names)
        try:
            picked = pick(archive.content)
        except FormatError as error:
            raise error if error.path else FormatError(str(error), path=file.stored.path) from None
        archive.look_ahead(_saved_in(picked))
        return located(archive, picked, file.stored.path), file.stored, archive


#: Optimizer states lie four levels deep (``state``, parameter, name of the state). Nothing that is read lies deeper.
_MAX_DEPTH = 8


def _saved_in(value: Any, depth: int = 0) -> Iterator[Saved]:
    """The tensors that :func:`located` meets."""
    if isinstance(value, Saved):
        if value.code is not None and 0 not in value.sizes:
            yield value
    elif depth < _MAX_DEPTH and type(value) in (dict, list, tuple):
        for inner in value.values() if type(value) is dict else value:
            yield from _saved_in(inner, depth + 1)


def located(archive: Archive, value: Any, file: str, path: tuple[Any, ...] = ()) -> Any:
    """``value``, with the place of each tensor in the file instead of its description."""
    if isinstance(value, Saved):
        name = archive.name_of(path)
        if value.code is None:
            raise FormatError(f"{name!r} has a dtype that can't be read", path=file)
        chunks: list[Chunk] = []
        at = archive.payload(value, value.code, name) if 0 not in value.sizes else 0
        for box in value.boxes:
            chunks.append(Chunk(box, file, at))
            at += box.numel * itemsize(value.code)
        return StoredTensor(
            name, value.code, value.shard.shape if value.shard else value.sizes, tuple(chunks)
        )
    if len(path) == _MAX_DEPTH:
        return value
    if type(value) is dict:
        return {k: located(archive, v, file, (*path, _part(k))) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(located(archive, v, file, (*path, k)) for k, v in enumerate(value))
    return value


def _part(key: Any) -> str:
    """A key as part of a name, cut to the longest that a name may be."""
    return str(key)[: MAX_NAME_CHARS + 1] if isinstance(key, str | int) else brief(key)


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True
