"""The ranks that load or save together, and how they agree that all went well.

Agreement goes through keyed entries of the default process group's store, never through a collective: a
rank that is stopped inside a gloo collective poisons the group for good. Rank 0 coordinates. In round ``n``::

    others:  status/<rank> = ok | cause | payload,  n/arrived += 1,  poll n/verdict,  n/seen += 1
    rank 0:  poll n/arrived,  read the statuses,  n/verdict = ok | causes | reply,  poll n/seen,  delete n/*

The verdict is set once (compare-and-set), so all ranks read the same one whoever wrote it, whenever they
read it: waiting ranks write it themselves when rank 0 makes no progress. Progress is ``beat/<rank>``, which
`Ranks.tick` advances about once a second from the working thread; there are no background threads.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol, cast

import torch.distributed as dist

from shardwise import errors
from shardwise._compat import default_store
from shardwise.errors import CheckpointError, RankError

__all__ = ["Ranks"]

_PART_BYTES = 4 * 1024**2  # TCPStore refuses values above 8 MiB and drops the connection
_INLINE_BYTES = 64 * 1024  # payloads up to here travel inside the status or verdict
_STATUSES_PER_GET = 256
_CAUSE_CHARS = 4_000
_ALL_CAUSES_CHARS = 256_000  # of one verdict, so that 1,000 failing ranks still fit into one value
_DESCRIPTION_CHARS = 1_000
_FIRST_PAUSE_S = 0.001
_LOOK_PERIOD_S = 1.0
_LINGER_S = 2.0  # how long rank 0 stays for ranks that have arrived but not yet read the verdict
_SAME_FAILURE_GRACE_S = 2.0  # how long rank 0 waits for the others to fail alike
_FAILED = 1 << 32  # arrived counts arrivals in its low half, failures among them in its high half
_AGREED = "_shardwise_agreed"  # attribute of errors that all ranks raise: an outer agree() lets them pass
_UNREACHABLE = "unreachable: the process group's store is gone (did rank 0, or the process hosting it, end?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that load or save together.

    All ranks must make the same calls in the same order; `tick` is free. A call returns on every rank or
    raises the same `RankError` on every living rank. ``timeout_s`` bounds the time *without progress*
    (neither arriving nor ticking), not the time that work takes. With one rank nothing is sent and
    exceptions pass unchanged.

    A rank that is killed or stopped is named after ``timeout_s``. Limit: while a *stopped* process hosts a
    TCPStore (rank 0 without torchrun), store calls of the others block until it is continued or killed.
    """

    rank: int = 0
    world_size: int = 1
    timeout_s: float = 300.0
    _group: weakref.ref[dist.ProcessGroup] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @classmethod
    def current(cls, *, timeout_s: float = 300.0) -> Ranks:
        """The ranks of the default process group (any backend), or one rank if there is none.

        Keeps no reference to the group or its store: after the group is destroyed, ask again.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(timeout_s=timeout_s)
        group = weakref.ref(cast(dist.ProcessGroup, dist.group.WORLD))
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), timeout_s=timeout_s, _group=group)

    @contextmanager
    def agree(self, label: str) -> Iterator[Claim]:
        """Run rank-local work; every rank must enter. If it fails anywhere, all living ranks raise.

        What the work finds that all ranks must find alike it gives to ``claim`` of the yielded object.

        Raises `RankError` naming the failing ranks and their causes, chained from the rank's own exception
        where it has one. When all ranks fail with the same type and text, each raises its own exception
        instead. KeyboardInterrupt and SystemExit are reported to the others and go on as themselves.
        """
        own: BaseException | None = None
        claim = Claim()
        try:
            yield claim
        except BaseException as error:
            if self.world_size == 1 or self._link().is_agreed(error):
                raise
            own = error
        if self.world_size == 1:
            return
        call = _Call("agree", label, self.timeout_s)
        different = self._link().agree(call, own=own, payload=claim.digest(), decide=_ranks_unlike_first)
        if different:
            ranks: list[int] = json.loads(different)
            words = claim.words().encode(errors="backslashreplace")
            self._link().agree(call, payload=words, decide=partial(_raise_different, label, ranks))

    def gather(self, label: str, payload: bytes) -> list[bytes] | None:
        """Bring every rank's payload to rank 0, in rank order; the other ranks get None."""
        if self.world_size == 1:
            return [payload]
        gathered: list[bytes] = []

        def keep(payloads: list[bytes]) -> bytes:
            gathered.extend(payloads)
            return b""

        self._link().agree(_Call("gather", label, self.timeout_s), payload=payload, decide=keep)
        return gathered if self.rank == 0 else None

    def share(self, label: str, payload: bytes | None) -> bytes:
        """Bring rank 0's payload to every rank. What other ranks pass is not looked at."""
        missing = ValueError(f"share('{label}') needs a payload on rank 0, got None")
        if self.world_size == 1:
            if payload is None:
                raise missing
            return payload
        own = missing if self.rank == 0 and payload is None else None
        call = _Call("share", label, self.timeout_s)
        return self._link().agree(call, own=own, decide=lambda _: payload or b"")

    def on_first(self, label: str, work: Callable[[], bytes]) -> bytes:
        """Run ``work`` on rank 0 and bring what it returns to every rank; every rank must call it.

        A `CheckpointError` of ``work`` is raised with its own type and text on every rank, because what it
        says is so for all; anything else becomes a `RankError`, as in `agree`.
        """
        payload, refusal = b"", None
        with self.agree(label):
            if self.rank == 0:
                try:
                    payload = b"\n" + work()
                except CheckpointError as error:
                    refusal = error
                    payload = f"{type(error).__name__}\n{_text(error)}".encode(errors="replace")
        kind, content = self.share(label, payload).split(b"\n", 1)
        if kind:
            raise refusal or getattr(errors, kind.decode())(content.decode())
        return content

    def tick(self, amount: int = 1) -> None:
        """Tell the others that this rank makes progress. Call it for each block read or written.

        Costs about a microsecond; the store is written about once a second. Never fails for a broken
        store: the next agreement reports that.
        """
        if self.world_size > 1:
            self._link().tick(amount, _look_period_s(self.timeout_s))

    def _link(self) -> _Link:
        group = self._group() if self._group is not None else None
        if group is None or group is not dist.group.WORLD:
            raise ValueError("the process group of this Ranks was destroyed; call Ranks.current() again")
        link = _links.get(group)
        if link is None:
            link = _links[group] = _open_link(self.rank, self.world_size)
        return link


class Claim:
    """What a rank says that every rank of an agreement must say alike; see `Ranks.agree`."""

    def __init__(self) -> None:
        self._payload = b""
        self._describe: Callable[[bytes], str] | None = None

    def alike(self, payload: bytes, describe: Callable[[bytes], str] | None = None) -> None:
        """Every rank must give the same bytes, else all raise `RankError` naming those unlike rank 0.

        Only hashes travel. ``describe`` turns a rank's own payload into the words for that error; it is
        called on all ranks, only if they differ.
        """
        self._payload, self._describe = payload, describe

    def digest(self) -> bytes:
        """What travels; nothing where nothing was claimed."""
        return hashlib.blake2b(self._payload, digest_size=32).digest() if self._payload else b""

    def words(self) -> str:
        """What the error says of this rank's payload."""
        return _describe(self._payload, self._describe)


class _Store(Protocol):
    """What we use of torch.distributed.Store; its stub says str where bytes are taken and given."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class _Call:
    """Which agreement a rank is in."""

    kind: str
    label: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Status:
    """How a rank arrived at a round. ``fingerprint`` is equal for failures of the same type and full text."""

    round: int
    kind: str
    label: str
    cause: str | None = None
    fingerprint: str = ""
    parts: int = 0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What all ranks of a round do: go on with the reply, or raise."""

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


def _failure(call: _Call, causes: Mapping[int, str], missing: tuple[int, ...] = ()) -> _Verdict:
    room = max(200, _ALL_CAUSES_CHARS // max(1, len(causes)))
    short = {str(rank): _shorten(cause, room) for rank, cause in sorted(causes.items())}
    return _Verdict(ok=False, label=call.label, causes=short, missing=missing, timeout_s=call.timeout_s)


class _Watch:
    """Finds ranks that make no progress, by looking at their beats about once a second.

    Adds up the time between looks instead of comparing clocks, so that a watcher that was itself stopped
    or suspended does not blame the others when it wakes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._period_s = _look_period_s(timeout_s)
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


# One link per process group, shared by all Ranks of it so that their rounds stay in step. Weak, because a
# reference to the store would keep its port taken after destroy_process_group().
_links: weakref.WeakKeyDictionary[dist.ProcessGroup, _Link] = weakref.WeakKeyDictionary()


def _open_link(rank: int, world_size: int) -> _Link:
    try:
        store = default_store()
        # Under torchrun the store outlives the group: a group made anew must not read old verdicts.
        generation = store.add(f"shardwise/generation/{rank}", 1)
        prefixed = dist.distributed_c10d.PrefixStore(f"shardwise/{generation}", store)
    except RuntimeError as error:
        raise RankError("open the process group's store", {0: _UNREACHABLE}) from error
    return _Link(cast(_Store, prefixed), rank, world_size, generation)


class _Link:
    """This process's end of the agreements of one process group."""

    def __init__(self, store: _Store, rank: int, world_size: int, generation: int) -> None:
        self._store = store
        self._rank = rank
        self._others = world_size - 1
        self._generation = generation
        self._round = 0
        self._posted = 0  # the last round at which this rank has arrived
        self._ticks = 0
        self._ticked = 0.0
        self._prepared = False
        self._broken = False
        self._unswept: list[str] = []
        # All ranks together poll about 5,000 times a second at most: a fraction of what a TCPStore serves.
        self._longest_pause_s = max(0.005, 0.0002 * world_size)

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
        """Whether all ranks have just raised this, so that agreeing on it again would wait for nobody."""
        return bool(getattr(error, _AGREED, None) == (self._generation, self._round))

    def agree(
        self,
        call: _Call,
        *,
        own: BaseException | None = None,
        payload: bytes = b"",
        decide: Callable[[list[bytes]], bytes] = lambda _: b"",
    ) -> bytes:
        """One round. ``decide`` runs on rank 0 on all payloads and makes the reply, or raises RankError."""
        self._round += 1
        status = self._status(call, own)
        try:
            if self._rank == 0:
                verdict, reply = self._lead(call, status, own, payload, decide)
            elif own is None or isinstance(own, Exception):
                verdict, reply = self._follow(call, status, payload)
            else:  # Ctrl-C or exit: tell the others, don't wait for them nor for rank 0's verdict
                self._publish(_failure(call, {self._rank: _cause(own)}))
                self._post(status)
                self._store.add(self._key("seen"), 1)
                raise own
        except RuntimeError as error:  # only the store raises these
            if own is not None and not isinstance(own, Exception):
                raise own from None
            self._raise_unreachable(call, status, own, error)
        except BaseException as error:
            if error is not own:
                with suppress(RuntimeError):  # we leave; don't let the others wait for us
                    self._publish(_failure(call, {self._rank: _cause(error)}))
            raise
        if own is not None and (verdict.identical or not isinstance(own, Exception)):
            self._raise(own)
        if not verdict.ok:
            self._raise(verdict.error(), own)
        return reply

    # -- rank 0 ------------------------------------------------------------------------------------------

    def _lead(
        self,
        call: _Call,
        own_status: _Status,
        own: BaseException | None,
        payload: bytes,
        decide: Callable[[list[bytes]], bytes],
    ) -> tuple[_Verdict, bytes]:
        verdict, reply = self._await_arrivals(call, own_status, own), b""
        if verdict is None:
            verdict, reply = self._decide(call, payload, decide)
        parts = self._put_parts("reply", reply)
        header = replace(verdict, parts=parts)
        verdict = self._publish(header, b"" if parts else reply)
        names = ["arrived", "verdict", "seen", *(f"reply/{i}" for i in range(parts))]
        self._unswept += [self._key(name) for name in names]
        self._linger(min(_LINGER_S, call.timeout_s / 2))
        return verdict, reply

    def _await_arrivals(self, call: _Call, own_status: _Status, own: BaseException | None) -> _Verdict | None:
        """Wait until all are here (None), or until the round is known to fail."""
        watch = _Watch(call.timeout_s)
        pauses = self._pauses()
        failed_since: float | None = None
        while not self._store.check([self._key("verdict")]):
            arrived, failed = self._arrivals()
            failed += own_status.cause is not None
            if failed:
                failed_since = failed_since or time.monotonic()
                alike = failed == arrived + 1 and (own is None or isinstance(own, Exception))
                waited_s = time.monotonic() - failed_since
                if not alike or arrived == self._others or waited_s > _SAME_FAILURE_GRACE_S:
                    return self._failures(call, own_status)
            elif arrived == self._others:
                return None
            if watch.due():
                idle = watch.look(self._beats_of_absent())
                if idle:
                    return replace(self._failures(call, own_status), missing=idle)
            self.tick(1, _look_period_s(call.timeout_s))
            time.sleep(next(pauses))
        return self._published()[0]

    def _failures(self, call: _Call, own_status: _Status) -> _Verdict:
        statuses = {0: own_status, **{rank: status for rank, (status, _) in self._statuses().items()}}
        causes: dict[int, str] = {}
        for rank, status in statuses.items():
            if status.cause is not None:
                where = "" if status.label == call.label else f" (in '{status.label}')"
                causes[rank] = status.cause + where
        alike = len({status.fingerprint for status in statuses.values()}) == 1
        return replace(_failure(call, causes), identical=alike and len(causes) == self._others + 1)

    def _decide(
        self, call: _Call, payload: bytes, decide: Callable[[list[bytes]], bytes]
    ) -> tuple[_Verdict, bytes]:
        statuses = self._statuses()
        if len(statuses) < self._others:  # the others gave us up while we were stopped, and went on
            return self._published()
        causes = {rank: _disagreement(rank, status, call) for rank, (status, _) in statuses.items()}
        causes = {rank: cause for rank, cause in causes.items() if cause}
        if causes:
            return _failure(call, causes), b""
        payloads = [payload]
        for rank, (status, inline) in sorted(statuses.items()):
            payloads.append(self._get_parts(f"payload/{rank}", status.parts) if status.parts else inline)
        try:
            return _Verdict(ok=True, label=call.label), decide(payloads)
        except RankError as error:
            return _failure(call, error.causes), b""

    def _linger(self, longest_s: float) -> None:
        """Stay until all who arrived have read the verdict: the store may end with this process.

        When all ranks have read it, nobody needs this or an earlier round's keys.
        """
        pauses = self._pauses()
        end = time.monotonic() + longest_s
        while (seen := self._store.add(self._key("seen"), 0)) < self._others:
            if seen >= self._arrivals()[0] or time.monotonic() > end:
                return
            time.sleep(next(pauses))
        for key in self._unswept:
            self._store.delete_key(key)
        self._unswept.clear()

    def _arrivals(self) -> tuple[int, int]:
        failed, arrived = divmod(self._store.add(self._key("arrived"), 0), _FAILED)
        return arrived, failed

    def _prepare(self) -> None:
        """Create the others' keys where they have not: reading a key that does not exist blocks."""
        if not self._prepared:
            for rank in range(1, self._others + 1):
                self._store.compare_set(f"beat/{rank}", b"", b"0 0")
                self._store.compare_set(f"status/{rank}", b"", _pack(_Status(0, "", "")))
            self._prepared = True

    def _beats_of_absent(self) -> dict[int, bytes]:
        self._prepare()
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(1, self._others + 1)])
        return {rank: beat for rank, beat in enumerate(beats, 1) if int(beat.split()[0]) < self._round}

    def _statuses(self) -> dict[int, tuple[_Status, bytes]]:
        """The statuses, with inline payload, of those who have arrived at this round."""
        self._prepare()
        found: dict[int, tuple[_Status, bytes]] = {}
        for first in range(1, self._others + 1, _STATUSES_PER_GET):
            ranks = range(first, min(first + _STATUSES_PER_GET, self._others + 1))
            values = self._store.multi_get([f"status/{rank}" for rank in ranks])
            for rank, packed in zip(ranks, values, strict=True):
                header, inline = packed.split(b"\n", 1)
                status = _Status(**json.loads(header))
                if status.round == self._round:
                    found[rank] = status, inline
        return found

    # -- the other ranks ---------------------------------------------------------------------------------

    def _follow(self, call: _Call, status: _Status, payload: bytes) -> tuple[_Verdict, bytes]:
        parts = self._put_parts(f"payload/{self._rank}", payload)
        self._post(replace(status, parts=parts), b"" if parts else payload)
        watch = _Watch(call.timeout_s)
        pauses = self._pauses()
        while not self._store.check([self._key("verdict")]):
            if watch.due() and watch.look({0: self._beat_of_first()}):
                causes = {} if status.cause is None else {self._rank: status.cause}
                self._publish(_failure(call, causes, missing=(0,)))
            time.sleep(next(pauses))
        verdict, reply = self._published()
        for i in range(parts):  # rank 0 has read them, or never will
            self._store.delete_key(self._key(f"payload/{self._rank}/{i}"))
        self._store.add(self._key("seen"), 1)
        return verdict, reply

    def _post(self, status: _Status, inline: bytes = b"") -> None:
        self._store.set(f"status/{self._rank}", _pack(status, inline))
        self._posted = self._round
        self._beat()
        self._store.add(self._key("arrived"), 1 if status.cause is None else 1 + _FAILED)

    def _beat_of_first(self) -> bytes:
        return self._store.get("beat/0") if self._store.check(["beat/0"]) else b""

    # -- both --------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _status(self, call: _Call, own: BaseException | None) -> _Status:
        if own is None:
            return _Status(self._round, call.kind, call.label)
        full = f"{type(own).__module__}.{type(own).__qualname__}: {_text(own)}"
        fingerprint = hashlib.blake2b(full.encode(errors="replace"), digest_size=16).hexdigest()
        return _Status(self._round, call.kind, call.label, _cause(own), fingerprint)

    def _beat(self) -> None:
        self._store.set(f"beat/{self._rank}", f"{self._posted} {self._ticks}".encode())

    def _publish(self, verdict: _Verdict, inline: bytes = b"") -> _Verdict:
        """Make this the verdict unless there is one; returns the one that holds."""
        packed = self._store.compare_set(self._key("verdict"), b"", _pack(verdict, inline))
        return _Verdict(**json.loads(packed.split(b"\n", 1)[0]))

    def _published(self) -> tuple[_Verdict, bytes]:
        header, inline = self._store.get(self._key("verdict")).split(b"\n", 1)
        verdict = _Verdict(**json.loads(header))
        return verdict, self._get_parts("reply", verdict.parts) if verdict.parts else inline

    def _put_parts(self, name: str, payload: bytes) -> int:
        """Store a payload that is too large to travel inline, in parts; returns how many."""
        if len(payload) <= _INLINE_BYTES:
            return 0
        view = memoryview(payload)
        starts = range(0, len(payload), _PART_BYTES)
        for i, start in enumerate(starts):
            self._store.set(self._key(f"{name}/{i}"), bytes(view[start : start + _PART_BYTES]))
            self.tick(1, _LOOK_PERIOD_S)
        return len(starts)

    def _get_parts(self, name: str, count: int) -> bytes:
        parts = []
        for key in [self._key(f"{name}/{i}") for i in range(count)]:
            if self._store.check([key]):  # else its rank gave us up and took it back: a verdict says so
                parts.append(self._store.get(key))
            self.tick(1, _LOOK_PERIOD_S)
        return b"".join(parts)

    def _pauses(self) -> Iterator[float]:
        pause_s = _FIRST_PAUSE_S
        while True:
            yield pause_s
            pause_s = min(1.5 * pause_s, self._longest_pause_s)

    def _raise_unreachable(
        self, call: _Call, status: _Status, own: BaseException | None, store_error: RuntimeError
    ) -> NoReturn:
        causes = {0: _UNREACHABLE}
        if status.cause is not None:
            causes[self._rank] = status.cause if self._rank else f"{status.cause}; {_UNREACHABLE}"
        self._raise(RankError(call.label, causes), own or store_error)

    def _raise(self, error: BaseException, cause: BaseException | None = None) -> NoReturn:
        setattr(error, _AGREED, (self._generation, self._round))
        if cause is None:
            raise error
        raise error from cause


def _look_period_s(timeout_s: float) -> float:
    return min(_LOOK_PERIOD_S, timeout_s / 4)


def _pack(header: _Status | _Verdict, inline: bytes = b"") -> bytes:
    return json.dumps(asdict(header)).encode() + b"\n" + inline


def _cause(error: BaseException) -> str:
    text = _text(error)
    return _shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, _CAUSE_CHARS)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # reporting must not fail: the others wait for it
        return "(its text can't be made)"


def _shorten(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 20]} … [shortened]"


def _disagreement(rank: int, status: _Status, call: _Call) -> str:
    if (status.kind, status.label) == (call.kind, call.label):
        return ""
    theirs, ours = f"'{status.label}'", f"'{call.label}'"
    if theirs == ours:
        theirs, ours = f"{status.kind}({theirs})", f"{call.kind}({ours})"
    return f"ranks disagree on what they are doing: rank {rank} is in {theirs}, rank 0 in {ours}"


def _ranks_unlike_first(digests: list[bytes]) -> bytes:
    """The ranks whose digest is not rank 0's, as JSON; nothing if there are none."""
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    return json.dumps(different).encode() if different else b""


def _describe(payload: bytes, describe: Callable[[bytes], str] | None) -> str:
    if describe is None:
        return f"{len(payload)} bytes with hash {hashlib.blake2b(payload, digest_size=8).hexdigest()}"
    try:
        return _shorten(describe(payload), _DESCRIPTION_CHARS)
    except Exception as error:  # the difference matters more than its description
        return f"{len(payload)} bytes (describing them failed: {_cause(error)})"


def _raise_different(label: str, ranks: list[int], texts: list[bytes]) -> NoReturn:
    words = [text.decode() for text in texts]
    raise RankError(label, {r: f"differs from rank 0: has {words[r]}; rank 0 has {words[0]}" for r in ranks})
