"""The files of a model in hub format: places each tensor, makes files in their final size, publishes them whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..catalog import Chunk, StoredTensor
from ..catalog.safetensors import catalog_of_safetensors
from ..dtypes import itemsize
from ..errors import CheckpointError, SourceError
from ..format.header import read_header
from ..layout.boxes import whole
from ..layout.spec import TensorSpec
from ..limits import inside
from ..ranks.patience import patiently, remove_tree
from ..ranks.ranks import Ranks
from ..store.publish import temporary_beside
from ..store.write import fsync_directory, make_directories, write_file

__all__ = ["INDEX_NAME", "HubFiles", "header_of", "lay_out", "prepare_files", "publish_files"]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
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


def prepare_files(final: str, output: HubFiles, ranks: Ranks) -> str:
    """Rank 0 makes the temporary directory and the files in their final size. Returns the path on all ranks."""

    def make() -> str:
        _refuse_taken(final)
        path = temporary_beside(final)
        try:
            make_directories(os.path.dirname(path))
            patiently(os.mkdir, path)
            for file, header in output.headers.items():
                patiently(os.makedirs, os.path.join(path, os.path.dirname(file)), exist_ok=True)
                write_file(os.path.join(path, file), header)
                patiently(os.truncate, os.path.join(path, file), output.sizes[file])
        except (OSError, CheckpointError) as error:
            remove_tree(path)
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path}: can't be created: {reason}") from error
        return path

    return ranks.on_first("make export directory", make)


def _refuse_taken(final: str) -> None:
    if os.path.islink(final):
        raise CheckpointError(
            f"{final}: is a symbolic link, which can't be exchanged for the finished export; give the directory "
            f"that it stands for, or a new one"
        )
    try:
        taken = os.path.lexists(final) and not (os.path.isdir(final) and not os.listdir(final))
    except OSError as error:
        raise CheckpointError(f"{final}: can't be looked at: {error.strerror}") from error
    if taken:
        raise CheckpointError(f"{final}: is there already; export into a new or empty directory")


def publish_files(
    temporary: str, final: str, output: HubFiles, assets: Mapping[str, bytes], bytes_written: int
) -> None:
    """Write index and small files, sync them, and rename. For rank 0, after every rank synced its bytes.

    Raises :class:`CheckpointError` if bytes are missing, or if a reader would refuse the headers.
    """
    if bytes_written != output.total_bytes:
        raise CheckpointError(f"{final}: ranks wrote {bytes_written} bytes, expected {output.total_bytes}")
    if output.index is not None:
        write_file(os.path.join(temporary, INDEX_NAME), output.index)
    for name, content in assets.items():
        write_file(inside(temporary, name), content)
    _check_readable(temporary, final, output)
    for folder in dict.fromkeys((*map(os.path.dirname, output.headers), "")):
        fsync_directory(os.path.join(temporary, folder))
    try:
        if os.path.isdir(final):
            patiently(os.rmdir, final)
        patiently(os.rename, temporary, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be published: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))


def _check_readable(temporary: str, final: str, output: HubFiles) -> None:
    """Read every header and the index as a load does, before anything has the final name."""
    try:
        found = {
            (file, entry.name): (entry.dtype, entry.shape, entry.offset_bytes)
            for file in output.headers
            for entry in read_header(os.path.join(temporary, file)).entries.values()
        }
        if output.index is not None:
            catalog_of_safetensors(temporary)
    except SourceError as error:
        raise CheckpointError(
            f"{final}: nothing is published, because no reader would take it: {error}"
        ) from error
    chunks = [(t, t.chunks[0]) for t in output.tensors.values()]
    if found != {(c.path, t.name): (t.dtype, t.shape, c.offset_bytes) for t, c in chunks}:
        raise CheckpointError(f"{final}: nothing is published: its headers do not say what was to be written")
