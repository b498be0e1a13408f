"""The files of documents: encodes them, passes them through the reader's own checks, and writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from ..errors import FormatError, SourceError, StateError
from ..format.documents import parse_documents
from ..format.manifest import BLOCK_BYTES, FileEntry, Manifest
from ..limits import MAX_JSON_BYTES
from ..state.typed_json import Encoded
from ..store.write import write_file
from .stored_documents import check_each

__all__ = ["checked_text", "write_documents"]


def checked_text(documents: Mapping[str, Encoded], outline: Manifest, stem: str, final: str) -> bytes:
    """The text of ``<stem>.json``. Raises :class:`StateError` naming a document that no reader would take.

    ``outline``: the manifest; its digests and files are ignored. Memory: the text, and copies of one document's
    tensors; a document with more than 16 MiB of tensors is parsed but not decoded.
    """
    document = {name: encoded.document for name, encoded in documents.items()}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    path = os.path.join(final, f"{stem}.json")
    try:
        if len(text) > MAX_JSON_BYTES:
            largest = max(document, key=lambda name: len(json.dumps(document[name])))
            raise FormatError(
                f"has {len(text)} bytes, the limit is {MAX_JSON_BYTES}; most are of {largest!r}: give its large values as "
                f"tensors",
                path=path,
            )
        for name, parsed in parse_documents(text, outline, path).items():
            tensors = documents[name].tensors
            if sum(t.numel() * t.element_size() for t in tensors.values()) <= BLOCK_BYTES:
                check_each({name: Encoded(parsed, tensors, ())}, outline, final)
    except SourceError as error:
        raise StateError(f"this state isn't saved, because it couldn't be read back: {error}") from error
    return text


def write_documents(
    root: str, stem: str, text: bytes, documents: Mapping[str, Encoded], files: dict[str, FileEntry]
) -> None:
    """Write ``<stem>.json`` with the documents and, if they refer to tensors, ``<stem>.safetensors`` with these."""
    from safetensors.torch import save

    tensors = {f"{n}/{k}": t.detach().cpu() for n, p in documents.items() for k, t in p.tensors.items()}
    files[f"{stem}.json"] = write_file(os.path.join(root, f"{stem}.json"), text)
    if tensors:
        owned = {k: t.clone() for k, t in tensors.items()}  # save() refuses tensors that share storage
        files[f"{stem}.safetensors"] = write_file(os.path.join(root, f"{stem}.safetensors"), save(owned))
