"""``quick_check``: whether a published step is what its manifest says, as far as that can be told without payload."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import xxhash

from ..catalog.checkpoint import check_size
from ..errors import IntegrityError, SourceError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, Manifest, read_manifest
from ..limits import inside
from ..transfer import FileReader

__all__ = ["check_files", "quick_check", "read_head"]


def quick_check(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Manifest intact; every file there with its size; headers and small files as their checksums say.

    Resuming reads no headers, and at another world size not the files of the old ranks: what it takes for
    valid must nevertheless be what ``verify`` does. Reads no payload. Rank-local; raises for the first thing that
    is wrong: :class:`SourceError`, :class:`IntegrityError` (also if it holds another step).
    """
    manifest = check_files(path, step, on_progress)
    with FileReader() as reader:
        for name, entry in manifest.files.items():
            total = xxhash.xxh3_64()
            for piece in read_head(reader, inside(path, name), entry.header_bytes):
                total.update(piece)
            if total.hexdigest() != entry.header_xxh3:
                what = "content" if entry.header_bytes == entry.nbytes else "header"
                raise IntegrityError(f"{what} differs from its checksum: damaged", path=inside(path, name))
            on_progress()
    return manifest


def read_head(reader: FileReader, file: str, nbytes: int) -> Iterator[memoryview]:
    """The first bytes of a file, in pieces of at most 16 MiB that share one buffer."""
    view = memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
    for done in range(0, nbytes, BLOCK_BYTES):
        piece = view[: nbytes - done]
        reader.read_into(file, done, piece)
        yield piece


def check_files(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Manifest intact and of this step; every file there with its size: what retention counts as valid.

    Reads the manifest, and asks once for each file. Rank-local; raises as :func:`quick_check` does.
    """
    try:
        os.stat(os.path.join(path, MANIFEST_NAME))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IntegrityError("lost: no manifest.json", path=path) from error
    except OSError as error:  # a server that is away is no damage
        raise SourceError(f"can't be read: {error.strerror}", path=path) from error
    manifest = read_manifest(path)
    if manifest.step != step:
        raise IntegrityError(
            f"holds step {manifest.step}, not {step}: an old manifest, or a step under another's name. If it was renamed, "
            f"give it the name that it was published under",
            path=path,
        )
    for name, entry in manifest.files.items():
        check_size(inside(path, name), entry.nbytes)
        on_progress()
    return manifest
