"""Checks of stored parts: whether they are there, of the dtype and shape that their format says, and the same bytes reshaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..catalog.records import Chunk, Coded, StoredTensor
from ..errors import FormatError, SourceError
from ..layout.boxes import whole
from ..limits import brief
from .families import Found, Source

__all__ = ["check", "each_module", "group_size_of", "require", "reshaped", "stems_with", "words_of"]

T = TypeVar("T")


def require(tensors: Mapping[str, StoredTensor], name: str, of: str) -> StoredTensor:
    """The stored tensor ``name``, without which ``of`` can't be decoded. Raises :class:`FormatError` if it is missing."""
    if name not in tensors:
        raise FormatError(f"missing: {of} can't be decoded without it", path=name)
    return tensors[name]


def check(stored: StoredTensor, dtype: str, shape: tuple[int, ...], why: str) -> None:
    """Raise :class:`FormatError` unless a stored tensor has this dtype and shape. ``why``: what they follow from."""
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise FormatError(
            f"expected {dtype} {list(shape)} for {why}, found {stored.dtype} {list(stored.shape)}",
            path=stored.name,
        )


def reshaped(stored: StoredTensor, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """The same bytes as a tensor of another dtype and shape. Raises :class:`FormatError` if they are not of one piece."""
    if len(stored.chunks) != 1:
        raise FormatError(f"expected one piece, found {len(stored.chunks)}", path=stored.name)
    chunk = stored.chunks[0]
    found = StoredTensor(stored.name, dtype, shape, (Chunk(whole(shape), chunk.path, chunk.offset_bytes),))
    assert found.nbytes == stored.nbytes
    return found


def stems_with(names: Iterable[str], last: tuple[str, ...]) -> list[str]:
    """The modules with a tensor of one of these last names, each as the start of its tensors' names."""
    parted = (name.rpartition(".") for name in names)
    return sorted({stem + dot for stem, dot, end in parted if end in last})


def each_module(
    source: Source,
    method: str,
    last: tuple[str, ...],
    settings_of: Callable[[Mapping[str, Any]], T],
    make: Callable[[Source, str, T], Coded],
) -> Found:
    """What a family finds whose modules each have tensors of these last names. Errors of ``settings_of`` and ``make`` become problems."""
    found = Found()
    stems = stems_with(source.tensors, last)
    if source.settings.get("quant_method") != method or not stems:
        return found
    try:
        settings = settings_of(source.settings)
    except FormatError as error:
        found.problems.append(f"{stems[0]}qweight can't be decoded, as {len(stems)} modules in all: {error}")
        return found
    for stem in stems:
        try:
            found.add(make(source, stem, settings))
        except SourceError as error:
            found.problems.append(str(error))
    return found


def group_size_of(size: object) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError`."""
    if type(size) is not int or (size < 1 and size != -1):
        raise FormatError(
            f"expected a positive number or -1 as group_size in config.json, found {brief(size)}"
        )
    return size


def words_of(
    tensors: Mapping[str, StoredTensor], stem: str
) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    """``qweight``, ``qzeros`` and ``scales`` of a module, each in two dims. Raises :class:`FormatError` if it has no such three."""
    if f"{stem}weight" in tensors:
        raise FormatError(f"stored plainly, too: expected either it or {stem}qweight", path=f"{stem}weight")
    codes, zeros, scales = (
        require(tensors, stem + one, f"{stem}weight") for one in ("qweight", "qzeros", "scales")
    )
    for part, dtype in ((codes, "I32"), (zeros, "I32"), (scales, "F16")):
        if part.dtype != dtype or len(part.shape) != 2 or not all(part.shape):
            raise FormatError(
                f"expected {dtype} in two dims, found {part.dtype} {list(part.shape)}", path=part.name
            )
    return codes, zeros, scales
