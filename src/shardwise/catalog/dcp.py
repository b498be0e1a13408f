"""Catalog of a torch.distributed.checkpoint directory (``.metadata`` and ``*.distcp``), headers only.

The format is torch's FileSystemWriter's (torch 2.3-2.13, metadata version 1.0.0): ``.metadata`` is a pickle of
dataclasses that lists, per tensor, its chunks and, per chunk, a byte range of a file; each range is what
``torch.save`` makes of one tensor, a zip file with the elements uncompressed in it. Neither pickle is given
anything of torch's or Python's: the few classes that the format uses stand for plain records here, and any other
name is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import FormatError, IntegrityError, SourceError
from ..layout.boxes import Box
from .records import Catalog, Chunk, StoredFile, StoredTensor, assemble
from .torchfile import DTYPE_NAMES, Archive, Saved, is_name_of, plain_args, to_dict, to_tuple, unpickled

__all__ = ["METADATA_NAME", "ByteRange", "DcpCheckpoint", "catalog_of_dcp", "model_in", "read_dcp"]

METADATA_NAME = ".metadata"
_MODEL_PATHS: tuple[tuple[str, ...], ...] = (("model",), ("app", "model"), ("state", "model"))
#: Entries of a state dict that are no model's, where the model's tensors lie at the top (torchtitan).
_BESIDE = frozenset(("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state"))
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
    the HF Trainer and torch's own examples write it, its tensors; else all tensors but those of an optimizer and
    of the other entries that torchtitan puts beside them. May be empty.
    """
    return model_in(read_dcp(path))


def model_in(found: DcpCheckpoint) -> Catalog:
    """The model's part of a DCP directory that was read; see :func:`catalog_of_dcp`."""
    paths = {n: found.paths.get(n, (n,)) for n in found.catalog.tensors}
    prefix = next((p for p in _MODEL_PATHS if any(path[: len(p)] == p for path in paths.values())), ())
    tensors = {
        name: replace(found.catalog.tensors[stored], name=name)
        for stored, path in paths.items()
        if path[: len(prefix)] == prefix
        and (prefix or len(path) == 1 or path[0] not in _BESIDE)
        and (name := ".".join(map(str, path[len(prefix) :])))
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
    try:
        return _described(metadata, root)
    except (AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise FormatError(
            f"its metadata does not have the parts of DCP's ({type(error).__name__}: {error}): damaged",
            path=os.path.join(root, METADATA_NAME),
        ) from error


def _described(metadata: Any, root: str) -> DcpCheckpoint:
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


def _memory_format(value: Any) -> str:
    """Stands for the enum of memory formats, which nothing here asks for."""
    return "memory format"


def _member(owner: Any, name: Any) -> str:
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 refer to a member of an enum. Gets nothing."""
    if not is_name_of(owner, _memory_format) or not isinstance(name, str):
        raise ValueError("getattr of something else than a memory format")
    return "memory format"


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
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("builtins", "getattr"): _member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): to_tuple,
    ("torch.serialization", "_get_layout"): plain_args,
    **{("pathlib", name): plain_args for name in ("PosixPath", "PurePosixPath", "Path", "WindowsPath")},
    ("collections", "OrderedDict"): to_dict,
    **{("torch", name): code for name, code in DTYPE_NAMES.items()},
}


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
    return unpickled(content, _NAMES, file)


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
        raise FormatError(
            f"chunks of {name!r} make shape {list(found.shape)}, expected {list(shape)}", path=root
        )
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
        archive = Archive(self._fd(where), where.offset_bytes, where.nbytes, where.path)
        saved = archive.content
        if not isinstance(saved, Saved) or saved.code not in (code, None) or saved.sizes != sizes:
            raise FormatError(
                f"chunk of {name!r} is no tensor of dtype {code} and shape {list(sizes)}", path=where.path
            )
        return archive.payload(saved, code, name)

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
