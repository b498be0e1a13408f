"""``WeightSender``: the trainer's side. Publishes versions of a model's weights, and serves them while training continues."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
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
from ..publish.hosts import address_toward_store, own_address
from ..publish.ring import new_word
from ..ranks.ranks import Ranks, host_key
from ..tensors.live import describe
from .changes import encoded, words_of
from .layout import Read, Snapshot, bytes_of, held_by, layout_of, read_of
from .links import Address, Document, Listener, Payload, new_secret

#: A delta is sent where it takes at most this share of the whole.
_MOST_OF_WHOLE = 0.75
#: Plans of receivers that a rank remembers; those with one layout share a plan.
_MOST_PLANS = 4096
#: How long a restarted trainer waits for its port.
_PATIENCE_S = 20.0


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
        try:
            if hasattr(os, "memfd_create"):  # ends with the process, however that ends
                self.fd = os.memfd_create("shardwise-weights", os.MFD_CLOEXEC)
                os.posix_fallocate(self.fd, 0, size)
            memory = mmap.mmap(-1 if self.fd is None else self.fd, size)
        except OSError as error:
            self.close()
            raise CheckpointError(f"no memory for a snapshot of {size:,} bytes: {error.strerror}") from error
        self.snapshot = Snapshot(torch.frombuffer(memory, dtype=torch.uint8))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.version = None
        self.snapshot = Snapshot(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class _Overwritten(Exception):
    """The version was overwritten while it was read."""


#: Those of this process. A fork, such as a worker of a data loader, must keep neither their port nor their memory.
_SENDERS: weakref.WeakSet[WeightSender] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for sender in _SENDERS:
        if sender._listener is not None:
            sender._listener.leave()
            sender._listener = None
        for slot in sender._slots:
            slot.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class WeightSender:
    """Publish versions of ``model``'s weights to inference engines and other programs, while training continues.

    Receivers (:class:`WeightReceiver`) connect to ``url``. Each of their ranks pulls its own slices from the ranks that hold them, in
    whatever layout it has; no tensor is gathered anywhere. From version to version, only changed elements travel.

    Args:
        model: a live model, sharded in any way or not at all.
        url: where rank 0 listens, as ``shardwise://host:port/secret``: then receivers find a restarted trainer again. The other ranks listen on the
            address with which they reach it. Default: the addresses with which ranks reach the process group's store, free ports and
            a new secret. Give :attr:`url` to the receivers, and keep it private: whoever has it can read the weights.
        dtype: cast floating-point tensors to this dtype, as an engine uses them. Default: no cast.
        naming: ``"hub"``, ``"module"`` or ``"adapter"``, as in :func:`iter_full_tensors`.
        keep: how many versions stay readable, in a buffer each. With 2 or more, a receiver that has the version before gets only
            what changed.
        timeout_s: limit for a rank, or a receiver, that makes no progress.

    Every rank of the default process group must create it, call :meth:`publish` and :meth:`close`. Memory: ``keep`` times this rank's
    shards in ``dtype``; for each receiver that is pulling 64 MiB or its largest part of a tensor, up to twice. Raises as :func:`iter_full_tensors`,
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
        self._plans: dict[
            str, Sequence[Read]
        ] = {}  # by name, what a receiver reads; the last used one comes last
        self._newest: int | None = None
        self._catalog: Document | None = None
        self._model = model
        self._slots: list[_Slot] = []
        self._listener: Listener | None = None
        try:
            self._url = self._open(url, dtype, naming, keep)
        except BaseException:
            self.close()
            raise
        _SENDERS.add(self)

    @property
    def url(self) -> str:
        """What a :class:`WeightReceiver` connects to. It contains the secret."""
        return self._url

    def _open(self, url: str | None, dtype: torch.dtype | str | None, naming: str, keep: int) -> str:
        ranks = self._ranks
        with ranks.agree("describe the weights") as claim:
            if keep < 1:
                raise ValueError(f"keep must be at least 1, got {keep}")
            given = Address.parse(url) if url is not None else None
            if given is not None and given.host in ("0.0.0.0", "::"):
                raise ValueError(
                    f"url: receivers can't connect to {given.host}; give an address of rank 0's host"
                )
            live = describe(self._model)
            contents = contents_named(live, naming)
            code = dtype_code(dtype)
            claim.alike([keep, code, url, [[n, s.dtype, list(s.shape)] for n, s in contents.hub.items()]])
            self._held, dtypes = held_by(live, contents, code, ranks.rank)
            local = live.local_tensors()
            self._layouts = {copy.wanted: layout_of(local[copy.wanted]) for copy in self._held.copies}
            for _ in range(keep):
                self._slots.append(_Slot(self._held.nbytes))
        secret = ranks.on_first("make a secret", lambda: given.secret if given else new_secret())
        self._run = ranks.on_first("name the weights", new_word)
        with ranks.agree("listen"):
            host = own_address((given.host, given.port)) if given is not None else address_toward_store()
            port = 0
            if given is not None and ranks.rank == 0:
                host, port = given.host, given.port
            self._listener = self._listen(secret, host, port)
        own = {
            "at": [host, self._listener.port],
            "host": host_key(),
            "files": [f"/proc/{os.getpid()}/fd/{slot.fd}" for slot in self._slots if slot.fd is not None],
            "boxes": [[n, list(b.start), list(b.sizes), at] for n, b, at in self._held.boxes],
        }
        gathered = ranks.gather("describe the weights", own)
        if gathered is not None:
            tensors = {n: [dtypes[n], list(s.shape)] for n, s in contents.hub.items()}
            self._catalog = {"run": self._run, "tensors": tensors, "ranks": gathered}
        port = self._listener.port
        return ranks.on_first("tell the address", lambda: str(Address(host, port, secret)))

    def _listen(self, secret: str, host: str, port: int) -> Listener:
        """At a port that was asked for, wait for a trainer that was killed to leave it."""
        until = time.monotonic() + (_PATIENCE_S if port else 0)
        while True:
            try:
                return Listener(self._answer, secret, host, port, self._ranks.timeout_s)
            except CheckpointError:
                if time.monotonic() >= until:
                    raise
                self._ranks.tick()
                time.sleep(0.2)

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and give the memory back. Rank-local; may be called again."""
        if self._listener is not None:
            self._listener.close()
        for slot in self._slots:
            slot.close()
        self._listener = None

    @torch.no_grad()
    def publish(self, version: int) -> PublishReport:
        """Copy the current weights into a snapshot, and make it the newest version. Training may continue as soon as this returns.

        ``version``: above that of the last call. Every rank must call it. Overwrites the oldest version: a receiver in the middle of
        pulling that one starts over with the newest. Raises :class:`ValueError`; :class:`StateError` if the sender was closed, or if tensors of the
        model have other shapes, dtypes or strides than when it was created; :class:`RankError`.
        """
        started = time.perf_counter()
        slot = None
        try:
            with self._ranks.agree("publish weights") as claim:
                claim.alike(version)
                if self._listener is None:
                    raise StateError("publish: the sender was closed")
                if self._newest is not None and version <= self._newest:
                    raise ValueError(
                        f"publish({version}): versions must increase, and {self._newest} was published"
                    )
                slot = min(self._slots, key=lambda one: -1 if one.version is None else one.version)
                slot.version = None
                self._copy_into(slot)
        except BaseException:
            if slot is not None:  # other ranks may have failed: then nobody has this version
                slot.version = None
            raise
        slot.version = self._newest = version
        return PublishReport(version, self._held.nbytes, time.perf_counter() - started)

    def _copy_into(self, slot: _Slot) -> None:
        local = describe(self._model).local_tensors()  # puts gathered parameters back to shards
        for name, layout in self._layouts.items():
            found = local.get(name)
            if found is not None and found.is_meta:
                raise StateError(f"{name!r} is on meta; load the model before its weights are published")
            if found is None or layout_of(found) != layout:
                raise StateError(
                    f"{name!r} has another shape, dtype or layout than when the WeightSender was created: close it, and create another"
                )
        parts = Destination({name: local[name] for name in self._layouts})
        for copy in self._held.copies:
            slot.snapshot.strided(*read_of(copy)).copy_(parts.strided(copy))
            self._ranks.tick()

    # ------------------------------------------------------------------------------------------------
    # Answers to receivers, in threads of the listener.

    def _answer(self, asked: Document) -> tuple[Document, int, Payload]:
        match asked["ask"]:
            case "catalog":
                if self._catalog is None:
                    raise CheckpointError("the sender is starting")
                return self._catalog, 0, ()
            case "newest":
                versions = [one.version for one in self._slots if one.version is not None]
                return {"run": self._run, "version": self._newest, "versions": versions}, 0, ()
            case "register" | "take" if asked["run"] != self._run:  # planned for a trainer that was replaced
                return {"gone": True}, 0, ()
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
            self._plans.pop(str(asked["plan"]), None)
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[str(asked["plan"])] = reads
        return {}

    @contextmanager
    def _reading(self, version: int) -> Iterator[tuple[int, Snapshot]]:
        """The slot of a version, and its content. Raises :class:`_Overwritten` if it isn't there, or was overwritten meanwhile."""
        found = next((k for k, one in enumerate(self._slots) if one.version == version), None)
        if found is None:
            raise _Overwritten
        yield found, self._slots[found].snapshot
        if self._slots[found].version != version:
            raise _Overwritten

    def _take(self, asked: Document) -> tuple[Document, int, Payload]:
        """A version's elements for a plan: a checksum for each read, and the bytes, unless the receiver reads them from memory."""
        with self._lock:
            plan = self._plans.pop(asked["plan"], None)
            if plan is None:
                return {"unknown": True}, 0, ()
            self._plans[asked["plan"]] = plan
        version = int(asked["version"])
        first, stop = asked["reads"]
        reads = plan[first:stop]
        with self._reading(version) as (slot, snapshot):
            sums = [
                xxhash.xxh3_64_intdigest(bytes_of(snapshot.strided(*read)).numpy().data) for read in reads
            ]
            if asked["carry"] == "memory":
                return {"sums": sums, "slot": slot}, 0, ()
            changes = self._changes(reads, snapshot, asked["have"])
        sizes = [
            self._nbytes(read) if one is None else len(one) for read, one in zip(reads, changes, strict=True)
        ]
        said = {"sums": sums, "changes": [None if one is None else len(one) for one in changes]}
        return said, sum(sizes), self._payload(reads, version, changes)

    def _changes(self, reads: Sequence[Read], snapshot: Snapshot, have: int | None) -> list[bytes | None]:
        """What changed of each read since the version ``have``; None where it's less to send the read whole."""
        found: list[bytes | None] = []
        try:
            if have is None:
                raise _Overwritten
            with self._reading(int(have)) as (_, before):
                for read in reads:
                    new, old = snapshot.strided(*read), before.strided(*read)
                    most = int(new.numel() * new.element_size() * _MOST_OF_WHOLE)
                    words = [words_of(bytes_of(one).numpy(), new.element_size()) for one in (old, new)]
                    found.append(encoded(words[0], words[1], most))
            return found
        except _Overwritten:
            return [None] * len(reads)

    def _nbytes(self, read: Read) -> int:
        found = self._slots[0].snapshot.strided(*read)
        return found.numel() * found.element_size()

    def _payload(
        self, reads: Sequence[Read], version: int, changes: Sequence[bytes | None]
    ) -> Iterator[memoryview]:
        for read, found in zip(reads, changes, strict=True):
            if found is not None:
                yield memoryview(found)
                continue
            with suppress(_Overwritten), self._reading(version) as (_, snapshot):
                yield bytes_of(snapshot.strided(*read)).numpy().data
                continue
            raise ConnectionError("the version was overwritten")  # ends the link: the receiver starts over
