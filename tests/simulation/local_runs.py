"""Schedules of runs whose hosts have a directory each: ``Checkpointer(local=True)``, whose steps are published in two phases.

Hosts lose power, also between the phases; they are away for a launch, come back, and come in another order.
"""

from __future__ import annotations

import functools
import itertools
import random

import shardwise.checkpoint.checkpointer as checkpointer_module
from tests.simulation.agreements import TIMEOUT_S, born
from tests.simulation.files import Files
from tests.simulation.local_judge import Parts, judge_away, judge_hosts, judge_leftovers, judge_part
from tests.simulation.programs import launch as start
from tests.simulation.run_faults import FAULTS, plan_fault, run_launch
from tests.simulation.run_judge import Run, judge_launch, judge_lost, watch_launch
from tests.simulation.store import Server
from tests.simulation.world import Process, World

__all__ = ["MOST_HOSTS", "local_problems"]

MOST_HOSTS = 3
#: What may happen to a host, besides what may happen to one of its ranks.
_OF_HOSTS = (
    "a host loses power",
    *("a host loses power between the phases",) * 4,
    *("is cut off between the phases", "the store dies between the phases"),
    "a read is garbled",
)


def local_problems(world: World, server: Server, disks: list[Files]) -> list[str]:
    """Run one schedule; what was wrong with it."""
    checkpointer_module._NUMBERS = itertools.count()
    draw = world.draw
    disks = disks[: draw.choice((2, 2, MOST_HOSTS))]
    run = Run(world, disks, draw.choice(("sync", "sync", "async")), draw.choice((1, 1, 2, None)), "local/run")
    parts, launches = Parts(), draw.choice((2, 3, 3))
    hosts = list(range(len(disks)))
    sizes = [draw.choice((1, 1, 2)) for _ in hosts]
    for launch in range(launches):
        is_last = launch == launches - 1
        if launch and draw.random() < 0.3:
            sizes = [draw.choice((1, 1, 2)) for _ in hosts]
            draw.shuffle(hosts)
        if launch:
            kept = draw.random() < 0.5 and not server.is_dead
            server = server if kept else Server(world, server.dropped)
            server.labels = disks[0].labels
        server.duplicates = 0.3 if draw.random() < 0.2 else 0.0
        # Host 0 is always there: else two launches without a host in common go on from different steps, as two runs do.
        away = [h for h in hosts[:] if h and not is_last and draw.random() < 0.2]
        present = [h for h in hosts if h not in away]
        parts.hosts[launch] = present
        processes = _processes(world, server, launch, present, sizes)
        _judge_names(run, parts, launch)
        watch_launch(run, launch)
        if launch and not is_last and draw.random() < 0.1:
            run.forgets = launch
        start(run, processes, 1 if is_last else draw.randrange(1, 3))
        is_calm = is_last or (bool(away) and draw.random() < 0.5)
        fault = None if is_calm else draw.choice((None, *FAULTS, *_OF_HOSTS, *_OF_HOSTS))
        if fault is not None:
            _plan(run, fault, processes, server)
        run_launch(run, launch, processes, fault)
        if run.is_lost:
            judge_lost(run, launch)
            break
        is_refused = bool(away) and judge_away(run, parts, launch, processes, away)
        judge_launch(run, launch, processes, "a host is away" if is_refused else fault)
        if fault is None and not is_refused:
            judge_leftovers(run, launch, present)
        _end_launch(run, processes, draw, survives=fault == "a rank survives")
        if fault == "all lose power" or (fault is None and not is_last and draw.random() < 0.5):
            _lose_all(run)
        if world.problems:
            break
        if is_last:
            judge_hosts(run, parts, launch, is_whole=all(len(p) == len(hosts) for p in parts.hosts.values()))
    return list(world.problems)


def _processes(
    world: World, server: Server, launch: int, present: list[int], sizes: list[int]
) -> list[Process]:
    places = [host for host in present for _ in range(sizes[host])]
    processes = [born(world, server, rank, len(places), launch) for rank in range(len(places))]
    for process, host in zip(processes, places, strict=True):
        process.host, process.leads_host = host, places.index(host) == process.rank
    return processes


def _judge_names(run: Run, parts: Parts, launch: int) -> None:
    run.lock_lost_at = None
    for host, files in enumerate(run.disks):
        files.on_rename = functools.partial(judge_part, run, parts, host, launch)


def _end_launch(run: Run, processes: list[Process], draw: random.Random, *, survives: bool) -> None:
    """Kill what is left, as a launcher does before it starts its ranks again; a host that is cut off goes on for a while."""
    world = run.world
    for files in run.disks:
        files.failing, files.on_scan, files.on_mkdir = None, None, None
    world.garbled_reads = 0
    for process in processes:
        if survives and process.paused_until > world.now and not process.is_dead:
            world.note("survives", process)
            world.at(process.paused_until + draw.random() * 10.0, process.kill)
            continue
        process.kill()
    world.run(limit_s=world.now + 1.0)


def _plan(run: Run, fault: str, processes: list[Process], server: Server) -> None:
    world, draw = run.world, run.world.draw
    victim = draw.choice(processes)
    if fault == "a host loses power":
        victim.dies_at = draw.randrange(1, 300)
        world.on_death.append(lambda dead: _lose_host(run, victim) if dead is victim else None)
    elif fault.endswith(" between the phases"):
        _plan_between(run, fault, processes, server)
    elif fault == "a read is garbled":
        world.garbled_reads = draw.choice((1, 1, 2, 3))
    else:
        plan_fault(run, fault, processes, server)
    world.note(f"planned: {fault}")


def _lose_host(run: Run, victim: Process) -> None:
    """All processes of a host die at once, and what it had not synced is lost."""
    for process in run.world.processes:
        if process.host == victim.host:
            process.kill()
    run.world.note(f"host {victim.host} loses power: {run.disks[victim.host].lose_power()}")


def _lose_all(run: Run) -> None:
    """Every host loses power, but for one on which a process of a launch before still lives."""
    living = {process.host for process in run.world.processes if not process.is_dead}
    for host, files in enumerate(run.disks):
        if host not in living:
            run.world.note(f"host {host} loses power: {files.lose_power()}")


def _plan_between(run: Run, fault: str, processes: list[Process], server: Server) -> None:
    """Soon after a part of a step gets its name, on whichever host, a host or the store is lost."""
    world, left = run.world, run.world.draw.randrange(1, 2 * len(run.disks))
    judges = {host: files.on_rename for host, files in enumerate(run.disks)}

    def strike() -> None:
        victim = world.draw.choice(processes)
        if fault.startswith("a host loses power"):
            _lose_host(run, victim)
        elif fault.startswith("is cut off"):
            victim.cut_off(TIMEOUT_S * world.draw.uniform(0.1, 2.5))
        else:
            server.die()

    def renamed(host: int, old: str, new: str) -> None:
        nonlocal left
        judge = judges[host]
        if judge is not None:
            judge(old, new)
        name = new.rpartition("/")[2]
        if name.startswith("step-") and "." not in name:
            left -= 1
            if not left:
                delay_s = world.latency_s * world.draw.choice((0.5, 4.0, 12.0)) * world.draw.random()
                world.at(world.now + delay_s, strike)

    for host, files in enumerate(run.disks):
        files.on_rename = functools.partial(renamed, host)
