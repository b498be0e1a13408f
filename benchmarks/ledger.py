"""What a ledger costs its process: ``python -m benchmarks.ledger [--seconds N]``. Exits 1 above 1 % of one core.

Prints the CPU seconds of the ledger's process beyond those of one without, as a share of one core, while it sleeps and while it
multiplies matrices; the speed of the matrices beside that without a ledger; and the time of a phase.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

import shardwise as sw
from shardwise.operations.recorder import phase

_MOST = 0.01
_ROUNDS = 3


def sleep(until_s: float) -> int:
    """What waits: all CPU time is the ledger's."""
    while (left_s := until_s - time.perf_counter()) > 0:
        time.sleep(min(left_s, 0.5))
    return 1


def multiply(until_s: float) -> int:
    """What computes, mostly without the GIL. Returns the number of products."""
    matrix, done = torch.ones(512, 512), 0
    while time.perf_counter() < until_s:
        torch.mm(matrix, matrix)
        done += 1
    return done


def measure(work: Callable[[float], int], seconds: float, place: str | None) -> tuple[float, float]:
    """CPU seconds of the process and work done, each per second."""
    with nullcontext() if place is None else sw.ledger(place):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        done = work(began_s + seconds)
        took_s = time.perf_counter() - began_s
        return (time.process_time() - cpu_s) / took_s, done / took_s


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        with sw.ledger(place):
            multiply(time.perf_counter() + 0.5)  # what is imported and allocated once
        shares, speeds = [], []
        for _ in range(_ROUNDS):
            shares.append(measure(sleep, seconds, place)[0] - measure(sleep, seconds, None)[0])
            speeds.append(measure(multiply, seconds, place)[1] / measure(multiply, seconds, None)[1])
        share, speed = statistics.median(shares), statistics.median(speeds)
        print(f"CPU of a ledger: {share:.2%} of one core (each run: {', '.join(f'{s:.2%}' for s in shares)})")
        print(
            f"matrices with a ledger: {speed:.3f} of the speed without (each: {', '.join(f'{s:.3f}' for s in speeds)})"
        )
        with sw.ledger(place):
            began_s = time.perf_counter()
            for _ in range(900):
                with phase("timed"):
                    pass
            print(f"a phase: {(time.perf_counter() - began_s) / 900 * 1e6:.0f} µs")
        began_s = time.perf_counter()
        for _ in range(100_000):
            with phase("timed"):
                pass
        print(f"a phase without a ledger: {(time.perf_counter() - began_s) / 100_000 * 1e6:.2f} µs")
    return int(share > _MOST)


if __name__ == "__main__":
    raise SystemExit(main())
