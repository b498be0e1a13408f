"""The ranks that load or save together, and how they agree on results and failures; :mod:`.protocol` carries it."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist

from shardwise import errors
from shardwise.errors import CheckpointError, RankError
from shardwise.ranks.beats import look_period_s
from shardwise.ranks.messages import pack, unpack
from shardwise.ranks.patience import LIMIT, Watch, watched
from shardwise.ranks.protocol import Agreement, agreement_of
from shardwise.ranks.verdicts import Request, cause_of, shorten, text_of

from ..objects import frozen

__all__ = ["Claim", "Ranks", "different"]

_DESCRIPTION_CHARS = 1_000
T = TypeVar("T")
R = TypeVar("R")


@frozen(kw_only=True)
class Ranks:
    """The ranks that load or save together.

    All ranks must make the same calls in the same order, except `tick`, which any rank may call at any time. A call
    returns on every rank or raises the same `RankError` on every surviving rank. ``timeout_s`` bounds the time *without
    progress* (no arrival, no tick, no running system call on a file), not the time that work takes. One system call
    counts as progress for ten times ``timeout_s`` (:mod:`.patience`). With one rank nothing is sent and exceptions
    pass unchanged.

    The error names a killed or stopped rank after ``timeout_s``. Limit: while a *stopped* process hosts a TCPStore
    (rank 0 without torchrun), store calls of the other ranks block until it is continued or killed.
    """

    rank: int = 0
    world_size: int = 1
    timeout_s: float = 300.0
    channel: str = ""
    """Each channel counts its own rounds. A second thread must agree on another channel."""
    _group: weakref.ref[dist.ProcessGroup] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @classmethod
    def current(cls, *, timeout_s: float = 300.0, channel: str = "") -> Ranks:
        """The ranks of the default process group (any backend), or one rank without a group.

        Keeps no reference to the group or its store: after the group is destroyed, call it again.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(timeout_s=timeout_s, channel=channel)
        group = weakref.ref(cast(dist.ProcessGroup, dist.group.WORLD))
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=timeout_s,
            channel=channel,
            _group=group,
        )

    @contextmanager
    def agree(self, label: str) -> Iterator[Claim]:
        """Run rank-local work; every rank must enter. If it fails on any rank, all surviving ranks raise.

        ``alike`` of the yielded object takes a result that must be the same on all ranks.

        Raises `RankError` naming the failing ranks and their causes, chained from this rank's exception if it has
        one. If all ranks fail with the same type and text, each raises its own exception instead, however late one of
        them is: while only failures are known, the ranks wait for the rest. KeyboardInterrupt and SystemExit are reported
        to the other ranks and raised unchanged.
        """
        own: BaseException | None = None
        claim = Claim()
        try:
            with self.patience():
                yield claim
        except BaseException as error:
            if self.world_size == 1 or self._agreement().is_agreed(error):
                raise
            own = error
        if self.world_size == 1:
            return
        request = Request("agree", label, self.timeout_s)
        different = self._agreement().agree(
            request, own=own, payload=claim.digest(), decide=_ranks_unlike_first
        )
        if different:
            ranks: list[int] = json.loads(different)
            words = claim.words().encode(errors="backslashreplace")
            self._agreement().agree(request, payload=words, decide=partial(_raise_different, label, ranks))

    def combine(self, label: str, work: Callable[[], T], decide: Callable[[list[T]], R]) -> R:
        """Run rank-local work; rank 0 decides on all results, in rank order, and every rank gets its reply.

        One round. Results and the reply must be values that :func:`.messages.pack` takes. Failures of ``work`` and,
        on rank 0, of ``decide`` are handled as in `agree`.
        """
        if self.world_size == 1:
            return decide([work()])

        def of_all(payloads: list[bytes]) -> R:
            return decide([cast(T, unpack(payload)) for payload in payloads])

        return cast(R, unpack(self._round(label, lambda: pack(work()), _decided(label, of_all))))

    def reduce(
        self, label: str, work: Callable[[], T], merge: Callable[[Sequence[T]], T], decide: Callable[[T], R]
    ) -> R:
        """Run rank-local work; results are merged on their way to rank 0, which decides, and every rank gets its reply.

        One round. No rank receives more than 17 results (:mod:`.tree`), rank 0 included. ``merge`` gets results, or merged
        ones, of any ranks in any order; it must not depend on that. Otherwise as `combine`; a failure of ``merge`` is one of
        the rank that merges.
        """
        if self.world_size == 1:
            return decide(merge([work()]))

        def merged(payloads: Sequence[bytes]) -> T:
            return merge([cast(T, unpack(payload)) for payload in payloads])

        return cast(
            R,
            unpack(
                self._round(
                    label,
                    lambda: pack(work()),
                    _decided(label, lambda p: decide(merged(p))),
                    lambda p: pack(merged(p)),
                )
            ),
        )

    def gather(self, label: str, value: T) -> list[T] | None:
        """Bring every rank's value to rank 0, in rank order; the other ranks get None. One round, as in `combine`."""
        gathered: list[T] = []
        self.combine(label, lambda: value, gathered.extend)
        return gathered if self.rank == 0 else None

    def on_first(self, label: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on every rank; every rank must call it. One round.

        The result must be a value that :func:`.messages.pack` takes. A `CheckpointError` of ``work`` is raised with
        its own type and text on every rank, because it holds for all; any other error becomes a `RankError`, as in
        `agree`.
        """
        if self.world_size == 1:
            return work()
        refusal: CheckpointError | None = None

        def first() -> bytes:
            nonlocal refusal
            if self.rank != 0:
                return b""
            try:
                return b"\n" + pack(work())
            except CheckpointError as error:
                refusal = error
                return f"{type(error).__name__}\n{text_of(error)}".encode(errors="replace")

        kind, content = self._round(label, first, lambda payloads: payloads[0]).split(b"\n", 1)
        if kind:
            raise refusal or getattr(errors, kind.decode())(content.decode())
        return cast(T, unpack(content))

    def _round(
        self,
        label: str,
        work: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        merge: Callable[[list[bytes]], bytes] | None = None,
    ) -> bytes:
        """Send every rank's bytes to rank 0, merged on the way or not, and its reply to every rank. For two ranks or more."""
        own: BaseException | None = None
        payload = b""
        try:
            with self.patience():
                payload = work()
        except BaseException as error:
            if self._agreement().is_agreed(error):
                raise
            own = error
        kind = "combine" if merge is None else "reduce"
        return self._agreement().agree(
            Request(kind, label, self.timeout_s), own=own, payload=payload, decide=decide, merge=merge
        )

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Count system calls through :func:`.patience.patiently` in the block as progress. Rank-local.

        `agree`, `combine` and `on_first` do this for their work.
        """
        if self.world_size == 1:
            yield
            return
        watch = Watch(self.tick, look_period_s(self.timeout_s), LIMIT * self.timeout_s)
        try:
            with watched(watch):
                yield
        finally:
            watch.end()

    def is_settled(self, error: BaseException) -> bool:
        """Whether an agreement has just failed with this error for all ranks. False where this rank did not learn the outcome: others
        may go on as after a success. Rank-local."""
        return self.world_size == 1 or self._agreement().is_settled(error)

    def tick(self, amount: int = 1) -> None:
        """Tell the other ranks that this rank makes progress. Call it for each block read or written.

        Costs about a microsecond; writes to the store about once a second. Does not fail on a broken store: the next
        agreement reports that.
        """
        if self.world_size > 1:
            self._agreement().tick(amount, look_period_s(self.timeout_s))

    def _agreement(self) -> Agreement:
        group = self._group() if self._group is not None else None
        if group is None or group is not dist.group.WORLD:
            raise CheckpointError(
                "the process group was destroyed while ranks still had to agree; call close() of a Checkpointer (or "
                "leave its block) before destroy_process_group()"
            )
        return agreement_of(group, self.rank, self.world_size, self.channel)


class Claim:
    """A result of one rank that must be the same on every rank; see `Ranks.agree`."""

    def __init__(self) -> None:
        self._payload = b""
        self._describe: Callable[[], str] | None = None

    def alike(self, value: Any, describe: Callable[[], str] | None = None) -> None:
        """Require the same value on every rank; otherwise all raise `RankError` naming the ranks unlike rank 0.

        The value is one that :func:`.messages.pack` takes. Only hashes travel. ``describe`` says in words what this rank
        has, for that error. It is called on all ranks, and only if they differ.
        """
        self._payload, self._describe = pack(value), describe

    def digest(self) -> bytes:
        """The hash that travels; empty if nothing was claimed."""
        return hashlib.blake2b(self._payload, digest_size=32).digest() if self._payload else b""

    def words(self) -> str:
        """This rank's payload in the words of the error."""
        return _describe(self._payload, self._describe)


def _decided(label: str, decide: Callable[[list[bytes]], Any]) -> Callable[[list[bytes]], bytes]:
    """``decide`` of payloads, with its reply as bytes and its failure as rank 0's."""

    def decided(payloads: list[bytes]) -> bytes:
        try:
            return pack(decide(payloads))
        except RankError:  # it names ranks and causes
            raise
        except Exception as error:
            raise RankError(label, {0: cause_of(error)}) from error

    return decided


def _ranks_unlike_first(digests: list[bytes]) -> bytes:
    """The ranks whose digest differs from rank 0's, as JSON; empty if there are none."""
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    return json.dumps(different).encode() if different else b""


def _describe(payload: bytes, describe: Callable[[], str] | None) -> str:
    if describe is None:
        return f"a value with hash {hashlib.blake2b(payload, digest_size=8).hexdigest()}"
    try:
        return shorten(describe(), _DESCRIPTION_CHARS)
    except Exception as error:  # the difference matters more than its description
        return f"a value that can't be described: {cause_of(error)}"


def _raise_different(label: str, ranks: list[int], texts: list[bytes]) -> NoReturn:
    raise different(label, ranks, [text.decode() for text in texts])


def different(label: str, ranks: Iterable[int], words: Sequence[str]) -> RankError:
    """The error for ``ranks`` that have something else than rank 0; ``words`` say what each rank has."""
    return RankError(label, {r: f"differs from rank 0: has {words[r]}; rank 0 has {words[0]}" for r in ranks})
