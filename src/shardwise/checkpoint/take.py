"""Takes a training state for a save: collects it by reference, compares it between ranks, and copies it where a save runs in the
background.
"""

from __future__ import annotations

import os
import platform
import posixpath
import socket
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ..catalog.checkpoint import directory
from ..digests import PendingSums
from ..dtypes import itemsize, torch_dtype
from ..errors import CheckpointError, StateError
from ..format.manifest import Manifest, document_of
from ..host import copies_late, dense_parts, flat_bytes
from ..internals.torch import empty_host_cache, local_tensor
from ..limits import MAX_NAME_CHARS, brief
from ..models.homes import asset_files
from ..objects import frozen, gc_paused
from ..planning.match import recall
from ..ranks.ranks import Ranks
from ..state.optimizer import TrainState
from ..state.parts import refuse_meta
from ..state.typed_json import Encoded, encode
from ..tensors.boxes import Box, LocalBox, boxes_of_range, contiguous_parts
from .snapshot import (
    LAYOUT,
    PLAIN,
    Agreed,
    OwnPart,
    Piece,
    Snapshot,
    agree,
    comparable,
    differing_in,
    differing_tensors,
    merged,
    on_host,
    own_parts,
    plain_sums,
    plain_tensors,
    take_snapshot,
)

# ----------------------------------------------------------------------------------------------------
# Collects a training state by reference and compares it between ranks, before anything is written.

#: Files that every checkpoint may have.
_OWN_NAMES = ("manifest.json", "state.json", "state.safetensors")


@frozen
class Lineage:
    """The run that writes, and the step that it last saved or resumed from."""

    run_id: str
    parent_step: int | None
    base: dict[tuple[str, str], int] = field(default_factory=dict)
    """Digests of the tensors that the steps before only refer to, by model and name. On rank 0, of this process."""

    def at(self, step: int) -> Lineage:
        """The same run after it saved ``step``."""
        return replace(self, parent_step=step)

    def refuse_changed_base(self, manifest: Manifest) -> None:
        """Raise :class:`StateError` for a frozen tensor that has changed since the step before: no file holds its content."""
        found = {(m, n): t.digest for m, ts in manifest.models.items() for n, t in ts.items() if t.refers}
        changed = [n for (m, n), digest in found.items() if self.base.get((m, n), digest) != digest]
        if changed:
            raise StateError(
                f"{len(changed)} frozen tensors have changed since the step before: {', '.join(changed[:10])}; a checkpoint "
                f"that only refers to them would lose that: give TrainState(frozen='hold')"
            )
        self.base.update(found)


@frozen
class Taken:
    """What one rank has at one instant; not yet compared with what the other ranks have.

    Tensors are references to the live ones, until :mod:`.take` replaces them by copies.
    """

    snapshot: Snapshot
    assets: Mapping[str, bytes]
    """Small files beside the models' tensors, by path in the checkpoint; on rank 0."""
    step: int
    lineage: Lineage
    seed: int
    software: Mapping[str, str]
    hub_tensors: Mapping[str, Mapping[str, tuple[int, ...]]]
    own: Sequence[OwnPart]
    """What this rank writes, for each part of the snapshot."""


@frozen
class Collected(Taken):
    """The same, compared between ranks and ready to be written; contains no other live objects."""

    shared: Mapping[str, Encoded]
    """Documents that are equal on all ranks."""
    local: Mapping[str, Encoded]
    """Documents that only this rank has."""


@gc_paused()
def take(state: TrainState, step: int, lineage: Lineage, agreed: Agreed, rank: int) -> Taken:
    """Take a training state by reference. Rank-local. ``agreed``: as :func:`.agree` gives it.

    Raises :class:`StateError`.
    """
    snapshot = take_snapshot(state, step, agreed)
    for live in (live for part in snapshot.parts for live in part.live):
        refuse_meta(live.stored.name, live.tensor)
    _check_names(snapshot)
    assets = _assets(state, snapshot) if rank == 0 else {}
    seed, own = torch.initial_seed() % 2**63, own_parts(snapshot, rank)
    # Of each loaded model the names and shapes of its source tensors; none if they are its own.
    origins = {name: recall(model) for name, model in _configured(state, snapshot)}
    sources = {name: {} if o.is_plain else dict(o.shapes) for name, o in origins.items() if o is not None}
    return Taken(snapshot, assets, step, lineage, seed, software_versions(state), sources, own)


def compare(taken_by: Callable[[], Taken | None], ranks: Ranks) -> Collected | None:
    """Compare what all ranks have taken; None if a rank has taken nothing. Collective; writes nothing. The caller may not change the
    state before it returns.

    Raises :class:`StateError` or :class:`RankError` on every rank, also for what ``taken_by`` raises on any of them.
    """
    taken: Taken | None = None
    sums: dict[str, int] = {}

    def told() -> dict[str, Any] | None:
        nonlocal taken, sums
        taken = taken_by()
        if taken is None:
            return None
        if ranks.world_size > 1:
            sums = plain_sums(taken.snapshot)
        return comparable(taken.snapshot, sums, ranks)

    found = ranks.reduce("collect state", told, merged, differing_in)
    if taken is None or found is None:
        return None
    differing, held = found
    snapshot = taken.snapshot
    if len(held) > 1:  # the tensors of ranks in words, with the first rank that has these
        some = "; ".join(f"rank {rank} has {text}" for text, rank in held.items())
        raise StateError(
            f"ranks hold different modules: {some}. Every rank must hold the same model, or declare its part of one: call "
            f"sw.declare_part(model) on every rank for pipeline stages, and for experts that are made on some ranks only"
        )
    _refuse_other_layouts(snapshot, differing)
    tensors = differing_tensors(sums, ranks) if PLAIN in differing else set()
    shared, local = _split_documents(snapshot, set(differing), tensors, ranks)
    return Collected(**{f.name: getattr(taken, f.name) for f in fields(taken)}, shared=shared, local=local)


def collect(state: TrainState, step: int, lineage: Lineage, ranks: Ranks) -> Collected:
    """Collect a training state by reference and compare it between ranks. Collective; writes nothing.

    Raises :class:`StateError` or :class:`RankError` on every rank.
    """
    agreed = agree(state, ranks)
    found = compare(lambda: take(state, step, lineage, agreed, ranks.rank), ranks)
    assert found is not None
    return found


def _check_names(snapshot: Snapshot) -> None:
    """Raise :class:`StateError` for a tensor's name that readers of slice files refuse."""
    for part in snapshot.models:
        for v in part.live:
            if len(v.stored.name) > MAX_NAME_CHARS:
                raise StateError(
                    f"{part.name}: the tensor {brief(v.stored.name)} has a name of {len(v.stored.name)} characters, the limit "
                    f"is {MAX_NAME_CHARS}; give the module or the parameter a shorter name"
                )
            if v.stored.name == "__metadata__":
                raise StateError(
                    f"{part.name}: safetensors keeps the name '__metadata__' for itself; give the parameter or the buffer another one"
                )


def _split_documents(
    snapshot: Snapshot, documents: set[str], tensors: set[str], ranks: Ranks
) -> tuple[dict[str, Encoded], dict[str, Encoded]]:
    """Documents that are equal on all ranks, and those that differ. Plain buffers that differ become a document.

    ``documents`` and ``tensors``: names of those that differ.
    Raises :class:`StateError` if a plain *parameter* differs between ranks: its gradients were not reduced.
    """
    local_names = snapshot.always_local | (documents & set(snapshot.documents))
    buffers: dict[str, dict[str, torch.Tensor]] = {}
    for key, (part, t) in plain_tensors(snapshot, kind="buffer").items():
        if key in tensors:
            buffers.setdefault(document_of("model", part.name, "buffers"), {})[t.name] = t.tensor
    _refuse_differing(snapshot, documents, tensors)  # alike on every rank
    local = {n: p for n, p in snapshot.documents.items() if n in local_names}
    if tensors:  # on every rank, or on none
        with ranks.agree("compare state"):
            local |= on_host({name: encode(values, where=name) for name, values in buffers.items()})
    left_out = local_names | snapshot.compared_only
    shared = {n: p for n, p in snapshot.documents.items() if n not in left_out}
    return shared, {n: p for n, p in local.items() if n not in snapshot.compared_only}


def _configured(state: TrainState, snapshot: Snapshot) -> Iterator[tuple[str, nn.Module]]:
    """By name in the checkpoint, the models that the small files are about."""
    return ((part.name, state.models[part.like]) for part in snapshot.models if part.like)


def _assets(state: TrainState, snapshot: Snapshot) -> dict[str, bytes]:
    found = {
        f"{directory('model', name)}/{file}": content
        for name, model in _configured(state, snapshot)
        for file, content in asset_files(model).items()
    }
    folders = {directory(part.kind, part.name) for part in snapshot.parts}
    own = [*_OWN_NAMES, "rank", *folders]
    for name in state.files:
        first, *rest = name.split("/")
        is_relative = posixpath.normpath(name) == name and first not in ("", ".", "..")
        is_ours = (
            name in own or first == "rank" or (first in folders and rest and name.endswith(".safetensors"))
        )
        if not is_relative or is_ours:
            raise StateError(
                f"files={{{name!r}: …}}: expected a relative path, but not of a file of the format itself"
            )
    return {**found, **state.files}


def _refuse_other_layouts(snapshot: Snapshot, differing: Sequence[str]) -> None:
    if LAYOUT in differing:
        live = [v for part in snapshot.models for v in part.live]
        every = max(len(v.stored.geometry.ranks) for v in live)
        parts = [v.stored.name for v in live if len(v.stored.geometry.ranks) < every]
        raise StateError(
            "ranks do not describe the same tensors: their names, shapes, dtypes, meshes or optimizer states "
            "differ between ranks"
            + (f"; on meshes of only some ranks: {', '.join(parts[:10])}" if parts else "")
            + ". Every rank must hold the same model, and a tensor's mesh must be the same one on every rank "
            "(say Replicate() on its further axes instead of slicing the mesh), or every rank must declare its part of one "
            "model: sw.declare_part(model), for pipeline stages and local experts"
        )


def _refuse_differing(snapshot: Snapshot, documents: set[str], tensors: set[str]) -> None:
    parameters = {
        key: t.name if len(snapshot.models) == 1 else f"{part.name} {t.name}"
        for key, (part, t) in plain_tensors(snapshot, kind="parameter").items()
    }
    optimizers = {document_of("optimizer", o.name) for o in snapshot.optimizers}
    bad = sorted(parameters[key] for key in tensors & parameters.keys())
    bad += sorted(documents & ({"step"} | optimizers | snapshot.compared_only))
    if bad:
        raise StateError(
            f"ranks hold different values of {', '.join(bad[:10])}, which must be equal on all: were the gradients "
            f"of unsharded parameters reduced, and does every rank save the same step?"
        )


def software_versions(state: TrainState) -> dict[str, str]:
    """Versions, threads and devices: an exact resume needs the same."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    for package in ("shardwise", "transformers", "numpy"):
        found[package] = _version(package)
    for package in ("diffusers", "peft"):
        if package in sys.modules:
            found[package] = _version(package)
    device = next((p.device.type for m in state.models.values() for p in m.parameters()), "cpu")
    found["device"] = _device_name(device)
    found["threads"] = str(torch.get_num_threads())
    return found


@cache
def _version(package: str) -> str:
    """Of an installed package; it does not change while the process runs, and to read it takes milliseconds."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device_name(kind: str) -> str:
    """The model of this process's current device of a type; the type, if torch has no name for it (CPU, MPS)."""
    module = None if kind == "meta" else torch.get_device_module(kind)
    found: str = getattr(module, "get_device_name", lambda: kind)()
    return found


# ----------------------------------------------------------------------------------------------------
# Staging: host memory through which tensors go to the writer.
#
# One thread copies tensors in, the writer takes their bytes out in the same order. With room for the whole state, an
# async save is over for the training when the last copy is enqueued. With less, copying goes in waves: it waits until
# the writer frees room.
#
# Copies from a device run on a stream beside the current one, after all work that was enqueued before. The host waits
# for none of them before the writer takes their bytes.

_ALIGNMENT = 64
_PAGE_BYTES = 4096
#: The largest block of pinned memory.
_BLOCK_BYTES = 64 * 1024**2
#: Bytes of one copy from a device: the writer has the first ones while the next are under way.
_COPY_BYTES = 8 * 1024**2


class StagingBuffer:
    """A ring of host memory between a thread that copies and the writer.

    ``nbytes`` is its size. :meth:`reserve` allocates and touches it; it is kept for the next save, until :meth:`release`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._is_pinned = False
        self._blocks: list[torch.Tensor] = []
        self._sides: dict[torch.device, torch.Stream] = {}
        self._changed = threading.Condition()
        self._reset()

    def reserve(self, nbytes: int, most_bytes: int | None = None, *, pinned: bool = False) -> None:
        """Make room for ``nbytes``, at most ``most_bytes``, reusing existing memory. Not while a save runs.

        ``pinned``: for copies from a device. Raises :class:`CheckpointError` if the system has not enough memory.
        """
        if most_bytes is not None:
            nbytes = max(_ALIGNMENT, min(nbytes, most_bytes // _ALIGNMENT * _ALIGNMENT))
        sizes = pinned_sizes(nbytes, most_bytes) if pinned else [_aligned(nbytes)]
        if sum(sizes) > self.nbytes or (pinned and not self._is_pinned):
            try:
                self._allocate(sizes, pinned=pinned)
            except (RuntimeError, MemoryError) as error:
                self._blocks, self.nbytes = [], 0
                raise CheckpointError(
                    f"can't allocate {nbytes} bytes of host memory for the copy of the state "
                    f"({error}); give a smaller max_staging_bytes, or mode='sync'"
                ) from error
        self._reset()

    def _allocate(self, sizes: list[int], *, pinned: bool) -> None:
        """Allocate blocks; keeps the largest pinned ones, and frees the other ones before."""
        keeps, frees_pinned = pinned and self._is_pinned, self._is_pinned
        self._blocks = [b for b in self._blocks if keeps and b.numel() == _BLOCK_BYTES]
        if frees_pinned:  # torch's host allocator keeps what is freed
            empty_host_cache()
        for size in sizes[len(self._blocks) :]:
            # Of zeros, so that the system finds the pages now; pinning does that, too.
            memory = torch.empty if pinned else torch.zeros
            self._blocks.append(memory(size, dtype=torch.uint8, pin_memory=pinned))
        self._is_pinned, self.nbytes = pinned, sum(sizes)

    def release(self) -> None:
        """Give the memory back. Not while a save runs; a later :meth:`reserve` allocates it again."""
        was_pinned = self._is_pinned and self.nbytes > 0
        self._blocks, self.nbytes, self._is_pinned = [], 0, False
        self._sides.clear()
        self._reset()
        if was_pinned:  # torch's host allocator keeps what is freed
            empty_host_cache()

    def _reset(self) -> None:
        self._stops = list(accumulate(block.numel() for block in self._blocks))
        self._enqueued: list[_Copy] = []  # copies without an event behind them
        self._ready: deque[_Copy] = deque()  # oldest first
        self._taken: _Copy | None = None
        # Positions: bytes put in and bytes free again, since the save began.
        self._head = self._tail = 0
        self._asked = 0
        self._ordered: set[torch.device] = set()  # devices whose copies began
        self._error: BaseException | None = None

    # -- the thread that copies --------------------------------------------------------------------------

    def copying(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Copy tensors in, in order. Yields when there is no room: see :meth:`wait_for_room`.

        At the end all copies are enqueued, and their devices' current streams go on after them: the caller may then
        change or free the tensors.
        """
        for tensor in tensors:
            side = self._side_of(tensor.device)
            if side is not None:
                tensor.record_stream(side)  # else its memory could be used again while it is copied
            for cut in dense_parts(tensor):
                with side or nullcontext():
                    flat = flat_bytes(cut)
                done = 0
                while done < flat.numel():
                    view = self._room(
                        flat.numel() - done if side is None else min(flat.numel() - done, _COPY_BYTES)
                    )
                    if view is None:
                        self._publish()
                        yield
                        continue
                    with side or nullcontext():
                        view.copy_(flat[done : done + view.numel()], non_blocking=side is not None)
                    done += view.numel()
                    if side is None or self._head - self._enqueued[0].begin >= _COPY_BYTES:
                        self._publish()
        self._publish()
        for device in self._ordered:
            torch.accelerator.current_stream(device).wait_stream(self._sides[device])

    def order(self) -> None:
        """Make the next copies wait for all that was enqueued on the current streams, not only before the first copy."""
        for device in self._ordered:
            self._wait_for_current(device)

    def _wait_for_current(self, device: torch.device) -> None:
        self._sides[device].wait_stream(torch.accelerator.current_stream(device))

    def wait_for_room(self) -> bool:
        """Wait until :meth:`copying` can go on. False if the writer has failed: then there is nothing more to do.

        All ranks learn of that together, when they ask for the outcome.
        """
        with self._changed:
            while self._free_bytes < self._asked and self._error is None:
                self._changed.wait()
            return self._error is None

    def _side_of(self, device: torch.device) -> torch.Stream | None:
        """The stream for copies from a device; None where copies are made at once."""
        if not copies_late(device):
            return None
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        if device not in self._ordered:
            self._wait_for_current(device)
            self._ordered.add(device)
        return self._sides[device]

    @property
    def _free_bytes(self) -> int:
        return self.nbytes - (self._head - self._tail)

    def _room(self, nbytes: int) -> torch.Tensor | None:
        """The place of the next bytes, at most ``nbytes``; None while the writer still needs that memory."""
        at = self._head % self.nbytes
        index = bisect_right(self._stops, at)
        nbytes = min(nbytes, self._stops[index] - at)
        with self._changed:
            self._asked = _aligned(nbytes)
            if self._free_bytes < self._asked or self._error is not None:
                return None
        start = at - self._stops[index] + self._blocks[index].numel()
        view = self._blocks[index][start : start + nbytes]
        self._enqueued.append(_Copy(self._head, view))
        self._head += self._asked
        return view

    def _publish(self) -> None:
        """Let the writer have the copies that are enqueued so far."""
        if self._enqueued:
            events = [self._sides[device].record_event() for device in self._ordered]
            with self._changed:
                for copy in self._enqueued:
                    copy.events = events
                self._ready += self._enqueued
                self._changed.notify_all()
            self._enqueued = []

    # -- the writer --------------------------------------------------------------------------------------

    def take(self) -> torch.Tensor:
        """The next bytes, as ``uint8``. Frees those taken before."""
        self.free()
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise CheckpointError(f"copying the state failed: {self._error}") from self._error
                self._changed.wait()
            self._taken = self._ready.popleft()
        for event in self._taken.events:
            event.synchronize()
        self._taken.events.clear()  # those enqueued with it have arrived, too
        return self._taken.view

    def pull(self, copying: Iterator[None]) -> torch.Tensor:
        """:meth:`take` for a writer that copies by itself: first it enqueues as many copies as there is room for."""
        self.free()
        next(copying, None)
        return self.take()

    def free(self) -> None:
        """Free the bytes that were taken last."""
        with self._changed:
            if self._taken is not None:
                self._tail = self._taken.begin + _aligned(self._taken.view.numel())
            self._taken = None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the other thread raise instead of waiting forever."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


@dataclass(slots=True)
class _Copy:
    """Bytes at a position of the ring, and the events after which they are there."""

    begin: int
    view: torch.Tensor
    events: Any = ()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def room_for(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in the buffer."""
    return sum(_aligned(cut.nbytes) for cut in dense_parts(tensor))


def pinned_sizes(nbytes: int, most_bytes: int | None = None) -> list[int]:
    """Sizes of pinned blocks that hold ``nbytes``, or as many whole pages of them as fit into ``most_bytes``.

    Powers of two: torch's host allocator rounds every request up to one.
    """
    pages = -(-nbytes // _PAGE_BYTES)
    if most_bytes is not None and pages * _PAGE_BYTES > most_bytes:
        pages = most_bytes // _PAGE_BYTES
        if not pages:
            return [max(_ALIGNMENT, 1 << most_bytes.bit_length() - 1)]
    full, rest = divmod(pages * _PAGE_BYTES, _BLOCK_BYTES)
    bits = reversed(range(rest.bit_length()))
    return [_BLOCK_BYTES] * full + [1 << bit for bit in bits if rest >> bit & 1]


def detached_documents(collected: Collected) -> Collected:
    """``collected`` with copies of the (small) tensors of documents: training may then change the originals."""

    def copies(documents: Mapping[str, Encoded]) -> dict[str, Encoded]:
        return {
            name: replace(encoded, tensors={k: t.detach().clone() for k, t in encoded.tensors.items()})
            for name, encoded in documents.items()
        }

    return replace(collected, shared=copies(collected.shared), local=copies(collected.local))


# ----------------------------------------------------------------------------------------------------
# The pieces that a rank hands to the writer, in order, and where their bytes come from.

#: Pinned memory of a save that waits: two copies of 8 MiB are under way or being written.
_RING_BYTES = 16 * 1024**2
_SUM_BYTES = 8
#: The most that the buffer adds to the bytes of a tensor.
_ROUNDING_BYTES = 64


def live_piece(piece: Piece) -> torch.Tensor:
    """The live tensor's elements in the box: a view."""
    found = local_tensor(piece.live.tensor).detach()
    for dim, (start, size) in enumerate(zip(piece.held.local_start, piece.held.box.sizes, strict=True)):
        if size != found.shape[dim]:
            found = found.narrow(dim, start, size)
    return found


def pieces_of(collected: Collected) -> Iterator[Piece]:
    """The pieces that a rank hands to the writer, in order. The writer writes them, or only sums replicas."""
    for part in collected.own:
        for file in part.files:
            yield from file.pieces
        yield from part.summed


# --- contents --------------------------------------------------------------------------------------------


class Contents(Protocol):
    """Gives the writer the bytes of pieces. It asks once for each piece of :func:`pieces_of`, in order."""

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        """The piece as consecutive tensors on the CPU, each valid until the next is asked for.

        Each comes with its box, to sum its digest; without one if that sum comes late.
        """

    def late_sums(self) -> Iterable[tuple[Piece, int]]:
        """Digest sums of the pieces whose parts came without a box. After the last piece."""


#: Gives the tensor of a :class:`Piece`, on the CPU.
TensorOf = Callable[[Piece], torch.Tensor]


class InParts:
    """Asks ``tensor_of`` for each piece; for a piece of more than ``most_bytes``, for each part."""

    def __init__(self, tensor_of: TensorOf, most_bytes: int) -> None:
        self._tensor_of = tensor_of
        self._most_bytes = most_bytes

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        box, first = piece.held.box, piece.held.local_start
        limit = max(1, self._most_bytes // itemsize(piece.live.stored.dtype))
        for part in contiguous_parts(box, limit):
            local = tuple(at + a - b for at, a, b in zip(first, part.start, box.start, strict=True))
            yield part, self._tensor_of(Piece(piece.live, LocalBox(part, local)))

    def late_sums(self) -> tuple[()]:
        return ()


def _joined(nbytes: int, views: Iterator[torch.Tensor]) -> torch.Tensor:
    found = torch.empty(0, dtype=torch.uint8)
    while found.numel() < nbytes:
        found = torch.cat([found, next(views)])
    return found


def boxes_from(take: Callable[[], torch.Tensor], box: Box, dtype: str) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of a tensor from a buffer, as consecutive boxes. ``take``: its next bytes, valid until the next call."""
    numel, done = box.numel, 0
    while done < numel:
        values = take().view(torch_dtype(dtype))
        for part in boxes_of_range(done, done + values.numel(), box.sizes):
            held, values = values[: part.numel], values[part.numel :]
            yield part.moved(box.start), held.view(part.sizes)
            done += part.numel


class StagedContents:
    """Copies of pieces, from a buffer into which :meth:`copying` puts them, followed by the digest sums that devices compute."""

    def __init__(self, pieces: Sequence[Piece], buffer: StagingBuffer) -> None:
        self._pieces, self.buffer = pieces, buffer
        self.is_pinned = any(copies_late(p.live.tensor.device) for p in pieces)
        """Whether pinned memory helps."""
        self._counted = [p for p in pieces if p.is_on_device and p.live.counted]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it in the buffer."""
        devices = {p.live.tensor.device for p in self._counted}
        copied = sum(room_for(live_piece(p)) for p in self._pieces if p.is_copied)
        return copied + _SUM_BYTES * len(self._counted) + _ROUNDING_BYTES * len(devices)

    @cached_property
    def _sums(self) -> PendingSums:
        """Digest sums of the pieces on devices; being made from the first call on."""
        return PendingSums((live_piece(p), p.held.box.start) for p in self._counted)

    def copying(self) -> Iterator[None]:
        """As :meth:`StagingBuffer.copying`."""

        def tensors() -> Iterator[torch.Tensor]:
            for piece in self._pieces:
                if piece.is_copied:
                    yield live_piece(piece)
            vectors = self._sums.vectors
            self.buffer.order()
            yield from vectors

        return self.buffer.copying(tensors())

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        if piece.is_on_device:
            left = piece.nbytes if piece.is_copied else 0
            while left:
                part = self._take()
                left -= part.numel()
                yield None, part
        elif piece.is_copied:
            yield from boxes_from(self._take, piece.held.box, piece.live.stored.dtype)
        else:
            yield piece.held.box, live_piece(piece)

    def late_sums(self) -> Iterable[tuple[Piece, int]]:
        if not any(piece.nbytes for piece in self._counted):
            return ()
        views = chain(
            [self._take()], (self._take() for _ in repeat(None))
        )  # the first tells that the sums are made
        sums = self._sums.on_host([_joined(v.nbytes, views).view(v.dtype) for v in self._sums.vectors])
        return zip(self._counted, sums, strict=True)

    def _take(self) -> torch.Tensor:
        return self.buffer.take()


class LiveContents(StagedContents):
    """The live tensors: in place on the CPU; from a device through a small ring, while the writer writes."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__([p for p in pieces if p.is_on_device], StagingBuffer())
        self._copying: Iterator[None] | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory of the ring; 0 if no tensor lies on a device."""
        return self.buffer.nbytes

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        if piece.is_on_device:
            yield from super().parts_of(piece)
        else:
            yield piece.held.box, live_piece(piece)

    def _take(self) -> torch.Tensor:
        if self._copying is None:
            self.buffer.reserve(min(_RING_BYTES, self.nbytes), pinned=self.is_pinned)
            self._copying = self.copying()
            next(self._copying, None)
            _ = self._sums  # made with the copies
        return self.buffer.pull(self._copying)


# ----------------------------------------------------------------------------------------------------
# ``InMemoryCheckpoints``: how often a run keeps a step in memory, where, and how many copies.

_DEFAULT_DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryCheckpoints:
    """Keep a recent step in the hosts' memory between saves to disk. Pass it as ``Checkpointer(memory=…)``.

    Memory per rank, measured in shards (the bytes that the rank writes to disk): two slots for its own shard and one for a copy from each of
    ``copies - 1`` other hosts, so ``1 + copies``. With ``during_copies="all"``, twice ``copies``.

    Args:
        every: ``remember`` keeps each step that is divisible by this number.
        copies: number of hosts that keep each slice: its own and the next ones, so at most the number of hosts. On a single host each slice
            exists once: it survives killed processes, but not the loss of the host.
        directory: a directory on tmpfs, the same for all ranks of a host.
        host: name of this rank's host. Ranks with the same name share ``directory`` and are lost together; copies go to hosts with other names.
            None: the machine's own name. Set it if several machines fail together (a rack, one power supply), or if containers on
            one machine don't share ``/dev/shm`` and therefore count as separate hosts.
        address: IPv4 address, IPv6 address or name at which this host listens and other hosts reach it. None: the address from which it
            reaches the process group's store (``MASTER_ADDR``). Set it, on each host, to choose a network such as InfiniBand.
        during_copies: how much of the previous step is kept while other hosts receive the new one. ``"own"``: each host's own slices; if a
            host is lost at that moment, neither step is complete, and the resume uses the disk. ``"all"``: every copy, which needs
            more memory.
        timeout_s: give up on a host that sends nothing for this long; the step then lacks that copy.
    """

    every: int
    copies: int = 2
    directory: str = _DEFAULT_DIRECTORY
    host: str | None = None
    address: str | None = None
    during_copies: Literal["own", "all"] = "own"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("copies", self.copies)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.during_copies not in ("own", "all"):
            raise ValueError(f"during_copies must be 'own' or 'all', got {self.during_copies!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @property
    def host_name(self) -> str:
        """The host's name: the one you passed, or the machine's name and boot ID, because two machines may have the same name."""
        if self.host is not None:
            return self.host
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux
            boot = ""
        return f"{socket.gethostname()} {boot}"

    @property
    def received_slots(self) -> int:
        """Number of slots for data from other hosts."""
        return 2 if self.during_copies == "all" else 1

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return os.path.abspath(self.directory)
