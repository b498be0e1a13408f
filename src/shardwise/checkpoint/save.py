"""Writes one checkpoint, in the foreground or in the background: snapshot, write, agree, commit."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..catalog.checkpoint import directory, packed_name
from ..digests import ReplicaTotals, added_sums, finish, partial_sum
from ..dtypes import itemsize
from ..errors import CheckpointError, FormatError, LowSpaceError, SourceError, StateError
from ..format.header import misnamed
from ..format.manifest import (
    BLOCK_BYTES,
    GRADIENT,
    FileEntry,
    Manifest,
    Packed,
    StateEntry,
    TensorEntry,
    parse_documents,
)
from ..format.slices import StateKey, header_bytes
from ..limits import MAX_JSON_BYTES, inside
from ..models.homes import ADAPTERS_NAME
from ..objects import frozen, gc_paused
from ..operations.operation import announced, in_background, note, operation, phase, this_operation
from ..operations.printed import Printed
from ..publish.lock import wait_for_folders
from ..publish.places import Target
from ..publish.write import WriterOf, fsync_directory, make_directories, write_file, write_slices, writer_of
from ..ranks.ranks import Ranks, patiently
from ..state.optimizer import TrainState
from ..state.typed_json import Encoded
from ..storage.records import counting, is_url
from ..tensors.placements import Geometry
from .snapshot import Live, ModelPart, OptimizerPart, Piece, Snapshot, plain_tensors
from .stored import check_each
from .take import (
    Collected,
    Contents,
    Lineage,
    LiveContents,
    StagedContents,
    StagingBuffer,
    collect,
    detached_documents,
    live_piece,
    pieces_of,
    room_for,
)

# ----------------------------------------------------------------------------------------------------
# Hard links to the files of a checkpoint's ``model/`` at its top, where ``from_pretrained`` looks.

_log = logging.getLogger(__name__)
_FOLDER = "model/"


def show_at_top(root: str, files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Link the files of ``model/`` into ``root``, except those already there. Returns all files' manifest entries.

    Links take no space. If the file system has none, small files are copied and weights are skipped with a warning.
    Weights of a model with adapters are skipped: ``from_pretrained`` can't build a model from them. For rank 0, before
    the manifest is written.
    """
    found = dict(files)
    inside = {
        name: name.removeprefix(_FOLDER)
        for name in files
        if name.startswith(_FOLDER) and name.removeprefix(_FOLDER) not in files
    }
    has_adapters = inside.pop(_FOLDER + ADAPTERS_NAME, None) is not None
    weights = {n: top for n, top in inside.items() if top.endswith(".safetensors") and "/" not in top}
    for name in weights:
        del inside[name]
    for name, top in inside.items():
        source, target = os.path.join(root, name), os.path.join(root, top)
        make_directories(os.path.dirname(target))
        try:
            patiently(os.link, source, target)
        except OSError:
            write_file(target, patiently(Path(source).read_bytes))
        found[top] = files[name]
    for folder in {os.path.dirname(top) for top in inside.values()} - {""}:
        fsync_directory(os.path.join(root, folder))
    if not has_adapters:
        found |= _link_weights(root, weights, files)
    return found


def _link_weights(
    root: str, weights: Mapping[str, str], files: Mapping[str, FileEntry]
) -> dict[str, FileEntry]:
    """Link all weights or none: a reader takes the files that it finds for the whole model."""
    try:
        for name, top in weights.items():
            patiently(os.link, os.path.join(root, name), os.path.join(root, top))
    except OSError as error:
        for top in weights.values():
            with contextlib.suppress(FileNotFoundError):
                patiently(os.unlink, os.path.join(root, top))
        _log.warning(
            "%s: no hard links here (%s), so from_pretrained can open only its folder 'model', not the checkpoint itself",
            root,
            error.strerror,
        )
        return {}
    return {top: files[name] for name, top in weights.items()}


# ----------------------------------------------------------------------------------------------------
# The files of documents: encodes them, passes them through the reader's own checks, and writes them.


def write_documents(
    root: str, stem: str, text: bytes, documents: Mapping[str, Encoded], files: dict[str, FileEntry]
) -> None:
    """Write ``<stem>.json`` with the documents and, if they refer to tensors, ``<stem>.safetensors`` with these."""
    from safetensors.torch import save

    tensors = {f"{n}/{k}": t.detach().cpu() for n, p in documents.items() for k, t in p.tensors.items()}
    files[f"{stem}.json"] = write_file(os.path.join(root, f"{stem}.json"), text)
    if tensors:
        owned = {k: t.clone() for k, t in tensors.items()}  # save() refuses tensors that share storage
        files[f"{stem}.safetensors"] = write_file(os.path.join(root, f"{stem}.safetensors"), save(owned))


# ----------------------------------------------------------------------------------------------------
# The manifest of a save: rank 0 makes it from what each rank tells of its files and of its copies of the tensors.

#: Digests by kind and name of the part, and stored name.
Digests = Mapping[tuple[str, str, str], int]


def file_records(
    collected: Collected, rank: int, files: Mapping[str, FileEntry], sums: Sequence[int]
) -> dict[str, Any]:
    """A rank's record for rank 0: entries of its files, and its share of the digest sums of all tensors."""
    entries = {name: {**asdict(entry), "blocks": list(entry.blocks)} for name, entry in files.items()}
    share = _totals(collected.snapshot).share(np.array(sums, dtype=np.uint64), rank)
    return {"files": entries, "sums": share}


def merged_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The records of several ranks as one: all entries, and the sums of shares."""
    files = {name: entry for one in records for name, entry in one["files"].items()}
    return {"files": files, "sums": added_sums([one["sums"] for one in records])}


def records_on_first(
    label: str, collected: Collected, ranks: Ranks, files: Mapping[str, FileEntry], sums: Sequence[int]
) -> list[dict[str, Any]]:
    """The :func:`merged_records` of all ranks on rank 0; nothing on other ranks. Collective."""
    merged: list[dict[str, Any]] = []
    ranks.reduce(
        label, lambda: file_records(collected, ranks.rank, files, sums), merged_records, merged.append
    )
    return merged


def manifest_of(collected: Collected, ranks: Ranks, records: Mapping[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote. ``records``: the :func:`merged_records` of all ranks."""
    files = {n: FileEntry(**{**e, "blocks": tuple(e["blocks"])}) for n, e in records["files"].items()}
    totals, _ = _totals(collected.snapshot).read(records["sums"])
    digests = {
        (part.kind, part.name, v.stored.name): finish(total, v.stored.dtype, v.stored.shape)
        for (part, v), total in zip(_counted(collected.snapshot), totals.tolist(), strict=True)
    }
    return _with_digests(collected, ranks, digests, files)


def outline_of(collected: Collected, ranks: Ranks) -> Manifest:
    """What the check of documents takes from a manifest, before anything is written: it has no files, no digests, and only the
    tensors that documents name, which are buffers and those with states of few bits."""
    snapshot = collected.snapshot
    named = {name for o in snapshot.optimizers for name in o.drained.low_bit}
    named |= {t.name for m in snapshot.models for t in m.named if t.kind == "buffer"}

    def only(of: Mapping[str, Any]) -> dict[str, Any]:
        return {n: states for n, states in of.items() if n in named}

    models = [replace(m, live=tuple([v for v in m.live if v.stored.name in named])) for m in snapshot.models]
    optimizers = [
        replace(
            o,
            drained=replace(
                o.drained, tensors=only(o.drained.tensors), packed_index=only(o.drained.packed_index)
            ),
        )
        for o in snapshot.optimizers
    ]
    spoken_of = replace(snapshot, models=tuple(models), optimizers=tuple(optimizers))
    return _with_digests(replace(collected, snapshot=spoken_of), ranks, defaultdict(int), {})


def _with_digests(
    collected: Collected, ranks: Ranks, digests: Digests, files: Mapping[str, FileEntry]
) -> Manifest:
    snapshot = collected.snapshot
    geometries: dict[Geometry, int] = {}
    models = {m.name: _model_entries(m, snapshot, digests, geometries) for m in snapshot.models}
    return Manifest(
        step=collected.step,
        run_id=collected.lineage.run_id,
        parent_step=collected.lineage.parent_step,
        world_size=ranks.world_size,
        seed=collected.seed,
        geometries=tuple(geometries),
        models=models,
        packed={o.name: _packed_entries(o, digests) for o in snapshot.optimizers},
        files=dict(sorted(files.items())),
        software=collected.software,
        hub_tensors=collected.hub_tensors,
        local_documents=tuple(sorted(collected.local)),
    )


def _model_entries(
    model: ModelPart, snapshot: Snapshot, digests: Digests, geometries: dict[Geometry, int]
) -> dict[str, TensorEntry]:
    named = {t.name: t for t in model.named}
    shapes = {v.stored.name: v.stored.shape for v in model.live}
    states = {
        o.name: _state_entries(o, shapes, digests) for o in snapshot.optimizers if o.model == model.name
    }
    entries = {}
    for live in model.live:
        if not live.counted:
            continue
        t = live.stored
        entries[t.name] = TensorEntry(
            dtype=t.dtype,
            shape=t.shape,
            geometry=geometries.setdefault(t.geometry, len(geometries)),
            digest=digests["model", model.name, t.name],
            owner=t.owner,
            kind=named[t.name].kind,
            aliases=named[t.name].aliases,
            stored_aliases=model.stored_aliases.get(t.name, ()),
            refers=live.refers,
            states={o: found[t.name] for o, found in states.items() if t.name in found},
        )
    return entries


def _counted(snapshot: Snapshot) -> list[tuple[ModelPart | OptimizerPart, Live]]:
    """The tensors that have a digest, in the order of a rank's sums."""
    return [(part, v) for part in snapshot.parts for v in part.live if v.counted]


def _totals(snapshot: Snapshot) -> ReplicaTotals:
    stored = [v.stored for _, v in _counted(snapshot)]
    return ReplicaTotals([t.geometry for t in stored], [t.owner for t in stored])


def refuse_unequal(snapshot: Snapshot, added: Any) -> None:
    """Raises :class:`StateError` naming tensors whose replicas differ, except plain buffers. ``added``: the sums of all ranks' copies."""
    counted = _counted(snapshot)
    _, differ = _totals(snapshot).read(added)
    buffers = plain_tensors(snapshot, kind="buffer")
    unequal = [
        v.stored.name
        for part, v in map(counted.__getitem__, differ.tolist())
        if not (part.kind == "model" and f"{part.name}:{v.stored.name}" in buffers)
    ]
    if unequal:
        hint = ""
        if any(name.endswith(f".{GRADIENT}") for name in unequal):
            hint = (
                ". Gradients that wait for an optimizer step were not reduced (DDP's no_sync?): save after the step, or reduce in "
                "every backward"
            )
        raise StateError(
            f"replicas of {len(unequal)} tensors differ between ranks: {', '.join(unequal[:10])}; they have drifted "
            f"apart, and a checkpoint can hold only one of them{hint}"
        )


def _state_entries(
    part: OptimizerPart, shapes: Mapping[str, tuple[int, ...]], digests: Digests
) -> dict[str, dict[str, StateEntry]]:
    stored = {v.stored.name: v.stored for v in part.live}
    found: dict[str, dict[str, StateEntry]] = {}
    for name, states in part.drained.tensors.items():
        for key in states:
            t = stored[StateKey(name, key).name]
            digest = digests["optimizer", part.name, t.name]
            own = t.shape if t.shape != shapes[name] else None
            found.setdefault(name, {})[key] = StateEntry(t.dtype, digest, t.owner, shape=own)
    for name, packed in part.drained.packed_index.items():
        for key, (pack, index) in packed.items():
            dtype = pack.rsplit(".", 1)[1]
            found.setdefault(name, {})[key] = StateEntry(dtype, packed=pack, index=index)
    return found


def _packed_entries(part: OptimizerPart, digests: Digests) -> dict[str, Packed]:
    stored = {v.stored.name: v.stored for v in part.live}
    found = {}
    for key, tensor in part.drained.packed.items():
        t = stored[packed_name(key)]
        found[key] = Packed(t.dtype, tensor.numel(), digests["optimizer", part.name, t.name], t.owner)
    return found


# ----------------------------------------------------------------------------------------------------
# Low disk space is seen before payload is written: the plan knows the bytes.


def payload_bytes(collected: Collected) -> int:
    """Bytes of all tensors that a save writes, over all ranks. Linear in tensors, whatever the number of ranks."""
    stored = (v.stored for part in collected.snapshot.parts for v in part.live if not v.refers)
    return sum(itemsize(t.dtype) * math.prod(t.shape) for t in stored)


def refuse_low_space(place: str, most: int, what: str, exactly: Callable[[], int] | None = None) -> None:
    """Raise :class:`LowSpaceError` if the file system of ``place``, as this host sees it, has less free than the save takes.

    ``most``: an upper bound of the bytes; ``exactly`` gives their number, and is called only where the bound does not fit. A URL is not
    checked. Root also counts the blocks that the file system keeps for root. This check does not see a user's quota.
    """
    if is_url(place):
        return
    try:
        while place and not patiently(os.path.exists, place):
            place = os.path.dirname(place)
        found = patiently(os.statvfs, place or ".")
    except OSError:  # what writes there says it better
        return
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    if free >= most or not found.f_blocks:
        return
    needed = most if exactly is None else exactly()
    if free < needed:
        raise LowSpaceError(
            f"{place}: {os.strerror(errno.ENOSPC)}: {what} takes {_words(needed)}, and the file system has {_words(free)} free "
            f"on host {socket.gethostname()}. Nothing was written. Delete files, keep fewer steps (keep_last), or give a fallback",
            needed_bytes=needed,
            free_bytes=free,
        )


def _words(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 1e9:.2f} GB)"


# ----------------------------------------------------------------------------------------------------
# Writes one checkpoint: snapshot → write → agree → commit.


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
    """Number of stored gradients that no optimizer step has used yet, because the save was made during gradient accumulation."""
    requests: int = 0
    """Requests that this rank made to an object store, counting each part of a large object. 0 for a local path, and for an async save that isn't
    published yet."""
    failure: str | None = None
    """Why a step wasn't saved, if a ``FailurePolicy`` let training continue. The same on every rank."""
    failed_step: int | None = None
    """The step that ``failure`` is about. With ``mode="async"`` it is usually the previous step: a background save fails after its own report was returned, so the next call to ``save`` reports it."""

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


@announced("save", "step")
@gc_paused()
def write_checkpoint(
    state: TrainState, target: Target, step: int, lineage: Lineage, ranks: Ranks, *, at_top: bool = False
) -> SaveReport:
    """Publish ``state`` at ``target``. Collective; on failure nothing is published on any rank.

    ``at_top``: link the files of ``model/`` at the top, too (:mod:`.save`); for a local target.
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

    Raises :class:`StateError` naming tensors whose replicas differ between ranks. Calls ``prove`` on rank 0 before the commit, with the digests of the written tensors.
    """
    final, counted = target.final, this_operation(target.final)
    total = payload_bytes(collected)
    try:
        first_final, place = target.begin(
            folders_of(collected), partial(_refuse, target, collected, total), ranks
        )
        with phase("write"), ranks.agree("write checkpoint"):
            if first_final != final:
                raise CheckpointError(
                    f"rank {ranks.rank} should save to {final}, rank 0 to {first_final}; give every rank the same path "
                    f"(if it contains the time, rank 0 must make it and send it to all ranks)"
                )
            texts = checked_texts(collected, ranks, final)
            refuse_low_space(
                place,
                total,
                f"rank {ranks.rank}'s part",
                lambda: _bytes_to_write(collected, texts, ranks.rank),
            )
            if not is_url(place):
                wait_for_folders(place, folders_of(collected), ranks)
            counted.expect(lambda: _bytes_to_write(collected, texts, ranks.rank))
            files, sums = write_rank(place, collected, texts, ranks, contents)
        merged = records_on_first("file records", collected, ranks, files, sums)

        def proved() -> Manifest:
            places = target.places if len(target.places) > 1 else ()  # else one directory holds all of it
            refuse_unequal(collected.snapshot, merged[0]["sums"])
            manifest = replace(manifest_of(collected, ranks, *merged), places=places)
            if at_top:
                shown = show_at_top(place, manifest.files)
                manifest = replace(manifest, files=dict(sorted(shown.items())))
            collected.lineage.refuse_changed_base(manifest)
            prove(manifest)
            return manifest

        target.commit(proved, ranks)
    except BaseException:
        target.discard(ranks)
        raise
    return sum(f.nbytes for f in files.values())


def _refuse(target: Target, collected: Collected, total: int) -> None:
    """Refuse the name of another step, and too little space. For rank 0."""
    if misnamed(target.final, collected.step, collected.assets):
        raise CheckpointError(
            f"{target.final}: is the name of another step, but this is step {collected.step}: a reader would call it damaged; "
            f"give it the name of its step"
        )
    if not target.places:  # else each rank looks at the part that it writes
        refuse_low_space(os.path.dirname(target.final), total, f"step {collected.step}")


def folders_of(collected: Collected) -> list[str]:
    """The folders in a checkpoint that ranks write into."""
    return ["rank", *(directory(p.kind, p.name) for p in collected.snapshot.parts)]


def _documents(collected: Collected, ranks: Ranks) -> dict[str, Mapping[str, Encoded]]:
    """The documents that this rank writes, by the stem of their files."""
    found = {f"rank/{ranks.rank:05d}": collected.local}
    return found | {"state": collected.shared} if ranks.rank == 0 else found


def checked_texts(collected: Collected, ranks: Ranks, final: str) -> dict[str, bytes]:
    """The texts of this rank's documents, by the stem of their files. Raises :class:`StateError` naming a document that no reader would take.

    Memory: the text, and copies of one document's tensors; a document with more than 16 MiB of tensors is parsed but not decoded.
    """
    outline, texts = outline_of(collected, ranks), dict[str, bytes]()
    for stem, documents in _documents(collected, ranks).items():
        document = {name: encoded.document for name, encoded in documents.items()}
        text = texts[stem] = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        path = os.path.join(final, f"{stem}.json")
        try:
            if len(text) > MAX_JSON_BYTES:
                largest = max(document, key=lambda name: len(json.dumps(document[name])))
                raise FormatError(
                    f"has {len(text)} bytes, the limit is {MAX_JSON_BYTES}; most are of {largest!r}: give its large values as "
                    f"tensors",
                    path=path,
                )
            for name, parsed in parse_documents(text, outline, path).items():
                tensors = documents[name].tensors
                if sum(t.numel() * t.element_size() for t in tensors.values()) <= BLOCK_BYTES:
                    check_each({name: Encoded(parsed, tensors, ())}, outline, final)
        except SourceError as error:
            raise StateError(f"this state isn't saved, because it couldn't be read back: {error}") from error
    return texts


def _bytes_to_write(collected: Collected, texts: Mapping[str, bytes], rank: int) -> int:
    """The bytes of this rank's files, but for tensors of documents: these are known when they are encoded."""
    files = [file for part in collected.own for file in part.files]
    small = [*texts.values(), *(collected.assets.values() if rank == 0 else ())]
    return sum(len(header_bytes(file.slices)) + file.payload_bytes for file in files) + sum(map(len, small))


def write_rank(
    root: str,
    collected: Collected,
    texts: Mapping[str, bytes],
    ranks: Ranks,
    contents: Contents,
    writer_of: WriterOf = writer_of,
) -> tuple[dict[str, FileEntry], list[int]]:
    """Write and sync this rank's files. Returns their entries and the digest sums of its copies of all tensors."""
    counted, files = this_operation(), dict[str, FileEntry]()
    live = [v for _, v in _counted(collected.snapshot)]
    totals = {id(v): 0 for v in live}

    def parts_of(piece: Piece) -> Iterator[torch.Tensor]:
        for box, part in contents.parts_of(piece):
            if box is not None and id(piece.live) in totals:
                totals[id(piece.live)] += partial_sum(part, box.start)
            yield part

    for own in collected.own:
        for file in own.files:
            slices = map(parts_of, file.pieces)  # the writer takes them in the order of slices
            path, tick = os.path.join(root, file.name), counted.counting(ranks.tick)
            files[file.name] = write_slices(path, file.slices, slices, tick, writer_of)
        for piece in own.summed:
            for _ in parts_of(piece):
                pass
            ranks.tick()
    for stem, documents in _documents(collected, ranks).items():
        write_documents(root, stem, texts[stem], documents, files)
        counted.add(len(texts[stem]))
        if tensors := files.get(f"{stem}.safetensors"):
            counted.expect(partial(int, tensors.nbytes))
            counted.add(tensors.nbytes)
    if ranks.rank == 0:
        for name, content in collected.assets.items():
            file_path = inside(root, name)
            if not is_url(file_path):
                make_directories(os.path.dirname(file_path))
            files[name] = write_file(file_path, content)
            counted.add(len(content))
    for piece, total in contents.late_sums():
        totals[id(piece.live)] += total
    return files, [totals[id(v)] % 2**64 for v in live]


# ----------------------------------------------------------------------------------------------------
# Async save: copies the state; then training goes on while a background thread hashes, writes and publishes.
#
# The thread agrees with the other ranks' threads through the store, on its own channel, and starts no collective. It
# runs at a lower priority than the training if the system has priorities per thread.

_LOWER_PRIORITY = 13


class BackgroundSave(ABC):
    """A save whose thread works while the program trains."""

    def __init__(self, step: int, name: str, *, is_daemon: bool) -> None:
        self.step = step
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-{step}", daemon=is_daemon)

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.ident is not None and not self._ended.is_set()

    def start(self) -> RuntimeError | None:
        """Start the thread. Returns the error if the system is out of threads."""
        try:
            self._thread.start()
        except RuntimeError as error:
            return error
        return None

    def join(self) -> None:
        """Wait until the work is done. Not by ``Thread.join``: after Ctrl-C in it Python (3.11) takes a running thread for one that has ended."""
        self._ended.wait()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    @abstractmethod
    def _work(self) -> None: ...


def reserve_for(
    collected: Collected, buffer: StagingBuffer, ranks: Ranks, most_bytes: int | None
) -> StagedContents:
    """Size the buffer for the whole state, or for as much of it as the budget allows. Returns the state as it will be in the buffer.
    Collective.

    Raises :class:`StateError` on every rank if a rank's largest piece is larger than the budget.
    """
    with ranks.agree("reserve staging"):
        pieces = list(pieces_of(collected))
        staged = StagedContents(pieces, buffer)
        needed = staged.nbytes
        if most_bytes is not None and needed > most_bytes:
            largest, name = max((room_for(live_piece(p)), p.live.stored.name) for p in pieces if p.is_copied)
            if largest > most_bytes:
                raise StateError(
                    f"{name} takes {largest} bytes on rank {ranks.rank}, the staging budget is {most_bytes}; give "
                    f"max_staging_bytes={largest} or more"
                )
        buffer.reserve(needed, most_bytes, pinned=staged.is_pinned)
    return staged


class AsyncSave(BackgroundSave):
    """One save in a background thread. :meth:`copy` starts it, :meth:`wait` ends it."""

    def __init__(
        self,
        collected: Collected,
        target: Target,
        staged: StagedContents,
        ranks: Ranks,
        after: Callable[[], None],
        called: float,
    ) -> None:
        # Not a daemon: an ending process waits until the save is finished, or given up because other ranks made no
        # progress for ``timeout_s``.
        super().__init__(collected.step, "shardwise-save", is_daemon=False)
        try:
            self._collected = detached_documents(collected)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"can't allocate host memory for copies of the documents ({error})"
            ) from error
        self._target, self._staged, self._buffer = target, staged, staged.buffer
        self._ranks = ranks
        self._after = after
        self._called = called
        self._stall_seconds = 0.0
        self._report: SaveReport | None = None
        self._started = time.perf_counter()

    def copy(self) -> SaveReport:
        """Copy the state and start the thread; returns when training may change the state.

        Copies from a device are enqueued then, and its current stream goes on after them.

        A failure ends the save on every rank alike: :meth:`wait` raises it.
        """
        in_waves = self._staged.nbytes > self._buffer.nbytes
        if in_waves:  # now, because the thread must free room; otherwise after copying, not to slow it down
            self._begin(in_waves=True)
        try:
            for _ in self._staged.copying():
                if not self._buffer.wait_for_room():
                    break
        except BaseException as error:
            self._buffer.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._stall_seconds = time.perf_counter() - self._called
            if not in_waves:
                self._begin(in_waves=False)
        nbytes = sum(piece.nbytes for piece in pieces_of(self._collected) if piece.is_copied)
        return self._report_of(nbytes, 0, is_published=False)

    def _report_of(self, bytes_written: int, requests: int, *, is_published: bool) -> SaveReport:
        return SaveReport.of(
            self._collected,
            path=self._target.final,
            bytes_written=bytes_written,
            started=self._started,
            stall_seconds=self._stall_seconds,
            staging_bytes=self._buffer.nbytes,
            is_published=is_published,
            requests=requests,
        )

    def _begin(self, *, in_waves: bool) -> None:
        if error := self.start():  # save in this thread
            if in_waves:  # the buffer has no room for the rest
                self._buffer.fail(error)
            self._run()

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._started

    def wait(self) -> SaveReport:
        """Block until the step is published. Raises the save's error, alike on every rank."""
        self.join()
        if self.error is not None:
            raise self.error
        assert self._report is not None
        return self._report

    def _work(self) -> None:
        if threading.current_thread() is not self._thread:
            return self._save()
        _lower_priority()
        with in_background():
            self._save()

    def _save(self) -> None:
        try:
            with operation("save", step=self.step) as heard, counting() as asked:
                written = publish_collected(self._collected, self._target, self._ranks, self._staged)
                self._report = self._report_of(written, asked.total, is_published=True)
                heard.returns(self._report)
            note("save", self._report.to_json())
            self._after()
        except BaseException as error:
            self.error = error
            self._buffer.fail(error)
            # The next call raises it, but there may be no next call.
            _log.error("the async save of step %d failed: %s", self.step, error)


def _lower_priority() -> None:
    """Lower the priority of this thread. Only on Linux, which has priorities per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER_PRIORITY)
