"""The signals that ask this process to stop. A handler only sets a flag; processes that inherit it are left as they were."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ..objects import frozen

__all__ = ["Received", "StopSignals", "numbers_of"]

_log = logging.getLogger(__name__)
#: A scheduler and a launcher often pass on one and the same signal. What comes later than this is a second one.
_SAME_SIGNAL_S = 2.0


@frozen
class Received:
    """The first signal that asked this process to stop."""

    number: int
    at_s: float
    """By ``time.monotonic()``."""


def numbers_of(names: Iterable[str]) -> tuple[int, ...]:
    """The numbers of signals by name. Raises ``ValueError`` for a name that this system lacks, or that can't be handled."""
    if isinstance(names, str):
        raise ValueError(f"stop_on={names!r} is a string; expected a tuple of names: stop_on=({names!r},)")
    found = []
    for name in names:
        number = getattr(signal, name, None) if isinstance(name, str) and name.startswith("SIG") else None
        if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"stop_on holds {name!r}; expected names of signals: ('SIGTERM', 'SIGUSR1')")
        found.append(int(number))
    return tuple(dict.fromkeys(found))


class StopSignals:
    """Handlers of some signals in this process, from :meth:`listen` to :meth:`close`.

    A handler writes down the first signal, and whether a second one came, then calls the handler that was there before.
    It allocates nothing that the interrupted code could hold, waits for nothing and logs nothing.

    In forked processes: the handlers of before are given back at once. A worker of :mod:`multiprocessing` (a worker of a
    ``DataLoader``) obeys these signals from its parent alone: a scheduler that signals the whole process group would end it,
    and the parent with it, before a step is saved.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self.first: Received | None = None
        self.came_again = False
        self._pid = os.getpid()
        self._is_open = False
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. Raises ``ValueError`` outside of the main thread, and for a handler that is not Python's."""
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can be handled in the main thread only, and this is another one; make the Checkpointer there, or leave "
                "stop_on out and call request_stop()"
            )
        before = {number: signal.getsignal(number) for number in self.numbers}
        if foreign := [signal.Signals(n).name for n, handler in before.items() if handler is None]:
            raise ValueError(
                f"{foreign[0]} has a handler that was not installed from Python; choose another signal"
            )
        self._before, self._is_open = before, True
        for number in self.numbers:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # libraries' system calls go on where a signal came
        _heard.add(self)
        _hook_forks()
        multiprocessing.util.register_after_fork(self, StopSignals._obey_parent_alone)

    def close(self) -> None:
        """Give the handlers of before back. A handler that was installed over this one stays, and calls the one before through it."""
        self._is_open = False
        _heard.discard(self)
        self._give_back()

    def _give_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the handler that stays does nothing but call the one before
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # in a forked process, in the instant before its own handlers are back
        if self._is_open:
            now = time.monotonic()
            if self.first is None:
                self.first = Received(number, now)
            elif now - self.first.at_s > _SAME_SIGNAL_S:
                self.came_again = True
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _in_fork(self) -> None:
        """Give handlers back in a forked process."""
        with contextlib.suppress(ValueError):
            self._give_back()

    def _obey_parent_alone(self) -> None:
        """In a new worker of multiprocessing: take the signals that its parent sends, and drop those of other senders."""
        if not self._is_open or not hasattr(signal, "sigwaitinfo"):
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(
            target=_pass_on_from, args=(self._pid, self.numbers), name="shardwise-signals", daemon=True
        ).start()


def _pass_on_from(parent: int, numbers: tuple[int, ...]) -> None:
    """Deliver the blocked signals of one sender to this process, as if they had not been blocked. Runs until the process ends."""
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_pid == parent or os.getppid() != parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            os.kill(
                os.getpid(), received.si_signo
            )  # this thread alone can take it: it has done so when this returns
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


_heard: weakref.WeakSet[StopSignals] = weakref.WeakSet()
_is_hooked = False


def _hook_forks() -> None:
    """Once in this process: Python can't take such a hook back."""
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        os.register_at_fork(after_in_child=_in_every_fork)


def _in_every_fork() -> None:
    for signals in list(_heard):
        signals._in_fork()
