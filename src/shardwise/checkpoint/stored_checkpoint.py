"""A checkpoint as a restore sees it: the manifest, and this rank's documents, under stored names or this run's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..format.documents import document_of
from ..format.manifest import Manifest, TensorEntry
from ..layout.live import LiveModel
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..state.documents import check_form
from ..state.places import Places
from .stored_documents import decode_documents, read_documents

__all__ = ["StoredCheckpoint", "read_checkpoint"]


@frozen
class StoredCheckpoint:
    """The manifest and the decoded documents of a checkpoint, for one rank."""

    path: str
    manifest: Manifest
    documents: Mapping[str, Any]
    """Shared by all ranks and, at the saved world size, this rank's own."""
    places: Places
    """Where the documents' tensors lay."""
    as_saved: Manifest
    """The manifest under the stored names, which order slice files."""

    def under_names_of(self, lives: Mapping[str, LiveModel]) -> StoredCheckpoint:
        """The same under the names of this run's models: a tied tensor may have another first name. Reads nothing."""
        manifest, documents = self.manifest, self.documents
        for name, live in lives.items():
            manifest, documents = _renamed(manifest, documents, name, live.first_names)
        return replace(self, manifest=manifest, documents=documents)


def read_checkpoint(path: str, manifest: Manifest, ranks: Ranks) -> StoredCheckpoint:
    """Read and decode documents, and check their form. Rank-local.

    Raises as :func:`read_documents` and :func:`decode_documents`; :class:`FormatError` for a document with a wrong form.
    """
    stored, places = read_documents(path, manifest, "state"), Places()
    if manifest.world_size == ranks.world_size:
        stored |= read_documents(path, manifest, f"rank/{ranks.rank:05d}")
    documents = decode_documents(stored, path, places)
    check_form(documents, manifest, path)
    return StoredCheckpoint(path, manifest, documents, places, manifest)


def _renamed(
    manifest: Manifest, documents: Mapping[str, Any], model: str, live: Mapping[str, str]
) -> tuple[Manifest, Mapping[str, Any]]:
    """One model's tensors, and the documents of optimizers that train it, under the names in ``live``."""
    entries: dict[str, TensorEntry] = {}
    for n, t in manifest.models[model].items():
        # If a converted checkpoint stores one tensor under two names, the trained one counts.
        if live.get(n, n) not in entries or t.states:
            entries[live.get(n, n)] = t
    if list(entries) == list(manifest.models[model]):
        return manifest, documents
    found = dict(documents)
    for optimizer in manifest.packed:
        name = document_of("optimizer", optimizer)
        opaque, low_bit = (document_of("optimizer", optimizer, what) for what in ("opaque", "low_bit"))
        if name not in found or found[name].get("model", "model") != model:
            continue
        groups = [{**g, "names": [live.get(n, n) for n in g["names"]]} for g in found[name]["groups"]]
        values = {live.get(n, n): v for n, v in found[name]["values"].items()}
        found[name] = {**found[name], "groups": groups, "values": values}
        if opaque in found:
            found[opaque] = {live.get(n, n): v for n, v in found[opaque].items()}
        if low_bit in found:
            forms = {k: found[low_bit][k] for k in ("states", "by_rank")}
            renamed = {k: {live.get(n, n): v for n, v in of.items()} for k, of in forms.items()}
            found[low_bit] = {**found[low_bit], **renamed}
    return replace(manifest, models={**manifest.models, model: entries}), found
