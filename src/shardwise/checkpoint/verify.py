"""``verify``: prove a stored checkpoint from its own files: checksums, cover, headers, digests."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from ..catalog.checkpoint import (
    catalog_of_slices,
    check_size,
    directory,
    model_tensors,
    optimizer_digests,
    optimizer_tensors,
    size_differs,
    size_problem,
)
from ..catalog.records import refuse_other
from ..digests import finish, partial_sum_bytes
from ..dtypes import itemsize
from ..engine.objects import SourceReader
from ..errors import IntegrityError, ShardwiseError, SourceError
from ..format.header import misnamed
from ..format.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    absent_places,
    describe_absent,
    describe_part,
    files_by_place,
    read_manifest,
    refuse_part,
)
from ..format.slices import Slice, SliceTensor, file_name, header_bytes, rank_files
from ..limits import inside
from ..objects import frozen
from ..operations.operation import Operation, announced, this_operation
from ..operations.printed import Printed
from ..storage import absolute, files_below, looking_once, stat_of_expected
from ..storage.records import Stat, is_url, join
from ..tensors.boxes import boxes_of_range

# ----------------------------------------------------------------------------------------------------
# ``quick_check``: compares a published step with its manifest, without reading payload.


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
            if problem := _head_problem(reader, inside(path, name), manifest.files[name]):
                raise IntegrityError(f"{problem}: damaged", path=inside(path, name))
            on_progress()


def _head_problem(reader: SourceReader, file: str, entry: FileEntry, expected: bytes = b"") -> str | None:
    """What is wrong with a file's header, or with all of a small file. ``expected``: the header, where it is known. Memory: 16 MiB."""
    nbytes = entry.header_bytes
    view = memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
    total, is_expected = xxhash.xxh3_64(), len(expected) in (0, nbytes)
    for done in range(0, nbytes, BLOCK_BYTES):
        piece = view[: nbytes - done]
        reader.read_into(file, done, piece)
        total.update(piece)
        is_expected = is_expected and (not expected or expected[done : done + piece.nbytes] == piece)
    if total.hexdigest() != entry.header_xxh3:
        return f"{'content' if nbytes == entry.nbytes else 'header'} differs from its checksum"
    return None if is_expected else "header disagrees with the manifest"


def check_files(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> Manifest:
    """Check that the manifest is intact and of this step, and that every file has its size: then retention counts it.

    Reads the manifest and stats each file once. Rank-local; raises as :func:`quick_check` does.
    """
    with looking_once(path):
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


# ----------------------------------------------------------------------------------------------------


@frozen
class VerifyReport(Printed):
    """The result of a verification: what was checked, and every problem that it found."""

    path: str
    step: int
    problems: tuple[str, ...]
    files: int
    tensors: int
    bytes_read: int
    seconds: float
    referred: int = 0
    """Number of tensors for which the checkpoint stores only digests. A restore compares them with the live ones."""

    part: str | None = None
    """For one host's part of a step (``Checkpointer(local=True)``): which part it is, and where the others are. The files here were checked."""

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is complete and free of problems."""
        return not self.problems and self.part is None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**Printed.to_json(self), "ok": self.ok}


@announced("verify", "path")
def verify(path: str | os.PathLike[str], *, threads: int | None = None) -> VerifyReport:
    """Check every byte of a stored checkpoint. Reads all of it once, in blocks of 16 MiB, in one process.

    It checks the manifest's own checksum; that the directory contains exactly the manifest's files, with the right sizes; the checksum of
    every header, small file and 16 MiB block; that headers agree with the manifest; that slices cover every tensor exactly once; that this
    release knows the names and forms of the documents (with at most 16 MiB of tensors); every tensor's digest, recomputed from the stored
    bytes; and that a directory named after a step contains that step. Hard links to one file are read once. For one host's part of a step, it
    checks the files that are there; ``part`` of the report says where the others are.

    ``threads`` defaults to all cores available to the process, at most 8; each thread takes 17 MiB of memory. A single rank can call it. Raises
    :class:`SourceError` (or a subclass) only if there is no readable manifest; every other problem is a line in ``problems``.
    """
    started = time.perf_counter()
    root = absolute(path) if is_url(os.fspath(path)) else os.fspath(path)
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    try:
        manifest = read_manifest(root)
    except SourceError as error:
        if error.path == root:  # it has no manifest
            refuse_other(root, "verified")
        raise
    work = _Verification(root, manifest, this_operation(root))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work.run(threads or min(8, cores))
    return VerifyReport(
        path=root,
        step=manifest.step,
        problems=work.problems(),
        files=work.files + 1,
        tensors=work.tensors,
        bytes_read=work.bytes_read,
        seconds=time.perf_counter() - started,
        referred=sum(t.refers for entries in manifest.models.values() for t in entries.values()),
        part=work.part,
    )


def _file_set_problems(root: str, manifest: Manifest, absent: Collection[int]) -> tuple[list[str], set[str]]:
    """Problems of the set of files and their sizes, and the names of files that can't be read. ``absent``: parts that lie elsewhere."""
    found, bad = files_below(root, manifest.files), set()
    problems = [
        f"{n}: not listed in the manifest" for n in sorted(set(found) - set(manifest.files) - {MANIFEST_NAME})
    ]
    of_places = files_by_place(manifest)
    if len(absent) == len(of_places):
        problems.append(f"lost: {describe_absent(root, manifest.places, absent)}")
    bad |= {name for number in absent for name in of_places[number]}
    for name, entry in manifest.files.items():
        if name in bad:
            continue
        wrong = _wrong_file(inside(root, name), entry.nbytes, found[name]) if name in found else "lost"
        if wrong is not None:
            problems.append(f"{name}: {wrong}")
            bad.add(name)
    return problems, bad


def _wrong_file(path: str, nbytes: int, seen: Stat | None) -> str | None:
    if seen is not None:
        return size_differs(seen.nbytes, nbytes)
    try:
        return size_problem(os.stat(path), nbytes)
    except OSError as error:  # a link to nothing, or to itself
        return f"lost ({error.strerror})"


def _slice_sets(manifest: Manifest) -> Iterator[tuple[str, str, list[SliceTensor], dict[str, int]]]:
    """(kind, name, stored tensors, recorded digest by stored name) of every model and optimizer."""
    for model, entries in manifest.models.items():
        held = {n: t for n, t in entries.items() if not t.refers}
        digests = {alias: t.digest for n, t in held.items() for alias in (n, *t.stored_aliases)}
        yield "model", model, model_tensors(manifest, model), digests
    for optimizer in manifest.packed:
        model = model_of(manifest, optimizer)
        states = optimizer_digests(manifest, optimizer, model)
        yield "optimizer", optimizer, optimizer_tensors(manifest, optimizer, model), states


def model_of(manifest: Manifest, optimizer: str) -> str:
    """The model whose parameters have states of an optimizer; the first model if none has."""
    return next(
        (m for m, ts in manifest.models.items() if any(optimizer in t.states for t in ts.values())),
        next(iter(manifest.models)),
    )


@frozen
class _File:
    """A file to check, and its consecutive slices; empty for a file without slices, or with unknown ones."""

    name: str
    entry: FileEntry
    part: int
    slices: tuple[Slice, ...]

    @property
    def payload_bytes(self) -> int:
        return self.entry.nbytes - self.entry.header_bytes


class _Verification:
    """One verification: its tasks (headers, and blocks of payload), which threads take in turn, and their findings."""

    def __init__(self, root: str, manifest: Manifest, counted: Operation) -> None:
        self._root = root
        self._manifest = manifest
        self._counted = counted
        self._lock = threading.Lock()
        self._stopped = False
        self._done = 0
        self._found: dict[tuple[int, int], list[str]] = {}  # by file and block, for a fixed order
        absent = absent_places(root, manifest)
        self._absent = absent
        self.part = describe_absent(root, manifest.places, absent) if absent else None
        wrong_files, self._bad = _file_set_problems(root, manifest, absent)
        wrong_name = misnamed(root, manifest.step, manifest.files)
        self._first = [f"{MANIFEST_NAME}: {wrong_name}"] * bool(wrong_name) + wrong_files
        self._last: list[str] = []
        self._parts = list(_slice_sets(manifest))
        self._sums: list[dict[str, int]] = [dict.fromkeys(digests, 0) for *_, digests in self._parts]
        self._unread: list[set[str]] = [set() for _ in self._parts]
        self._files = self._files_to_check()
        self._total = sum(f.entry.nbytes for f in self._files)
        self._tasks = ((f, b) for f, file in enumerate(self._files) for b in range(-1, _blocks_in(file)))

    @property
    def files(self) -> int:
        """The files of the manifest that are in this directory, or should be."""
        of_places = files_by_place(self._manifest)
        return sum(len(names) for number, names in enumerate(of_places) if number not in self._absent)

    @property
    def tensors(self) -> int:
        elsewhere = sum(map(len, self._unread)) if self.part else 0
        return sum(map(len, self._sums)) - elsewhere

    @property
    def bytes_read(self) -> int:
        return self._done

    def run(self, threads: int) -> None:
        """Check everything; returns when all threads have ended."""
        # Only this check decodes documents; everything else needs the manifest alone.
        from .stored import document_problems

        self._counted.expect(lambda: self._total)
        with ThreadPoolExecutor(threads, thread_name_prefix="shardwise-verify") as pool:
            try:
                for ended in [pool.submit(self._work) for _ in range(threads)]:
                    ended.result()
            finally:
                self._stopped = True
        bad = self._bad | {self._files[f].name for f, _ in self._found}
        self._last = list(document_problems(self._root, self._manifest, bad))

    def problems(self) -> tuple[str, ...]:
        """All problems, files first."""
        lines = [
            *self._first,
            *(line for key in sorted(self._found) for line in self._found[key]),
            *self._last,
        ]
        for (_, name, stored, digests), sums, unread in zip(
            self._parts, self._sums, self._unread, strict=True
        ):
            for t in stored:
                if t.name not in unread and finish(sums[t.name] % 2**64, t.dtype, t.shape) != digests[t.name]:
                    lines.append(f"{name} tensor {t.name!r}: content differs from its digest")
        return tuple(dict.fromkeys(lines))

    def _files_to_check(self) -> list[_File]:
        """Files that exist with their size. Tensors with slices in any other file are not summed."""
        slices: dict[str, tuple[int, tuple[Slice, ...]]] = {}
        for k, (kind, name, stored, _) in enumerate(self._parts):
            try:
                catalog_of_slices(self._root, self._manifest, kind, name, stored)
            except ShardwiseError as error:
                self._first.append(f"{name}: {error}")
                self._unread[k] |= self._sums[k].keys()
                continue
            per_rank = {
                r: rank_files(stored, r) for r in sorted({r for t in stored for r in t.geometry.ranks})
            }
            count = max((len(files) for files in per_rank.values()), default=0)
            for rank, files in per_rank.items():
                for n, held in enumerate(files):
                    relative = f"{directory(kind, name)}/{file_name(kind, rank, n, count)}"
                    slices[relative] = k, tuple(held)
        found = []
        for name, entry in self._manifest.files.items():
            part, own = slices.get(name, (0, ()))
            file = _File(name, entry, part, own)
            if name in self._bad:
                self._unread[part] |= {s.tensor.name for s in own}
            elif own and sum(s.nbytes for s in own) != file.payload_bytes:
                self._first.append(f"{name}: {file.payload_bytes} bytes of payload do not fit its tensors")
                self._unread[part] |= {s.tensor.name for s in own}
                found.append(_File(name, entry, part, ()))
            else:
                found.append(file)
        return self._without_links(found)

    def _without_links(self, files: list[_File]) -> list[_File]:
        """Drop hard links to another listed file with the same checksums: its bytes are read once."""
        read: dict[tuple[int, int, FileEntry], _File] = {}
        links = set()
        for file in sorted(files, key=lambda f: not f.slices):  # prefer the file whose tensors are known
            with contextlib.suppress(OSError):  # reading the file reports the error
                status = os.stat(inside(self._root, file.name))
                if read.setdefault((status.st_dev, status.st_ino, file.entry), file) is not file:
                    links.add(file.name)
        return [file for file in files if file.name not in links]

    def _work(self) -> None:
        """Take tasks until there are none."""
        buffer = bytearray()
        with SourceReader(self._count) as reader:
            while not self._stopped:
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                file, block = self._files[task[0]], task[1]
                length = 0 if block < 0 else min(BLOCK_BYTES, file.payload_bytes - block * BLOCK_BYTES)
                if len(buffer) < length:
                    buffer = bytearray(length)
                try:
                    lines, sums = self._check(file, block, reader, memoryview(buffer)[:length])
                except ShardwiseError as error:
                    lines, sums = [f"{file.name}: {error}"], []
                    with self._lock:
                        self._unread[file.part] |= {s.tensor.name for s in file.slices}
                with self._lock:
                    if lines:
                        self._found[task] = lines
                    for name, total in sums:
                        self._sums[file.part][name] += total

    def _check(
        self, file: _File, block: int, reader: SourceReader, view: memoryview
    ) -> tuple[list[str], list[tuple[str, int]]]:
        """Problems of the header (block -1) or a block of payload, and its share of the sums of tensors."""
        path = inside(self._root, file.name)
        lines = []
        if block < 0:
            expected = header_bytes(file.slices) if file.slices else b""
            if problem := _head_problem(reader, path, file.entry, expected):
                lines.append(f"{file.name}: {problem}")
            if (count := len(file.entry.blocks)) != _blocks_in(file):
                lines.append(
                    f"{file.name}: manifest has {count} block checksums, expected {_blocks_in(file)}"
                )
            return lines, []
        offset = file.entry.header_bytes + block * BLOCK_BYTES
        reader.read_into(path, offset, view)
        if block < len(file.entry.blocks) and xxhash.xxh3_64_hexdigest(view) != file.entry.blocks[block]:
            lines = [f"{file.name}: bytes {offset} to {offset + view.nbytes} differ from their checksum"]
        return lines, list(_sums_in(file.slices, block * BLOCK_BYTES, view))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
        self._counted.add(nbytes)


def _blocks_in(file: _File) -> int:
    return math.ceil(file.payload_bytes / BLOCK_BYTES)


def _sums_in(slices: Sequence[Slice], begin: int, view: memoryview) -> Iterator[tuple[str, int]]:
    """The share of each tensor's digest sum in the payload bytes from ``begin`` on."""
    end = begin + view.nbytes
    first = max(0, bisect_right(slices, begin, key=lambda s: s.offset_bytes) - 1)
    for s in slices[first:]:
        if s.offset_bytes >= end:
            return
        low, high = max(begin, s.offset_bytes), min(end, s.offset_bytes + s.nbytes)
        if low >= high:
            continue
        size, at = itemsize(s.tensor.dtype), low - begin
        total = 0
        run = (low - s.offset_bytes) // size, (high - s.offset_bytes) // size
        for part in boxes_of_range(*run, s.held.box.sizes):
            nbytes, start = part.numel * size, part.moved(s.held.box.start).start
            total += partial_sum_bytes(view[at : at + nbytes], s.tensor.dtype, part.sizes, start)
            at += nbytes
        yield s.tensor.name, total
