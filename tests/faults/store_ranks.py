"""SIGKILL of one rank and of all ranks at every request of a save into an object store by two ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.publish import line as head_line
from tests.faults.forks import Scenario
from tests.faults.objects import Fault, Place, fresh_place, injected, proxy_of, use_directly, use_proxy
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import IO, Attempt, Found, Tiny, outcome_of

__all__ = ["store_rank_rows"]

#: Several requests pass while a machine is busy: a rank that waits for one is not dead.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Instant:
    victim: int
    with_peer: bool
    fault: Fault
    place: Place
    looked_at_by: int
    """Ranks that look afterwards."""

    @property
    def label(self) -> str:
        who = "all ranks" if self.with_peer else f"rank {self.victim}"
        return f"{who}: {self.fault.kind} request {self.fault.number}, looked at by {self.looked_at_by}"


class _Anywhere(Tiny):
    """Another number of ranks can resume it, too."""

    def _of_rank(self, step: int) -> list[int]:
        return [0, step, self.line]

    def differences(self, step: int) -> list[str]:
        wrong = super().differences(step)
        return wrong if dist.get_world_size() == 2 else [text for text in wrong if "RNG" not in text]


def store_rank_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    servers = context.servers()
    (before, *_) = context.forks.run(2, lambda: _published(Place(servers[0], "pristine-of-ranks")))
    counted = fresh_place(servers[0])
    counted.put(before)
    requests = context.forks.run(2, lambda: _save(counted, {})[1])
    instants = []
    for victim, with_peer in ((0, False), (1, False), (0, True)):
        faults = [
            Fault(kind, number)
            for number in range(requests[victim])
            for kind in ("SIGKILL before", "SIGKILL after")[: 1 if with_peer else 2]
        ]
        for k, fault in enumerate(context.sample(faults, 1)):
            place = fresh_place(servers[k % len(servers)])
            instants.append(_Instant(victim, with_peer, fault, place, 1 + k // 2 % 2))
    for instant in instants:
        instant.place.put(before)
    ended = context.all([lambda i=instant: _kill(context, i) for instant in instants])
    cases = []
    for world_size in (1, 2):
        some = [(i, e) for i, e in zip(instants, ended, strict=True) if i.looked_at_by == world_size]
        found = context.batches([i.place for i, _ in some], _find, world_size=world_size, size=4)
        for (instant, (heard, problem, hung)), what in zip(some, found, strict=True):
            case = judge(instant.label, agreed(what), heard=heard, problem=problem)
            cases.append(Case(case.place, "wrong", case.heard, case.problem, hung=True) if hung else case)
    yield from rows_of("store: SIGKILL of ranks", cases, time.monotonic() - started)


def _published(place: Place) -> dict[str, bytes]:
    """The objects of a run with step 1. On both ranks."""
    use_directly(place.server)
    run = _Anywhere()
    with sw.Checkpointer(place.url, io=IO) as checkpoints:
        run.set_values(1)
        checkpoints.save(run.state, 1)
    return place.objects()


def _save(place: Place, faults: dict[int, Fault]) -> tuple[Attempt, int]:
    """Resume step 1, and save step 2 with this rank's fault. What it heard, and its number of requests. On both ranks."""
    proxy = proxy_of(place.server)
    use_proxy(proxy)
    run = _Anywhere()
    checkpoints = sw.Checkpointer(place.url, keep_last=1, io=IO)
    report = checkpoints.resume(run.state)
    assert report is not None
    assert report.step == 1
    run.set_values(2)
    dist.barrier()
    with injected(proxy, faults.get(dist.get_rank()), place):
        result = outcome_of(lambda: checkpoints.save(run.state, 2))
        return result, len(proxy.log)


def _kill(context: Context, instant: _Instant) -> Scenario[tuple[list[Attempt], str, bool]]:
    survivor = 1 - instant.victim
    launch: Any = None
    for _ in range(_TRIES):
        launch = context.forks.start(2, _save, instant.place, {instant.victim: instant.fault})
        yield lambda launch=launch: launch.ended([instant.victim])
        if instant.with_peer:
            launch.kill_all()
        yield launch.ended
        if launch.statuses[instant.victim] == -signal.SIGKILL or launch.hung:
            break
    heard: list[Attempt] = []
    problem = ""
    if launch.statuses[instant.victim] != -signal.SIGKILL:
        problem = f"never killed: {launch.output(instant.victim)}"
    elif not instant.with_peer and not launch.has_result(survivor):
        problem = f"rank {survivor} ended otherwise: {launch.output(survivor)}"
    elif not instant.with_peer:
        told: Attempt = launch.result(survivor)[0]
        heard.append(told)
        if not told.is_done and not (told.outcome == "RankError" and told.names(instant.victim)):
            problem = f"rank {survivor} was not told that rank {instant.victim} is gone: {told}"
    if not problem:
        launch.forget()
    return heard, problem, bool(launch.hung)


def _find(place: Place) -> Found:
    """Resume, compare every value, save the next step and sweep. On every rank."""
    use_directly(place.server)
    run = _Anywhere()
    head_line.LEFT_AFTER_S = -60.0
    try:
        with sw.Checkpointer(place.url, io=IO) as checkpoints:
            report = checkpoints.resume(run.state)
            if report is None:
                return Found(None)
            wrong = run.differences(report.step)
            run.set_values(report.step + 1)
            saved = checkpoints.save(run.state, report.step + 1)
    except ShardwiseError as error:
        return Found(None, error=f"{type(error).__name__}: {error}")
    if dist.get_rank() == 0:
        wrong += sw.verify(saved.path).problems
        head = place.head()
        assert head is not None
        left = {name.partition("/")[0] for name in place.names()} - head.names - {"head.json"}
        wrong += [f"left after the sweep: {sorted(left)}"] if left else []
        place.clear()
    return Found(report.step, damaged=dict(report.damaged), wrong=tuple(wrong))
