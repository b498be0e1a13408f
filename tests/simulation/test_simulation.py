"""A short form of the simulation: ``make simulate`` runs more schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.disk import Disk
from tests.simulation.agreements import TIMEOUT_S, Call, Story
from tests.simulation.files import Files
from tests.simulation.installed import Stage
from tests.simulation.many import simulated
from tests.simulation.mutations import Mutation, found_at, mutations
from tests.simulation.run_judge import Run, judge_end
from tests.simulation.schedules import KINDS, run_seed
from tests.simulation.world import World

#: The operations of a rank in the rounds of `_story`, at most.
_OPERATIONS = 60


@pytest.fixture(name="stage")
def _stage() -> Iterator[Stage]:
    with simulated() as stage:
        yield stage


@pytest.mark.parametrize(("kind", "schedules"), [("agreement", 1500), ("run", 150), ("local", 40)])
def test_schedules_break_no_promise(stage: Stage, kind: str, schedules: int) -> None:
    found = [run_seed(stage, seed, kind) for seed in range(schedules)]
    assert [(one.seed, one.problems) for one in found if one.problems] == []


@pytest.mark.parametrize("fault", ["dies", "stops for long"])
@pytest.mark.parametrize("victim", [0, 1])
def test_every_operation_of_a_round(stage: Stage, fault: str, victim: int) -> None:
    """A rank that is lost between any two operations is named, and no rank waits longer than the timeout."""
    for at in range(1, _OPERATIONS):
        calls = [Call(kind, [0.2, 0.1], size=150) for kind in ("combine", "agree")]
        story = Story(world_size=2, calls=calls, fault=fault, victim=victim, seconds=2 * TIMEOUT_S, at=at)
        for seed in range(3):
            assert run_seed(stage, seed, "agreement", story=story).problems == (), at


def test_a_seed_replays_its_schedule(stage: Stage) -> None:
    for kind in KINDS:
        first, again = (run_seed(stage, 7, kind, traced=True) for _ in range(2))
        assert len(first.trace) > 30
        assert first == again


@pytest.mark.parametrize(
    ("steps", "has_guest", "problems"), [((1, 2), True, 0), ((1, 2), False, 2), ((0, 1, 2), True, 1)]
)
def test_only_the_step_of_a_guest_may_stay_unsaid(
    steps: tuple[int, ...], has_guest: bool, problems: int
) -> None:
    """A process of an earlier launch may save once the last launch is done, and be killed before its retention: seed 26057 of runs."""
    world = World(0)
    files, home = Files(world), "home/run"
    tree = {f"{home}/step-{step:08d}": None for step in steps}
    files.disk = Disk({"home": None, home: None, **tree, f"{home}/latest": b"step-00000002\n"})
    run = Run(world, [files], "sync", 1, said={1: 1}, tried={(0, 1), (1, 1), (0, 2)}, has_guest=has_guest)
    judge_end(run, 1, files)
    assert len(world.problems) == problems


@pytest.mark.parametrize(
    "name",
    [
        "drop: add arrived",
        "drop: compare_set verdict",
        "drop: fsync home/run/.tmp-step-*-*/manifest.json",
        "drop: rename home/run/.tmp-step-*-* -> home/run/step-*",
        "no check: whether a rank makes progress",
        "no check: whether another run has the lock",
        "no check: whether all parts are sealed before one appears",
        "no check: whether a sealed part is of a published step",
    ],
)
def test_schedules_find_errors(stage: Stage, name: str) -> None:
    """Of all mutations (``python -m tests.simulation --mutations 1500``) some that take few schedules."""
    kind, _, label = name.partition(": ")
    (mutation,) = [m for m in mutations({label} if kind == "drop" else set()) if m.name == name]
    assert isinstance(mutation, Mutation)
    assert found_at(stage, mutation, 2000) is not None
