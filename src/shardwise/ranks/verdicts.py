"""What ranks tell each other in a round: how each one arrived, and the verdict for all. :mod:`.protocol` carries them.

Failures travel in words, cut to a size that one value of the store can hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, field, fields

from shardwise.errors import RankError

from ..objects import frozen

__all__ = [
    "Request",
    "Status",
    "Verdict",
    "cause_of",
    "disagreement",
    "failure",
    "pack",
    "shorten",
    "status_of",
    "text_of",
    "unpacked_status",
    "unpacked_verdict",
]

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
