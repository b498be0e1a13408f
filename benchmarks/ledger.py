"""What a ledger costs its process: ``python -m benchmarks.ledger [--seconds N]``. Exits 1 above 1 % of one core.

Prints the CPU seconds of the ledger's process beyond those of one without, as a share of one core, while it sleeps; the speed of
products of matrices beside that without a ledger; and the time of a phase. Then it trains a small transformer that is saved every
second, by turns in the background, in fresh processes: CPU seconds of the ledger's thread and of its phases as a share of one core, the
speed beside that without a ledger, and the ledger's peaks beside the kernel's, VmHWM and that of a cgroup of the process's own, where one
can be made. Exits 1 also if a peak is 2 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from benchmarks.fresh import from_fresh_process
from shardwise.operations.host_budget import cgroups_with
from shardwise.operations.operation import phase

_MOST, _MOST_OFF = 0.01, 0.02
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
    with nullcontext() if place is None else sw.reports.memory_ledger(place):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        done = work(began_s + seconds)
        took_s = time.perf_counter() - began_s
        return (time.process_time() - cpu_s) / took_s, done / took_s


def own_cgroup() -> Path | None:
    """Move this process into a cgroup of its own that counts memory. None where that can't be had."""
    for version, level in cgroups_with("memory"):
        place = level / f"shardwise-benchmark-{os.getpid()}"
        with suppress(OSError):
            place.mkdir()
            (place / "cgroup.procs").write_text("0")
            if (place / ("memory.current" if version == 2 else "memory.usage_in_bytes")).exists():
                return place
    return None


def train(seconds: float, place: str, with_ledger: bool) -> dict[str, Any]:
    """In a fresh process: steps of training with a save every second. Speed, the ledger's CPU time, and peaks."""
    torch.set_num_threads(1)
    cgroup = own_cgroup()
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True)
    model = nn.TransformerEncoder(layer, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    state = sw.TrainState(model=model, optimizer=optimizer)
    batch, steps, saves, ledgers_s = torch.randn(4, 64, 384), 0, 0, 0.0
    with nullcontext() if not with_ledger else sw.reports.memory_ledger(f"{place}/ledger") as ledger:
        began_s = time.perf_counter()
        with (
            sw.Checkpointer(f"{place}/sync", keep_last=1) as sync,
            sw.Checkpointer(f"{place}/async", keep_last=1, mode="async") as late,
        ):
            while (took_s := time.perf_counter() - began_s) < seconds:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if took_s > saves + 1:
                    saves += 1
                    (late if saves % 2 else sync).save(state, steps)
            for thread in threading.enumerate():
                if thread.name == "shardwise-ledger" and thread.ident is not None:
                    ledgers_s = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        took_s = time.perf_counter() - began_s
    found: dict[str, Any] = {"steps_per_s": steps / took_s, "thread": ledgers_s / took_s, "saves": saves}
    if with_ledger:
        assert ledger is not None
        records = [json.loads(line) for line in ledger.file.read_text().splitlines()]
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found["phases"] = sum(r["kind"] == "phase" for r in records)
        found["took_s"] = took_s
        found["peaks"] = {
            "VmHWM": (records[-1]["peak_resident_bytes"], int(status["VmHWM"].split()[0]) * 1024)
        }
        if cgroup is not None:
            files = (cgroup / "memory.peak", cgroup / "memory.max_usage_in_bytes")
            peak = int(next(f for f in files if f.exists()).read_text())
            found["peaks"][f"cgroup {cgroup.parent}"] = (records[-1]["peak_cgroup_bytes"], peak)
    if cgroup is not None:
        with suppress(OSError):
            (cgroup.parent / "cgroup.procs").write_text("0")
            cgroup.rmdir()
    return found


def of_a_training(seconds: float, phase_s: float) -> bool:
    """Measure and print. Whether share and peaks are as they should be."""
    with_one, without = [], []
    for _ in range(_ROUNDS):
        for found, has_ledger in ((with_one, True), (without, False)):
            with tempfile.TemporaryDirectory() as place:
                found.append(from_fresh_process(train, seconds, place, has_ledger))
    shares = [one["thread"] + one["phases"] * phase_s / one["took_s"] for one in with_one]
    speeds = [a["steps_per_s"] / b["steps_per_s"] for a, b in zip(with_one, without, strict=True)]
    told = ", ".join(f"{s:.2%}" for s in shares)
    print(
        f"training with {with_one[0]['saves']} saves: {statistics.median(shares):.2%} of one core (each run: {told})"
    )
    print(
        f"steps with a ledger: {statistics.median(speeds):.3f} of the speed without (each: {', '.join(f'{s:.3f}' for s in speeds)})"
    )
    off = {}
    for name in with_one[0]["peaks"]:
        off[name] = max(abs(one["peaks"][name][0] / one["peaks"][name][1] - 1) for one in with_one)
        ours, kernels = with_one[0]["peaks"][name]
        print(
            f"peak beside {name}: {ours / 2**20:.1f} and {kernels / 2**20:.1f} MiB; at most {off[name]:.2%} off in {_ROUNDS} runs"
        )
    return statistics.median(shares) <= _MOST and max(off.values()) <= _MOST_OFF


def main() -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        with sw.reports.memory_ledger(place):
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
        with sw.reports.memory_ledger(place):
            began_s = time.perf_counter()
            for _ in range(900):
                with phase("timed"):
                    pass
            phase_s = (time.perf_counter() - began_s) / 900
            print(f"a phase: {phase_s * 1e6:.0f} µs")
        began_s = time.perf_counter()
        for _ in range(100_000):
            with phase("timed"):
                pass
        print(f"a phase without a ledger: {(time.perf_counter() - began_s) / 100_000 * 1e6:.2f} µs")
    return int(not of_a_training(seconds, phase_s) or share > _MOST)


if __name__ == "__main__":
    raise SystemExit(main())
