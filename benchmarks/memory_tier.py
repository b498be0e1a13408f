"""The memory tier beside its floors: the stall of ``remember``, a resume from memory and from a slow disk, the memory of a host.

    OMP_NUM_THREADS=1 python benchmarks/memory_tier.py --ranks 4 --gib 1 --rounds 7

Each rank is a host of its own, with its own directory on tmpfs. The state is a model in bf16 and AdamW's two moments.

*Stall.* ``remember`` against a plain copy of the rank's tensors into memory that was touched before, in turn, from the third step on:
the first two find no pages in their slots. Seconds of the slowest rank, the least of all rounds.

*Recovery.* ``Checkpointer.resume`` in fresh processes, with one host lost and its rank started on an empty one: from memory, and
from disk, in turn. The disk is one for all ranks and gives 200 MB/s: reads of its files, which lie in the page cache, wait for each
other and for that rate. It has no other latency, so a real disk of that rate takes longer.

*Memory.* The pages of a host's directory, after four steps and while a step is copied, and what the process has more of anonymous memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes
from benchmarks.restore import train_state
from shardwise.tensors.live import local_tensor

DISK_BYTES_PER_S = 200e6
COPIES = 2
#: Words in which digests are summed (1 MiB), a piece of another host's slices on its way, the documents in each slot.
SMALL_BYTES = 2 * 2**20
LOST = 1


def tier(hosts: str, rank: int) -> sw.InMemoryCheckpoints:
    """This rank as a host."""
    folder = Path(hosts) / f"host-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return sw.InMemoryCheckpoints(
        every=1, copies=COPIES, directory=str(folder), host=f"host-{rank}", address="127.0.0.1"
    )


def locals_of(state: sw.TrainState) -> list[torch.Tensor]:
    """This rank's part of every tensor of model and optimizer that has elements."""
    assert state.model is not None
    assert state.optimizer is not None
    moments = [t for of in state.optimizer.state.values() for t in of.values()]
    found = [local_tensor(t).detach() for t in (*state.model.parameters(), *moments)]
    return [t for t in found if t.dim()]


class Most:
    """The most memory of a host while it is entered: its directory's pages, and anonymous memory that is new."""

    def __init__(self, folder: str) -> None:
        self._folder, self._ended = folder, threading.Event()
        self._before = anonymous_bytes()
        self.tmpfs_bytes = self.anonymous_bytes = 0

    def __enter__(self) -> Most:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.tmpfs_bytes = max(self.tmpfs_bytes, pages_in(self._folder))
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous_bytes() - self._before)
            if self._ended.wait(0.02):
                return


def pages_in(folder: str) -> int:
    """Bytes of the pages of all files below a directory."""
    found = {}
    for path in Path(folder).rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def remember(rank: int, world_size: int, nbytes: int, root: str, hosts: str, rounds: int) -> dict[str, Any]:
    """Keep steps in memory, each beside a plain copy. The last one stays, and lies on disk, too."""
    state = train_state(world_size, nbytes)
    sources = locals_of(state)
    target = [torch.zeros_like(t) for t in sources]
    given = tier(hosts, rank)
    copies, stalls = [], []
    with sw.Checkpointer(root, memory=given) as checkpoints:
        checkpoints.save(state, 1)
        gc.collect()

        def copy() -> None:
            dist.barrier()
            started = time.perf_counter()
            for one, source in zip(target, sources, strict=True):
                ctypes.memmove(one.data_ptr(), source.data_ptr(), source.nbytes)
            copies.append(time.perf_counter() - started)

        def keep(step: int) -> int:
            dist.barrier()
            started = time.perf_counter()
            copied = checkpoints.remember(state, step)
            stalls.append(time.perf_counter() - started)
            assert checkpoints.wait_for_memory() == step
            return copied

        for turn in range(rounds + 2):
            for work in (copy, lambda: keep(2 + turn))[:: -1 if turn % 2 else 1]:  # noqa: B023
                work()
        target.clear()
        with Most(given.directory) as most:
            copied = keep(2 + rounds + 2)
            keep(2 + rounds + 3)
    files = Path(root, "step-00000001").rglob("*")
    shard = sum(p.stat().st_size for p in files if p.is_file() and is_of(p, rank))
    return {
        "copies": copies[2:],
        "stalls": stalls[2 : rounds + 2],
        "first": stalls[0],
        "copied": copied,
        "shard": shard,
        "tmpfs": most.tmpfs_bytes,
        "anonymous": most.anonymous_bytes,
    }


def is_of(path: Path, rank: int) -> bool:
    """Whether a rank has written a file of a checkpoint."""
    name = path.name
    if path.parent.name == "rank":
        return name.startswith(f"{rank:05d}")
    return name.startswith(f"shard-{rank + 1:05d}") or (rank == 0 and not name.startswith("shard-"))


class SlowDisk:
    """One disk for all processes: each read of a file below ``root`` waits for those before it, and for the rate."""

    def __init__(self, root: str, free_at: Any) -> None:
        self._root, self._free_at = os.path.abspath(root), free_at
        self._read = os.preadv

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = self._read(fd, buffers, offset, flags)
        if os.readlink(f"/proc/self/fd/{fd}").startswith(self._root):
            with self._free_at.get_lock():
                end = max(self._free_at.value, time.monotonic()) + count / DISK_BYTES_PER_S
                self._free_at.value = end
            time.sleep(max(0.0, end - time.monotonic()))
        return count


def resume(
    rank: int, world_size: int, nbytes: int, root: str, hosts: str, free_at: Any
) -> tuple[float, float, int, bool, int]:
    """Resume from memory; with ``free_at``, from the slow disk alone."""
    state = train_state(world_size, nbytes)
    gc.collect()
    if free_at is not None:
        os.preadv = SlowDisk(root, free_at).preadv
    dist.barrier()
    started = time.perf_counter()
    checkpoints = sw.Checkpointer(root, memory=tier(hosts, rank) if free_at is None else None)
    report = checkpoints.resume(state)
    ended = time.perf_counter()
    assert report is not None
    checkpoints.close()
    return started, ended, report.step, report.from_memory, sum(report.fetched.values())


def measure_stall(args: argparse.Namespace, root: str, hosts: str) -> dict[str, Any]:
    """On as many ranks as there are cores: more of them would wait for each other, and not for a copy."""
    count = min(args.ranks, os.cpu_count() or 1)
    ranks = on_fresh_ranks(count, remember, int(args.gib * 2**30), root, hosts, args.rounds)
    least = {
        kind: min(max(r[kind][turn] for r in ranks) for turn in range(args.rounds))
        for kind in ("copies", "stalls")
    }
    ratio = least["stalls"] / least["copies"]
    return {
        "ranks of the stall, MiB copied by each": f"{count}, {ranks[0]['copied'] / 2**20:.1f}",
        "stall s / copy s, least": f"{least['stalls']:.4f} / {least['copies']:.4f} = {ratio:.2f}",
        "stall of the first step s": round(max(r["first"] for r in ranks), 3),
        "contract: stall <= 1.1 x copy": verdict(ratio <= 1.1),
    }


def measure_memory(args: argparse.Namespace, root: str, hosts: str) -> dict[str, Any]:
    """And leave what :func:`measure_recovery` resumes."""
    ranks = on_fresh_ranks(args.ranks, remember, int(args.gib * 2**30), root, hosts, 1)
    most = max(ranks, key=lambda r: (r["tmpfs"] + r["anonymous"]) / r["shard"])
    shards = (most["tmpfs"] + most["anonymous"]) / most["shard"]
    extra = most["tmpfs"] + most["anonymous"] - (1 + COPIES) * most["shard"]
    return {
        "shard of a rank, MiB": round(most["shard"] / 2**20, 1),
        "memory of a host, shards": f"{most['tmpfs'] / most['shard']:.3f} on tmpfs, {shards:.3f} with new anonymous memory",
        f"beyond {1 + COPIES} shards, MiB": f"{extra / 2**20:.2f}, of it new anonymous memory {most['anonymous'] / 2**20:.2f}",
        f"contract: memory <= {1 + COPIES} shards + 2 MiB": verdict(extra <= SMALL_BYTES),
    }


def measure_recovery(args: argparse.Namespace, root: str, hosts: str) -> dict[str, Any]:
    nbytes = int(args.gib * 2**30)
    seconds: dict[str, list[float]] = {"memory": [], "disk": []}
    brought = 0
    for turn in range(args.rounds):
        for kind in list(seconds)[:: -1 if turn % 2 else 1]:
            shutil.rmtree(f"{hosts}/host-{LOST}", ignore_errors=True)
            free_at = multiprocessing.Value("d", 0.0) if kind == "disk" else None
            ranks = on_fresh_ranks(args.ranks, resume, nbytes, root, hosts, free_at)
            if any(r[3] != (kind == "memory") for r in ranks):
                raise SystemExit(f"a resume from {kind} took step {ranks[0][2]} from elsewhere")
            seconds[kind].append(max(r[1] for r in ranks) - min(r[0] for r in ranks))
            brought = sum(r[4] for r in ranks) or brought
    memory, disk = min(seconds["memory"]), min(seconds["disk"])
    return {
        "resume s from memory, from the disk, least": f"{memory:.3f}, {disk:.3f}: {disk / memory:.1f} x",
        "brought from other hosts, MiB of all ranks": round(brought / 2**20, 1),
        "contract: resume from memory >= 5 x as fast": verdict(disk >= 5 * memory),
    }


def verdict(holds: bool) -> str:
    return "holds" if holds else "BROKEN"


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("stall", "memory"), help="the stall; memory and resumes")
    parser.add_argument("--short", action="store_true", help="tiny: that it runs; seconds say nothing then")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.short:
        args.ranks, args.gib, args.rounds = 2, 0.02, 1
    result: dict[str, Any] = {"ranks, GiB, rounds": f"{args.ranks}, {args.gib}, {args.rounds}"}
    for measures in ((measure_stall,), (measure_memory, measure_recovery)):
        if args.only in (None, measures[0].__name__.removeprefix("measure_")):
            root = tempfile.mkdtemp(prefix="shardwise-bench-")
            hosts = tempfile.mkdtemp(prefix="shardwise-bench-", dir="/dev/shm")
            try:
                for measure in measures:
                    result |= measure(args, root, hosts)
            finally:
                shutil.rmtree(root, ignore_errors=True)
                shutil.rmtree(hosts, ignore_errors=True)
    print(json.dumps(result) if args.json else "\n".join(f"{k:50} {v}" for k, v in result.items()))
    broken = [name for name, value in result.items() if name.startswith("contract") and value != "holds"]
    sys.exit(1 if broken and not args.short else 0)


if __name__ == "__main__":
    main()
