"""What a save and a restore cost as ranks grow: planning of a rank, messages, rank 0's decision, manifest, and the store.

    OMP_NUM_THREADS=1 python benchmarks/scale.py                     # 64, 256, 1,024 and 4,096 ranks, 100,000 tensors
    OMP_NUM_THREADS=1 python benchmarks/scale.py --only store        # agreements on a real TCPStore
    OMP_NUM_THREADS=1 python benchmarks/scale.py --only messages

*Messages*: one process plays the ranks of a save one after another on the model of ``metadata.py``: each makes the record that
it would send after writing (checksums' digits and sums are stand-ins), and the code of the save merges them in the tree of
ranks, as they would. Counted are the bytes that rank 0 receives, those of the rank that receives most, and those of all ranks
together, which all pass the store; beside them what rank 0 would receive if each rank sent it all of its sums. Then rank 0's
part: merging, the manifest, its text, and a reader's check of it.

*Store*: a TCPStore in a process of its own, one client (a socket and a thread) for each rank, in processes that share the
cores. Each round is the production code's. *Store* seconds are CPU seconds of the store's process in one round; the seconds
that pass are those of all clients on these cores, too. ``--tensors`` numbers travel up the tree in a round of sums.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.metadata import (
    collected_of,
    make_state,
    plan_save,
    rank_of,
    ranks_not_there,
    records_of_all,
    timed,
)
from shardwise.checkpoint.save_manifest import manifest_of, merged_records
from shardwise.digests.replicas import added_sums
from shardwise.format.manifest import parse_manifest
from shardwise.gc_paused import gc_paused
from shardwise.ranks.messages import pack, unpack
from shardwise.ranks.ranks import Ranks
from shardwise.ranks.tree import ranks_below
from tests.harness.thread_ranks import ThreadRanks, rank_on

RANKS = (64, 256, 1024, 4096)
MEBI = 2**20


# ----------------------------------------------------------------------------------------------------
# Messages of a save


def measure_messages(params: int, ranks: int, mesh: str) -> dict[str, Any]:
    """Planning of one rank, all records merged in the tree, and rank 0's decision; in a process of its own."""
    with ranks_not_there(ranks):
        state = make_state(params, ranks, mesh)
        gc.collect()
        before = peak_bytes()
        plan_s, (snapshot, headers) = timed(lambda: plan_save(state, rank_of(ranks)), 1)
        plan_bytes = peak_bytes() - before
        collected = collected_of(snapshot)
        records = records_of_all(collected, ranks, max(len(h) for _, h in headers))
        sums = sum(v.counted for part in snapshot.parts for v in part.live)
        first, received, sent, merge_s = merged_up(records, ranks)
    before = peak_bytes()
    decide_s, text = timed(lambda: decided(collected, ranks, first), 1)
    return {
        "tensors": sum(len(part.live) for part in snapshot.parts),
        "planning, CPU s": round(plan_s, 2),
        "planning, MiB": round(plan_bytes / MEBI),
        "rank 0 receives, MB": round(received[0] / 1e6, 1),
        "most that a rank receives, MB": round(max(received) / 1e6, 1),
        "through the store, MB": round(sent / 1e6),
        "without the tree rank 0 receives, MB": round((8 * sums * ranks + received[0] - 8 * sums * 16) / 1e6),
        "merging on the slowest rank, CPU s": round(merge_s, 2),
        "rank 0's decision, CPU s": round(decide_s, 2),
        "rank 0's decision, MiB": round((peak_bytes() - before) / MEBI),
        "manifest, MB": round(len(text) / 1e6, 2),
    }


def merged_up(records: Any, ranks: int) -> tuple[list[bytes], list[int], int, float]:
    """Carry the ranks' records up the tree: rank 0's payloads, the bytes each rank receives, all bytes, the slowest merge."""
    waiting: dict[int, bytes] = {}
    received, sent, slowest = [0] * ranks, 0, 0.0
    for rank in reversed(range(ranks)):  # below before above
        payloads = [pack(records(rank)), *(waiting.pop(r) for r in ranks_below(rank, ranks))]
        received[rank] = sum(map(len, payloads[1:]))
        if rank == 0:
            return payloads, received, sent, slowest
        begun = time.process_time()
        if len(payloads) > 1:
            waiting[rank] = pack(merged_records([unpack(p) for p in payloads]))
            slowest = max(slowest, time.process_time() - begun)
        else:
            waiting[rank] = payloads[0]
        sent += len(waiting[rank])
    raise AssertionError("there is no rank 0")


@gc_paused()  # as where ranks agree on a save
def decided(collected: Any, ranks: int, payloads: list[bytes]) -> str:
    """What rank 0 does with the payloads that it receives, until it writes the manifest."""
    manifest = manifest_of(collected, Ranks(world_size=ranks), merged_records([unpack(p) for p in payloads]))
    text = manifest.to_text()
    parse_manifest(text.encode(), "manifest.json")  # a reader's own code takes it, before it is published
    return text


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ----------------------------------------------------------------------------------------------------
# Agreements on a real store


def serve() -> None:
    """Host a store; tell its port; at each line of input tell the CPU seconds of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, flush=True)


def client(port: int, first: int, last: int, ranks: int, tensors: int, rounds: int) -> None:
    """Play the ranks from ``first`` to ``last`` - 1, a thread each; a round of each kind at each line of input."""
    threading.stack_size(512 * 1024)
    with ThreadPoolExecutor(last - first) as pool:  # some connections take five seconds, here and there
        held = list(pool.map(lambda rank: rank_on(port, rank, ranks, timeout_s=600), range(first, last)))
    kinds = ["agree", "gather", "sums"] if tensors else ["agree", "gather"]
    steps = [kind for kind in kinds for _ in range(rounds)]
    start, end = threading.Barrier(last - first + 1), threading.Barrier(last - first + 1)

    def run(member: ThreadRanks) -> None:
        for kind in steps:
            start.wait()
            one_round(kind, member, tensors)
            end.wait()

    threads = [threading.Thread(target=run, args=(member,)) for member in held]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for _ in steps:
        sys.stdin.readline()
        start.wait()
        end.wait()
        print("done", flush=True)


def one_round(kind: str, ranks: ThreadRanks, tensors: int) -> None:
    if kind == "agree":
        with ranks.agree("bench"):
            pass
    elif kind == "gather":
        ranks.combine("bench", lambda: "x" * 600, len)
    else:
        ranks.reduce(
            "bench", lambda: np.full(tensors, ranks.rank, np.uint64), added_sums, lambda s: int(s[0])
        )


def measure_store(ranks: int, tensors: int, rounds: int, processes: int) -> dict[str, Any]:
    """Store seconds and seconds of each kind of round, medians of the rounds after the first."""
    server = child("--serve")
    port = int(server.stdout.readline())  # type: ignore[union-attr]
    cuts = [ranks * k // processes for k in range(processes + 1)]
    clients = [child("--client", *map(str, (port, a, b, ranks, tensors, rounds))) for a, b in pairwise(cuts)]
    for one in clients:
        answer(one)
    found: dict[str, Any] = {}
    for kind in ["agree", "gather", "sums"] if tensors else ["agree", "gather"]:
        cpu, wall = [], []
        for _ in range(rounds):
            before, begun = float(told(server).split()[0]), time.perf_counter()
            for one in clients:
                say(one)
            for one in clients:
                answer(one)
            wall.append(time.perf_counter() - begun)
            cpu.append(float(told(server).split()[0]) - before)
        found[f"{kind}, store s"] = round(statistics.median(cpu[1:] or cpu), 3)
        found[f"{kind}, first, store s"] = round(cpu[0], 3)
        found[f"{kind}, s"] = round(statistics.median(wall[1:] or wall), 2)
    found["store's memory, MiB"] = round(float(told(server).split()[1]) / MEBI)
    for one in [*clients, server]:
        one.stdin.close()  # type: ignore[union-attr]
        one.wait(60)
    return found


def child(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *words]
    environment = {
        **os.environ,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # else a line for each client whose host has no name
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args} ended with {process.wait()}")
    return line


def told(process: subprocess.Popen[str]) -> str:
    say(process)
    return answer(process)


# ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--params", type=int, default=33_400, help="in steps of 200; three tensors each")
    parser.add_argument("--mesh", default="1-D", help="of benchmarks/metadata.py")
    parser.add_argument("--tensors", type=int, default=0, help="numbers that a rank sends in a round of sums")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--only", choices=("messages", "store"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--played", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve()
    elif args.client:
        client(*args.client)
    elif args.played:
        print(json.dumps(measure_messages(args.params, args.played, args.mesh)))
    else:
        for ranks in args.ranks:
            if args.only != "store":
                words = ("--played", str(ranks), "--params", str(args.params), "--mesh", args.mesh)
                print(ranks, "messages", answer(child(*words)).strip(), flush=True)
            if args.only != "messages":
                found = measure_store(ranks, args.tensors, args.rounds, args.processes)
                print(ranks, "store", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
