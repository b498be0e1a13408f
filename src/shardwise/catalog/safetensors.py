"""Catalog of a safetensors file or directory (HF layout, or slices with DCP_SHARDING_INFO)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import FormatError, SourceError
from ..format.header import Entry, Header, describe_steps, read_headers
from ..storage import exists, is_directory, is_file
from ..storage.records import is_url
from ..tensors.boxes import Box, whole
from .records import Catalog, Chunk, StoredFile, StoredTensor, assemble
from .weights import Choice, Listed, Weights, listed, names_of, weights_in


def catalog_of_safetensors(path: str | os.PathLike[str]) -> Catalog:
    """Catalog of a ``.safetensors`` file or of a directory of them, from headers only.

    In a directory, the files are those that ``from_pretrained`` takes; if it finds none, every ``*.safetensors``.
    ``ignored_files`` lists the other files. Entries with ``saved_offsets`` are chunks of one tensor; a tensor that is
    stored twice (chunks overlap) is refused.

    Raises :class:`SourceError` (nothing found), :class:`FormatError` (a header or the index is wrong).
    Rank-local; reads a few KiB per file.
    """
    root = os.fspath(path)
    if is_file(root):
        folder, name = os.path.dirname(root) or ".", os.path.basename(root)
        others = [] if is_url(root) else names_of(folder)  # who may read an object may not list its folder
        ignored = sorted(n for n in others if n.endswith(".safetensors") and n != name)
        return _catalog(folder, Listed((name,), ignored=tuple(ignored)))
    if is_directory(root):
        choice = Choice(use_safetensors=True)
        weights = weights_in(root, choice)
        return catalog_of_weights(root, weights, choice) if weights else _catalog(root, Listed(_every(root)))
    if exists(root):
        raise FormatError("can't be read: not a regular file", path=root)
    raise SourceError("no such file or directory", path=root)


def catalog_of_weights(root: str, weights: Weights, choice: Choice) -> Catalog:
    """Catalog of the safetensors files of a directory that :func:`.weights_in` chose."""
    return _catalog(root, listed(root, weights, is_asked=choice.is_asked))


def has_safetensors(root: str) -> bool:
    """Whether a directory holds a safetensors file."""
    return is_directory(root) and any(name.endswith(".safetensors") for name in names_of(root))


def _catalog(root: str, found: Listed) -> Catalog:
    paths = [os.path.join(root, name) for name in found.names]
    headers = dict(zip(found.names, read_headers(paths), strict=True))
    if found.weight_map:
        _refuse_copies(root, found.weight_map, headers)
    tensors = _tensors(root, headers)
    return Catalog(
        "safetensors",
        root,
        tensors,
        files=tuple(StoredFile(os.path.join(root, n), h.file_bytes, h.version) for n, h in headers.items()),
        ignored_files=found.ignored,
        metadata={k: v for h in headers.values() for k, v in h.metadata.items() if k != "DCP_SHARDING_INFO"},
        passed_over=found.passed_over,
        unheld=found.unheld(tensors),
    )


def _every(root: str) -> tuple[str, ...]:
    """All safetensors files of a directory. Raises :class:`SourceError` if there is none, saying what there is instead."""
    names = names_of(root)
    found = tuple(sorted(n for n in names if n.endswith(".safetensors")))
    if found:
        return found
    if steps := describe_steps(root):
        raise SourceError(steps, path=root)
    hint = ""
    if exists(os.path.join(root, "manifest.json")):
        hint = "; it is a shardwise checkpoint whose slices are in model/"
    elif pickled := sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))):
        hint = (
            f"; it has files of torch.save under unknown names ({', '.join(pickled[:3])}): give the path of the one to load, "
            f"such as {os.path.join(root, pickled[0])!r}"
        )
    raise SourceError(f"no .safetensors file in this directory{hint}", path=root)


def _refuse_copies(root: str, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Check that no listed file holds a copy of a tensor that the index finds in another one."""
    for file, header in headers.items():
        for name, entry in header.entries.items():
            mapped = weight_map.get(name, file)
            if (
                mapped != file
                and entry.saved_offsets is None
                and mapped in headers
                and name in headers[mapped].entries
            ):
                raise FormatError(
                    f"tensor {name!r} is stored twice: the index maps it to {mapped}, and {file} holds "
                    f"another copy; remove one",
                    path=root,
                )


def _tensors(root: str, headers: dict[str, Header]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    boxes: dict[tuple[int, ...], Box] = {}
    in_parts: dict[str, list[Chunk]] = {}
    for file, header in headers.items():
        path = os.path.join(root, file)
        for name, entry in header.entries.items():
            box = boxes.get(entry.shape) if entry.saved_offsets is None else _box(entry)
            if box is None:
                box = boxes[entry.shape] = whole(entry.shape)
            chunk = Chunk(box, path, entry.offset_bytes)
            known = found.get(name)
            if known is None:
                found[name] = StoredTensor(name, entry.dtype, box.stop, (chunk,))
                if any(box.start):
                    in_parts[name] = [chunk]
                continue
            if known.dtype != entry.dtype or len(known.shape) != len(entry.shape):
                raise FormatError(
                    f"tensor {name!r} is {known.dtype} {list(known.shape)} in {known.chunks[0].path} and {entry.dtype} "
                    f"{list(entry.shape)} here",
                    path=path,
                )
            in_parts.setdefault(name, [known.chunks[0]]).append(chunk)
    return found | {name: assemble(name, found[name].dtype, chunks) for name, chunks in in_parts.items()}


def _box(entry: Entry) -> Box:
    assert entry.saved_offsets is not None
    stop = tuple(o + n for o, n in zip(entry.saved_offsets, entry.shape, strict=True))
    return Box(entry.saved_offsets, stop)
