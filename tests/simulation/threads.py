"""``threading`` and ``time`` of a simulated process, as far as the simulated code uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from tests.simulation.world import Task, World

__all__ = ["Locks", "TaskLocal", "Threading", "Time"]


class Time:
    """Stands for the module ``time``: each process has its own zero, and sleeps take longer than asked for."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world

    def monotonic(self) -> float:
        world = self._world()
        return world.now + (world.task.process.clock_offset_s if world.task else 0.0)

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        world = self._world()
        world.operation(max(seconds, world.least_sleep_s * world.draw.uniform(0.5, 1.0)))


class _Lock:
    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: list[Task] = []

    def __enter__(self) -> _Lock:
        while self._held:
            assert self._world.task is not None
            self._waiting.append(self._world.task)
            self._world.block()
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False
        for task in self._waiting:
            self._world.ready(task)
        self._waiting.clear()


class _Condition(_Lock):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._told: list[Task] = []

    def wait(self) -> None:
        assert self._world.task is not None
        self._told.append(self._world.task)
        self.__exit__()
        self._world.block()
        self.__enter__()

    def notify_all(self) -> None:
        told, self._told = self._told, []
        for task in told:
            self._world.ready(task)


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._world.ready(task)
        self._waiting.clear()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._world.task
        assert task is not None
        if not self._is_set:
            self._waiting.append(task)
            if timeout is not None:
                self._world.ready(task, max(timeout, self._world.least_sleep_s))
            self._world.block()
            if task in self._waiting:
                self._waiting.remove(task)
        return self._is_set


class _Thread:
    def __init__(
        self, *, target: Callable[[], Any], world: World, name: str = "", daemon: bool = False
    ) -> None:
        self._world, self._target, self.name = world, target, name
        self._task: Task | None = None
        self.ident: int | None = None

    def start(self) -> None:
        def run() -> None:
            assert self._world.task is not None
            self._world.task.local["thread"] = self
            self._target()

        self._task = self._world.start(self._world.process, run)
        self.ident = 1

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.has_ended

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        while not self._task.has_ended:
            assert self._world.task is not None
            self._task.waiting_to_end.append(self._world.task)
            self._world.block()


class Threading:
    """Stands for the module ``threading``."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world

    def Lock(self) -> _Lock:
        return _Lock(self._world())

    def Condition(self) -> _Condition:
        return _Condition(self._world())

    def Event(self) -> _Event:
        return _Event(self._world())

    def Thread(self, *, target: Callable[[], Any], name: str = "", daemon: bool = False) -> _Thread:
        return _Thread(target=target, world=self._world(), name=name, daemon=daemon)

    def current_thread(self) -> Any:
        task = self._world().task
        return task.local.get("thread") if task is not None else None

    def get_native_id(self) -> int:
        return 0


class TaskLocal:
    """Stands for the one ``threading.local`` of :mod:`shardwise.ranks.ranks`."""

    def __init__(self, world: Callable[[], World]) -> None:
        object.__setattr__(self, "_world", world)

    def __getattr__(self, name: str) -> Any:
        task = self._world().task
        return None if task is None else task.local.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        task = self._world().task
        if task is not None:
            task.local[name] = value


class Locks(MutableMapping[str, Any]):
    """Stands for the locks that one process holds: :mod:`shardwise.publish.lock` has them in a dict."""

    def __init__(self, world: Callable[[], World]) -> None:
        self._world = world
        self._outside: dict[str, Any] = {}

    @property
    def _own(self) -> dict[str, Any]:
        task = self._world().task
        return self._outside if task is None else task.process.held_locks

    def __getitem__(self, key: str) -> Any:
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
