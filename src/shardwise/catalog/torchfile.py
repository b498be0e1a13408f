"""Files that ``torch.save`` writes: where the elements of their tensors lie, without unpickling anything but records.

The format is torch's zip container (torch 1.6-2.13): ``data.pkl`` describes tensors, each ``data/<key>`` holds the
elements of one storage, uncompressed. The pickle is read with names that stand for plain records and nothing behind
them; any other name is refused.
"""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..dtypes import itemsize
from ..errors import FormatError, SourceError
from ..layout.boxes import whole
from ..patience import patiently
from .records import Catalog, Chunk, StoredFile, StoredTensor

__all__ = [
    "DTYPE_NAMES",
    "FULL_STATE_STEM",
    "Archive",
    "Saved",
    "catalog_of_torch_file",
    "catalog_of_torch_files",
    "has_torch_files",
    "is_torch_file",
    "is_name_of",
    "plain_args",
    "read_torch_file",
    "to_dict",
    "to_tuple",
    "unpickled",
]

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


def plain_args(*args: Any) -> Any:
    """Stands for a function: gives its arguments."""
    return args


def to_tuple(values: Any = ()) -> tuple[Any, ...]:
    """Stands for ``torch.Size``."""
    return tuple(values)


class _Dict(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        """Forgets the attributes (``_metadata`` of state dicts)."""


def to_dict() -> dict[Any, Any]:
    """Stands for ``OrderedDict``."""
    return _Dict()


class _Callable:
    """One of our functions, of which a pickle can't change the attributes (BUILD)."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def __call__(self, *args: Any) -> Any:
        return self._work(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("state for a function")


def is_name_of(found: Any, work: Callable[..., Any]) -> bool:
    """Whether something in a pickle is the name behind which ``work`` stands."""
    return isinstance(found, _Callable) and found._work is work


class _Unpickler(pickle.Unpickler):
    """Knows only the names that it is given; makes records of them."""

    def __init__(self, stream: io.BytesIO, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        try:
            found = self._names[module, name]
        except KeyError:
            raise FormatError(
                f"refused: its pickle asks for {module}.{name}, which is not a part of the format"
            ) from None
        return _Callable(found) if inspect.isfunction(found) else found

    def persistent_load(self, pid: Any) -> Any:
        return pid


def unpickled(content: bytes, names: Mapping[tuple[str, str], Any], file: str) -> Any:
    """What a pickle describes, in terms of ``names`` only. Raises :class:`FormatError` for any other name."""
    try:
        return _Unpickler(io.BytesIO(content), names).load()
    except FormatError as error:
        raise FormatError(str(error), path=file) from None
    except Exception as error:  # a pickle can fail in any way
        raise FormatError(f"can't be read ({type(error).__name__}: {error}): damaged", path=file) from error


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
        count = patiently(os.preadv, self._fd, [view[:length]], self._begin + self._at) if length else 0
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class Saved:
    """What ``data.pkl`` of one tensor says."""

    key: str
    code: str | None
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuilt(
    storage: Any,
    offset: int,
    sizes: Any,
    strides: Any,
    grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Saved:
    kind, code, key, *_ = storage
    if kind != "storage":
        raise ValueError(f"a tensor of {kind!r}")
    if metadata:
        raise ValueError(f"a tensor that is a view of its storage as {metadata!r} (negated, conjugated)")
    if offset < 0 or any(n < 0 for n in (*sizes, *strides)):
        raise ValueError(f"a tensor at {offset} of shape {tuple(sizes)} and strides {tuple(strides)}")
    return Saved(str(key), code, int(offset), tuple(map(int, sizes)), tuple(map(int, strides)))


def _parameter(data: Saved, *_: Any) -> Saved:
    return data


def _rebuilt_typed(
    storage: Any,
    offset: int,
    sizes: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    code: str,
    metadata: Any = None,
) -> Saved:
    """``_rebuild_tensor_v3``: dtypes that no storage class stands for."""
    saved = _rebuilt(storage, offset, sizes, strides, metadata=metadata)
    return Saved(saved.key, code, saved.offset, saved.sizes, saved.strides)


_TENSOR_NAMES: dict[tuple[str, str], Callable[..., Any] | str | None] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuilt_typed,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): to_dict,
    ("torch", "Size"): to_tuple,
    **{("torch", name): code for name, code in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): code for name, code in DTYPE_NAMES.items()},
}


class Archive:
    """One ``torch.save``d object in a byte range of an open file: its description, and where storages lie."""

    def __init__(self, fd: int, offset_bytes: int, nbytes: int, path: str) -> None:
        """Reads the zip's directory and ``data.pkl``. Raises :class:`FormatError`."""
        self._fd, self._offset_bytes, self._path = fd, offset_bytes, path
        window = _Window(fd, offset_bytes, nbytes)
        try:
            with zipfile.ZipFile(window) as archive:
                self._entries = {i.filename.partition("/")[2]: i for i in archive.infolist()}
                small = [i for n, i in self._entries.items() if n in ("data.pkl", "byteorder")]
                if any(i.compress_type != zipfile.ZIP_STORED or i.file_size > nbytes for i in small):
                    raise ValueError("its description is compressed")
                described = archive.read(self._entries["data.pkl"])
                has_order = "byteorder" in self._entries
                self._order = archive.read(self._entries["byteorder"]) if has_order else b"little"
        except (
            zipfile.BadZipFile,
            KeyError,
            NotImplementedError,
            RuntimeError,
            OSError,
            ValueError,
        ) as error:
            raise FormatError(f"not what torch.save writes: {error}", path=path) from error
        self.content = unpickled(described, _TENSOR_NAMES, path)

    def payload(self, saved: Saved, code: str, name: str) -> int:
        """Offset, in the file, of a tensor's elements. Raises :class:`FormatError` if they don't lie row by row."""
        size = itemsize(code)
        data = self._entries.get(f"data/{saved.key}")
        if (
            data is None
            or data.compress_type != zipfile.ZIP_STORED
            or self._order != b"little"
            or saved.offset < 0
            or not _is_row_major(saved.sizes, saved.strides)
            or (saved.offset + math.prod(saved.sizes)) * size > data.file_size
        ):
            raise FormatError(
                f"{name!r} does not lie row by row (shape {list(saved.sizes)}, strides {list(saved.strides)}); "
                f"save it from a contiguous tensor",
                path=self._path,
            )
        local = os.pread(self._fd, 30, self._offset_bytes + data.header_offset)  # it tells its own length
        lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        return self._offset_bytes + data.header_offset + 30 + lengths + saved.offset * size


def is_torch_file(path: str) -> bool:
    """Whether a path names a file as ``torch.save`` does: ``.bin``, ``.pt`` or ``.pth``."""
    return path.endswith((".bin", ".pt", ".pth")) and os.path.isfile(path)


#: What Accelerate and the HF Trainer call a model in FSDP's full state, whose names are those of modules.
FULL_STATE_STEM = "pytorch_model_fsdp"
TORCH_INDEX_NAME, TORCH_SINGLE_NAME = "pytorch_model.bin.index.json", "pytorch_model.bin"


def has_torch_files(root: str) -> bool:
    """Whether a directory holds a model in the layout that came before safetensors."""
    return any(os.path.isfile(os.path.join(root, n)) for n in (TORCH_INDEX_NAME, TORCH_SINGLE_NAME))


def catalog_of_torch_files(root: str) -> Catalog:
    """Catalog of a directory with ``pytorch_model.bin``, or with several and an index.

    Raises as :func:`catalog_of_torch_file`; :class:`FormatError` for a tensor that two files hold, or that a file
    lacks which the index names.
    """
    index = os.path.join(root, TORCH_INDEX_NAME)
    if not os.path.isfile(index):
        return replace(catalog_of_torch_file(os.path.join(root, TORCH_SINGLE_NAME)), root=root)
    try:
        with open(index, "rb") as stream:
            weight_map = json.load(stream)["weight_map"]
        names = sorted({str(n) for n in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise FormatError(f"not an index of files: {error}", path=index) from error
    if any(os.path.basename(n) != n for n in names):
        raise FormatError(f"names files outside its directory: {names}", path=index)
    tensors: dict[str, StoredTensor] = {}
    files: list[StoredFile] = []
    for name in names:
        part = catalog_of_torch_file(os.path.join(root, name))
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise FormatError(f"{twice[0]!r} is stored twice, in {name} and before", path=index)
        tensors |= part.tensors
        files += part.files
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise FormatError(f"{lost[0]!r} is not in {weight_map[lost[0]]}", path=index)
    return Catalog("torch", root, tensors, tuple(files))


def catalog_of_torch_file(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of a state dict in one ``torch.save``d file: a dict of tensors by name, or such a dict under ``model``.

    What :func:`read_torch_file` reads and raises; :class:`FormatError` if there is no such dict.
    """
    content, file = read_torch_file(path, _state_dict_in)
    if not isinstance(content, dict):
        raise FormatError("holds no dict of tensors", path=file.path)
    tensors = {str(n): replace(t, name=str(n)) for n, t in content.items()}
    kind = "full state" if os.path.basename(file.path).startswith(FULL_STATE_STEM) else "torch"
    return Catalog(kind, file.path, tensors, (file,))


def _state_dict_in(content: Any) -> Any:
    for key in ("model", "state_dict", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if isinstance(content, dict):  # what else there is may hold tensors that can't be read
        return {k: v for k, v in content.items() if isinstance(v, Saved)}
    return content


def read_torch_file(
    path: str | os.PathLike[str], pick: Callable[[Any], Any] = lambda content: content
) -> tuple[Any, StoredFile]:
    """What one ``torch.save``d file holds: dicts and lists as they are, and where each tensor in them lies.

    ``pick`` takes the part that is wanted, before tensors are looked for. Rank-local; reads the zip's directory, the description and 30 bytes a tensor, no payload. Raises
    :class:`SourceError`, :class:`FormatError` (other names than those of tensors, elements that do not lie row by
    row, a file in the old format before torch 1.6).
    """
    file = os.fspath(path)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(f"can't be opened: {error.strerror}", path=file) from error
    try:
        nbytes = os.fstat(fd).st_size
        archive = Archive(fd, 0, nbytes, file)
        return _located(archive, pick(archive.content), (), file), StoredFile(file, nbytes)
    finally:
        os.close(fd)


#: Optimizer states lie four deep (``state``, parameter, name of the state), and nothing that is read deeper.
_MAX_DEPTH = 8


def _located(archive: Archive, value: Any, path: tuple[Any, ...], file: str) -> Any:
    """``value`` with each tensor's place in the file instead of its description."""
    if isinstance(value, Saved):
        name = ".".join(map(str, path))
        if value.code is None:
            raise FormatError(f"{name!r} has a dtype that can't be read", path=file)
        chunks: tuple[Chunk, ...] = ()
        if 0 not in value.sizes:
            chunks = (Chunk(whole(value.sizes), file, archive.payload(value, value.code, name)),)
        return StoredTensor(name, value.code, value.sizes, chunks)
    if len(path) == _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {k: _located(archive, v, (*path, k), file) for k, v in value.items()}
    if isinstance(value, list):
        return [_located(archive, v, (*path, k), file) for k, v in enumerate(value)]
    return value


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True
