"""Catalog of a safetensors file or directory (HF layout, or slices with DCP_SHARDING_INFO)."""

from __future__ import annotations

import os

from ..errors import FormatError, SourceError
from ..format.header import Entry, Header, read_headers
from ..format.steps import describe_steps
from ..layout.boxes import Box, whole
from ..storage import exists, is_directory, is_file, is_url, names_in
from .index import read_weight_map
from .records import Catalog, Chunk, StoredFile, StoredTensor, assemble

__all__ = ["INDEX_NAME", "SINGLE_NAME", "catalog_of_safetensors", "has_safetensors", "with_variant"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def with_variant(name: str, variant: str | None) -> str:
    """The name of a weights file or its index in a variant, as in transformers: ``model.fp16.safetensors``."""
    if variant is None:
        return name
    stem, _, end = name.rpartition(".")
    return f"{stem}.{variant}.{end}"


def catalog_of_safetensors(path: str | os.PathLike[str], variant: str | None = None) -> Catalog:
    """Catalog of a ``.safetensors`` file or of a directory of them, from headers only.

    In a directory, ``model.safetensors.index.json`` decides which files belong; without one, a single
    ``model.safetensors``; without that, every ``*.safetensors``. ``ignored_files`` lists the other files. With
    ``variant`` only its index or its single file counts. Entries with ``saved_offsets`` are chunks of one tensor; a
    tensor that is stored twice (chunks overlap) is refused.

    Raises :class:`SourceError` (nothing found), :class:`FormatError` (a header or the index is wrong).
    Rank-local; reads a few KiB per file.
    """
    root = os.fspath(path)
    beside = True
    if is_file(root):
        beside = not is_url(root)  # who may read an object may not list its folder
        names, weight_map, root = [os.path.basename(root)], None, os.path.dirname(root) or "."
    elif is_directory(root):
        names, weight_map = _files_of(root, variant)
    elif exists(root):
        raise FormatError("can't be read: not a regular file", path=root)
    else:
        raise SourceError("no such file or directory", path=root)
    listed = _listed(root) if beside else []
    ignored = tuple(sorted(n for n in listed if n.endswith(".safetensors") and n not in names))
    headers = dict(zip(names, read_headers([os.path.join(root, name) for name in names]), strict=True))
    if weight_map is not None:
        _check_index(root, weight_map, headers, with_variant(INDEX_NAME, variant))
    files = tuple(StoredFile(os.path.join(root, n), h.file_bytes, h.version) for n, h in headers.items())
    metadata = {k: v for h in headers.values() for k, v in h.metadata.items() if k != "DCP_SHARDING_INFO"}
    return Catalog("safetensors", root, _tensors(root, headers), files, ignored, metadata)


def has_safetensors(root: str) -> bool:
    """Whether a directory holds a safetensors file."""
    return is_directory(root) and any(name.endswith(".safetensors") for name in _listed(root))


def _files_of(root: str, variant: str | None) -> tuple[list[str], dict[str, str] | None]:
    index, single = os.path.join(root, with_variant(INDEX_NAME, variant)), with_variant(SINGLE_NAME, variant)
    if exists(index):
        weight_map = read_weight_map(index)
        return sorted(set(weight_map.values())), weight_map
    if exists(os.path.join(root, single)):
        return [single], None
    if variant is not None:
        raise SourceError(f"holds no {single} and no index of variant {variant!r}", path=root)
    listed = _listed(root)
    names = sorted(n for n in listed if n.endswith(".safetensors"))
    if not names:
        if steps := describe_steps(root):
            raise SourceError(steps, path=root)
        hint = ""
        if exists(os.path.join(root, "manifest.json")):
            hint = "; it is a shardwise checkpoint whose slices lie in model/"
        elif any(n.endswith((".bin", ".pt", ".pth")) for n in listed):
            hint = "; it has files of torch.save under unknown names: give the path of the one to load"
        raise SourceError(f"no .safetensors file in this directory{hint}", path=root)
    return names, None


def _listed(root: str) -> list[str]:
    try:
        return names_in(root)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=root) from error


def _check_index(root: str, weight_map: dict[str, str], headers: dict[str, Header], index_name: str) -> None:
    """Check that the file of each indexed name holds it, and that no other listed file holds a copy."""
    index = os.path.join(root, index_name)
    lost = [f"{n} (in {f})" for n, f in weight_map.items() if n not in headers[f].entries]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise FormatError(
            f"lists tensors that their files do not hold: {', '.join(lost[:5])}{more}", path=index
        )
    for file_name, header in headers.items():
        for name, entry in header.entries.items():
            mapped = weight_map.get(name, file_name)
            if mapped != file_name and entry.saved_offsets is None:
                raise FormatError(
                    f"tensor {name!r} is stored twice: the index maps it to {mapped}, and {file_name} holds "
                    f"another copy; remove one",
                    path=root,
                )


def _tensors(root: str, headers: dict[str, Header]) -> dict[str, StoredTensor]:
    chunks: dict[str, list[Chunk]] = {}
    first: dict[str, tuple[str, Entry]] = {}
    for file_name, header in headers.items():
        path = os.path.join(root, file_name)
        for name, entry in header.entries.items():
            known_in, known = first.setdefault(name, (path, entry))
            if known.dtype != entry.dtype or len(known.shape) != len(entry.shape):
                raise FormatError(
                    f"tensor {name!r} is {known.dtype} {list(known.shape)} in {known_in} and {entry.dtype} "
                    f"{list(entry.shape)} here",
                    path=path,
                )
            chunks.setdefault(name, []).append(Chunk(_box(entry), path, entry.offset_bytes))
    return {name: assemble(name, first[name][1].dtype, found) for name, found in chunks.items()}


def _box(entry: Entry) -> Box:
    if entry.saved_offsets is None:
        return whole(entry.shape)
    stop = tuple(o + n for o, n in zip(entry.saved_offsets, entry.shape, strict=True))
    return Box(entry.saved_offsets, stop)
