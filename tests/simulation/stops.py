"""Schedules of a run that is asked to stop: each rank looks after each step, and all must stop at one call, or learn why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import RankError
from shardwise.ranks.ranks import Ranks
from shardwise.ranks.stop import PreemptionPolicy, Stops
from tests.simulation.agreements import TIMEOUT_S, born, limit_s
from tests.simulation.store import Server
from tests.simulation.world import Killed, Process, World

__all__ = ["stop_problems"]

FAULTS = ("dies", "stops", "stops for long", "is cut off", "the store dies")
_DEADLINE_S = 100.0
#: A lease has at most 8 calls, and is lent at most 4 calls before it begins.
_MOST_CALLS_LATE = 13


@dataclass(slots=True)
class _Loop:
    """What all ranks do, who is asked to stop, and what goes wrong."""

    world_size: int
    steps: list[int]
    pause_s: float
    asked: dict[int, int]
    """At which call of its own a rank is asked."""
    fault: str | None
    victim: int
    stray: int = -1
    """A rank whose steps are others."""
    first_asked_s: float | None = None
    first_call_then: int = 0
    """Calls of rank 0 when the first rank was asked."""
    known_call: int | None = None
    """Calls of rank 0 when it could know: it was asked itself, or another rank's word was in the store."""
    calls: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """``stopped`` with call and step, ``end``, ``error`` with the ranks it names, ``unreachable``."""

    def is_known(self) -> None:
        """Rank 0 can know from now on that a rank was asked."""
        if self.known_call is None:
            self.known_call = max(self.calls.values(), default=0)


class _Told(dict[str, bytes]):
    """The store's values. Notes when the first rank has told that it was asked."""

    def __init__(self, values: dict[str, bytes], loop: _Loop) -> None:
        super().__init__(values)
        self._loop = loop

    def __setitem__(self, key: str, value: bytes) -> None:
        if key.endswith("/asked"):
            self._loop.is_known()
        super().__setitem__(key, value)


def stop_problems(world: World, server: Server) -> list[str]:
    """Run one schedule of a stop; what was wrong with it."""
    draw = world.draw
    size = draw.choice((2, 2, 3, 4))
    steps = [step for step in range(draw.randrange(15, 40)) for _ in range(draw.choice((1, 1, 1, 4)))]
    asks = draw.sample(range(size), draw.choice((0, 1, 1, 1, min(2, size), size)))
    loop = _Loop(
        world_size=size,
        steps=steps,
        pause_s=draw.choice(
            (0.001, 0.02, 0.1, 0.5)
        ),  # no collective keeps ranks together here: they drift apart
        asked={rank: draw.randrange(len(steps)) for rank in asks},
        fault=draw.choice(FAULTS) if draw.random() < 0.5 else None,
        victim=draw.randrange(size),
        stray=draw.randrange(size) if draw.random() < 0.1 else -1,
    )
    world.note(f"{loop}")
    server.data = _Told(server.data, loop)
    processes = [born(world, server, rank, size) for rank in range(size)]
    server.duplicates = 0.3 if draw.random() < 0.2 else 0.0
    for process in processes:
        process.main = world.start(process, lambda p=process: _main(world, loop, p))  # type: ignore[misc]
    _plan_fault(world, loop, processes, server)
    world.run(limit_s=60.0 * loop.pause_s + len(steps) * (2 * loop.pause_s + 4.0) + 12 * limit_s(world))
    problems = list(world.problems)
    for process in processes:
        assert process.main is not None
        if not process.is_dead and not process.main.has_ended:
            problems.append(f"hang: rank {process.rank} still waits at {world.now:.1f} s")
    return problems + _judged(loop, processes)


def _plan_fault(world: World, loop: _Loop, processes: list[Process], server: Server) -> None:
    victim, draw = processes[loop.victim], world.draw
    at = draw.randrange(1, 4 * len(loop.steps))
    if loop.fault == "dies":
        victim.dies_at = at
    elif loop.fault in ("stops", "stops for long"):
        long = loop.fault.endswith("long")
        victim.pauses_at = at
        victim.pause_s = TIMEOUT_S * (draw.uniform(1.1, 2.5) if long else draw.uniform(0.05, 0.8))
    elif loop.fault == "is cut off":
        world.at(draw.random() * 5.0, lambda: victim.cut_off(TIMEOUT_S * draw.uniform(0.1, 2.0)))
    elif loop.fault == "the store dies":
        world.at(draw.random() * 5.0, server.die)


def _main(world: World, loop: _Loop, process: Process) -> None:
    rank, ranks = process.rank, Ranks.current(timeout_s=TIMEOUT_S)
    stops = Stops(PreemptionPolicy(stop_on=(), deadline_s=_DEADLINE_S), ranks)
    for call, step in enumerate(loop.steps):
        world.operation(loop.pause_s * world.draw.random())
        world.progressed()
        loop.calls[rank] = call
        if loop.asked.get(rank) == call:
            stops.request()
            if rank == 0:
                loop.is_known()
            if loop.first_asked_s is None:
                loop.first_asked_s, loop.first_call_then = world.now, max(loop.calls.values())
        shown = step + 1000 if rank == loop.stray and call > 4 else step
        try:
            has_stopped = stops.should_stop(shown, ranks)
        except Killed:
            raise
        except RankError as error:
            _judge_wait(world, process)
            if not error.causes and not error.missing:
                world.problems.append(f"nameless: rank {rank} got an error that names no rank: {error}")
            is_lost = any("unreachable" in cause for cause in error.causes.values())
            loop.ended[rank] = ("unreachable" if is_lost else "error", (*error.causes, *error.missing))
            return
        _judge_wait(world, process)
        if has_stopped:
            loop.ended[rank] = "stopped", (call, shown)
            if loop.first_asked_s is not None and loop.asked.get(rank) is not None:
                _judge_time(world, loop, rank, stops)
            return
    loop.ended[rank] = "end", None


def _judge_wait(world: World, process: Process) -> None:
    waited_s = world.now - world.last_progress
    if waited_s > limit_s(world):
        world.problems.append(f"late: rank {process.rank} waited {waited_s:.2f} s without progress")
    world.progressed()


def _judge_time(world: World, loop: _Loop, rank: int, stops: Stops) -> None:
    """A rank that was asked knows how much time is left, however long the others took to come to the call."""
    left_s = stops.left_s()
    assert left_s is not None
    assert loop.first_asked_s is not None
    true_s = loop.first_asked_s + _DEADLINE_S - world.now
    if loop.asked[rank] >= 0 and len(loop.asked) == 1 and abs(left_s - true_s) > 2.0 + loop.pause_s:
        world.problems.append(f"wrong time: rank {rank} believes in {left_s:.1f} s, {true_s:.1f} are left")


def _judged(loop: _Loop, processes: list[Process]) -> list[str]:
    problems = []
    kinds = {kind for kind, _ in loop.ended.values()}
    stopped = {rank: place for rank, (kind, place) in loop.ended.items() if kind == "stopped"}
    if len(set(stopped.values())) > 1:
        problems.append(f"disagree: ranks stopped at {stopped}")
    if stopped and kinds - {"stopped", "unreachable"}:
        problems.append(f"disagree: {loop.ended}")
    faulty = {loop.victim} if loop.fault else set()
    faulty |= {p.rank for p in processes if p.is_dead} | ({loop.stray} - {-1})
    if loop.stray < 0:  # else rank 0 may be the stray one, and others are named
        left = {rank for rank, (kind, _) in loop.ended.items() if kind != "stopped"}
        for rank, (kind, named) in loop.ended.items():
            if kind == "error" and set(named) - faulty - (left - {rank}):
                problems.append(f"wrong rank: rank {rank} was told that ranks {named} failed")
    if stopped:
        call, _ = next(iter(stopped.values()))
        if loop.first_asked_s is None:
            problems.append(f"false alarm: no rank was asked to stop, and all stop at call {call}")
        elif call < min(loop.asked.values()):
            problems.append(f"false alarm: all stop at call {call}, before a rank was asked")
        elif loop.fault is None and loop.known_call is not None and call > loop.known_call + _MOST_CALLS_LATE:
            problems.append(f"late: known at call {loop.known_call}, stopped at {call}")
    if loop.fault is None and loop.stray < 0:
        if kinds - {"stopped", "end"}:
            problems.append(f"false alarm: {loop.ended}")
        # Where rank 0 is never told, from when it should have been.
        since = loop.first_call_then if loop.known_call is None else loop.known_call
        if kinds == {"end"} and since + _MOST_CALLS_LATE < len(loop.steps) and loop.asked:
            problems.append("missed: a rank was asked, and no rank stopped")
    return problems
