"""A catalog as bytes, for a rank that does not see the files."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..layout.boxes import Box
from .records import Catalog, Chunk, Quantization, StoredFile, StoredTensor

__all__ = ["packed_catalog", "unpacked_catalog"]


def packed_catalog(catalog: Catalog) -> bytes:
    """The catalog for :func:`unpacked_catalog`, as JSON."""
    paths = sorted({chunk.path for tensor in catalog.tensors.values() for chunk in tensor.chunks})
    number = {path: index for index, path in enumerate(paths)}
    tensors = [
        [
            tensor.name,
            tensor.dtype,
            tensor.shape,
            [[c.box.start, c.box.stop, number[c.path], c.offset_bytes] for c in tensor.chunks],
        ]
        for tensor in catalog.tensors.values()
    ]
    document = {
        "kind": catalog.kind,
        "root": catalog.root,
        "paths": paths,
        "tensors": tensors,
        "files": [asdict(file) for file in catalog.files],
        "ignored_files": catalog.ignored_files,
        "passed_over": catalog.passed_over,
        "unheld": dict(catalog.unheld),
        "ignored_entries": catalog.ignored_entries,
        "metadata": dict(catalog.metadata),
        "digests": dict(catalog.digests),
        "settings": dict(catalog.quantization.settings),
        "content": {name: content.hex() for name, content in catalog.quantization.content.items()},
    }
    return json.dumps(document).encode()


def unpacked_catalog(content: bytes) -> Catalog:
    """The catalog that another rank of this run packed."""
    document = json.loads(content)
    paths = document["paths"]
    tensors = {}
    for name, dtype, shape, chunks in document["tensors"]:
        parts = tuple(
            Chunk(Box(tuple(start), tuple(stop)), paths[path], offset) for start, stop, path, offset in chunks
        )
        tensors[name] = StoredTensor(name, dtype, tuple(shape), parts)
    return Catalog(
        kind=document["kind"],
        root=document["root"],
        tensors=tensors,
        files=tuple(StoredFile(**file) for file in document["files"]),
        ignored_files=tuple(document["ignored_files"]),
        passed_over=tuple(document["passed_over"]),
        unheld=document["unheld"],
        ignored_entries=tuple(document["ignored_entries"]),
        metadata=document["metadata"],
        digests=document["digests"],
        quantization=Quantization(
            document["settings"], {name: bytes.fromhex(text) for name, text in document["content"].items()}
        ),
    )
