"""Schedules of whole runs: a ``Checkpointer`` that saves, dies, loses power, is launched again, and must lose no published step."""

from __future__ import annotations

import functools
import itertools

import shardwise.checkpoint.checkpointer as checkpointer_module
from tests.simulation.agreements import born
from tests.simulation.files import Files
from tests.simulation.programs import launch as start
from tests.simulation.run_faults import FAULTS, plan_fault, run_launch
from tests.simulation.run_judge import Run, judge_end, judge_launch, judge_lost, judge_rename, watch_launch
from tests.simulation.store import Server
from tests.simulation.world import World

__all__ = ["run_problems"]


def run_problems(world: World, server: Server, files: Files) -> list[str]:
    """Run one schedule of a run; what was wrong with it."""
    checkpointer_module._NUMBERS = itertools.count()  # each process counts from 0
    draw = world.draw
    run = Run(world, [files], draw.choice(("sync", "sync", "async")), draw.choice((1, 1, 2, None)))
    size, launches = draw.choice((1, 2, 2, 3)), draw.choice((2, 2, 3))
    for launch in range(launches):
        is_last = launch == launches - 1
        if launch and draw.random() < 0.3:  # elastic: the launcher goes on with as many as there are
            size = draw.choice((1, 2, 3))
        if is_last or launch:
            kept = draw.random() < 0.5 and not server.is_dead
            server = server if kept else Server(world, server.dropped)
            server.labels = files.labels
        processes = [born(world, server, rank, size, launch) for rank in range(size)]
        run.lock_lost_at = None
        files.on_rename = functools.partial(judge_rename, run)
        watch_launch(run, launch)
        if launch and not is_last and draw.random() < 0.15:
            run.forgets = launch
        steps = 1 if is_last else draw.randrange(1, 3)
        start(run, processes, steps)
        fault = None if is_last else draw.choice((None, *FAULTS, *FAULTS))
        if fault is not None:
            plan_fault(run, fault, processes, server)
        run_launch(run, launch, processes, fault)
        if run.is_lost:
            judge_lost(run, launch)
            break
        judge_launch(run, launch, processes, fault)
        files.failing, files.on_rename, files.on_scan, files.on_mkdir = None, None, None, None
        for process in processes:
            if process.paused_until > world.now and not process.is_dead and fault == "a rank survives":
                world.note(
                    "survives", process
                )  # its host is cut off: the launcher can't kill it, but its end comes
                world.at(process.paused_until + draw.random() * 10.0, process.kill)
                continue
            process.kill()  # as a launcher does before it starts its ranks again
        world.run(limit_s=world.now + 1.0)
        if fault == "all lose power" or (fault is None and not is_last and draw.random() < 0.5):
            world.note(f"power is lost: {files.lose_power()}")
        if world.problems:
            break
        if is_last:
            judge_end(run, launch, files)
    return list(world.problems)
