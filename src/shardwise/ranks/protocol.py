"""One agreement of all ranks, through keyed entries of the process group's store, never through a collective.

A rank that is stopped inside a gloo collective poisons the group for good. Rank 0 coordinates. In round ``n``::

    rank r:  status/<rank> = ok | cause | payload,  n/arrived += 1,  poll n/verdict,  n/seen += 1
    rank 0:  poll n/arrived,  read the statuses,  n/verdict = ok | causes | reply,  poll n/seen,  delete n/*

The verdict is set once (compare-and-set), so all ranks read the same one at any time, even when a waiting rank wrote
it because rank 0 made no progress. Where payloads are combined (:mod:`.tree`), a rank waits for those below it, combines
theirs with its own, and only then arrives; rank 0 takes those of 16 ranks. Progress is ``beat/<rank>`` (:mod:`.beats`).
`Ranks.tick` advances it about once a second from the working thread; during a system call on a file the watching thread does
(:mod:`.patience`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, cast

import torch.distributed as dist

from shardwise.errors import RankError
from shardwise.internals.torch import default_store
from shardwise.ranks.beats import LOOK_PERIOD_S, Watch, look_period_s
from shardwise.ranks.parts import Parts, Store
from shardwise.ranks.tree import are_mergeable, ranks_below
from shardwise.ranks.verdicts import (
    Request,
    Status,
    Verdict,
    cause_of,
    disagreement,
    failure,
    pack,
    status_of,
    unpacked_status,
    unpacked_verdict,
)

__all__ = ["Agreement", "agreement_of"]

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
