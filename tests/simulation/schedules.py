"""One seed, one schedule."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.agreements import Story, agreement_problems
from tests.simulation.files import Files
from tests.simulation.installed import Stage
from tests.simulation.runs import run_problems
from tests.simulation.stops import stop_problems
from tests.simulation.store import Server
from tests.simulation.world import World

__all__ = ["KINDS", "Schedule", "kind_and_seed", "run_seed"]

#: Of so many schedules one is of this kind: whole runs take ten times as long as agreements.
KINDS = {"agreement": 1, "run": 5, "stop": 5}
_IN_TURN = ("agreement", "agreement", "agreement", "stop", "run")


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
    server, files = Server(world, dropped), Files(world, dropped)
    server.labels = files.labels = labels
    on.world, on.files = world, files
    try:
        if kind == "agreement":
            problems = agreement_problems(world, server, story)
        elif kind == "stop":
            problems = stop_problems(world, server)
        else:
            problems = run_problems(world, server, files)
    finally:
        world.end()
        files.end()
    return Schedule(seed, tuple(problems), world.operations, tuple(world.trace or ()))
