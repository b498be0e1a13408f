"""Checks before every commit, into a directory or a store: all files are there, and a reader will take the manifest."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CheckpointError, SourceError
from ..format.manifest import FileEntry, Manifest, parse_manifest

__all__ = ["check_written", "readable_text"]


def check_written(place: str, found: Mapping[str, int], files: Mapping[str, FileEntry]) -> None:
    """Raise :class:`CheckpointError` unless the sizes ``found`` at ``place``, by name, are exactly those of the manifest's ``files``."""
    wrong = [f"{n}: not ours" for n in found if n not in files]
    wrong += [f"{n}: lost" for n in files if n not in found]
    wrong += [
        f"{n}: {found[n]} bytes, expected {entry.nbytes}"
        for n, entry in files.items()
        if found.get(n, entry.nbytes) != entry.nbytes
    ]
    if wrong:
        raise CheckpointError(f"{place}: files differ from what the ranks wrote: {'; '.join(wrong[:10])}")


def readable_text(manifest: Manifest, path: str) -> bytes:
    """The manifest's text. Raises :class:`CheckpointError` if :func:`.read_manifest` would refuse it."""
    text = manifest.to_text().encode()
    try:
        parse_manifest(text, path)
    except SourceError as error:
        raise CheckpointError(f"nothing is published, because it couldn't be read back: {error}") from error
    return text
