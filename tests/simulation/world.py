"""Simulated time and processes: ordinary blocking code, of which exactly one piece runs at a time.

A thread of a process is a greenlet. Each operation (of the store, the clock, the file system) takes some simulated time,
drawn from the seed; whoever's operation ends next goes on. So the seed alone decides every interleaving.
"""

from __future__ import annotations

import heapq
import random
import traceback
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

__all__ = ["Killed", "Process", "Task", "World"]


class Killed(BaseException):
    """The process of this thread is gone. Every operation raises it, so nothing that still runs has an effect."""


class Process:
    """One process of a rank. It dies at its ``dies_at``-th operation, if it is given."""

    def __init__(self, world: World, rank: int, launch: int) -> None:
        self.world, self.rank, self.launch = world, rank, launch
        self.host = 0
        self.leads_host = rank == 0
        """Whether it is the first rank of its host."""
        self.is_dead = False
        self.paused_until = 0.0
        self.cut_until = 0.0
        """Until when it does not reach the store."""
        self.operations = 0
        self.dies_at: int | None = None
        self.pauses_at: int | None = None
        self.pause_s = 0.0
        self.calls_at: tuple[int, Callable[[], None]] | None = None
        """What happens to the machine at which operation."""
        self.tasks: list[Task] = []
        self.clock_offset_s = world.draw.random() * 1e4
        self.held_locks: dict[str, Any] = {}
        self.group: Any = None
        self.store: Any = None
        self.opening: Any = None
        self.main: Task | None = None

    def kill(self) -> None:
        """SIGKILL, at once."""
        if not self.is_dead:
            self.is_dead = True
            self.world.note("dies", self)
            self.world.progressed()  # a rank may wait its whole time for this one, after it has waited for another
            self.world.at(self.world.now, self._reap)
            for told in self.world.on_death:
                told(self)

    def _reap(self) -> None:
        for task in self.tasks:
            if task.greenlet:
                self.world.task = task
                task.greenlet.throw(Killed)
            self.world.task, task.has_ended = None, True

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        self.paused_until = self.world.now + seconds
        self.world.note(f"stops for {seconds:.2f} s", self)
        self.world.progressed(self.paused_until)

    def cut_off(self, seconds: float) -> None:
        """It does not reach the store for ``seconds``."""
        self.cut_until = self.world.now + seconds
        self.world.note(f"is cut off for {seconds:.2f} s", self)
        self.world.progressed(self.cut_until)


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, run: Callable[[], Any]) -> None:
        self.process = process
        self.has_ended = False
        self.token = 0
        self.local: dict[str, Any] = {}
        self.waiting_to_end: list[Task] = []
        self._run_it = run
        self.greenlet = greenlet(self._run, process.world.hub)
        process.tasks.append(self)

    def _run(self) -> None:
        world = self.process.world
        try:
            if not self.process.is_dead:
                self._run_it()
        except Killed:
            pass
        except BaseException as error:  # of a thread that no one waits for: the schedule shows it
            world.note("".join(traceback.format_exception(error)))
            world.problems.append(
                f"rank {self.process.rank}: a thread ended with {type(error).__name__}: {error}"
            )
        finally:
            self.has_ended = True
            for task in self.waiting_to_end:
                world.ready(task)


class World:
    """The clock, the threads that are ready, and what was seen."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.hub = getcurrent()
        self.processes: list[Process] = []
        self.problems: list[str] = []
        self.trace: list[str] | None = None
        self.on_death: list[Callable[[Process], None]] = []
        self.last_progress = 0.0
        """When a rank last did something other than wait; in the future while a pause or a partition lasts."""
        self.task: Task | None = None
        self._heap: list[tuple[float, int, Any, int]] = []
        self._number = 0
        self._limit_s = 0.0
        self.operations = 0
        self.garbled_reads = 0
        """Which read from another host arrives damaged, counted down; 0: none."""
        # How this schedule's machines are: quick or slow, even or uneven.
        self.latency_s = self.draw.choice((0.0005, 0.005, 0.03))
        self.slow_share = self.draw.choice((0.0, 0.0, 0.05))
        self.least_sleep_s = self.draw.choice((0.15, 0.3, 0.5))

    # -- of tasks ---------------------------------------------------------------------------------------

    @property
    def process(self) -> Process:
        """The process that runs now."""
        assert self.task is not None
        return self.task.process

    def wait(self, seconds: float) -> None:
        """Let simulated time pass in this thread."""
        task = self.task
        if task is None:  # the judge, between schedules
            return
        if task.process.is_dead:
            raise Killed
        wake = self.now + seconds
        if task.process.paused_until <= wake < self._limit_s and (not self._heap or wake < self._heap[0][0]):
            self.now = wake
            return
        self._push(wake, task, task.token)
        self._leave(task)

    def operation(self, seconds: float | None = None) -> None:
        """One operation of this process: takes time, and may be its last."""
        task = self.task
        if task is None:
            return
        process = task.process
        process.operations += 1
        self.operations += 1
        if process.operations == process.dies_at:
            process.kill()
        if process.operations == process.pauses_at:
            process.pause(process.pause_s)
        if process.calls_at is not None and process.operations == process.calls_at[0]:
            process.calls_at[1]()
        if seconds is None:
            seconds = self.latency_s * self.draw.random()
            if self.slow_share and self.draw.random() < self.slow_share:
                seconds *= 20
        self.wait(seconds)

    def block(self) -> None:
        """Leave this thread until :meth:`ready` is called for it."""
        assert self.task is not None
        if self.task.process.is_dead:
            raise Killed
        self._leave(self.task)

    def _leave(self, task: Task) -> None:
        self.hub.switch()
        if task.process.is_dead:
            raise Killed

    def ready(self, task: Task, seconds: float = 0.0) -> None:
        """Let a thread that :meth:`block` left go on, after ``seconds``."""
        self._push(self.now + seconds, task, task.token)

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Call a function outside all threads."""
        self._push(time, what, 0)

    def _push(self, time: float, what: Any, token: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, what, token))

    def start(self, process: Process, run: Callable[[], Any]) -> Task:
        """Start a thread."""
        task = Task(process, run)
        self.ready(task, self.latency_s * self.draw.random())
        return task

    # -- of the hub -------------------------------------------------------------------------------------

    def run(self, limit_s: float) -> None:
        """Run until nothing is left to run, or past ``limit_s``."""
        self._limit_s = limit_s
        while self._heap:
            time, _, what, token = self._heap[0]
            if time > limit_s:
                return
            heapq.heappop(self._heap)
            self.now = max(self.now, time)
            if not isinstance(what, Task):
                what()
                continue
            if what.has_ended or token != what.token:
                continue
            if what.process.paused_until > self.now and not what.process.is_dead:
                self._push(what.process.paused_until, what, token)
                continue
            what.token += 1
            self.task = what
            what.greenlet.switch()
            self.task = None

    def end(self) -> None:
        """Unwind what still runs."""
        for process in self.processes:
            process.is_dead = True
            process._reap()
            # Agreements are kept for as long as their group lives, and the store of these knows its process.
            process.group = process.store = None

    # -- what was seen ----------------------------------------------------------------------------------

    def note(self, what: str, process: Process | None = None) -> None:
        """For the replay of a seed."""
        if self.trace is not None:
            process = process or (self.task.process if self.task else None)
            who = f"{process.launch}.{process.rank}" if process else "-"
            self.trace.append(f"{self.now:9.3f} {who:>4} {what}")

    def progressed(self, until: float | None = None) -> None:
        """A rank did something, or a fault lasts until a time: waiting for it is no hang."""
        self.last_progress = max(self.last_progress, self.now if until is None else until)
