"""``quick_check``: compares a published step with its manifest, without reading payload."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import xxhash

from ..catalog.checkpoint import check_size
from ..errors import IntegrityError, SourceError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, Manifest, read_manifest
from ..format.places import absent_places, describe_part, files_by_place, refuse_part
from ..limits import inside
from ..storage import is_url, join, looking_once, stat_of_expected
from ..transfer import SourceReader

__all__ = ["check_files", "check_part", "check_parts", "quick_check", "read_head"]


def quick_check(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Check the manifest, the size of every file, and the checksums of headers and small files. Reads no payload.

    A resume itself reads no headers, and at another world size not the files of the old ranks; this check makes it
    accept only steps that ``verify`` accepts. Rank-local; raises for the first problem: :class:`SourceError`,
    :class:`IntegrityError` (also for another step), :class:`CheckpointError` for a part of a step, which is not damaged.
    """
    manifest = check_files(path, step, on_progress)
    _check_heads(path, manifest, manifest.files, on_progress)
    return manifest


def check_parts(
    path: str, step: int | None, on_progress: Callable[[], object], *, heads: bool = True
) -> tuple[Manifest, list[int]]:
    """As :func:`quick_check`, of a directory that may hold parts of a step: the manifest, and the numbers of the places whose parts are
    here, or [0] for a manifest without places. ``step`` None takes any. Without ``heads`` as :func:`check_files`.

    A place is not here if none of its files is. Raises for a part that is here and damaged.
    """
    manifest = _manifest_of(path, step)
    absent, here = absent_places(path, manifest), []
    for number, names in enumerate(files_by_place(manifest)):
        if number not in absent:
            here.append(number)
            _check_sizes(path, manifest, names, on_progress)
            if heads:
                _check_heads(path, manifest, names, on_progress)
    return manifest, here


def check_part(path: str, step: int) -> tuple[Manifest, str | None]:
    """As :func:`quick_check`, of a directory that may hold one host's part of a step: the manifest, and what part it is, if it is one.

    Raises as :func:`quick_check`; :class:`IntegrityError` also where the manifest is all that is left.
    """
    manifest, here = check_parts(path, step, lambda: None)
    part = describe_part(path, manifest)
    if not here:
        raise IntegrityError(f"lost: {part}", path=path)
    return manifest, part


def _check_heads(
    path: str, manifest: Manifest, names: Iterable[str], on_progress: Callable[[], object]
) -> None:
    with SourceReader() as reader:
        for name in names:
            entry = manifest.files[name]
            total = xxhash.xxh3_64()
            for piece in read_head(reader, inside(path, name), entry.header_bytes):
                total.update(piece)
            if total.hexdigest() != entry.header_xxh3:
                what = "content" if entry.header_bytes == entry.nbytes else "header"
                raise IntegrityError(f"{what} differs from its checksum: damaged", path=inside(path, name))
            on_progress()


def read_head(reader: SourceReader, file: str, nbytes: int) -> Iterator[memoryview]:
    """The first bytes of a file, in pieces of at most 16 MiB that share one buffer."""
    view = memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
    for done in range(0, nbytes, BLOCK_BYTES):
        piece = view[: nbytes - done]
        reader.read_into(file, done, piece)
        yield piece


def check_files(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Check that the manifest is intact and of this step, and that every file has its size: then retention counts it.

    Reads the manifest and stats each file once. Rank-local; raises as :func:`quick_check` does.
    """
    with looking_once(path):
        return _check_files(path, step, on_progress)


def _check_files(path: str, step: int, on_progress: Callable[[], object]) -> Manifest:
    manifest = _manifest_of(path, step)
    refuse_part(path, manifest)
    _check_sizes(path, manifest, manifest.files, on_progress)
    return manifest


def _check_sizes(
    path: str, manifest: Manifest, names: Iterable[str], on_progress: Callable[[], object]
) -> None:
    for name in names:
        check_size(inside(path, name), manifest.files[name].nbytes)
        on_progress()


def _manifest_of(path: str, step: int | None) -> Manifest:
    try:
        if not is_url(path):
            os.stat(os.path.join(path, MANIFEST_NAME))
        elif stat_of_expected(join(path, MANIFEST_NAME)) is None:
            raise FileNotFoundError(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IntegrityError("lost: no manifest.json", path=path) from error
    except OSError as error:  # an unreachable server is not damage
        raise SourceError(f"can't be read: {error.strerror}", path=path) from error
    manifest = read_manifest(path)
    if step is not None and manifest.step != step:
        raise IntegrityError(
            f"contains step {manifest.step}, but step {step} was expected: either the manifest is old or the directory was renamed. If it "
            f"was renamed, restore its original name",
            path=path,
        )
    return manifest
