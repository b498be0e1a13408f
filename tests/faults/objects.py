"""Small runs in an object store, the faults of its requests, and what must be there afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.format.header import HEAD_NAME, Head, parse_head, stored_step
from shardwise.publish import line as head_line
from shardwise.publish import write as in_store
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server, use_store

__all__ = [
    "KINDS",
    "Fault",
    "Kind",
    "Place",
    "Remembered",
    "digest_of",
    "fresh_place",
    "injected",
    "line_problems",
    "proxy_of",
    "small_state",
    "use_directly",
    "use_proxy",
]

#: A store that is away for ever ends a request after half a second.
_OPTIONS = {
    "retry_config": {
        "max_retries": 2,
        "backoff": {
            "base": 2,
            "init_backoff": timedelta(milliseconds=5),
            "max_backoff": timedelta(milliseconds=20),
        },
        "retry_timeout": timedelta(seconds=10),
    },
    "client_options": {"timeout": timedelta(seconds=20)},
}
_NOTHING_LISTED = b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>'


def small_state(seed: int) -> sw.TrainState:
    """A model and AdamW after a step, whose values say which seed they are of.

    The values come from a generator of their own: a resume on another thread sets torch's.
    """
    model, generator = nn.Linear(3, 2), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of a server's bucket."""

    server: S3Server
    key: str

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.key}"

    def put(self, objects: Mapping[str, bytes]) -> None:
        for name, content in objects.items():
            self.server.put(f"{self.key}/{name}", content)

    def names(self) -> list[str]:
        """Of all objects, below the prefix."""
        return [key.removeprefix(f"{self.key}/") for key in self.server.keys(f"{self.key}/")]

    def objects(self) -> dict[str, bytes]:
        return {name: self.server.call("GET", f"/{BUCKET}/{self.key}/{name}") for name in self.names()}

    def head(self) -> Head | None:
        if HEAD_NAME not in self.names():
            return None
        return parse_head(self.server.call("GET", f"/{BUCKET}/{self.key}/{HEAD_NAME}"), self.url)

    def clear(self) -> None:
        self.server.clear(self.key)


def fresh_place(server: S3Server) -> Place:
    return Place(server, f"run-{os.urandom(8).hex()}")


def use_directly(server: S3Server) -> None:
    """Let this process ask the server itself."""
    use_store(f"http://127.0.0.1:{server.port}", **_OPTIONS)


# ------------------------------------------------------------------------------------------------ faults


@dataclass(frozen=True, slots=True)
class Kind:
    """A fault of one request."""

    name: str
    do: Callable[[], Do]
    takes: Callable[[Asked], bool] = lambda asked: True
    """The requests that can have it."""
    then: Do | None = None
    """What becomes of all later requests."""
    is_lie: bool = False
    """The store says what is not so: a step whose bytes it spoils counts as damaged."""


def _has_body(asked: Asked) -> bool:
    return asked.method == "GET"


def _is_listing(asked: Asked) -> bool:
    return asked.method == "GET" and "list-type" in asked.path


def _is_payload(asked: Asked) -> bool:
    return asked.method == "GET" and "/step" in asked.path and not _is_listing(asked)


def _die(body: bytes) -> bytes:
    """SIGKILL of this process, whose proxy is one of its threads: so no other request slips in."""
    os.kill(os.getpid(), signal.SIGKILL)
    return body


KINDS = {
    kind.name: kind
    for kind in (
        Kind("503 once", lambda: Do(status=503)),
        Kind("503 for ever", lambda: Do(status=503), then=Do(status=503)),
        Kind("403", lambda: Do(status=403)),
        Kind("expired token", lambda: Do(status=400), then=Do(status=400)),
        Kind("lost reply", lambda: Do(lose_reply=True)),
        Kind("lost reply, then away", lambda: Do(lose_reply=True), then=Do(status=503)),
        Kind("cut after 1 byte", lambda: Do(cut_after=1), _has_body),
        Kind("cut in the middle", lambda: Do(cut_after=300), _has_body),
        Kind(
            "truncated, with its length",
            lambda: Do(change=lambda body: body[: len(body) // 2]),
            _has_body,
            is_lie=True,
        ),
        Kind("late listing", lambda: Do(change=lambda body: _NOTHING_LISTED), _is_listing),
        Kind("changed underneath", Do, _is_payload, is_lie=True),
        Kind("SIGKILL before", lambda: Do(before=lambda: _die(b"") and None)),
        Kind("SIGKILL after", lambda: Do(change=_die)),
    )
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, at the request with this number among those that can have it."""

    kind: str
    number: int


@contextmanager
def injected(proxy: Proxy, fault: Fault | None, place: Place) -> Iterator[list[str]]:
    """In this block, the fault happens. Gives the requests that it hit."""
    hit: list[str] = []
    seen = 0
    lock = threading.Lock()

    def decide(asked: Asked) -> Do | None:
        nonlocal seen
        if fault is None:
            return None
        kind = KINDS[fault.kind]
        with lock:
            if hit:
                return kind.then
            if not kind.takes(asked):
                return None
            seen += 1
            if seen <= fault.number:
                return None
            hit.append(f"{asked.method} {asked.path.partition('?')[0].rpartition('/')[2]}")
        if kind.name == "changed underneath":
            key = asked.path.partition("?")[0].removeprefix(f"/{BUCKET}/")
            content = place.server.call("GET", f"/{BUCKET}/{key}")
            return Do(
                before=lambda: place.server.put(key, content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
            )
        return kind.do()

    proxy.reset(decide)
    try:
        yield hit
    finally:
        proxy.reset()


# ------------------------------------------------------------------------------------------- afterwards


@dataclass(frozen=True, slots=True)
class Remembered:
    """What may be in a run: the digest of every seed, and the seeds by name of a step's directory, else by step."""

    digests: Mapping[int, str]
    by_name: Mapping[str, int]
    by_step: Mapping[int, tuple[int, ...]]

    def allows(self, name: str, step: int, digest: str) -> bool:
        seeds = (self.by_name[name],) if name in self.by_name else self.by_step.get(step, ())
        return any(self.digests[seed] == digest for seed in seeds)


def line_problems(
    place: Place,
    known: Remembered,
    next_seed: int,
    *,
    spoiled: frozenset[str] = frozenset(),
    saves_next: bool = True,
) -> tuple[int | None, list[str]]:
    """The newest step that the head names, and what is wrong with the line: looked at by a fresh Checkpointer, on a store without faults.

    ``spoiled``: names of directories whose bytes are damaged.
    """
    use_directly(place.server)
    head = place.head()
    steps = head.steps if head is not None else {}
    named = head.names if head is not None else frozenset()
    wrong = [f"{n} is there" for n in _folders(place) if stored_step(n) is None and not _is_ours(n)]
    good = {step: name for step, name in steps.items() if name not in spoiled}
    newest = max(good, default=None)
    for step, name in good.items():
        if step == newest and saves_next:
            continue  # it is resumed
        found, text = digest_of(f"{place.url}/{name}")
        if text:
            wrong.append(f"step {step} of the head: {text}")
        elif not known.allows(name, step, found):
            wrong.append(f"step {step} of the head is not what was saved")
    if not saves_next:
        return newest, wrong
    wrong += _resume_and_save(place, known, newest, next_seed, spoiled, bool(named))
    return newest, wrong


def _resume_and_save(
    place: Place,
    known: Remembered,
    newest: int | None,
    next_seed: int,
    spoiled: frozenset[str],
    was_ever: bool,
) -> list[str]:
    wrong = []
    before = place.head()
    try:
        with sw.Checkpointer(place.url) as checkpoints:
            report = checkpoints.resume(small_state(99))
            if (None if report is None else report.step) != newest:
                wrong.append(f"the head's newest step is {newest}, a resume found {report}")
            if report is not None:
                assert before is not None
                if not known.allows(before.steps[report.step], report.step, report.digest):
                    wrong.append(f"step {report.step} was resumed with other values")
                if any(before.steps[step] not in spoiled for step in report.damaged):
                    wrong.append(f"intact steps count as damaged: {report.damaged}")
            step = 1 if report is None else report.step + 1
            head_line.LEFT_AFTER_S = -60.0
            saved = checkpoints.save(small_state(next_seed), step)
    except ShardwiseError as error:
        if spoiled and newest is None:
            return wrong  # its only step is damaged
        return [*wrong, f"fresh: {type(error).__name__}: {error}"]
    finally:
        head_line.LEFT_AFTER_S = 24 * 3600.0
    found, text = digest_of(saved.path)
    if found != known.digests[next_seed]:
        wrong.append(f"the step saved next: {text or 'other values'}")
    after = place.head()
    assert after is not None
    left = set(_folders(place)) - after.names - {HEAD_NAME}
    if left:
        wrong.append(f"left after the sweep: {sorted(left)}")
    if set(after.steps) != {s for s in (before.steps if before else ()) if s < step} - _gone(
        before, after
    ) | {step}:
        wrong.append(f"steps were {before and sorted(before.steps)}, and are {sorted(after.steps)}")
    return wrong


def _gone(before: Head | None, after: Head) -> set[int]:
    """Steps that the resume set aside."""
    aside = {one.name for one in after.aside}
    return {step for step, name in before.steps.items() if name in aside} if before else set()


def _folders(place: Place) -> list[str]:
    """The first part of all names."""
    return sorted({name.partition("/")[0] for name in place.names()})


def _is_ours(name: str) -> bool:
    return name == HEAD_NAME or name.startswith(in_store.PROBE)


def digest_of(url: str) -> tuple[str, str]:
    """The digest of a checkpoint, or why it can't be restored."""
    try:
        return sw.restore(small_state(99), url).digest, ""
    except ShardwiseError as error:
        return "", f"{type(error).__name__}: {error}"


_proxies: dict[int, Proxy] = {}


def proxy_of(server: S3Server) -> Proxy:
    """This process's own proxy in front of a server."""
    if server.port not in _proxies:
        _proxies[server.port] = Proxy(server.port).__enter__()
    return _proxies[server.port]


def use_proxy(proxy: Proxy) -> None:
    """Let this process ask through it."""
    use_store(proxy.endpoint, **_OPTIONS)
