"""Reads pickled values and small tensors of other programs as plain values; builds no other object."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..catalog import StoredFile, StoredTensor
from ..catalog.dcp import ByteRange, DcpCheckpoint, ItemFiles
from ..catalog.pickled_trees import Record
from ..catalog.small_reads import OpenFile, open_file
from ..catalog.torchfile import ANY_NAMES, TENSOR_NAMES, Archive, Dtype, Names, Saved
from ..dtypes import itemsize, torch_dtype
from ..errors import FormatError, IntegrityError
from ..limits import MAX_BYTES_PER_BYTE, MAX_VALUE_BYTES, brief, is_count
from ..transfer import SourceReader

__all__ = [
    "Objects",
    "PlainValues",
    "count_of_steps",
    "nested",
    "plain_parts",
    "plain_tensor",
    "plain_values",
    "step_in",
]


#: Items up to this size are cached by their bytes.
_SMALL_BYTES = 64 * 1024


class Objects:
    """Reads pickled items of DCP files. Equal bytes give one value: each parameter repeats its group's settings.

    ``files``: as ``known`` of :class:`.ItemFiles`.
    """

    def __init__(self, files: Iterable[StoredFile] = ()) -> None:
        self._known: dict[bytes, Any] = {}
        self._files = ItemFiles(files)

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def value(self, where: ByteRange) -> Any:
        """The value of an item. Raises :class:`SourceError` as :func:`plain_values` does."""
        file = self._files.file(where)
        if where.nbytes > _SMALL_BYTES:
            return _plain_values(file, where.offset_bytes, where.nbytes)
        key = file.read(where.offset_bytes, where.nbytes)
        if key not in self._known:
            self._known[key] = _plain_values(file, where.offset_bytes, where.nbytes)
        return self._known[key]


def plain_values(path: str) -> Any:
    """Plain values and tensors from a file of ``torch.save``; builds no other object.

    Rank-local. Raises :class:`SourceError`, :class:`FormatError` for anything else, and for more bytes of tensors than
    :data:`~shardwise.limits.MAX_VALUE_BYTES`.
    """
    with open_file(path) as file:
        return _plain_values(file, 0, file.stored.nbytes)


def plain_parts(path: str, wanted: Sequence[str]) -> dict[Any, Any]:
    """The entries of the dict in a file of ``torch.save``, with the plain values of those in ``wanted`` and None for the others.

    Other entries may have objects of any class, which aren't built. Raises as :func:`plain_values`.
    """

    def pick(content: Any) -> Any:
        if type(content) is not dict:
            raise FormatError(f"holds {brief(content)}, expected a dict", path=path)
        return {key: value if key in wanted else None for key, value in content.items()}

    with open_file(path) as file:
        found: dict[Any, Any] = _plain_values(file, 0, file.stored.nbytes, ANY_NAMES, pick)
        return found


def _plain_values(
    file: OpenFile,
    offset_bytes: int,
    nbytes: int,
    names: Names = TENSOR_NAMES,
    pick: Callable[[Any], Any] = lambda content: content,
) -> Any:
    archive, path = Archive(file, offset_bytes, nbytes, names), file.stored.path
    known: dict[int, torch.Tensor] = {}

    def read(saved: Any) -> torch.Tensor:
        if id(saved) in known:  # the pickle has it once: one tensor, as torch.load gives it
            return known[id(saved)]
        found = torch.empty(saved.sizes, dtype=torch_dtype(saved.code))
        if found.numel():
            view = memoryview(found.reshape(-1).view(torch.uint8).numpy().data)
            content = file.read(archive.payload(saved, saved.code, "a value"), view.nbytes)
            if len(content) != view.nbytes:
                raise IntegrityError("ends before the end of a value: truncated", path=path)
            view[:] = content
        known[id(saved)] = found
        return found

    return PlainValues(path, nbytes, read).of(pick(archive.content))


class PlainValues:
    """Turns the records from the pickle in a file of ``nbytes`` into plain values. ``read`` gives a tensor's content.

    The tensors of one object have at most :data:`~shardwise.limits.MAX_VALUE_BYTES` together.
    """

    def __init__(self, path: str, nbytes: int, read: Callable[[Any], torch.Tensor]) -> None:
        self._path, self._read = path, read
        self._left = min(MAX_VALUE_BYTES, MAX_BYTES_PER_BYTE * nbytes)

    def of(self, value: Any) -> Any:
        """The plain value. Raises :class:`FormatError` for anything else."""
        cls = type(value)
        if cls is dict:
            return {k: self.of(v) for k, v in value.items()}
        if cls in (list, tuple):
            return cls(map(self.of, value))
        if value is None or cls in _PLAIN:
            return value
        if cls is Dtype and value.code is not None:
            return torch_dtype(value.code)
        if cls is StoredTensor:
            return self._within(value.nbytes, value)
        if cls is Saved and value.code is not None:
            return self._within(math.prod(value.sizes) * itemsize(value.code), value)
        if cls is Record:
            raise FormatError(
                f"holds an object of {brief(value.kind)}, and only plain values are read", path=self._path
            )
        raise FormatError(
            f"holds more than plain values, and only these are read: {brief(value)}", path=self._path
        )

    def _within(self, nbytes: int, value: Any) -> torch.Tensor:
        self._left -= nbytes
        if self._left < 0:
            raise FormatError(f"holds values of more than {MAX_VALUE_BYTES} bytes", path=self._path)
        return self._read(value)


_PLAIN = (bool, int, float, complex, str, bytes, set, Counter)


def plain_tensor(stored: StoredTensor, files: Iterable[StoredFile] = ()) -> torch.Tensor:
    """A (small) stored tensor, read whole. ``files``: as of :class:`.SourceReader`. Raises :class:`FormatError` if it is large, or not in one chunk."""
    if stored.nbytes > MAX_VALUE_BYTES:
        where = stored.chunks[0].path if stored.chunks else None
        raise FormatError(
            f"{brief(stored.name)} has {stored.nbytes} bytes; a value that is not a weight has at most {MAX_VALUE_BYTES}",
            path=where,
        )
    found = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    view = memoryview(found.reshape(-1).view(torch.uint8).numpy().data)
    with SourceReader(files=files) as reader:
        for chunk in stored.chunks:
            if chunk.box.sizes != stored.shape:
                raise FormatError(f"{stored.name!r} is small but was spread over ranks", path=chunk.path)
            reader.read_into(chunk.path, chunk.offset_bytes, view)
    return found


def step_in(found: DcpCheckpoint) -> int | None:
    """``step`` of a state dict, or of torchtitan's ``train_state``: a number, or a tensor of one element.

    None if there is none. Raises :class:`FormatError` for a number that can't count steps.
    """
    for name in ("step", "train_state.step"):
        if name in found.objects:
            with Objects(found.catalog.files) as read:
                value = read.value(found.objects[name])
        elif name in found.catalog.tensors and found.catalog.tensors[name].shape in ((), (1,)):
            value = plain_tensor(found.catalog.tensors[name], found.catalog.files)
        else:
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
            value = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(value, int | float | complex):
            return count_of_steps(value, name, found.catalog.root)
    return None


def count_of_steps(value: object, what: str, path: str) -> int:
    """``value`` if it counts steps. Raises :class:`FormatError` if not."""
    if type(value) is not int or not is_count(value):
        raise FormatError(f"{what} is {brief(value)}, which can't count steps", path=path)
    return value


def nested(found: DcpCheckpoint, keys: Sequence[str]) -> dict[Any, Any]:
    """An entry of the saved state dict, put together from its items; empty if there is none.

    Raises :class:`FormatError` if one item lies inside another.
    """
    root: dict[Any, Any] = {}
    with Objects(found.catalog.files) as read:
        for name in (*found.objects, *found.catalog.tensors):
            path = found.paths.get(name, (name,))
            if len(path) < 2 or path[0] not in keys:
                continue
            node = root
            for part in path[1:-1]:
                node = node.setdefault(part, _Node())
                if type(node) is not _Node:
                    raise FormatError(
                        f"{brief(name)} is inside another item: damaged", path=found.catalog.root
                    )
            if path[-1] in node:
                raise FormatError(f"{brief(name)} is stored twice: damaged", path=found.catalog.root)
            where = found.objects.get(name)
            node[path[-1]] = (
                read.value(where) if where else plain_tensor(found.catalog.tensors[name], found.catalog.files)
            )
    return {k: _with_lists(v) for k, v in root.items()}


class _Node(dict[Any, Any]):
    """A dict put together from items, as opposed to an item that is a dict."""


def _with_lists(value: Any) -> Any:
    """``value`` with lists for mappings whose keys are numbers; keys of real mappings are text."""
    if type(value) is not _Node:
        return value
    if value and all(isinstance(k, int) for k in value):
        return [_with_lists(value[k]) for k in sorted(value)]
    return {k: _with_lists(v) for k, v in value.items()}
