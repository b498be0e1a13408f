"""``WeightSender``: the trainer's side. Publishes versions of a model's weights, and serves them while training continues."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import torch
import xxhash
from torch import nn

from ..engine.engine import Destination
from ..errors import CheckpointError, FormatError, StateError
from ..export.hub import contents_named, dtype_code
from ..objects import frozen
from ..operations.printed import Printed
from ..publish.hosts import address_toward_store
from ..publish.ring import new_word
from ..ranks.ranks import Ranks, host_key
from ..tensors.live import describe
from .changes import encoded, words_of
from .layout import Snapshot, bytes_of, held_by
from .links import Address, Document, Listener, Payload, new_secret

#: A delta is sent where it takes at most this share of the whole.
_MOST_OF_WHOLE = 0.75
#: Plans of receivers that a rank remembers; those with one layout share a plan.
_MOST_PLANS = 256


@frozen
class PublishReport(Printed):
    """A version that receivers can now pull."""

    version: int
    bytes_copied: int
    """Bytes that this rank copied into its snapshot."""
    seconds: float
    """How long the call took; training waits for that long."""


class _Slot:
    """Memory for one version of a rank's part. ``version`` is None while it is written."""

    def __init__(self, nbytes: int) -> None:
        self.version: int | None = None
        self.fd: int | None = None
        size = max(nbytes, mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):  # ends with the process, however that ends
            self.fd = os.memfd_create("shardwise-weights", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(self.fd, 0, size)
            except OSError as error:
                os.close(self.fd)
                raise CheckpointError(
                    f"no memory for a snapshot of {size:,} bytes: {error.strerror}"
                ) from error
            memory = mmap.mmap(self.fd, size)
        else:
            memory = mmap.mmap(-1, size)
        self.snapshot = Snapshot(torch.frombuffer(memory, dtype=torch.uint8))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.version = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


#: Dtype, offset, and sizes and strides of loops of one read from a snapshot.
_Read = tuple[str, int, Sequence[tuple[int, int]]]


class _Overwritten(Exception):
    """The version was overwritten while it was read."""


class WeightSender:
    """Publish versions of ``model``'s weights to inference engines and other programs, while training continues.

    Receivers (:class:`WeightReceiver`) connect to ``url``. Each of their ranks pulls its own slices from the ranks that hold them, in
    whatever layout it has; no tensor is gathered anywhere. From version to version, only changed elements travel.

    Args:
        model: a live model, sharded in any way or not at all.
        url: where to listen, as ``shardwise://host:port/secret``: then receivers find a restarted trainer again. Default: this host's
            address, a free port and a new secret. Give :attr:`url` to the receivers, and keep it private: whoever has it can read
            the weights.
        dtype: cast floating-point tensors to this dtype, as an engine uses them. Default: no cast.
        naming: ``"hub"``, ``"module"`` or ``"adapter"``, as in :func:`iter_full_tensors`.
        keep: how many versions stay readable, in a buffer each. With 2 or more, a receiver that has the version before gets only
            what changed.
        timeout_s: limit for a rank, or a receiver, that makes no progress.

    Every rank of the default process group must create it, call :meth:`publish` and :meth:`close`. Memory: ``keep`` times this rank's
    shards in ``dtype``, plus one read of a receiver at a time for each receiver that is pulling. Raises as :func:`iter_full_tensors`,
    and :class:`CheckpointError` if it can't listen or has no memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        url: str | None = None,
        dtype: torch.dtype | str | None = None,
        naming: Literal["hub", "module", "adapter"] = "hub",
        keep: int = 2,
        timeout_s: float = 300.0,
    ) -> None:
        self._ranks = Ranks.current(timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._plans: dict[str, Sequence[_Read]] = {}  # by name, what a receiver reads
        self._newest: int | None = None
        self._model, self._naming = model, naming
        with self._ranks.agree("describe the weights") as claim:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}")
            given = Address.parse(url) if url is not None else None
            live = describe(model)
            contents = contents_named(live, naming)
            code = dtype_code(dtype)
            claim.alike([keep, code, url, [[n, s.dtype, list(s.shape)] for n, s in contents.hub.items()]])
            self._held, dtypes = held_by(live, contents, code, self._ranks.rank)
            self._slots = [_Slot(self._held.nbytes) for _ in range(keep)]
        self._local = {copy.wanted for copy in self._held.copies}
        secret = self._ranks.on_first("make a secret", lambda: given.secret if given else new_secret())
        self._run = self._ranks.on_first("name the weights", new_word)
        first = given is not None and self._ranks.rank == 0
        with self._ranks.agree("listen"):
            host = given.host if given is not None and first else address_toward_store()
            port = given.port if given is not None and first else 0
            self._listener = Listener(self._answer, secret, host, port, timeout_s)
        own = {
            "at": [host, self._listener.port],
            "host": host_key(),
            "files": [f"/proc/{os.getpid()}/fd/{slot.fd}" for slot in self._slots if slot.fd is not None],
            "boxes": [[n, list(b.start), list(b.sizes), at] for n, b, at in self._held.boxes],
        }
        gathered = self._ranks.gather("describe the weights", own)
        tensors = {n: [dtypes[n], list(s.shape)] for n, s in contents.hub.items()}
        self._catalog = {"run": self._run, "tensors": tensors, "ranks": gathered} if gathered else {}
        self.url = self._ranks.on_first(
            "tell the address", lambda: str(Address(host, self._listener.port, secret))
        )
        """What a :class:`WeightReceiver` connects to. It contains the secret."""

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and give the memory back. Rank-local."""
        self._listener.close()
        for slot in self._slots:
            slot.close()

    @torch.no_grad()
    def publish(self, version: int) -> PublishReport:
        """Copy the current weights into a snapshot, and make it the newest version. Training may continue as soon as this returns.

        ``version``: above that of the last call. Every rank must call it. Overwrites the oldest version: a receiver in the middle of
        pulling that one starts over with the newest. Raises :class:`ValueError`, :class:`RankError`.
        """
        started = time.perf_counter()
        with self._ranks.agree("publish weights") as claim:
            claim.alike(version)
            if self._newest is not None and version <= self._newest:
                raise ValueError(
                    f"publish({version}): versions must increase, and {self._newest} was published"
                )
            slot = min(self._slots, key=lambda one: -1 if one.version is None else one.version)
            slot.version = None
            live = describe(self._model)  # puts gathered parameters back to shards
            local = live.local_tensors()
            if unfilled := [name for name in self._local if local[name].is_meta]:
                raise StateError(
                    f"{len(unfilled)} tensors are on meta, e.g. {unfilled[0]!r}; load the model first"
                )
            parts = Destination({name: local[name] for name in self._local})
            for copy in self._held.copies:
                loops = [(loop.size, loop.source_stride) for loop in copy.loops]
                slot.snapshot.strided(copy.source_dtype, copy.offset_bytes, loops).copy_(parts.strided(copy))
                self._ranks.tick()
            slot.version = version
        self._newest = version
        return PublishReport(version, self._held.nbytes, time.perf_counter() - started)

    # ------------------------------------------------------------------------------------------------
    # Answers to receivers, in threads of the listener.

    def _answer(self, asked: Document) -> tuple[Document, int, Payload]:
        match asked["ask"]:
            case "catalog":
                return self._catalog, 0, ()
            case "newest":
                return {"run": self._run, "version": self._newest}, 0, ()
            case "register":
                return self._register(asked), 0, ()
            case "take":
                try:
                    return self._take(asked)
                except _Overwritten:
                    return {"gone": True}, 0, ()
            case other:
                raise FormatError(f"unknown request {other!r}")

    def _register(self, asked: Document) -> Document:
        reads = [(str(d), int(at), [(int(n), int(s)) for n, s in loops]) for d, at, loops in asked["reads"]]
        for read in reads:
            self._slots[0].snapshot.strided(*read)  # raises for a read outside of the snapshot
        with self._lock:
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[str(asked["plan"])] = reads
        return {}

    @contextmanager
    def _reading(self, version: int) -> Iterator[Snapshot]:
        """The snapshot of a version. Raises :class:`_Overwritten` if it isn't there, or was overwritten meanwhile."""
        slot = next((one for one in self._slots if one.version == version), None)
        if slot is None:
            raise _Overwritten
        yield slot.snapshot
        if slot.version != version:
            raise _Overwritten

    def _take(self, asked: Document) -> tuple[Document, int, Payload]:
        """A version's elements for a plan: a checksum for each read, and the bytes, unless the receiver reads them from memory."""
        with self._lock:
            plan = self._plans.get(asked["plan"])
        if plan is None:
            return {"unknown": True}, 0, ()
        version, have = int(asked["version"]), asked["have"]
        first, stop = asked["reads"]
        reads = plan[first:stop]
        sums, kinds = list[int](), list[int | None]()
        changes: list[bytes | None] = [None] * len(reads)
        before = next((one for one in self._slots if have is not None and one.version == have), None)
        with self._reading(version) as snapshot:
            for k, read in enumerate(reads):
                after = bytes_of(snapshot.strided(*read)).numpy()
                sums.append(xxhash.xxh3_64_intdigest(after.data))
                if before is not None and before.version == have:
                    itemsize = torch.empty(0, dtype=snapshot.strided(*read).dtype).element_size()
                    old = bytes_of(before.snapshot.strided(*read)).numpy()
                    most = int(after.nbytes * _MOST_OF_WHOLE)
                    changes[k] = encoded(words_of(old, itemsize), words_of(after, itemsize), most)
                kinds.append(None if changes[k] is None else len(changes[k] or b""))
        if before is not None and before.version != have:
            raise _Overwritten
        if asked["carry"] == "memory":
            slot = next(k for k, one in enumerate(self._slots) if one.version == version)
            return {"sums": sums, "slot": slot}, 0, ()
        sizes = [self._nbytes(read) if one is None else one for read, one in zip(reads, kinds, strict=True)]
        said = {"sums": sums, "changes": kinds}
        return said, sum(sizes), self._payload(reads, version, changes)

    def _nbytes(self, read: _Read) -> int:
        found = self._slots[0].snapshot.strided(*read)
        return found.numel() * found.element_size()

    def _payload(
        self, reads: Sequence[_Read], version: int, changes: Sequence[bytes | None]
    ) -> Iterator[memoryview]:
        for read, found in zip(reads, changes, strict=True):
            if found is not None:
                yield memoryview(found)
                continue
            with suppress(_Overwritten), self._reading(version) as snapshot:
                yield bytes_of(snapshot.strided(*read)).numpy().data
                continue
            raise ConnectionError("the version was overwritten")  # ends the link: the receiver starts over
