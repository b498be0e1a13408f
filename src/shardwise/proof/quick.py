"""``quick_check``: whether a published step is what its manifest says, as far as that can be told without payload."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from ..catalog.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..errors import CheckpointError, IntegrityError, SourceError
from ..read import FileReader

__all__ = ["check_files", "quick_check"]


def quick_check(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Manifest intact; every file there with its size; headers and small files as their checksums say.

    Resuming reads no headers, and at another world size not the files of the old ranks: what it takes for
    valid must nevertheless be what ``verify`` does. Reads no payload. Rank-local; raises for the first thing that
    is wrong: :class:`SourceError`, :class:`IntegrityError`, :class:`CheckpointError` (it holds another step).
    """
    manifest = check_files(path, step, on_progress)
    with FileReader() as reader:
        for name, entry in manifest.files.items():
            head = bytearray(entry.header_bytes)
            reader.read_into(os.path.join(path, name), 0, memoryview(head))
            if xxhash.xxh3_64_hexdigest(head) != entry.header_xxh3:
                what = "content" if entry.header_bytes == entry.nbytes else "header"
                raise IntegrityError(
                    f"{what} differs from its checksum: damaged", path=os.path.join(path, name)
                )
            on_progress()
    return manifest


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
        raise CheckpointError(
            f"{path}: holds step {manifest.step}, not {step}; give it the name that it was published under"
        )
    for name, entry in manifest.files.items():
        file = os.path.join(path, name)
        try:
            size = os.stat(file).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise IntegrityError("lost: no such file", path=file) from error
        except OSError as error:
            raise SourceError(f"can't be read: {error.strerror}", path=file) from error
        if size != entry.nbytes:
            raise IntegrityError(
                f"{size} bytes, expected {entry.nbytes}: truncated or overwritten", path=file
            )
        on_progress()
    return manifest
