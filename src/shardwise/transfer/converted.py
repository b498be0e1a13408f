"""Reads the results of host conversions as if they were files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..catalog.records import StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..errors import SourceError
from ..planning.buckets import Span
from ..planning.records import Transfer
from ..recipe.host_convert import HostConversion

__all__ = ["ConvertingReader", "Reader", "spans_of_tensors"]


class Reader(Protocol):
    """The source of bytes for transfers."""

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``path`` at ``offset_bytes``."""

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """The reads in this block are of these spans, in this order."""

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of a transfer, in parts with their loops as dims, if the reader has or makes them in memory; else None."""


class ConvertingReader:
    """Reads files. A path that names the result of a host conversion runs the conversion, on sources read whole.

    Keeps only the results of the last conversion: transfers come by path, so each conversion runs once. Rank-local:
    every rank that holds a part of a result runs the conversion, and no rank waits for another. Memory:
    :attr:`HostConversion.staging_bytes` of the largest conversion, recorded in ``peak_bytes``.
    """

    def __init__(
        self,
        files: Reader,
        conversions: Mapping[str, HostConversion],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.peak_bytes = 0
        self._files = files
        self._conversions = conversions
        self._stored = stored
        self._last: HostConversion | None = None
        self._results: dict[str, memoryview] = {}

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """As :meth:`FileReader.expecting`. Conversions announce their own sources."""
        return self._files.expecting(span for span in spans if span[0] not in self._conversions)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """As :meth:`FileReader.read_into`. Raises :class:`SourceError` if a conversion fails or its results differ
        from the plan."""
        host = self._conversions.get(path)
        if host is None:
            self._files.read_into(path, offset_bytes, view)
            return
        if self._last is not host:
            self._last, self._results = None, {}  # free before the next conversion
            self._results = self._convert(host)
            self._last = host
            self.peak_bytes = max(self.peak_bytes, host.staging_bytes)
        view[:] = self._results[path][offset_bytes : offset_bytes + view.nbytes]

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """As the reader of the files. Results of conversions are read."""
        return None if transfer.path in self._conversions else self._files.elements(transfer)

    def _convert(self, host: HostConversion) -> dict[str, memoryview]:
        with self._files.expecting(spans_of_tensors(self._stored[name] for name in host.sources)):
            sources = {name: self._read(self._stored[name]) for name in host.sources}
        try:
            made = dict(host.run(sources))
        except Exception as error:  # a caller's operation may raise anything
            raise SourceError(f"{host.name} failed: {type(error).__name__}: {error}") from error
        found = {target: (t.dtype, tuple(t.shape)) for target, t in made.items()}
        planned = {target: (torch_dtype(t.dtype), t.shape) for target, t in host.outputs.items()}
        if found != planned:
            raise SourceError(f"{host.name} made {found}, but {planned} were planned")
        return {
            host.outputs[target].name: t.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for target, t in made.items()
        }

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        """A stored tensor, whole."""
        tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
        for chunk in stored.chunks:
            is_whole = chunk.box.sizes == stored.shape
            part = tensor if is_whole else torch.empty(chunk.box.sizes, dtype=tensor.dtype)
            view = part.reshape(-1).view(torch.uint8).numpy().data
            self._files.read_into(chunk.path, chunk.offset_bytes, view)
            if not is_whole:
                tensor[chunk.box.slices] = part
        return tensor


def spans_of_tensors(tensors: Iterable[StoredTensor]) -> Iterator[Span]:
    """The bytes of whole tensors."""
    for tensor in tensors:
        for chunk in tensor.chunks:
            yield (
                chunk.path,
                chunk.offset_bytes,
                chunk.offset_bytes + chunk.box.numel * itemsize(tensor.dtype),
            )
