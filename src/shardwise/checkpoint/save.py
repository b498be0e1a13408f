"""Writes one checkpoint: snapshot → write → agree → commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from ..catalog.checkpoint import directory
from ..digests.digest import partial_sum
from ..errors import CheckpointError
from ..format.manifest import FileEntry, Manifest
from ..format.slices import header_bytes
from ..format.steps import misnamed
from ..limits import inside
from ..objects import frozen, gc_paused
from ..operations.announced import announced
from ..operations.operation import Operation, this_operation
from ..operations.printed import Printed
from ..operations.recorder import phase
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..state.typed_json import Encoded
from ..storage import counting, is_url
from ..store.part_target import PartTarget
from ..store.slice_file import write_slices
from ..store.target import Target
from ..store.write import make_directories, write_file
from .at_top import show_at_top
from .collect import Collected, Lineage, collect
from .document_files import checked_text, write_documents
from .own_files import OwnPart, Piece
from .parts import begin_parts, publish_parts
from .pieces import Contents, LiveContents, pieces_of
from .save_manifest import file_records, manifest_of, merged_records, outline_of
from .shared_fs import wait_for_folders
from .snapshot import Live
from .space import payload_bytes, refuse_low_space

__all__ = ["SaveReport", "publish_collected", "write_checkpoint"]


@frozen
class SaveReport(Printed):
    """The result of a save on this rank."""

    path: str
    step: int
    bytes_written: int
    """Payload and headers that this rank wrote. For an async save, the bytes that it copied."""
    seconds: float
    """From the call until the step was published. For an async save, until ``save`` returned."""
    stall_seconds: float
    """How long training waited for ``save``. For an async save, this includes the wait for the previous save."""
    skipped: tuple[str, ...]
    """State that can't be stored: functions, by path; gradients whose use no hook recorded; and custom state of a model or an optimizer
    that can't be put into a document. A restore reports the last kind, too."""
    staging_bytes: int = 0
    """Host memory for copies of the state. An async save keeps it for the next one; other saves use at most 16 MiB, for tensors on a
    device. If the tensors are on a device, the memory is pinned, and this is exactly what torch allocated."""
    is_published: bool = True
    """Whether the step is published. An async save is published once ``Checkpointer.wait`` returns."""
    gradients: int = 0
    """Number of stored gradients that still wait for an optimizer step, because the save was in the middle of an accumulation."""
    requests: int = 0
    """Requests that this rank made to an object store, counting each part of a large object. 0 for a local path, and for an async save that isn't
    published yet."""
    failure: str | None = None
    """Why a step wasn't saved, if a ``FailurePolicy`` let training continue. The same on every rank."""
    failed_step: int | None = None
    """The step that ``failure`` is about. With ``mode="async"`` it is usually the previous step: a background save fails after its own report was
    returned, so the next call of ``save`` reports it."""

    @classmethod
    def of(
        cls,
        collected: Collected,
        *,
        path: str,
        bytes_written: int,
        started: float,
        stall_seconds: float | None = None,
        staging_bytes: int = 0,
        is_published: bool = True,
        requests: int = 0,
    ) -> SaveReport:
        """Create the report of a save that has just ended and that started at ``started``, as ``time.perf_counter()`` returned it. Without
        ``stall_seconds``, training waited the entire time.
        """
        seconds = time.perf_counter() - started
        return cls(
            path=path,
            step=collected.step,
            bytes_written=bytes_written,
            seconds=seconds,
            stall_seconds=seconds if stall_seconds is None else stall_seconds,
            skipped=collected.snapshot.not_stored,
            staging_bytes=staging_bytes,
            is_published=is_published,
            gradients=collected.snapshot.gradients,
            requests=requests,
        )

    @classmethod
    def of_failure(cls, path: str, step: int, failure: str) -> SaveReport:
        """Create the report of a save that failed while training continues."""
        return cls(path, step, 0, 0.0, 0.0, (), is_published=False, failure=failure, failed_step=step)

    def after_failure(self, step: int, failure: str) -> SaveReport:
        """A copy of this report that also says that the earlier save of ``step`` failed in the background."""
        if self.failure is None:
            return replace(self, failure=failure, failed_step=step)
        return replace(
            self, failure=f"{self.failure}; the save of step {step} before it failed, too: {failure}"
        )

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@announced("save", "step")
@gc_paused()
def write_checkpoint(
    state: TrainState, target: Target, step: int, lineage: Lineage, ranks: Ranks, *, at_top: bool = False
) -> SaveReport:
    """Publish ``state`` at ``target``. Collective; on failure nothing is published on any rank.

    ``at_top``: link the files of ``model/`` at the top, too (:mod:`.at_top`); for a local target.
    """
    started = time.perf_counter()
    with phase("collect"):
        collected = collect(state, step, lineage, ranks)
    contents = LiveContents(pieces_of(collected))
    with counting() as asked:
        written = publish_collected(collected, target, ranks, contents, at_top=at_top)
    return SaveReport.of(
        collected,
        path=target.final,
        bytes_written=written,
        started=started,
        staging_bytes=contents.staging_bytes,
        requests=asked.total,
    )


def publish_collected(
    collected: Collected,
    target: Target,
    ranks: Ranks,
    contents: Contents,
    prove: Callable[[Manifest], None] = lambda manifest: None,
    *,
    at_top: bool = False,
) -> int:
    """Write, agree, commit. Collective; on failure nothing is published. Returns the bytes that this rank wrote.

    Calls ``prove`` on rank 0 before the commit, with the digests of the written tensors.
    """
    final, counted = target.final, this_operation(target.final)
    total = payload_bytes(collected)
    try:
        first_final, place = ranks.on_first(
            "make temporary directory", lambda: _begin(target, collected, total)
        )
        if isinstance(target, PartTarget):
            place = begin_parts(target, place, _folders(collected), ranks)
        with phase("write"), ranks.agree("write checkpoint"):
            if not target.places and first_final != final:
                raise CheckpointError(
                    f"rank {ranks.rank} should save to {final}, rank 0 to {first_final}; give every rank the same path "
                    f"(if it contains the time, rank 0 must make it and send it to all ranks)"
                )
            texts = _checked_texts(collected, ranks, final)
            refuse_low_space(
                place,
                total,
                f"rank {ranks.rank}'s part",
                lambda: _bytes_to_write(collected, texts, ranks.rank),
            )
            if not is_url(place):
                wait_for_folders(place, _folders(collected), ranks)
            counted.expect(lambda: _bytes_to_write(collected, texts, ranks.rank))
            files, sums = _write_rank(place, collected, texts, ranks, contents, counted)
        merged: list[dict[str, Any]] = []  # on rank 0
        ranks.reduce(
            "file records",
            lambda: file_records(collected, ranks.rank, files, sums),
            merged_records,
            merged.append,
        )

        def proved() -> Manifest:
            places = target.places if len(target.places) > 1 else ()  # else one directory holds all of it
            manifest = replace(manifest_of(collected, ranks, *merged), places=places)
            if at_top:
                shown = show_at_top(place, manifest.files)
                manifest = replace(manifest, files=dict(sorted(shown.items())))
            collected.lineage.refuse_changed_base(manifest)
            prove(manifest)
            return manifest

        if isinstance(target, PartTarget):
            publish_parts(target, proved, ranks)
        else:
            ranks.on_first("publish checkpoint", lambda: target.commit(proved()))
    except BaseException:
        if ranks.rank == (target.leader if isinstance(target, PartTarget) else 0):
            with ranks.patience():
                target.discard()
        raise
    return sum(f.nbytes for f in files.values())


def _begin(target: Target, collected: Collected, total: int) -> list[str]:
    """Rank 0's path of the checkpoint, and the one that every rank writes below."""
    if misnamed(target.final, collected.step, collected.assets):
        raise CheckpointError(
            f"{target.final}: is the name of another step, but this is step {collected.step}: a reader would call it damaged; "
            f"give it the name of its step"
        )
    if not target.places:  # else each rank looks at the part that it writes
        refuse_low_space(os.path.dirname(target.final), total, f"step {collected.step}")
    return [target.final, target.begin(_folders(collected))]


def _folders(collected: Collected) -> list[str]:
    return ["rank", *(directory(p.kind, p.name) for p in collected.snapshot.parts)]


def _documents(collected: Collected, ranks: Ranks) -> dict[str, Mapping[str, Encoded]]:
    """The documents that this rank writes, by the stem of their files."""
    found = {f"rank/{ranks.rank:05d}": collected.local}
    return found | {"state": collected.shared} if ranks.rank == 0 else found


def _checked_texts(collected: Collected, ranks: Ranks, final: str) -> dict[str, bytes]:
    """Raises :class:`StateError` for documents of this rank that no reader would take."""
    outline = outline_of(collected, ranks)
    return {
        stem: checked_text(documents, outline, stem, final)
        for stem, documents in _documents(collected, ranks).items()
    }


def _bytes_to_write(collected: Collected, texts: Mapping[str, bytes], rank: int) -> int:
    """The bytes of this rank's files, but for tensors of documents: these are known when they are encoded."""
    files = [file.slices for part in collected.own for file in part.files]
    small = [*texts.values(), *(collected.assets.values() if rank == 0 else ())]
    return sum(len(header_bytes(file)) + sum(s.nbytes for s in file) for file in files) + sum(map(len, small))


def _write_rank(
    root: str,
    collected: Collected,
    texts: Mapping[str, bytes],
    ranks: Ranks,
    contents: Contents,
    counted: Operation,
) -> tuple[dict[str, FileEntry], list[int]]:
    """Write and sync this rank's files. Returns their entries and the digest sums of its copies of all tensors."""
    files: dict[str, FileEntry] = {}
    sums = _Sums(contents)
    for part, own in zip(collected.snapshot.parts, collected.own, strict=True):
        sums.start(v for v in part.live if v.counted)
        _write_tensors(root, own, files, ranks, sums, counted)
    for stem, pieces_of_stem in _documents(collected, ranks).items():
        write_documents(root, stem, texts[stem], pieces_of_stem, files)
        counted.add(len(texts[stem]))
        if tensors := files.get(f"{stem}.safetensors"):
            counted.expect(partial(int, tensors.nbytes))
            counted.add(tensors.nbytes)
    if ranks.rank == 0:
        for name, content in collected.assets.items():
            file = inside(root, name)
            if not is_url(file):
                make_directories(os.path.dirname(file))
            files[name] = write_file(file, content)
            counted.add(len(content))
    return files, sums.finish()


class _Sums:
    """Takes pieces from ``contents``, and adds up the digest sums of tensors on the way."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._totals: list[int] = []
        self._indices: dict[int, int] = {}  # of totals, by id of the tensor's record
        self._summed_by_device: list[int] = []

    def start(self, live: Iterable[Live]) -> None:
        """Make room for the sums of tensors, in this order."""
        for v in live:
            self._indices[id(v)] = len(self._totals)
            self._totals.append(0)

    def parts_of(self, piece: Piece) -> Iterator[torch.Tensor]:
        """The piece as tensors on the CPU."""
        index = self._indices.get(id(piece.live))
        if index is not None and piece.is_on_device:
            self._summed_by_device.append(index)
        for box, part in self._contents.parts_of(piece):
            if index is not None and box is not None:
                self._totals[index] += partial_sum(part, box.start)
            yield part

    def finish(self) -> list[int]:
        """The sums of all tensors, after the last piece."""
        for index, total in zip(self._summed_by_device, self._contents.device_sums(), strict=True):
            self._totals[index] += total
        return [total % 2**64 for total in self._totals]


def _write_tensors(
    root: str,
    own: OwnPart,
    files: dict[str, FileEntry],
    ranks: Ranks,
    sums: _Sums,
    counted: Operation,
) -> None:
    for file in own.files:
        contents = map(sums.parts_of, file.pieces)  # the writer takes them in the order of slices
        path = os.path.join(root, file.name)
        files[file.name] = write_slices(path, file.slices, contents, counted.counting(ranks.tick))
    for piece in own.summed:
        for _ in sums.parts_of(piece):
            pass
        ranks.tick()
