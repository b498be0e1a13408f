"""``verify``: prove a stored checkpoint from its own files: checksums, cover, headers, digests."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from ..catalog.checkpoint import catalog_of_slices, directory, model_tensors, optimizer_tensors, packed_name
from ..catalog.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from ..catalog.slices import Slice, SliceTensor, file_name, header_bytes, rank_files
from ..dtypes import itemsize
from ..errors import ShardwiseError
from ..read.files import FileReader
from .digest import finish, partial_sum_bytes

__all__ = ["VerifyReport", "model_of", "pieces", "verify"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and every problem that was found."""

    path: str
    step: int
    problems: tuple[str, ...]
    files: int
    tensors: int
    bytes_read: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def verify(path: str | os.PathLike[str], on_progress: Progress | None = None) -> VerifyReport:
    """Check a stored checkpoint completely; reads all of it once or twice, in pieces of 16 MiB, on one process.

    Checked: the manifest's own checksum; that exactly its files are there with their sizes; the checksum of
    every header, small file and 16 MiB block; that headers say what the manifest says; that slices cover
    every tensor exactly once; and every tensor's digest, recomputed from the stored bytes.

    ``on_progress(done, total)`` is called with bytes. Rank-local. Raises :class:`SourceError` (or a
    subclass) only if there is no readable manifest; everything else is a line in ``problems``.
    """
    started = time.perf_counter()
    root = os.fspath(path)
    manifest = read_manifest(root)
    problems = _file_set_problems(root, manifest)
    total = 2 * sum(e.nbytes for e in manifest.files.values())
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        if on_progress is not None:
            on_progress(min(done, total), total)

    with FileReader(count) as reader:
        for name, entry in manifest.files.items():
            if not any(p.startswith(f"{name}:") for p in problems):
                problems += _checksum_problems(reader, root, name, entry)
        tensors = 0
        for kind, part, stored, digests in _slice_sets(manifest):
            tensors += len(digests)
            problems += _slice_problems(reader, root, manifest, kind, part, stored, digests)
        return VerifyReport(
            path=root,
            step=manifest.step,
            problems=tuple(dict.fromkeys(problems)),
            files=len(manifest.files) + 1,
            tensors=tensors,
            bytes_read=reader.bytes_read,
            seconds=time.perf_counter() - started,
        )


def _file_set_problems(root: str, manifest: Manifest) -> list[str]:
    found = set()
    for folder, _, names in os.walk(root):
        found |= {os.path.relpath(os.path.join(folder, n), root).replace(os.sep, "/") for n in names}
    problems = [
        f"{n}: not listed in the manifest" for n in sorted(found - set(manifest.files) - {MANIFEST_NAME})
    ]
    for name, entry in manifest.files.items():
        if name not in found:
            problems.append(f"{name}: lost")
        elif (size := os.stat(os.path.join(root, name)).st_size) != entry.nbytes:
            problems.append(f"{name}: {size} bytes, expected {entry.nbytes}: truncated or overwritten")
    return problems


def _checksum_problems(reader: FileReader, root: str, name: str, entry: FileEntry) -> list[str]:
    path = os.path.join(root, name)
    try:
        head = bytearray(entry.header_bytes)
        reader.read_into(path, 0, memoryview(head))
        if xxhash.xxh3_64_hexdigest(head) != entry.header_xxh3:
            what = "content" if entry.header_bytes == entry.nbytes else "header"
            return [f"{name}: {what} differs from its checksum"]
        problems = []
        payload = entry.nbytes - entry.header_bytes
        buffer = memoryview(bytearray(min(BLOCK_BYTES, payload)))
        expected = math.ceil(payload / BLOCK_BYTES)
        if len(entry.blocks) != expected:
            return [f"{name}: manifest has {len(entry.blocks)} block checksums, expected {expected}"]
        for k, checksum in enumerate(entry.blocks):
            offset = k * BLOCK_BYTES
            view = buffer[: min(BLOCK_BYTES, payload - offset)]
            reader.read_into(path, entry.header_bytes + offset, view)
            if xxhash.xxh3_64_hexdigest(view) != checksum:
                problems.append(
                    f"{name}: bytes {entry.header_bytes + offset} to {entry.header_bytes + offset + view.nbytes} "
                    f"differ from their checksum"
                )
        return problems
    except ShardwiseError as error:
        return [f"{name}: {error}"]


def _slice_sets(manifest: Manifest) -> Iterator[tuple[str, str, list[SliceTensor], dict[str, int]]]:
    """(kind, name, stored tensors, recorded digest by stored name) of every model and optimizer."""
    for model, entries in manifest.models.items():
        digests = {alias: t.digest for n, t in entries.items() for alias in (n, *t.stored_aliases)}
        yield "model", model, model_tensors(manifest, model), digests
    for optimizer, packed in manifest.packed.items():
        model = model_of(manifest, optimizer)
        states = {
            f"{n}.{s}": e.digest
            for n, t in manifest.models[model].items()
            for s, e in t.states.get(optimizer, {}).items()
            if e.packed is None
        }
        states |= {packed_name(k): p.digest for k, p in packed.items()}
        yield "optimizer", optimizer, optimizer_tensors(manifest, optimizer, model), states


def model_of(manifest: Manifest, optimizer: str) -> str:
    """The model whose parameters have states of an optimizer; the first one, if none has."""
    return next(
        (m for m, ts in manifest.models.items() if any(optimizer in t.states for t in ts.values())),
        next(iter(manifest.models)),
    )


def _slice_problems(
    reader: FileReader,
    root: str,
    manifest: Manifest,
    kind: str,
    part: str,
    stored: Sequence[SliceTensor],
    digests: dict[str, int],
) -> list[str]:
    try:
        catalog_of_slices(root, manifest, kind, part, stored)
    except ShardwiseError as error:
        return [f"{part}: {error}"]
    sums = dict.fromkeys(digests, 0)
    unreadable: set[str] = set()
    problems = []
    per_rank = {r: rank_files(stored, r) for r in sorted({r for t in stored for r in t.geometry.ranks})}
    count = max((len(files) for files in per_rank.values()), default=0)
    for rank, files in per_rank.items():
        for k, slices in enumerate(files):
            name = f"{directory(kind, part)}/{file_name(kind, rank, k, count)}"
            entry = manifest.files[name]
            path = os.path.join(root, name)
            try:
                problems += _header_problems(reader, path, name, entry, slices)
                for s in slices:
                    sums[s.tensor.name] += _slice_sum(reader, path, entry.header_bytes, s)
            except ShardwiseError as error:
                problems.append(f"{name}: {error}")
                unreadable |= {s.tensor.name for s in slices}
    for t in stored:
        if t.name not in unreadable and finish(sums[t.name] % 2**64, t.dtype, t.shape) != digests[t.name]:
            problems.append(f"{part} tensor {t.name!r}: content differs from its digest")
    return problems


def _header_problems(
    reader: FileReader, path: str, name: str, entry: FileEntry, slices: Sequence[Slice]
) -> list[str]:
    expected = header_bytes(slices)
    found = bytearray(min(len(expected), entry.nbytes))
    reader.read_into(path, 0, memoryview(found))
    if found != expected:
        return [f"{name}: header does not say what the manifest says"]
    return []


def _slice_sum(reader: FileReader, path: str, payload_start: int, s: Slice) -> int:
    size = itemsize(s.tensor.dtype)
    total = 0
    for start, sizes, first in pieces(s.held.box.start, s.held.box.sizes, BLOCK_BYTES // size):
        buffer = np.empty(math.prod(sizes) * size, dtype=np.uint8)
        reader.read_into(path, payload_start + s.offset_bytes + first * size, buffer.data)
        total += partial_sum_bytes(buffer, s.tensor.dtype, sizes, start)
    return total


def pieces(
    start: tuple[int, ...], sizes: tuple[int, ...], limit: int, first: int = 0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """A row-major box in contiguous pieces of at most ``limit`` elements: (start, sizes, first element)."""
    numel = math.prod(sizes)
    if numel == 0:
        return
    if numel <= limit:
        yield start, sizes, first
        return
    dim = next(d for d, n in enumerate(sizes) if n > 1)
    inner = numel // sizes[dim]
    rows = max(1, limit // inner)
    for begin in range(0, sizes[dim], rows):
        count = min(rows, sizes[dim] - begin)
        moved = (*start[:dim], start[dim] + begin, *start[dim + 1 :])
        cut = (*sizes[:dim], count, *sizes[dim + 1 :])
        yield from pieces(moved, cut, limit, first + begin * inner)
