"""Adversarial schedules of the ring of a load: the class itself, on the simulated device, whose streams run by chance.

    python -m tests.device.schedules --schedules 100000 --seed 0

prints how many schedules there were and in how many a target got wrong values; exit status 1 if there is one. In each
schedule streams run as late as they may, at once, or anything between; a slot is poisoned before it is filled again, and
filled in two steps, between which streams go on. Up to four threads fill slots, and chance says which of them does its next step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import shardwise.engine.files as to_device

__all__ = ["MUTANTS", "mutant", "races"]

#: Elements of a slot: 64 bytes.
_SLOT = 16
_MOST_PUTS = 24
#: Errors in the ring, as (what the source says, what it says then). Each must be found.
MUTANTS = {
    "a slot is filled again before its copy has ended": (
        "            event.synchronize()\n",
        "            pass\n",
    ),
    "a slot that a thread fills is free for another": (
        "        slot = self._free_slot()\n        try:\n",
        "        slot = self._free_slot()\n        self._free.put(slot)\n        try:\n",
    ),
    "copies begin before what the current stream was given": (
        "        self._side.wait_stream(torch.accelerator.current_stream(device))\n",
        "",
    ),
    "the current stream goes on before the copies": (
        "        torch.accelerator.current_stream(self._device).wait_stream(self._side)\n",
        "",
    ),
}


def mutant(name: str) -> ModuleType:
    """The ring's module with an error of :data:`MUTANTS`."""
    old, new = MUTANTS[name]
    text = Path(to_device.__file__).read_text()
    assert text.count(old) == 1, old
    spec = importlib.util.spec_from_loader(f"{to_device.__name__}_mutant", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(text.replace(old, new), f"{to_device.__file__}, {name}", "exec"), module.__dict__)
    return module


def races(
    schedules: int, seed: int, rings: ModuleType = to_device, *, stop_at_first: bool = False
) -> list[int]:
    """The seeds, from ``seed`` on, of the schedules in which a target got wrong values. Needs the simulated device."""
    device: Any = torch.get_device_module("simgpu")
    found = []
    for number in range(seed, seed + schedules):
        device.schedule(number)
        if not _is_right(random.Random(number), rings, device):
            found.append(number)
        device.synchronize()
        if found and stop_at_first:
            break
    device.schedule(None)
    return found


class _Stopped(Exception):
    """A read that fails in the middle of a load."""


class _Turns:
    """Runs threads one at a time; a seeded choice picks the thread that takes the next step."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._own = threading.local()
        self._back = threading.Semaphore(0)

    def step(self) -> None:
        """A thread's step is over, and another thread may have its turn. In the thread that runs them all: nothing."""
        if (mine := getattr(self._own, "turn", None)) is not None:
            self._back.release()
            mine.acquire()

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run each in a thread of its own until all are over."""

        def one(turn: threading.Semaphore, work: Callable[[], None]) -> None:
            self._own.turn = turn
            turn.acquire()
            try:
                work()
            finally:
                live.remove(turn)
                self._back.release()

        live = [threading.Semaphore(0) for _ in works]
        threads = [
            threading.Thread(target=one, args=pair, daemon=True)
            for pair in zip(list(live), works, strict=True)
        ]
        for thread in threads:
            thread.start()
        while live:
            self._draw.choice(live).release()
            self._back.acquire()
        for thread in threads:
            thread.join()


def _is_right(draw: random.Random, rings: ModuleType, device: Any) -> bool:
    """One load onto one or two devices: whether every element has its value in the end."""
    devices = [torch.device("simgpu", index) for index in range(1 + (draw.random() < 0.2))]
    if draw.random() < 0.3:
        torch.accelerator.set_stream(torch.Stream(devices[0]))
    memory = [torch.empty(2 * _SLOT * _MOST_PUTS, dtype=torch.int32, device=one) for one in devices]
    for one in memory:
        one.fill_(-1)  # a kernel before the load
    expected = [[-1] * len(one) for one in memory]
    puts = draw.randrange(1, _MOST_PUTS)
    fails_at = draw.randrange(puts) if draw.random() < 0.3 else None
    turns, threads = _Turns(draw), draw.choice((1, 1, 2, 4))
    numbers = iter(range(puts))

    def fill(number: int, is_cast: bool, buffer: torch.Tensor) -> torch.Tensor:
        words = buffer.view(torch.int64 if is_cast else torch.int32)
        words.fill_(-2)
        device.advance()
        turns.step()
        words[: len(words) // 2] = number
        device.advance()
        if number == fails_at:
            raise _Stopped
        turns.step()
        words[len(words) // 2 :] = number
        return words

    def puts_of_a_thread(ring: Any) -> Iterator[None]:
        for number in numbers:
            which, step, is_cast = (draw.randrange(len(memory)), draw.choice((1, 1, 2)), draw.random() < 0.3)
            count = draw.randrange(1, _SLOT // (1 + is_cast) + 1)
            begin = 2 * _SLOT * number
            target = memory[which][begin : begin + step * count : step]
            ring.put(target, count * (8 if is_cast else 4), lambda b, n=number, c=is_cast: fill(n, c, b))
            expected[which][begin : begin + step * count : step] = [number] * count
            yield

    stopped: list[_Stopped] = []

    def lane(ring: Any) -> None:
        try:
            for _ in puts_of_a_thread(ring):
                if stopped:
                    return
                turns.step()
        except _Stopped as error:
            stopped.append(error)

    try:
        with rings.DeviceRings(rings.SLOTS * _SLOT * 4) as ring:
            if threads == 1:
                lane(ring)
            else:
                for one in devices:
                    ring.prepare(one)
                turns.run([lambda: lane(ring)] * threads)
            if stopped:
                raise stopped[0]
    except _Stopped:
        # The caller gives up, and uses the memory for something else.
        for one in memory:
            one.fill_(-3)
        expected = [[-3] * len(one) for one in memory]
    for one in memory:
        one.add_(1)  # a kernel directly after
    found = [one.tolist() for one in memory]
    torch.accelerator.set_stream(device.default_stream(devices[0]))
    return found == [[value + 1 for value in values] for values in expected]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["SIMGPU_DEVICES"] = "2"
    from tests.device import simgpu  # noqa: F401

    begin = time.monotonic()
    found = races(options.schedules, options.seed)
    print(f"{options.schedules} schedules from seed {options.seed} on, {time.monotonic() - begin:.0f} s")
    print(f"races: {len(found)}" + (f", seeds {found[:20]}" if found else ""))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
