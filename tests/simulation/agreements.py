"""Schedules of agreement alone: what each rank does between rounds, what goes wrong, and what must hold whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.errors import RankError, ShardwiseError
from shardwise.ranks.ranks import Ranks
from tests.simulation.installed import PART_BYTES, Group
from tests.simulation.store import Server, Store
from tests.simulation.threads import Threading
from tests.simulation.world import Killed, Process, World

__all__ = ["Call", "Ended", "Story", "TIMEOUT_S", "agreement_problems", "born", "limit_s"]

TIMEOUT_S = 8.0
KINDS = ("agree", "alike", "combine", "reduce", "reduce", "gather", "on_first", "nested")
#: What may happen to one rank.
FAULTS = (
    "dies",
    "stops",
    "stops for long",
    "is cut off",
    "is cut off for long",
    "the store dies",
    "is interrupted",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended on one rank."""

    kind: str
    """``ok``, ``own`` (its own exception), ``agreed`` (an error of all), ``unreachable``, ``interrupted``."""
    value: Any = None
    missing: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    """The ranks that the error says failed."""


@dataclass(slots=True)
class Call:
    """One agreement: all ranks make it."""

    kind: str
    work_s: list[float]
    fails: frozenset[int] = frozenset()
    alike: bool = True
    differing: frozenset[int] = frozenset()
    size: int = 5
    stray: int = -1
    """A rank that makes another call."""


@dataclass(slots=True)
class Story:
    """What ranks do, and what happens to one of them."""

    world_size: int
    calls: list[Call]
    fault: str | None
    victim: int
    seconds: float
    """Of a pause or a partition."""
    at: int | None = None
    """At which operation of the victim; None: drawn."""
    hosted: bool = False
    returns: bool = False
    """Whether a group is made anew after the calls, in the same processes."""
    duplicates: float = 0.0


def limit_s(world: World) -> float:
    """How long a rank may wait for ranks that make no progress: the timeout, two looks, and pauses between polls."""
    return TIMEOUT_S + 2 * 1.0 + 2.0 + 8 * world.least_sleep_s + 120 * world.latency_s


def _told(draw: Any) -> Story:
    size = draw.choice((2, 2, 3, 4, 5, 6))  # in a tree of 2, a rank below another from 4 on
    calls = []
    for _ in range(draw.randrange(1, 4)):
        kind = draw.choice(KINDS)
        slow = draw.random() < 0.15
        work = [draw.random() * (TIMEOUT_S * 2 if slow else 0.5) for _ in range(size)]
        if draw.random() < 0.1:  # one rank alone is slow, and those above it in the tree wait for it
            work[draw.randrange(size)] = TIMEOUT_S * draw.uniform(1.0, 2.0)
        call = Call(kind, work, size=draw.choice((5, 5, 150, 350)))
        chance = draw.random()
        if chance < 0.2:
            call.fails = frozenset(r for r in range(size) if draw.random() < 0.5)
        elif chance < 0.3:
            call.fails = frozenset(range(size))
            call.alike = draw.random() < 0.7
        elif chance < 0.4:
            call.differing = frozenset(r for r in range(size) if draw.random() < 0.5)
        elif chance < 0.5:
            call.stray = draw.randrange(size)
        calls.append(call)
    fault = draw.choice(FAULTS) if draw.random() < 0.7 else None
    long = fault is not None and fault.endswith("for long")
    story = Story(
        world_size=size,
        calls=calls,
        fault=fault,
        victim=draw.randrange(size),
        seconds=TIMEOUT_S * (draw.uniform(1.1, 3.0) if long else draw.uniform(0.02, 0.8)),
        hosted=draw.random() < 0.25,
        returns=fault is None and draw.random() < 0.3,
        duplicates=0.3 if draw.random() < 0.2 else 0.0,
    )
    return story


def born(world: World, server: Server, rank: int, size: int, launch: int = 0) -> Process:
    """A process of a rank with a process group, whose store is at ``server``."""
    process = Process(world, rank, launch)
    process.opening = Threading(lambda: world).Lock()
    process.store = Store(server, process, f"attempt{launch}/")
    join_group(process, size)
    world.processes.append(process)
    return process


def join_group(process: Process, size: int) -> None:
    """Make a new process group in a process."""
    process.group = Group(size)


def agreement_problems(world: World, server: Server, story: Story | None = None) -> list[str]:
    """Run one schedule of agreement, of a story or of one that is drawn; what was wrong with it."""
    story = story or _told(world.draw)
    world.note(f"{story}")
    ended: dict[tuple[int, int], Ended] = {}
    processes = [born(world, server, rank, story.world_size) for rank in range(story.world_size)]
    server.duplicates = story.duplicates
    if story.hosted:
        server.host = processes[0]
    for process in processes:
        run = _script(world, story, process, ended)
        process.main = world.start(process, run)
    _plan_fault(world, story, processes, server)
    work_s = sum(sum(call.work_s) for call in story.calls)
    world.run(limit_s=4 * work_s + 12 * limit_s(world) + 4 * story.seconds + 200 * len(story.calls))
    problems = list(world.problems)
    for process in processes:
        assert process.main is not None
        if not process.is_dead and not process.main.has_ended:
            problems.append(f"hang: rank {process.rank} still waits at {world.now:.1f} s")
    problems += _disagreements(story, ended, processes)
    if story.fault is None and not problems and not story.hosted and server.most_keys > _most_keys(story):
        problems.append(f"leak: the store held {server.most_keys} keys")
    quiet = story.fault is None and not story.hosted and not world.slow_share and not problems
    if quiet and all(
        not c.fails and not c.differing and c.stray < 0 and max(c.work_s) < 1.0 for c in story.calls
    ):
        names = ("/verdict", "/arrived", "/seen", "/reply", "/payload")
        if left := [key for key in server.data if any(name in key for name in names)]:
            problems.append(f"leak: keys of rounds are left: {left[:6]}")
    return problems


def _most_keys(story: Story) -> int:
    """Of each rank four entries for good; of a round at most four parts of each payload, and a reply, which may hold all payloads."""
    lives = 2 if story.returns else 1
    replies = sum(3 + story.world_size * (call.size + 8) // PART_BYTES for call in story.calls)
    return 14 + story.world_size * (4 + 4 * len(story.calls) * lives) + replies * lives


def _plan_fault(world: World, story: Story, processes: list[Process], server: Server) -> None:
    victim, most = processes[story.victim], 60 * len(story.calls)
    at = story.at or world.draw.randrange(1, most)
    if story.fault == "dies":
        victim.dies_at = at
    elif story.fault in ("stops", "stops for long"):
        victim.pauses_at, victim.pause_s = at, story.seconds
    elif story.fault in ("is cut off", "is cut off for long"):
        world.at(world.draw.random() * 3.0, lambda: victim.cut_off(story.seconds))
    elif story.fault == "the store dies":
        world.at(world.draw.random() * 3.0, server.die)
    if (
        story.at is None
        and story.fault in ("stops for long", "is cut off for long")
        and world.draw.random() < 0.3
    ):
        other = processes[world.draw.randrange(len(processes))]
        other.dies_at = world.draw.randrange(1, most)


def _script(
    world: World, story: Story, process: Process, ended: dict[tuple[int, int], Ended]
) -> Callable[[], None]:
    def run() -> None:
        number = 0
        for life in range(2 if story.returns else 1):
            if life:  # as init_process_group does: it returns once all ranks are there
                while any((number - 1, r) not in ended and not has_left(r) for r in range(story.world_size)):
                    world.operation(0.05)
                join_group(process, story.world_size)
            for call in story.calls:
                interrupted = story.fault == "is interrupted" and process.rank == story.victim
                interrupts = interrupted and number == len(story.calls) - 1
                result = _timed(world, process, partial(_make, world, story, process, call, interrupts))
                ended[number, process.rank] = result
                world.note(f"call {number} ended: {result}")
                number += 1
                if _is_last(result):
                    return

    def has_left(rank: int) -> bool:
        return any(r == rank and _is_last(result) for (_, r), result in ended.items())

    return run


def _is_last(result: Ended) -> bool:
    """Whether a rank makes no more calls after one that ended so."""
    return bool(result.missing) or result.kind in ("unreachable", "interrupted")


def _timed(world: World, process: Process, call: Callable[[], Ended]) -> Ended:
    """Make a call, and look how long it waited while no rank made progress."""
    world.progressed()
    result = call()
    waited_s = world.now - world.last_progress
    if waited_s > limit_s(world):
        world.problems.append(
            f"late: rank {process.rank} waited {waited_s:.2f} s without progress, at most {limit_s(world):.2f} were "
            f"allowed; {result}"
        )
    world.progressed()
    return result


def _make(world: World, story: Story, process: Process, call: Call, interrupt: bool) -> Ended:
    rank = process.rank
    current = Ranks.current(timeout_s=TIMEOUT_S)
    own: BaseException | None = None

    def work() -> str:
        nonlocal own
        left = call.work_s[rank]
        while left > 0:
            step = min(left, 1.5)
            world.operation(step)
            world.progressed()
            current.tick()
            left -= step
        if interrupt:
            own = KeyboardInterrupt()
            raise own
        if rank in call.fails:
            own = ValueError("alike" if call.alike else f"of rank {rank}")
            raise own
        return f"{rank}:" + "x" * call.size

    label = "another call" if rank == call.stray else "a call"
    try:
        value: Any = None
        if call.kind == "nested":
            with current.agree("around it"):
                value = current.combine(label, work, len)
        elif call.kind in ("agree", "alike"):
            with current.agree(label) as claim:
                work()
                if call.kind == "alike":
                    claim.alike("differs" if rank in call.differing else "same")
        elif call.kind == "combine":
            value = current.combine(label, work, lambda found: ["reply", *found])
        elif call.kind == "reduce":
            is_stray = (
                rank == call.stray
            )  # what it hands over is of another call, and can't be merged with the rest
            value = current.reduce(
                label,
                lambda: 7 if is_stray else [work()],  # type: ignore[arg-type, return-value]
                _first if is_stray else _together,
                lambda found: ["reply", *found],
            )
        elif call.kind == "gather":
            found = current.gather(label, work())
            value = found is None or [f.partition(":")[0] for f in found] == [
                str(r) for r in range(current.world_size)
            ]
        else:
            value = current.on_first(label, work)
        return Ended("ok", value)
    except Killed:
        raise
    except RankError as error:
        if not error.causes and not error.missing:
            world.problems.append(f"nameless: rank {rank} got an error that names no rank: {error}")
        if any("unreachable" in cause for cause in error.causes.values()):
            return Ended("unreachable", str(error))
        return Ended("agreed", str(error), tuple(error.missing), tuple(error.causes))
    except (ShardwiseError, ValueError) as error:
        if error is not own:
            world.problems.append(f"strange: rank {rank} got {type(error).__name__}: {error}")
        if call.kind == "gather":  # it failed before the call
            return Ended("interrupted")
        return Ended("own", f"{error}")
    except KeyboardInterrupt:
        return Ended("interrupted")


def _first(found: Sequence[Any]) -> Any:
    return found[0]


def _together(found: Sequence[list[str]]) -> list[str]:
    """What several ranks gave, in the order of ranks."""
    return sorted((text for texts in found for text in texts), key=lambda text: int(text.partition(":")[0]))


def _disagreements(story: Story, ended: dict[tuple[int, int], Ended], processes: list[Process]) -> list[str]:
    problems = []
    faulty = {story.victim} if story.fault else set()
    faulty |= {p.rank for p in processes if p.is_dead}
    # A rank that gave up, waited for another or left makes no more calls: the rest miss it.
    left_early = {r for (_, r), e in ended.items() if _is_last(e)}
    for number in sorted({n for n, _ in ended}):
        call = story.calls[number % len(story.calls)]
        of = {r: e for (n, r), e in ended.items() if n == number}
        told = {r: e for r, e in of.items() if e.kind in ("ok", "agreed", "own")}
        kinds = {e.kind for e in told.values()}
        if len(kinds) > 1:
            problems.append(f"disagree: call {number} ({call.kind}) ended as {told}")
            continue
        values = {str(e.value) for e in told.values()}
        if kinds == {"agreed"} and len(values) > 1:
            problems.append(f"disagree: call {number} raised {values}")
        if kinds == {"ok"} and call.kind in ("combine", "reduce", "on_first") and len(values) > 1:
            problems.append(f"disagree: call {number} gave {values}")
        if kinds == {"ok"}:
            problems += _wrong_success(story, call, number, told)
        for r, e in told.items():
            if wrong := set(e.missing) - faulty - left_early:
                problems.append(
                    f"wrong rank: rank {r} was told in call {number} that {sorted(wrong)} is missing"
                )
        problems += _wrong_causes(story, call, number, told, faulty | left_early)
        if story.fault is None:
            problems += _wrong_failure(story, call, number, of)
    wanted = (2 if story.returns else 1) * len(story.calls) * story.world_size
    if (
        story.fault is None
        and len(ended) < wanted
        and not any(e.kind == "interrupted" for e in ended.values())
    ):
        problems.append(f"lost: only {sorted(ended)} were made")
    return problems


def _wrong_success(story: Story, call: Call, number: int, told: dict[int, Ended]) -> list[str]:
    if call.fails & ({0} if call.kind == "on_first" else set(range(story.world_size))):
        return [f"missed: call {number} is said to be done, but ranks {sorted(call.fails)} failed in it"]
    if call.stray >= 0:
        return [f"missed: call {number} is said to be done, but rank {call.stray} was in another one"]
    unlike = {r in call.differing for r in range(story.world_size)}
    if call.kind == "alike" and len(unlike) > 1:
        return [f"missed: call {number} is said to be alike, but ranks {sorted(call.differing)} differ"]
    wanted: Any = None
    if call.kind in ("combine", "reduce"):
        wanted = ["reply", *(f"{r}:" + "x" * call.size for r in range(story.world_size))]
    elif call.kind == "on_first":
        wanted = "0:" + "x" * call.size
    elif call.kind == "gather":
        wanted = True
    elif call.kind == "nested":
        wanted = story.world_size
    return [f"wrong: call {number} gave rank {r} {e.value}" for r, e in told.items() if e.value != wanted]


def _wrong_causes(
    story: Story, call: Call, number: int, told: dict[int, Ended], faulty: set[int]
) -> list[str]:
    """An error names as failed only ranks that failed, or did something else than rank 0."""
    everyone = set(range(story.world_size))
    differs = call.kind == "alike" and len({r in call.differing for r in everyone}) > 1
    guilty = set(call.fails) | faulty | (everyone if differs or call.stray == 0 else {call.stray})
    return [
        f"wrong rank: rank {r} was told in call {number} ({call.kind}) that {sorted(wrong)} failed: {e.value}"
        for r, e in told.items()
        if (wrong := set(e.failed) - guilty)
    ]


def _wrong_failure(story: Story, call: Call, number: int, of: dict[int, Ended]) -> list[str]:
    differs = call.kind == "alike" and len({r in call.differing for r in range(story.world_size)}) > 1
    if call.kind not in ("gather", "on_first") and call.stray < 0 and call.fails and not differs:
        # However far apart the ranks are, the type of the error is the same.
        wanted = "own" if call.alike and len(call.fails) == story.world_size else "agreed"
        if wrong := {r: e for r, e in of.items() if e.kind != wanted}:
            return [f"wrong type: call {number} ({call.kind}) should end as {wanted!r}, and ended as {wrong}"]
    return [
        f"false alarm: rank {r} got {e} in call {number}"
        for r, e in of.items()
        if e.kind != "ok" and not call.fails and not differs and call.stray < 0
    ]
