"""The files of a model in hub format: which tensor lies where in which file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..catalog import Chunk, StoredTensor
from ..catalog.safetensors import catalog_of_safetensors
from ..dtypes import itemsize
from ..errors import CheckpointError, SourceError
from ..format.header import read_headers
from ..layout.boxes import whole
from ..layout.spec import TensorSpec
from ..objects import frozen

__all__ = ["INDEX_NAME", "HubFiles", "check_readable", "header_of", "lay_out", "specs_in"]

INDEX_NAME = "model.safetensors.index.json"


@frozen
class HubFiles:
    """The files to write: the place of each hub tensor, headers and sizes by file, the index if there are several."""

    tensors: dict[str, StoredTensor]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: bytes | None

    @property
    def total_bytes(self) -> int:
        """Payload of all files."""
        return sum(t.nbytes for t in self.tensors.values())


_FLOATS = ("F16", "BF16", "F32", "F64")


def specs_in(tensors: Mapping[str, TensorSpec], dtype: str | None) -> dict[str, TensorSpec]:
    """Dtypes and shapes with floating-point tensors in ``dtype``; None: as they are."""
    return {
        n: TensorSpec(dtype, spec.shape) if dtype and spec.dtype in _FLOATS else spec
        for n, spec in tensors.items()
    }


def lay_out(hub: Mapping[str, TensorSpec], dtype: str | None, limit: int) -> HubFiles:
    """Which tensor goes into which file at which offset. Files are filled in the tensors' order."""
    specs = specs_in(hub, dtype)
    groups: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if groups[-1] and used + spec.nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += spec.nbytes
    stored, headers, sizes, weight_map = {}, {}, {}, {}
    for k, group in enumerate(groups):
        file = (
            "model.safetensors" if len(groups) == 1 else f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors"
        )
        header, offsets, end = header_of({n: specs[n] for n in group})
        headers[file], sizes[file] = header, len(header) + end
        for name in group:
            code, shape = specs[name]
            chunk = Chunk(whole(shape), file, len(header) + offsets[name])
            stored[name] = StoredTensor(name, code, shape, (chunk,))
            weight_map[name] = file
    total = sum(t.nbytes for t in stored.values())
    index = None
    if len(groups) > 1:
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index = (json.dumps(document, indent=2) + "\n").encode()
    return HubFiles(stored, headers, sizes, index)


def header_of(tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """A safetensors header with ``format: pt``; largest items first, which aligns all tensors."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-itemsize(tensors[n].dtype), n)):
        spec = tensors[name]
        offsets[name] = end
        stop = end + spec.nbytes
        document[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, stop]}
        end = stop
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


def check_readable(root: str, final: str, output: HubFiles) -> None:
    """Read every header, and the index if there is one, as a load does. Raises :class:`CheckpointError`."""
    try:
        paths = [os.path.join(root, file) for file in output.headers]
        found = {
            (file, entry.name): (entry.dtype, entry.shape, entry.offset_bytes)
            for file, header in zip(output.headers, read_headers(paths), strict=True)
            for entry in header.entries.values()
        }
        if output.index is not None:
            catalog_of_safetensors(root)
    except SourceError as error:
        raise CheckpointError(
            f"{final}: nothing is published, because it couldn't be read back: {error}"
        ) from error
    chunks = [(t, t.chunks[0]) for t in output.tensors.values()]
    if found != {(c.path, t.name): (t.dtype, t.shape, c.offset_bytes) for t, c in chunks}:
        raise CheckpointError(
            f"{final}: nothing is published: its headers don't match what was to be written"
        )
