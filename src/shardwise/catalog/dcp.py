"""Catalog of a torch.distributed.checkpoint directory (``.metadata`` and ``*.distcp``), headers only.

The format is torch's FileSystemWriter's (torch 2.3-2.13, metadata version 1.0.0): ``.metadata`` is a pickle of
dataclasses that lists, per tensor, its chunks and, per chunk, a byte range of a file; each range is what
``torch.save`` makes of one tensor, a zip file with the elements uncompressed in it. Neither pickle is given
anything of torch's or Python's: the few classes that the format uses stand for plain records here, and any other
name is refused.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import itemsize
from ..errors import FormatError, IntegrityError, SourceError
from ..layout.boxes import Box
from .records import Catalog, Chunk, StoredFile, StoredTensor, assemble

__all__ = ["METADATA_NAME", "ByteRange", "DcpCheckpoint", "catalog_of_dcp", "read_dcp"]

METADATA_NAME = ".metadata"
_MODEL_PATHS: tuple[tuple[str, ...], ...] = (("model",), ("app", "model"), ("state", "model"))
_MOST_METADATA_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where an item that is no tensor lies: a pickle, to be read with ``torch.load(weights_only=True)`` only."""

    path: str
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """What ``.metadata`` tells: tensors by name, other items by name, and the path of each name in the state dict."""

    catalog: Catalog
    objects: Mapping[str, ByteRange]
    paths: Mapping[str, tuple[str | int, ...]]


def catalog_of_dcp(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of the model in a DCP directory, under module names; see :func:`read_dcp`.

    Where the state dict that was saved has an entry ``model`` (also inside ``app`` or ``state``), as Accelerate,
    the HF Trainer and torch's own examples write it, its tensors; else all tensors.
    """
    found = read_dcp(path)
    paths = {n: found.paths.get(n, (n,)) for n in found.catalog.tensors}
    prefix = next((p for p in _MODEL_PATHS if any(path[: len(p)] == p for path in paths.values())), ())
    tensors = {
        name: replace(found.catalog.tensors[stored], name=name)
        for stored, path in paths.items()
        if path[: len(prefix)] == prefix and (name := ".".join(map(str, path[len(prefix) :])))
    }
    return replace(found.catalog, tensors=tensors)


def read_dcp(path: str | os.PathLike[str]) -> DcpCheckpoint:
    """Describe a DCP directory. Rank-local; reads ``.metadata`` and about 1 KiB per chunk, no payload.

    Raises :class:`SourceError` (not there, not readable), :class:`FormatError` (names other classes than DCP's,
    points outside its directory, compressed or strided chunks, overlapping or missing ones),
    :class:`IntegrityError` (a file that is lost or truncated).
    """
    root = os.fspath(path)
    metadata = _read_metadata(os.path.join(root, METADATA_NAME))
    locations = {}
    for index, where in _mapping(metadata, "storage_data").items():
        offset = getattr(index, "offset", None)
        locations[(index.fqn, None if offset is None else tuple(offset))] = _range_of(where, root)
    files = _Files()
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, ByteRange] = {}
    with files:
        for name, entry in _mapping(metadata, "state_dict_metadata").items():
            if isinstance(entry, _Object):
                where = locations.get((name, None)) or locations.get((name, ()))
                if where is None:
                    raise FormatError(f"lists no bytes of {name!r}", path=os.path.join(root, METADATA_NAME))
                objects[name] = where
            else:
                tensors[name] = _tensor(name, entry, locations, files, root)
        stored_files = tuple(StoredFile(p, n) for p, n in files.sizes.items())
    paths = {n: tuple(p) for n, p in (getattr(metadata, "planner_data", None) or {}).items()}
    return DcpCheckpoint(Catalog("dcp", root, tensors, stored_files), objects, paths)


# ----------------------------------------------------------------------------------------------------
# The two pickles, without anything behind their names


class _Record:
    """Stands for a dataclass of DCP: takes whatever state comes."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


class _Index(_Record):
    """MetadataIndex: a key of a dict, and frozen there."""

    fqn: str

    def __hash__(self) -> int:
        return id(self)


class _Object(_Record):
    """BytesStorageMetadata: an item that is no tensor."""


def _plain(*args: Any) -> Any:
    return args


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _ordered() -> dict[Any, Any]:
    return {}


_DTYPES = {
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
}
_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): _Record
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
        )
    },
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "BytesStorageMetadata"): _Object,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _plain,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _tuple,
    ("torch.serialization", "_get_layout"): _plain,
    **{("pathlib", name): _plain for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath")},
    ("collections", "OrderedDict"): _ordered,
    **{("torch", name): code for name, code in _DTYPES.items()},
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
    "UntypedStorage": None,
}


class _Unpickler(pickle.Unpickler):
    """Knows only the names that it is given; makes records of them."""

    def __init__(self, stream: io.BytesIO, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise FormatError(
                f"refused: its pickle asks for {module}.{name}, which is not a part of the format"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _read_metadata(file: str) -> Any:
    try:
        nbytes = os.stat(file).st_size
        if nbytes > _MOST_METADATA_BYTES:
            raise FormatError(f"{nbytes} bytes of metadata", path=file)
        with open(file, "rb") as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise SourceError(
            "no .metadata: not a DCP checkpoint, or one whose save did not end", path=file
        ) from error
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=file) from error
    return _unpickled(content, _NAMES, file)


def _unpickled(content: bytes, names: Mapping[tuple[str, str], Any], file: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(content), names).load()
    except FormatError as error:
        raise FormatError(str(error), path=file) from None
    except Exception as error:  # a pickle can fail in any way
        raise FormatError(f"can't be read ({type(error).__name__}: {error}): damaged", path=file) from error


def _mapping(metadata: Any, name: str) -> dict[Any, Any]:
    found = getattr(metadata, name, None)
    if not isinstance(found, dict):
        raise FormatError(f"its metadata has no {name}; expected that of torch's FileSystemWriter")
    return found


# ----------------------------------------------------------------------------------------------------
# Chunks


def _range_of(where: Any, root: str) -> ByteRange:
    relative, offset, nbytes = where.relative_path, where.offset, where.length
    if not isinstance(relative, str) or os.path.isabs(relative) or ".." in relative.split("/"):
        raise FormatError(f"points at {relative!r}, outside its directory", path=root)
    if getattr(where, "transform_descriptors", None):
        raise FormatError(
            f"{relative} is compressed ({where.transform_descriptors}); write the checkpoint without",
            path=root,
        )
    if not all(isinstance(n, int) and n >= 0 for n in (offset, nbytes)):
        raise FormatError(f"{relative}: byte range {offset!r} + {nbytes!r}", path=root)
    return ByteRange(os.path.join(root, relative), offset, nbytes)


def _tensor(
    name: str,
    entry: Any,
    locations: Mapping[tuple[str, tuple[int, ...] | None], ByteRange],
    files: _Files,
    root: str,
) -> StoredTensor:
    shape, code = tuple(entry.size), entry.properties.args[0]
    if not isinstance(code, str):
        raise FormatError(f"{name!r} has a dtype that can't be read", path=root)
    chunks = []
    for chunk in entry.chunks:
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        if not box.numel and shape != sizes:
            continue  # the empty part of a rank without rows
        where = locations.get((name, start))
        if where is None and not start:
            where = locations.get((name, None))
        if where is None:
            raise FormatError(f"lists no bytes of {name!r} at {start}", path=root)
        chunks.append(Chunk(box, where.path, files.payload(where, code, sizes, name)))
    if not chunks or 0 in shape:
        return StoredTensor(name, code, shape, ())
    found = assemble(name, code, chunks)
    if found.shape != shape:
        raise FormatError(f"chunks of {name!r} make shape {list(found.shape)}, expected {list(shape)}", path=root)
    return found


class _Files:
    """Finds where the elements of a ``torch.save``d tensor lie in a file."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def payload(self, where: ByteRange, code: str, sizes: tuple[int, ...], name: str) -> int:
        """Offset, in the file, of the elements of one chunk. Raises :class:`FormatError` if they don't lie row by row."""
        fd = self._fd(where)
        window = _Window(fd, where.offset_bytes, where.nbytes)
        try:
            with zipfile.ZipFile(window) as archive:
                entries = {i.filename.partition("/")[2]: i for i in archive.infolist()}
                described = archive.read(entries["data.pkl"])
                order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
        except (
            zipfile.BadZipFile,
            KeyError,
            NotImplementedError,
            RuntimeError,
            OSError,
            ValueError,
        ) as error:
            raise FormatError(
                f"chunk of {name!r} is not what torch.save writes: {error}", path=where.path
            ) from error
        tensor = _unpickled(described, _TENSOR_NAMES, where.path)
        if not isinstance(tensor, _Saved) or tensor.code not in (code, None):
            raise FormatError(f"chunk of {name!r} is no tensor of dtype {code}", path=where.path)
        expected = itemsize(code)
        for n in sizes:
            expected *= n
        data = entries.get(f"data/{tensor.key}")
        if (
            data is None
            or data.compress_type != zipfile.ZIP_STORED
            or order != b"little"
            or tensor.sizes != sizes
            or not _is_row_major(tensor.sizes, tensor.strides)
            or tensor.offset * itemsize(code) + expected > data.file_size
        ):
            raise FormatError(
                f"chunk of {name!r} of shape {list(sizes)} does not lie row by row (stored: shape "
                f"{list(tensor.sizes)}, strides {list(tensor.strides)}); save it from a contiguous tensor",
                path=where.path,
            )
        local = os.pread(
            fd, 30, where.offset_bytes + data.header_offset
        )  # a local header tells its own length
        begin = (
            data.header_offset
            + 30
            + int.from_bytes(local[26:28], "little")
            + int.from_bytes(local[28:30], "little")
        )
        return where.offset_bytes + begin + tensor.offset * itemsize(code)

    def _fd(self, where: ByteRange) -> int:
        if where.path not in self._open:
            try:
                fd = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError as error:
                raise IntegrityError("lost: no such file", path=where.path) from error
            except OSError as error:
                raise SourceError(f"can't be opened: {error.strerror}", path=where.path) from error
            while len(self._open) >= 64:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[where.path] = fd
            self.sizes[where.path] = os.fstat(fd).st_size
        if where.offset_bytes + where.nbytes > self.sizes[where.path]:
            raise IntegrityError(
                f"{self.sizes[where.path]} bytes, but a chunk ends at {where.offset_bytes + where.nbytes}: truncated",
                path=where.path,
            )
        return self._open[where.path]


class _Window(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, fd: int, begin: int, nbytes: int) -> None:
        self._fd, self._begin, self._nbytes, self._at = fd, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(view.nbytes, self._nbytes - self._at))
        count = os.preadv(self._fd, [view[:length]], self._begin + self._at) if length else 0
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Saved:
    """What ``data.pkl`` of one tensor says."""

    key: str
    code: str | None
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuilt(storage: Any, offset: int, sizes: Any, strides: Any, *_: Any) -> _Saved:
    kind, code, key, *_ = storage
    if kind != "storage":
        raise ValueError(f"a tensor of {kind!r}")
    return _Saved(str(key), code, int(offset), tuple(map(int, sizes)), tuple(map(int, strides)))


def _parameter(data: _Saved, *_: Any) -> _Saved:
    return data


def _rebuilt_typed(
    storage: Any, offset: int, sizes: Any, strides: Any, grad: Any, hooks: Any, code: str
) -> _Saved:
    """``_rebuild_tensor_v3``: dtypes that no storage class stands for."""
    saved = _rebuilt(storage, offset, sizes, strides)
    return _Saved(saved.key, code, saved.offset, saved.sizes, saved.strides)


_TENSOR_NAMES: dict[tuple[str, str], Callable[..., Any] | str | None] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_typed,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): _ordered,
    ("torch", "Size"): _tuple,
    **{("torch", name): code for name, code in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): code for name, code in _DTYPES.items()},
}


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True
