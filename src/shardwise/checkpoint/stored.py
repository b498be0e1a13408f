"""Reads a stored checkpoint's documents and their tensors."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from ..errors import FormatError, IntegrityError, ShardwiseError, SourceError, StateError
from ..format.manifest import (
    BLOCK_BYTES,
    CONVERTED,
    MANIFEST_NAME,
    Checksums,
    Manifest,
    TensorEntry,
    document_of,
    parse_documents,
    refuse_unknown,
)
from ..limits import MAX_JSON_BYTES, cause, inside, read_small
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..state.documents import check_form
from ..state.typed_json import Encoded, Places, decode
from ..tensors.live import LiveModel, is_declared, world_size

# ----------------------------------------------------------------------------------------------------
# Reads the documents of a checkpoint and their tensors: checks files against checksums, and refuses unknown names.


def read_documents(path: str, manifest: Manifest, stem: str) -> dict[str, Encoded]:
    """The documents in ``<stem>.json`` (``state``, or a rank's), with their tensors, still encoded.

    Raises :class:`IntegrityError` if a file is lost or differs from its checksum, :class:`FormatError` if
    :mod:`..state.typed_json` can't have written it, :class:`VersionError` for a document unknown to this release.
    """
    refuse_unknown(manifest.local_documents, manifest, os.path.join(path, MANIFEST_NAME))
    content = read_checked(path, manifest, f"{stem}.json", MAX_JSON_BYTES)
    documents = parse_documents(content, manifest, inside(path, f"{stem}.json"))
    always = "step" if stem == "state" else "rng"
    if always not in documents and not (always == "rng" and CONVERTED in manifest.software):
        raise FormatError(
            f"lacks the document {always!r}, which every save writes", path=inside(path, f"{stem}.json")
        )
    tensors = _tensors(path, manifest, f"{stem}.safetensors")
    keys = sorted(tensors)
    found = {}
    for name, document in documents.items():
        found[name] = Encoded(document, {k: tensors[f"{name}/{k}"] for k in _below(f"{name}/", keys)}, ())
    return found


def _below(prefix: str, keys: Sequence[str]) -> Iterator[str]:
    """The sorted keys that begin with ``prefix``, without the prefix."""
    place = bisect_left(keys, prefix)
    while place < len(keys) and keys[place].startswith(prefix):
        yield keys[place].removeprefix(prefix)
        place += 1


def decode_documents(stored: Mapping[str, Encoded], path: str, places: Places) -> dict[str, Any]:
    """The values of documents, by name. Raises :class:`FormatError` naming the document, :class:`StateError` for an
    enum whose module is not imported."""
    found = {}
    for name, document in stored.items():
        try:
            found[name] = decode(document.document, document.tensors, places)
        except FormatError as error:
            raise FormatError(f"document {name!r}: {error}", path=path) from error
    return found


def document_problems(path: str, manifest: Manifest, bad: Set[str]) -> Iterator[str]:
    """A line for each problem of all ranks' documents that a restore would refuse; skips files in ``bad``.

    Documents with more than 16 MiB of tensors are not decoded.
    """
    stems = [
        n.removesuffix(".json") for n in manifest.files if re.fullmatch(r"(state|rank/[0-9]{5,})\.json", n)
    ]
    for stem in stems:
        if bad & {f"{stem}.json", f"{stem}.safetensors"}:
            continue
        large = manifest.files.get(f"{stem}.safetensors")
        try:
            if large is not None and large.nbytes > BLOCK_BYTES:
                parse_documents(
                    read_checked(path, manifest, f"{stem}.json", MAX_JSON_BYTES), manifest, f"{stem}.json"
                )
            else:
                check_each(read_documents(path, manifest, stem), manifest, path)
        except ShardwiseError as error:
            yield f"{stem}.json: {error}"


def check_each(stored: Mapping[str, Encoded], manifest: Manifest, path: str) -> None:
    """Raise :class:`FormatError` for a document with a wrong form. Keeps no decoded value."""
    for name, document in stored.items():
        try:
            check_form(decode_documents({name: document}, path, Places()), manifest, path)
        except StateError:
            continue  # it needs an enum whose module this process may not have imported


def _tensors(path: str, manifest: Manifest, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    if name not in manifest.files:
        return {}
    content = read_checked(path, manifest, name)
    try:
        return load(content)
    except Exception as error:  # safetensors does not document what its parser, torch and numpy raise
        raise FormatError(f"not a safetensors file ({cause(error)})", path=inside(path, name)) from error


def read_checked(path: str, manifest: Manifest, name: str, max_bytes: int | None = None) -> bytes:
    """A small file of a checkpoint, compared with its checksums. Rank-local.

    Raises :class:`IntegrityError` if it is not listed, lost or changed; :class:`FormatError` if it is not a file or
    has more than ``max_bytes``.
    """
    entry = manifest.files.get(name)
    if entry is None:
        raise IntegrityError("is not listed in the manifest", path=os.path.join(path, name))
    file = inside(path, name)
    if max_bytes is not None and entry.nbytes > max_bytes:
        raise FormatError(f"has {entry.nbytes} bytes, the limit is {max_bytes}", path=file)
    try:
        content = read_small(file, max_bytes=max(entry.nbytes, MAX_JSON_BYTES))
    except MemoryError as error:
        raise SourceError(f"its {entry.nbytes} bytes don't fit in memory", path=file) from error
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise IntegrityError("lost: no such file", path=file) from error
        raise
    checksums = Checksums(entry.header_bytes)
    checksums.add(content)
    if checksums.entry() != entry:
        raise IntegrityError("content differs from its checksum: damaged", path=file)
    return content


# ----------------------------------------------------------------------------------------------------
# A checkpoint as a restore sees it: the manifest, and this rank's documents, under stored names or this run's.


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


def is_of_other_parts(manifest: Manifest, lives: Mapping[str, LiveModel]) -> bool:
    """Whether ranks hold other parts of a declared model than those that saved it. The same on every rank."""
    for model, live in lives.items():
        entries = manifest.models.get(model, {})
        if not is_declared(live.root):
            continue
        first = live.first_names
        if any(
            first.get(n, n) in live.geometries
            and not manifest.geometries[entry.geometry].is_same_place(live.geometries[first.get(n, n)])
            for n, entry in entries.items()
        ):
            return True
    return False


def why_of_others(manifest: Manifest) -> str:
    """Why a document that each rank stored for itself isn't this rank's."""
    if manifest.world_size != world_size():
        return "this run has a different number of ranks"
    return "ranks of this run hold other parts of the model"


def read_checkpoint(
    path: str, manifest: Manifest, ranks: Ranks, lives: Mapping[str, LiveModel]
) -> StoredCheckpoint:
    """Read and decode documents, and check their form. Rank-local.

    If ranks hold other parts of a declared model in ``lives`` now, only the random generators are this rank's own.

    Raises as :func:`read_documents` and :func:`decode_documents`; :class:`FormatError` for a document with a wrong form.
    """
    stored, places = read_documents(path, manifest, "state"), Places()
    if manifest.world_size == ranks.world_size:
        own = read_documents(path, manifest, f"rank/{ranks.rank:05d}")
        stored |= {"rng": own["rng"]} if "rng" in own and is_of_other_parts(manifest, lives) else own
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
