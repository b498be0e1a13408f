"""One seed, one schedule."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

from tests.simulation.agreements import agreement_problems
from tests.simulation.files import Files
from tests.simulation.installed import Stage
from tests.simulation.store import Server
from tests.simulation.world import World

__all__ = ["Schedule", "run_seed"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What was seen in one schedule."""

    seed: int
    problems: tuple[str, ...]
    operations: int
    trace: tuple[str, ...] = ()


def run_seed(
    on: Stage, seed: int, kind: str, *, dropped: str | None = None, labels: set[str] | None = None, traced: bool = False
) -> Schedule:
    """Run the schedule of a seed. ``dropped``: messages or calls of this kind are lost. ``labels`` gets the kinds there are."""
    world = World(seed)
    world.trace = [] if traced else None
    server, files = Server(world, dropped), Files(world, dropped)
    server.labels = files.labels = labels
    on.world, on.files = world, files
    try:
        if kind == "agreement":
            problems = agreement_problems(on, world, server)
        else:
            from tests.simulation.runs import run_problems

            problems = run_problems(on, world, server, files)
    finally:
        world.end()
        files.end()
    return Schedule(seed, tuple(problems), world.operations, tuple(world.trace or ()))
