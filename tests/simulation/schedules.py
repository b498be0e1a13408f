"""One seed, one schedule."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.agreements import Story, agreement_problems
from tests.simulation.files import Files
from tests.simulation.installed import Stage
from tests.simulation.local_runs import MOST_HOSTS, local_problems
from tests.simulation.runs import run_problems
from tests.simulation.stops import stop_problems
from tests.simulation.store import Server
from tests.simulation.world import World

__all__ = ["KINDS", "Schedule", "kind_and_seed", "run_seed"]

#: Of so many schedules one is of this kind: whole runs take ten times as long as agreements.
KINDS = {"agreement": 1, "run": 5, "stop": 5, "local": 5}
#: A schedule of hosts with own directories takes three times as long as one of a shared directory.
_IN_TURN = (*("agreement",) * 13, *("stop",) * 4, *("run",) * 2, "local")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What was seen in one schedule."""

    seed: int
    problems: tuple[str, ...]
    operations: int
    trace: tuple[str, ...] = ()


def kind_and_seed(number: int) -> tuple[str, int]:
    """What the schedule of a number is."""
    whole, rest = divmod(number, len(_IN_TURN))
    kind = _IN_TURN[rest]
    return kind, whole * _IN_TURN.count(kind) + _IN_TURN[:rest].count(kind)


def run_seed(
    on: Stage,
    seed: int,
    kind: str,
    *,
    story: Story | None = None,
    dropped: str | None = None,
    labels: set[str] | None = None,
    traced: bool = False,
) -> Schedule:
    """Run the schedule of a seed. ``dropped``: messages or calls of this kind are lost. ``labels`` gets the kinds there are."""
    world = World(seed)
    world.trace = [] if traced else None
    server = Server(world, dropped)
    disks = [Files(world, dropped) for _ in range(MOST_HOSTS if kind == "local" else 1)]
    server.labels = labels
    for files in disks:
        files.labels = labels
    on.world, on.disks = world, disks
    on.network.forget()
    try:
        if kind == "agreement":
            problems = agreement_problems(world, server, story)
        elif kind == "stop":
            problems = stop_problems(world, server)
        elif kind == "local":
            problems = local_problems(world, server, disks)
        else:
            problems = run_problems(world, server, disks[0])
    finally:
        world.end()
        for files in disks:
            files.end()
    return Schedule(seed, tuple(problems), world.operations, tuple(world.trace or ()))
