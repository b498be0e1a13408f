"""Agreements of thousands of ranks on a real TCPStore in a process of its own: a client (a socket and a thread) for each rank.

:mod:`scale` runs it. The clients lie in a few processes, which share the cores with the store: *seconds* are those of all of
them, *store s* are CPU seconds of the store's process. Each round is the production code's.

Store and clients lie in a network namespace of their own where the machine can make one: the store's one thread and each client look
up the name of the other end of each connection (``getnameinfo`` in c10d's sockets). Where a name server loses one question in
twenty, and each loss costs five seconds, 4,096 clients never come to the end. Without a network that look-up fails at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.distributed as dist

from shardwise.digests import added_sums
from tests.harness.thread_ranks import ThreadRanks, rank_on

MEBI = 2**20
#: So many clients of one process connect at a time: all at once would overrun the store's queue of connections.
_AT_ONCE = 32


def measured_apart(ranks: int, tensors: int, rounds: int, processes: int) -> dict[str, Any]:
    """:func:`measure` in a process of its own, in a network namespace if there are any."""
    words = [sys.executable, __file__, "--measure", *map(str, (ranks, tensors, rounds, processes))]
    done = subprocess.run([*_namespace(), *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _namespace() -> list[str]:
    """The beginning of a command that runs in a network of its own; nothing where that can't be had."""
    for user in ([], ["--map-root-user"]):
        made = ["unshare", *user, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        try:
            subprocess.run([*made, "true"], check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        return made
    print(
        "no network namespace here: names are looked up, and thousands of clients may take long",
        file=sys.stderr,
    )
    return []


def measure(ranks: int, tensors: int, rounds: int, processes: int) -> dict[str, Any]:
    """Store seconds and seconds of each kind of round, medians of the rounds after the first."""
    begun = time.perf_counter()
    server = child("--serve")
    port = int(answer(server))
    cuts = [ranks * k // processes for k in range(processes + 1)]
    clients = [child("--client", *map(str, (port, a, b, ranks, tensors, rounds))) for a, b in pairwise(cuts)]
    for one in clients:
        answer(one)
    found: dict[str, Any] = {"all connected after, s": round(time.perf_counter() - begun, 1)}
    for kind in kinds_of(tensors):
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
        found[f"{kind}, store s, most"] = round(max(cpu), 3)
        found[f"{kind}, s"] = round(statistics.median(wall[1:] or wall), 2)
    found["store's memory, MiB"] = round(float(told(server).split()[1]) / MEBI)
    for one in [*clients, server]:
        one.stdin.close()  # type: ignore[union-attr]
        one.wait(60)
    return found


def kinds_of(tensors: int) -> Sequence[str]:
    """The kinds of rounds. ``tensors``: numbers that a rank sends in a round of sums; without any there is none."""
    return ("agree", "gather", "sums") if tensors else ("agree", "gather")


# ----------------------------------------------------------------------------------------------------
# The processes of the store and of the clients


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
    with ThreadPoolExecutor(min(_AT_ONCE, last - first)) as pool:
        held = list(pool.map(lambda rank: rank_on(port, rank, ranks, timeout_s=600), range(first, last)))
    steps = [kind for kind in kinds_of(tensors) for _ in range(rounds)]
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


def child(*words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # else a line for each client whose host has no name
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", type=int, nargs=4, metavar=("RANKS", "TENSORS", "ROUNDS", "PROCESSES"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the store has a socket for each rank
    if args.serve:
        serve()
    elif args.client:
        client(*args.client)
    else:
        print(json.dumps(measure(*args.measure)))


if __name__ == "__main__":
    main()
