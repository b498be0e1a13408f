"""The names of the documents that a checkpoint may hold: a closed list. Pure; content is checked elsewhere.

Reading a checkpoint refuses any other name. A name from a file therefore never chooses which object gets its content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from ..errors import FormatError, VersionError
from ..limits import brief, parse_json
from ..objects import frozen
from .manifest import Manifest

__all__ = ["Document", "DocumentKind", "document_named", "document_of", "parse_documents", "refuse_unknown"]

DocumentKind = Literal[
    "step",
    "rng",
    "classes",
    "scheduler",
    "scaler",
    "dataloader",
    "extra",
    "optimizer",
    "opaque",
    "low_bit",
    "buffers",
    "modules",
    "own",
    "not_stored",
    "settings",
    "data_settings",
]
_OF_A_RUN: tuple[DocumentKind, ...] = (
    "step",
    "rng",
    "classes",
    "scheduler",
    "scaler",
    "dataloader",
    "not_stored",
    "settings",
    "data_settings",
)
_OF_AN_OPTIMIZER: tuple[DocumentKind, ...] = ("opaque", "low_bit", "own")
_OF_A_MODEL: tuple[DocumentKind, ...] = ("buffers", "modules", "own")
_EXTRA = "extra."


@frozen
class Document:
    """A document's kind and owner (a model, optimizer or extra), parsed from its name. An empty owner means the run itself."""

    kind: DocumentKind
    owner: str = ""


def document_of(kind: str, name: str, what: str = "") -> str:
    """Name of a model's or optimizer's document: ``optimizer``, ``optimizers.critic``, ``optimizers.critic.opaque``.

    For a single model, called ``model``, only ``what``.
    """
    stem = kind if name == kind else f"{kind}s.{name}"
    if not what:
        return stem
    return what if stem == "model" else f"{stem}.{what}"


def document_named(name: str, manifest: Manifest) -> Document | None:
    """The document that a name in a checkpoint stands for; None if this release does not know the name."""
    if name in _OF_A_RUN:
        return Document(name)
    if name.startswith(_EXTRA):
        return Document("extra", name.removeprefix(_EXTRA))
    for optimizer in manifest.packed:
        if name == document_of("optimizer", optimizer):
            return Document("optimizer", optimizer)
        for kind in _OF_AN_OPTIMIZER:
            if name == document_of("optimizer", optimizer, kind):
                return Document(kind, optimizer)
    for model in manifest.models:
        for kind in _OF_A_MODEL:
            if name == document_of("model", model, kind):
                return Document(kind, model)
    return None


def refuse_unknown(names: Iterable[str], manifest: Manifest, path: str) -> None:
    """Raise :class:`VersionError` for a name that this release does not know."""
    for name in names:
        if document_named(name, manifest) is None:
            raise VersionError(
                f"holds a document {brief(name)}, which this release does not know: a later release wrote it, or the file "
                f"was changed. Update shardwise, or take another checkpoint",
                path=path,
            )


def parse_documents(content: bytes, manifest: Manifest, path: str) -> dict[str, Any]:
    """The documents in a JSON file of a checkpoint, still encoded, by name.

    Raises :class:`FormatError` if the file is not a JSON object, :class:`VersionError` for an unknown name.
    """
    found = parse_json(content, path)
    if not isinstance(found, dict):
        raise FormatError(f"expected a JSON object of documents, got {brief(found)}", path=path)
    refuse_unknown(found, manifest, path)
    return found
