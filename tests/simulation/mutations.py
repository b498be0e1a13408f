"""Errors in the production code, each of which a schedule must find: one kind of message, fsync, rename or check that is dropped.

Messages and calls on files are the kinds that schedules themselves show. Checks are named here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint import checkpointer
from shardwise.checkpoint import run as run_steps
from shardwise.checkpoint import sites as local_parts
from shardwise.errors import IntegrityError
from shardwise.format.manifest import absent_places, files_by_place, parse_manifest, read_manifest
from shardwise.publish import hosts as copies
from shardwise.publish import line, lock
from shardwise.publish import places as publish
from shardwise.publish import sites as parts
from shardwise.ranks import protocol, ranks
from shardwise.ranks import protocol as beats
from shardwise.ranks import stop as leases
from shardwise.ranks import stop as stops
from shardwise.ranks.protocol import Request, Status
from tests.simulation.installed import Stage
from tests.simulation.schedules import KINDS, run_seed

__all__ = ["HARMLESS", "Mutation", "applied", "found_at", "mutations"]

#: Whose loss is no error, each with why.
HARMLESS = {
    "drop: ftruncate local/run/.tmp-*-view/state.json": "every host fetches all of it, which gives the file its size",
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One thing that the production code no longer does."""

    name: str
    dropped: str | None = None
    """The label of a message or call."""
    where: Any = None
    attribute: str = ""
    instead: Any = None


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _never(self: Any, is_asked: bool) -> bool:
    return False


def _none_idle(self: Any, found: Any) -> tuple[int, ...]:
    return ()


def _all_there(statuses: Mapping[int, tuple[Status, bytes]], below: Sequence[int], request: Request) -> bool:
    return all(s.cause is None and _same(s, request) for s, _ in statuses.values())


def _all_well(statuses: Mapping[int, tuple[Status, bytes]], below: Sequence[int], request: Request) -> bool:
    return len(statuses) == len(below) and all(_same(s, request) for s, _ in statuses.values())


def _all_in_it(statuses: Mapping[int, tuple[Status, bytes]], below: Sequence[int], request: Request) -> bool:
    return len(statuses) == len(below) and all(s.cause is None for s, _ in statuses.values())


def _same(status: Status, request: Request) -> bool:
    return (status.kind, status.label) == (request.kind, request.label)


def _without_ticks(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an agreement in which this rank says nothing of its progress."""

    def silent(self: Any, *arguments: Any) -> Any:
        self.tick = _nothing  # of this object alone, in front of the method
        try:
            return method(self, *arguments)
        finally:
            del self.tick

    return silent


def _in_one_phase(self: Any, manifest: Callable[[], Any], current: Any) -> None:
    text = current.on_first("make the manifest", lambda: manifest().to_text().encode())
    with current.agree("publish the parts"):
        if self._sites.leads(current.rank):
            self._seal(text)
            self._appear()


def _without_end(self: Any, manifest: Callable[[], Any], current: Any) -> None:
    text = current.on_first("make the manifest", lambda: manifest().to_text().encode())
    with current.agree("seal the parts"):
        if self._sites.leads(current.rank):
            self._seal(text)
    if self._sites.leads(current.rank):
        self._appear()


def _unchecked_parts(path: str, step: int, tick: Any, *, heads: bool = True) -> tuple[Any, list[int]]:
    manifest = read_manifest(path)
    absent = absent_places(path, manifest)
    return manifest, [n for n in range(max(1, len(manifest.places))) if n not in absent]


def _lost(held: Any, damage: str, at: Any) -> None:
    raise IntegrityError(damage or f"{held.path}: this step's files are missing on a host")


_bring = copies._bring


def _brings_anything(*unit: Any) -> bool:
    return _bring(*unit) or True


def _of_no_other_host(root: str) -> list[Any]:
    return [replace(part, places=[]) for part in publish.sealed_parts(root)]


def _new_id(root: str) -> str:
    return parts.secrets.token_hex(8)


def _sealed_without_name(self: Any, text: bytes) -> None:
    manifest = parse_manifest(text, self.final)
    names = files_by_place(manifest)[self._sites.own]
    publish.seal(self._temporary, text, {name: manifest.files[name] for name in names})
    self._is_sealed = len(self.places) > 1


def _sweep_all(root: str, sites: Any, current: Any) -> None:
    sites.on_each("look for parts", lambda: publish.sweep_leftovers(root), current)


#: By name: where the check is, its name there, and what stands in its place.
_CHECKS: tuple[tuple[str, Any, str, Any], ...] = (
    ("whether a rank makes progress", beats.Watch, "look", _none_idle),
    ("when to look for progress", beats.Watch, "due", lambda self: False),
    ("whether ranks are in the same call", protocol, "disagreement", lambda *_: ""),
    ("whether all failed alike", protocol.Agreement, "_failures", None),
    ("whether an error was agreed on", protocol.Agreement, "is_agreed", lambda self, error: False),
    ("whether all ranks below are there", protocol, "are_mergeable", _all_there),
    ("whether all ranks below are well", protocol, "are_mergeable", _all_well),
    ("whether all ranks below are in the same call", protocol, "are_mergeable", _all_in_it),
    (
        "that a rank is alive while it waits for those below",
        protocol.Agreement,
        "_await_verdict",
        _without_ticks(protocol.Agreement._await_verdict),
    ),
    (
        "that rank 0 is alive while it waits",
        protocol.Agreement,
        "_await_arrivals",
        _without_ticks(protocol.Agreement._await_arrivals),
    ),
    ("that a rank is alive while it works", ranks.Ranks, "tick", _nothing),
    ("whether ranks stop at one call", stops, "_first", lambda found: [max(f[2] for f in found), ""]),
    ("whether the lease is used up", leases.Lease, "covers", lambda self, calls, turns: False),
    ("whether the lease is the last one", leases.StopPoint, "_lend", _never),
    ("whether ranks claim the same", ranks, "_ranks_unlike_first", lambda digests: b""),
    ("whether the lock is held, before the step appears", publish, "check_held", _nothing),
    ("whether the lock is held, before a save", line, "check_held", _nothing),
    ("whether another run has the lock", lock, "lock_file", _nothing),
    ("whether the lock's file has its name", lock.DirectoryLock, "_has_its_name", lambda self: True),
    ("whether all files are there", publish, "check_written", _nothing),
    ("whether a step is newer than those there", run_steps.RunSteps, "name_of_next", None),
    ("whether a step is whole, on resume", checkpointer, "quick_check", _nothing),
    ("whether a step is whole, for retention", run_steps, "_is_whole", lambda *_: True),
    ("whether all parts are sealed before one appears", parts.PartTarget, "commit", _in_one_phase),
    ("whether all parts have appeared", parts.PartTarget, "commit", _without_end),
    ("whether a part is whole, on resume", local_parts, "check_parts", _unchecked_parts),
    ("whether every part of a step is there", local_parts.Found, "lost", property(lambda self: [])),
    ("whether a part is whole, for retention", run_steps, "_has_own_part", lambda *_: True),
    ("whether bytes of another host are right", copies, "_bring", _brings_anything),
    ("whether bytes of another host are right when read again", copies, "_ATTEMPTS", 1),
    ("whether a sealed part is of a published step", checkpointer, "settle_parts", _sweep_all),
    ("whether other parts may have appeared, after a failure", ranks.Ranks, "is_settled", lambda *_: True),
    ("whether a host that is away has the part", local_parts, "_refuse_lost", _lost),
    ("whether another host may have published its part", parts, "sealed_parts", _of_no_other_host),
    ("whether a directory has an id", parts, "id_of_place", _new_id),
    ("whether newer steps are there, after a resume", run_steps.RunSteps, "go_on_from", lambda *_: []),
    ("whether steps were lost", run_steps.RunSteps, "raise_if_lost", _nothing),
    ("whether killed saves left something", publish, "sweep_leftovers", lambda root: []),
    ("whether killed saves left something, on a host", parts, "sweep_leftovers", lambda *_: []),
    ("whether a sealed part has its name on the disk", parts.PartTarget, "_seal", _sealed_without_name),
    ("whether a newer step has made sealed parts useless", checkpointer, "delete_sealed", _nothing),
    ("whether a directory of links is deleted", local_parts, "remove_ours", _nothing),
)


#: Where only schedules of hosts with directories of their own come.
_ONLY_LOCAL = (local_parts, local_parts.Found, parts, parts.PartTarget, copies)


def _no_failures(self: Any, request: Any, own_status: Any) -> Any:
    return protocol.failure(request, {})


def _any_name(self: Any, step: int, *, has_begun: bool) -> str:
    return str(self._line.fresh_name(step))


_INSTEAD = {"_failures": _no_failures, "name_of_next": _any_name}


def mutations(labels: set[str]) -> list[Mutation]:
    """All mutations: of the kinds of messages and calls that schedules showed, and of the checks above."""
    harmless = ("get ", "add nothing", "open ")
    dropped = [label for label in sorted(labels) if not label.startswith(harmless)]
    found = [Mutation(f"drop: {label}", dropped=label) for label in dropped]
    for name, where, attribute, instead in _CHECKS:
        replacement = _INSTEAD[attribute] if instead is None else instead
        found.append(Mutation(f"no check: {name}", None, where, attribute, replacement))
    return found


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The production code with the error, for a mutation of a check."""
    if mutation.where is None:
        yield
        return
    before = getattr(mutation.where, mutation.attribute)
    setattr(mutation.where, mutation.attribute, mutation.instead)
    try:
        yield
    finally:
        setattr(mutation.where, mutation.attribute, before)


def _shares(mutation: Mutation) -> Mapping[str, int]:
    """Of so many schedules one is of this kind, for the kinds that make what is dropped: each kind of run has a directory of its own name."""
    of_kinds = {"home/run": "run", "local/run": "local", "another host": "local"}
    names = [name for name in of_kinds if name in (mutation.dropped or "")]
    if names or mutation.where in _ONLY_LOCAL:
        return {of_kinds[names[0]] if names else "local": 1}
    return KINDS


def found_at(on: Stage, mutation: Mutation, schedules: int) -> tuple[str, int, str] | None:
    """The kind and seed of the first schedule that finds a mutation, and what it says; None if none of so many does."""
    with applied(mutation):
        for seed in range(schedules):
            for kind, share in _shares(mutation).items():
                if seed % share == 0:
                    found = run_seed(on, seed // share, kind, dropped=mutation.dropped)
                    if found.problems:
                        return kind, seed // share, found.problems[0]
    return None
