"""One agreement of all ranks, through keyed entries of the process group's store, never through a collective."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, replace
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import torch.distributed as dist

from shardwise.errors import RankError
from shardwise.internals.torch import default_store

from ..objects import frozen

# ----------------------------------------------------------------------------------------------------
# Finds ranks that make no progress, by their beats: values in the store that change while a rank works.

LOOK_PERIOD_S = 1.0


def look_period_s(timeout_s: float) -> float:
    """Seconds between two signs of progress, and between two looks for them."""
    return min(LOOK_PERIOD_S, timeout_s / 4)


class Watch:
    """Looks at the beats of other ranks about once a second.

    Adds up the time between looks instead of comparing clocks: a watcher that was itself stopped or suspended does
    not blame other ranks when it wakes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._period_s = look_period_s(timeout_s)
        self._looked = time.monotonic()
        self._beats: dict[int, bytes] = {}
        self._idle_s: dict[int, float] = {}

    def due(self) -> bool:
        return time.monotonic() - self._looked >= self._period_s

    def look(self, beats: Mapping[int, bytes]) -> tuple[int, ...]:
        """The ranks among ``beats`` that made no progress for the timeout."""
        now = time.monotonic()
        elapsed_s = min(now - self._looked, 2 * self._period_s)
        self._looked = now
        for rank, beat in beats.items():
            moved = self._beats.get(rank) != beat
            self._idle_s[rank] = 0.0 if moved else self._idle_s[rank] + elapsed_s
        self._beats = dict(beats)
        return tuple(rank for rank in sorted(beats) if self._idle_s[rank] >= self._timeout_s)


# ----------------------------------------------------------------------------------------------------
# Payloads in a process group's store, in parts where they are too large for one value.

_PART_BYTES = 4 * 1024**2  # TCPStore refuses values above 8 MiB and drops the connection


class Store(Protocol):
    """The methods of torch.distributed.Store that shardwise uses. Its stub says str where it takes and gives bytes."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Parts:
    """Puts large payloads into a store and takes them out; calls ``tick`` after each part."""

    def __init__(self, store: Store, tick: Callable[[], object]) -> None:
        self._store = store
        self._tick = tick

    def put(self, key: str, payload: bytes, inline_bytes: int) -> int:
        """Store a payload in parts if it has more than ``inline_bytes``; returns the number of parts."""
        if len(payload) <= inline_bytes:
            return 0
        view = memoryview(payload)
        starts = range(0, len(payload), _PART_BYTES)
        for i, start in enumerate(starts):
            self._store.set(f"{key}/{i}", bytes(view[start : start + _PART_BYTES]))
            self._tick()
        return len(starts)

    def get(self, key: str, count: int) -> bytes:
        """The payload of so many parts, which are there: their rank deletes them after all that read them have left the round."""
        parts = []
        for i in range(count):
            parts.append(self._store.get(f"{key}/{i}"))
            self._tick()
        return b"".join(parts)

    def delete(self, key: str, count: int) -> None:
        """Delete the parts of a payload."""
        for i in range(count):
            self._store.delete_key(f"{key}/{i}")


# ----------------------------------------------------------------------------------------------------
# What ranks tell each other in a round: how each one arrived, and the verdict for all. :mod:`.protocol` carries them.
#
# Failures travel in words, cut to a size that one value of the store can hold.

_CAUSE_CHARS = 4_000
_ALL_CAUSES_CHARS = 256_000  # per verdict: the causes of 1,000 failing ranks fit into one value


@frozen
class Request:
    """The agreement that a rank is in."""

    kind: str
    label: str
    timeout_s: float


@frozen
class Status:
    """How a rank arrived at a round. Failures of the same type and full text have the same ``fingerprint``."""

    round: int
    kind: str
    label: str
    cause: str | None = None
    fingerprint: str = ""
    parts: int = 0


@frozen
class Verdict:
    """The outcome of a round for all ranks: go on with the reply, or raise."""

    ok: bool
    label: str
    causes: dict[str, str] = field(default_factory=dict)  # JSON has no integer keys
    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    identical: bool = False  # all ranks failed alike: each raises its own exception
    parts: int = 0

    def error(self) -> RankError:
        causes = {int(rank): cause for rank, cause in self.causes.items()}
        return RankError(self.label, causes, tuple(self.missing), self.timeout_s)


def failure(request: Request, causes: Mapping[int, str], missing: tuple[int, ...] = ()) -> Verdict:
    """A verdict that makes all ranks raise. Its causes are cut: those of 1,000 ranks fit into one value."""
    room = max(200, _ALL_CAUSES_CHARS // max(1, len(causes)))
    short = {str(rank): shorten(cause, room) for rank, cause in sorted(causes.items())}
    return Verdict(ok=False, label=request.label, causes=short, missing=missing, timeout_s=request.timeout_s)


def status_of(round_: int, request: Request, own: BaseException | None) -> Status:
    """How a rank arrives at a round, with ``own`` exception or without."""
    if own is None:
        return Status(round_, request.kind, request.label)
    full = f"{type(own).__module__}.{type(own).__qualname__}: {text_of(own)}"
    fingerprint = hashlib.blake2b(full.encode(errors="replace"), digest_size=16).hexdigest()
    return Status(round_, request.kind, request.label, cause_of(own), fingerprint)


def pack(header: Status | Verdict, inline: bytes = b"") -> bytes:
    """The value of a status or verdict in the store: a line of JSON, then a small payload.

    Leaves out optional fields that are empty, as their defaults are: every rank sends and gets such a line in each round.
    """
    told = {
        f.name: value
        for f in fields(header)
        if (value := getattr(header, f.name)) or (f.default is MISSING and f.default_factory is MISSING)
    }
    return json.dumps(told, separators=(",", ":")).encode() + b"\n" + inline


def unpacked_status(value: bytes) -> tuple[Status, bytes]:
    """The status and the payload that :func:`pack` was given."""
    header, inline = value.split(b"\n", 1)
    return Status(**json.loads(header)), inline


def unpacked_verdict(value: bytes) -> tuple[Verdict, bytes]:
    """The verdict and the payload that :func:`pack` was given."""
    header, inline = value.split(b"\n", 1)
    return Verdict(**json.loads(header)), inline


def cause_of(error: BaseException) -> str:
    """An exception in words for other ranks."""
    text = text_of(error)
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, _CAUSE_CHARS)


def text_of(error: BaseException) -> str:
    """An exception's text, or a note that it has none."""
    try:
        return str(error)
    except Exception:  # reporting must not fail: the other ranks wait for it
        return "(its text can't be made)"


def shorten(text: str, chars: int) -> str:
    """``text``, cut to at most ``chars`` characters."""
    return text if len(text) <= chars else f"{text[: chars - 20]} … [shortened]"


def disagreement(rank: int, status: Status, request: Request) -> str:
    """The cause of failure where a rank is in another agreement than rank 0, which is in ``request``; else empty."""
    if (status.kind, status.label) == (request.kind, request.label):
        return ""
    theirs, ours = f"'{status.label}'", f"'{request.label}'"
    if theirs == ours:
        theirs, ours = f"{status.kind}({theirs})", f"{request.kind}({ours})"
    return f"ranks disagree on what they are doing: rank {rank} is in {theirs}, rank 0 in {ours}"


# ----------------------------------------------------------------------------------------------------
# The tree in which payloads are combined on their way to rank 0, so that no rank receives one of each rank. Pure.
#
# Rank 0 is the root; the ranks below rank r are 16·r + 1 … 16·r + 16. With 4,096 ranks a payload passes three ranks at most.

#: How many payloads one rank combines with its own.
FAN = 16


def ranks_below(rank: int, world_size: int) -> Sequence[int]:
    """The ranks whose payloads a rank combines with its own."""
    return range(FAN * rank + 1, min(FAN * rank + FAN + 1, world_size))


def are_mergeable(
    statuses: Mapping[int, tuple[Status, bytes]], below: Sequence[int], request: Request
) -> bool:
    """Whether all ranks below are in this round with a payload. If not, the round fails, and rank 0 says why."""
    return len(statuses) == len(below) and all(
        s.cause is None and (s.kind, s.label) == (request.kind, request.label) for s, _ in statuses.values()
    )


# ----------------------------------------------------------------------------------------------------
# One agreement of all ranks, through keyed entries of the process group's store, never through a collective.
#
# A rank that is stopped inside a gloo collective poisons the group for good. Rank 0 coordinates. In round ``n``::
#
#     rank r:  status/<rank> = ok | cause | payload,  n/arrived += 1,  poll n/verdict,  n/seen += 1
#     rank 0:  poll n/arrived,  read the statuses,  n/verdict = ok | causes | reply,  poll n/seen,  delete n/*
#
# The verdict is set once (compare-and-set), so all ranks read the same one at any time, even when a waiting rank wrote
# it because rank 0 made no progress. Where payloads are combined (the tree below), a rank waits for those below it, combines
# theirs with its own, and only then arrives; rank 0 takes those of 16 ranks. Progress is ``beat/<rank>`` (:mod:`.protocol`).
# `Ranks.tick` advances it about once a second from the working thread; during a system call on a file the watching thread does
# (:mod:`.ranks`).

_INLINE_BYTES = 64 * 1024  # payloads up to here travel inside the status or verdict
_INLINE_IN_TREE_BYTES = 256  # rank 0 reads all statuses, but only the payloads of the ranks below it
_STATUSES_PER_GET = 256
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_LINGER_S = 2.0  # how long rank 0 waits for ranks that have arrived but not yet read the verdict
_FAILED = 1 << 32  # n/arrived counts arrivals in its low half, failures among them in its high half
_AGREED = "_shardwise_agreed"  # attribute of an error that all ranks raise: an outer agree() passes it on
_UNREACHABLE = "unreachable: the process group's store is gone (did rank 0, or the process hosting it, end?)"


# One agreement per process group. All Ranks of the group share it, so their rounds stay in step. Weak: a reference to the
# store would keep its port taken after destroy_process_group().
_opening = threading.Lock()
_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Agreement]] = weakref.WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup, rank: int, world_size: int, channel: str = "") -> Agreement:
    """This process's agreement of a group; made at the first call.

    Each channel has its own rounds and its own connection to the store, so two threads can agree independently.
    """
    with _opening:
        agreements = _agreements.setdefault(group, {})
        if channel not in agreements:
            agreements[channel] = _open_agreement(rank, world_size, channel)
        return agreements[channel]


def _open_agreement(rank: int, world_size: int, channel: str) -> Agreement:
    try:
        store = default_store()
        if channel:
            store = store.clone()
        # Under torchrun the store outlives the group: a new group must not read old verdicts.
        generation = store.add(f"shardwise/{channel}generation/{rank}", 1)
        prefixed = dist.distributed_c10d.PrefixStore(f"shardwise/{channel}{generation}", store)
    except RuntimeError as error:
        raise RankError("open the process group's store", {0: _UNREACHABLE}) from error
    return Agreement(cast(Store, prefixed), rank, world_size, generation)


class Agreement:
    """This process's end of the agreements of one process group."""

    def __init__(self, store: Store, rank: int, world_size: int, generation: int) -> None:
        self._store = store
        self._parts = Parts(store, lambda: self.tick(1, LOOK_PERIOD_S))
        self._rank = rank
        self._others = world_size - 1
        self._generation = generation
        self._round = 0
        self._posted = 0  # the last round at which this rank has arrived
        self._ticks = 0
        self._ticked = 0.0
        self._beating = (
            threading.Lock()
        )  # a beat from before this rank arrived must not be written after its arrival
        self._prepared = False
        self._broken = False
        self._unswept: list[str] = []
        self._tree = False  # whether payloads of this round are combined on their way
        # All ranks together poll about 5,000 times a second at most; a TCPStore serves many more. In a round it serves each rank
        # some requests, of 20 to 30 us each: an earlier first look would find nothing.
        self._longest_pause_s = max(0.005, 0.0002 * world_size)
        self._first_pause_s = max(_FIRST_PAUSE_S, 0.00002 * world_size)

    def tick(self, amount: int, period_s: float) -> None:
        self._ticks += amount
        now = time.monotonic()
        if now - self._ticked >= period_s and not self._broken:
            self._ticked = now
            try:
                self._beat()
            except RuntimeError:  # the store's; the next agreement reports it
                self._broken = True

    def is_agreed(self, error: BaseException) -> bool:
        """Whether all ranks have just raised this error: no rank would come to another agreement on it."""
        return bool(getattr(error, _AGREED, None) == (self._generation, self._round))

    def is_settled(self, error: BaseException) -> bool:
        """Whether the round just failed with this error on every rank that learns its outcome. False where this rank did not learn it."""
        causes = error.causes.values() if isinstance(error, RankError) else ()
        return self.is_agreed(error) and not any(_UNREACHABLE in cause for cause in causes)

    def agree(
        self,
        request: Request,
        *,
        own: BaseException | None = None,
        payload: bytes = b"",
        decide: Callable[[list[bytes]], bytes] = lambda _: b"",
        merge: Callable[[list[bytes]], bytes] | None = None,
    ) -> bytes:
        """One round. On rank 0, ``decide`` makes the reply from all payloads, or raises RankError.

        With ``merge`` each rank combines its payload with those of the ranks below it, and ``decide`` gets those of rank 0 and of
        the ranks below rank 0.
        """
        self._round += 1
        self._tree = merge is not None
        status = status_of(self._round, request, own)
        try:
            if merge is not None and self._rank and own is None:
                payloads = self._payloads_below(request, payload)
                try:
                    payload = merge(payloads) if payloads else b""
                except Exception as error:
                    own = error
                    status = status_of(self._round, request, own)
            if self._rank == 0:
                verdict, reply = self._lead(request, status, own, payload, decide)
            elif own is None or isinstance(own, Exception):
                verdict, reply = self._follow(request, status, payload)
            else:  # Ctrl-C or exit: tell the other ranks; wait neither for them nor for rank 0's verdict
                self._publish(failure(request, {self._rank: cause_of(own)}))
                self._post(status)
                self._store.add(self._key("seen"), 1)
                raise own
        except RuntimeError as error:  # only the store raises these
            if own is not None and not isinstance(own, Exception):
                raise own from None
            self._raise_unreachable(request, status, own, error)
        except BaseException as error:
            if error is not own:
                with suppress(RuntimeError):  # this rank leaves; the other ranks must not wait for it
                    self._publish(failure(request, {self._rank: cause_of(error)}))
            raise
        if own is not None and (verdict.identical or not isinstance(own, Exception)):
            self._raise(own)
        if not verdict.ok:
            self._raise(verdict.error(), own)
        return reply

    # -- rank 0 ------------------------------------------------------------------------------------------

    def _lead(
        self,
        request: Request,
        own_status: Status,
        own: BaseException | None,
        payload: bytes,
        decide: Callable[[list[bytes]], bytes],
    ) -> tuple[Verdict, bytes]:
        verdict, reply = self._await_arrivals(request, own_status, own), b""
        if verdict is None:
            verdict, reply = self._decide(request, payload, decide)
        parts = self._parts.put(self._key("reply"), reply, _INLINE_BYTES)
        header = replace(verdict, parts=parts)
        verdict = self._publish(header, b"" if parts else reply)
        names = ["arrived", "verdict", "seen", *(f"reply/{i}" for i in range(parts))]
        self._unswept += [self._key(name) for name in names]
        self._linger(min(_LINGER_S, request.timeout_s / 2))
        return verdict, reply

    def _await_arrivals(
        self, request: Request, own_status: Status, own: BaseException | None
    ) -> Verdict | None:
        """Wait until all ranks have arrived (None), or until the round is known to fail.

        Where every rank so far has failed, the others may fail alike: then each raises its own exception. So the verdict
        waits for them, as long as they make progress: the type of the error must not depend on how late a rank is.
        """
        watch = Watch(request.timeout_s)
        pauses = self._pauses()
        while not self._store.check([self._key("verdict")]):
            arrived, failed = self._arrivals()
            failed += own_status.cause is not None
            may_be_alike = failed == arrived + 1 and isinstance(own, Exception)
            if arrived == self._others or (failed and not may_be_alike):
                return self._failures(request, own_status) if failed else None
            if watch.due():
                idle = watch.look(self._beats_of_absent())
                if idle:
                    return replace(self._failures(request, own_status), missing=idle)
            self.tick(1, look_period_s(request.timeout_s))
            time.sleep(next(pauses))
        return self._published()[0]

    def _failures(self, request: Request, own_status: Status) -> Verdict:
        statuses = {0: own_status, **{rank: status for rank, (status, _) in self._statuses().items()}}
        causes: dict[int, str] = {}
        for rank, status in statuses.items():
            if status.cause is not None:
                where = "" if status.label == request.label else f" (in '{status.label}')"
                causes[rank] = status.cause + where
        alike = len({status.fingerprint for status in statuses.values()}) == 1
        return replace(failure(request, causes), identical=alike and len(causes) == self._others + 1)

    def _decide(
        self, request: Request, payload: bytes, decide: Callable[[list[bytes]], bytes]
    ) -> tuple[Verdict, bytes]:
        statuses = self._statuses()
        if len(statuses) < self._others:  # while rank 0 was stopped, the other ranks gave it up and went on
            return self._published()
        causes = {rank: disagreement(rank, status, request) for rank, (status, _) in statuses.items()}
        causes = {rank: cause for rank, cause in causes.items() if cause}
        if causes:
            return failure(request, causes), b""
        taken = sorted(statuses) if not self._tree else ranks_below(0, self._others + 1)
        try:
            return Verdict(ok=True, label=request.label), decide([payload, *self._payloads(statuses, taken)])
        except RankError as error:
            return failure(request, error.causes), b""

    def _payloads(self, statuses: dict[int, tuple[Status, bytes]], ranks: Sequence[int]) -> Iterator[bytes]:
        for rank in ranks:
            status, inline = statuses[rank]
            name = self._key(f"payload/{rank}")
            yield self._parts.get(name, status.parts) if status.parts else inline
            if self._tree:
                self._parts.delete(name, status.parts)

    def _linger(self, longest_s: float) -> None:
        """Stay until all ranks that arrived have read the verdict: the store may end with this process.

        Once all ranks have read it, the keys of this round and of earlier ones can go.
        """
        pauses = self._pauses()
        end = time.monotonic() + longest_s
        while (seen := self._store.add(self._key("seen"), 0)) < self._others:
            if seen >= self._arrivals()[0] or time.monotonic() > end:
                return
            time.sleep(next(pauses))
        self._sweep()

    def _arrivals(self) -> tuple[int, int]:
        failed, arrived = divmod(self._store.add(self._key("arrived"), 0), _FAILED)
        return arrived, failed

    def _prepare(self, of: Sequence[int]) -> None:
        """Create the keys that other ranks have not created yet: reading a missing key blocks."""
        first = {"beat": b"0 0", "status": pack(Status(0, "", ""))}
        for at in range(0, 0 if self._prepared else len(of), _STATUSES_PER_GET):
            keys = {f"{k}/{rank}": v for rank in of[at : at + _STATUSES_PER_GET] for k, v in first.items()}
            if not self._store.check([*keys]):  # most ranks have been here before
                for key, value in keys.items():
                    self._store.compare_set(key, b"", value)
        self._prepared = True

    def _beats_of_absent(self) -> dict[int, bytes]:
        self._prepare(range(1, self._others + 1))
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(1, self._others + 1)])
        return {rank: beat for rank, beat in enumerate(beats, 1) if int(beat.split()[0]) < self._round}

    def _statuses(self, of: Sequence[int] = ()) -> dict[int, tuple[Status, bytes]]:
        """The statuses, with inline payload, of the ranks that have arrived at this round; of all ranks by default."""
        of = of or range(1, self._others + 1)
        self._prepare(of)
        found: dict[int, tuple[Status, bytes]] = {}
        for first in range(0, len(of), _STATUSES_PER_GET):
            ranks = of[first : first + _STATUSES_PER_GET]
            values = self._store.multi_get([f"status/{rank}" for rank in ranks])
            for rank, packed in zip(ranks, values, strict=True):
                status, inline = unpacked_status(packed)
                if status.round == self._round:
                    found[rank] = status, inline
        return found

    # -- the other ranks ---------------------------------------------------------------------------------

    def _payloads_below(self, request: Request, payload: bytes) -> list[bytes]:
        """This rank's payload and those of the ranks below it, once they are there; none if the round fails."""
        below = ranks_below(self._rank, self._others + 1)
        if below:
            self._await_verdict(request, None, lambda: len(self._statuses(below)) == len(below))
        statuses = self._statuses(below) if below else {}
        return [payload, *self._payloads(statuses, below)] if are_mergeable(statuses, below, request) else []

    def _await_verdict(
        self, request: Request, cause: str | None, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for the verdict, or until this rank can go on. Makes the verdict if rank 0 makes no progress."""
        watch = Watch(request.timeout_s)
        pauses = self._pauses()
        while not until() and not self._store.check([self._key("verdict")]):
            if watch.due() and watch.look({0: self._beat_of_first()}):
                causes = {} if cause is None else {self._rank: cause}
                self._publish(failure(request, causes, missing=(0,)))
            if self._posted < self._round:  # it waits for other ranks, which may be missing
                self.tick(1, look_period_s(request.timeout_s))
            time.sleep(next(pauses))

    def _follow(self, request: Request, status: Status, payload: bytes) -> tuple[Verdict, bytes]:
        name = self._key(f"payload/{self._rank}")
        parts = self._parts.put(name, payload, _INLINE_IN_TREE_BYTES if self._tree else _INLINE_BYTES)
        self._post(replace(status, parts=parts), b"" if parts else payload)
        self._await_verdict(request, status.cause)
        verdict, reply = self._published()
        if not (self._tree and verdict.ok):  # in a tree the rank that took them has deleted them
            self._unswept += [f"{name}/{i}" for i in range(parts)]
        if verdict.ok:  # else another rank may have made it: a rank may be about to read the parts, and would wait for them
            self._sweep()
        self._store.add(self._key("seen"), 1)
        return verdict, reply

    def _post(self, status: Status, inline: bytes = b"") -> None:
        self._store.set(f"status/{self._rank}", pack(status, inline))
        self._store.add(self._key("arrived"), 1 if status.cause is None else 1 + _FAILED)
        # Last: rank 0 does not look for a rank that says it has arrived. One that died before it counted would never be missed.
        self._posted = self._round
        self._beat()

    def _beat_of_first(self) -> bytes:
        return self._store.get("beat/0") if self._store.check(["beat/0"]) else b""

    # -- both --------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Delete this rank's keys of rounds that all ranks that read them have left."""
        for key in self._unswept:
            self._store.delete_key(key)
        self._unswept.clear()

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _beat(self) -> None:
        with self._beating:
            self._store.set(f"beat/{self._rank}", f"{self._posted} {self._ticks}".encode())

    def _publish(self, verdict: Verdict, inline: bytes = b"") -> Verdict:
        """Set this verdict unless one is set already; returns the one that is set."""
        packed = self._store.compare_set(self._key("verdict"), b"", pack(verdict, inline))
        return unpacked_verdict(packed)[0]

    def _published(self) -> tuple[Verdict, bytes]:
        verdict, inline = unpacked_verdict(self._store.get(self._key("verdict")))
        return verdict, self._parts.get(self._key("reply"), verdict.parts) if verdict.parts else inline

    def _pauses(self) -> Iterator[float]:
        """The pauses between polls: up to 5 ms at first, later a twentieth of the time waited, at most 50 ms; longer from 25 ranks on."""
        begin = time.monotonic()
        pause_s = self._first_pause_s
        while True:
            yield pause_s
            waited_s = time.monotonic() - begin
            longest_s = max(self._longest_pause_s, min(0.05 * waited_s, _LONGEST_PAUSE_S))
            pause_s = min(1.5 * pause_s, longest_s)

    def _raise_unreachable(
        self, request: Request, status: Status, own: BaseException | None, store_error: RuntimeError
    ) -> NoReturn:
        causes = {0: _UNREACHABLE}
        if status.cause is not None:
            causes[self._rank] = status.cause if self._rank else f"{status.cause}; {_UNREACHABLE}"
        self._raise(RankError(request.label, causes), own or store_error)

    def _raise(self, error: BaseException, cause: BaseException | None = None) -> NoReturn:
        setattr(error, _AGREED, (self._generation, self._round))
        if cause is None:
            raise error
        raise error from cause


# ----------------------------------------------------------------------------------------------------
# Messages between ranks as bytes: plain values as JSON, bytes and arrays of numbers unchanged.

_JSON, _BYTES, _NUMBERS, _PARTS = b"j", b"b", b"n", b"p"


def packed_message(value: Any) -> bytes:
    """A value as bytes, for :func:`unpack`; None becomes no bytes.

    Takes bytes, 1-D arrays of uint64, mappings of text to these two, and values that JSON gives back equal: text,
    numbers, booleans, None, and lists and text-keyed mappings of these. Raises :class:`TypeError` otherwise (a tuple
    would come back as a list).
    """
    if value is None:
        return b""
    if isinstance(value, bytes):
        return _BYTES + value
    if _are_numbers(value):
        return _NUMBERS + bytes(value)
    if isinstance(value, dict) and any(
        isinstance(part, bytes) or _are_numbers(part) for part in value.values()
    ):
        parts = {name: packed_message(part) for name, part in value.items()}
        head = json.dumps([[name, len(part)] for name, part in parts.items()]).encode()
        return b"".join((_PARTS, len(head).to_bytes(8, "little"), head, *parts.values()))
    text = json.dumps(value)
    if json.loads(text) != value:
        raise TypeError(f"JSON does not give back {text[:200]} as it was: use lists, and text as keys")
    return _JSON + text.encode()


def _are_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint64 and value.ndim == 1


def unpack(payload: bytes) -> Any:
    """The value that :func:`pack` was given. Arrays can't be written to."""
    kind, content = payload[:1], payload[1:]
    if not payload:
        return None
    if kind == _BYTES:
        return content
    if kind == _NUMBERS:
        return np.frombuffer(content, dtype=np.uint64)
    if kind == _JSON:
        return json.loads(content)
    end = 8 + int.from_bytes(content[:8], "little")
    parts = {}
    for name, size in json.loads(content[8:end]):
        parts[name] = unpack(content[end : end + size])
        end += size
    return parts
