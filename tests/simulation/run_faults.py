"""What goes wrong in a launch of a run."""

from __future__ import annotations

import functools

from tests.simulation.agreements import TIMEOUT_S, limit_s
from tests.simulation.files import Files
from tests.simulation.run_judge import Run
from tests.simulation.store import Server
from tests.simulation.world import Process

__all__ = ["FAULTS", "LONGEST_LIFE_S", "plan_fault", "run_launch"]

#: A process that its launcher could not kill is gone after this time.
LONGEST_LIFE_S = 112.0

FAULTS = (
    *("a rank dies", "all lose power", "a rank stops", "a rank stops for long"),
    *(
        "is cut off",
        "the store dies",
        "a call fails",
        "a step is damaged",
        "the lock is lost",
        "a file is lost",
    ),
    *("a rank survives",),
)


def plan_fault(run: Run, fault: str, processes: list[Process], server: Server) -> None:
    world, draw = run.world, run.world.draw
    victim = draw.choice(processes)
    most = 200 if run.mode == "sync" else 260
    at = draw.randrange(1, most + 100 if run.is_local else most)
    world.note(f"planned: {fault}, rank {victim.rank}")
    if fault == "a rank dies":
        victim.dies_at = at
    elif fault == "all lose power":
        victim.dies_at = at
        world.on_death.append(lambda process: _die_with(process, processes) if process is victim else None)
    elif fault in ("a rank stops", "a rank stops for long"):
        victim.pauses_at = at
        victim.pause_s = TIMEOUT_S * (
            draw.uniform(1.1, 2.5) if fault.endswith("long") else draw.uniform(0.05, 0.8)
        )
    elif fault == "a rank survives":
        victim.pauses_at, victim.pause_s = at, 70.0 + 30.0 * draw.random()
    elif fault == "a step is damaged":
        _damage_next(run, run.disks[victim.host])
    elif fault == "the lock is lost":
        victim = next(p for p in processes if p.host == victim.host)  # it leads its host
        victim.calls_at = (at, functools.partial(_lose_lock, run, victim))
    elif fault == "a file is lost":
        files = run.disks[victim.host]
        files.on_scan = functools.partial(_lose_file, run, files)
    elif fault == "is cut off":
        world.at(world.now + draw.random() * 5.0, lambda: victim.cut_off(TIMEOUT_S * draw.uniform(0.1, 2.5)))
    elif fault == "the store dies":
        world.at(world.now + draw.random() * 5.0, server.die)
    elif fault == "a call fails":
        run.had_failing_call = True
        run.disks[victim.host].failing = (draw.randrange(0, 60), draw.choice((5, 28)))  # EIO, ENOSPC


def _damage_next(run: Run, files: Files) -> None:
    """The next step that appears has an empty file: a bad disk."""
    judge = files.on_rename
    is_done = False

    def is_step(name: str) -> bool:
        return name.startswith("step-") and "." not in name

    def renamed(old: str, new: str) -> None:
        nonlocal is_done
        home = files.node(run.home).entries
        if judge is not None:
            judge(old, new)
        name = new.rpartition("/")[2]
        if not name.startswith("step-") or "." in name or is_done:
            return
        if any(map(is_step, home)) or run.world.draw.random() < 0.1:
            is_done = True
            inner = files.node(old).entries["rank"].entries
            inner[max(inner)].content.clear()
            inner[max(inner)].fsync()
            run.damaged.add(int(name[5:]))
            run.was_damaged = True
            run.world.note(f"{name} is damaged")

    files.on_rename = renamed


def _lose_lock(run: Run, holder: Process) -> None:
    if run.holders.get((holder.launch, holder.host)) is not holder:
        return
    files = run.disks[holder.host]
    home = files.node(run.home).entries if files.has(run.home) else {}
    if home.pop(".lock", None) is not None:
        run.lock_lost_at, run.lock_lost_on = run.world.now, holder.host
        run.world.note("the lock's file is deleted")


def _lose_file(run: Run, files: Files, path: str) -> None:
    """Another program deletes a file of a save, right before its files are counted."""
    node = files.node(path).entries
    if (
        path.rpartition("/")[2].startswith(".tmp-step")
        and node.get("rank") is not None
        and node["rank"].entries
    ):
        node["rank"].entries.pop(min(node["rank"].entries))
        files.on_scan = None
        run.world.note(f"a file of {path} is deleted")


def _die_with(_: Process, processes: list[Process]) -> None:
    for process in processes:
        process.kill()


def run_launch(run: Run, launch: int, processes: list[Process], fault: str | None) -> None:
    """Let a launch run to its end, or to the time by which it must have ended."""
    world = run.world
    survivor = fault == "a rank survives"
    patience_s = LONGEST_LIFE_S if run.has_guest else 0.0  # a launch waits until an earlier one is gone
    world.run(limit_s=world.now + patience_s + (60.0 if survivor else 30 * limit_s(world)))
    for process in processes:
        assert process.main is not None
        is_stopped = process.paused_until > world.now - limit_s(world)
        if not process.is_dead and not process.main.has_ended and not is_stopped:
            world.problems.append(
                f"hang: launch {launch}, rank {process.rank} still waits at {world.now:.1f} s"
            )
