"""What a call of ``Checkpointer.should_stop`` costs on real ranks, by how long a step takes.

    OMP_NUM_THREADS=1 python -m benchmarks.should_stop --ranks 2

Ranks are gloo processes of this machine, their store is served by the parent, as torchrun does. Microseconds are wall time of the
call on the slowest rank, median and largest of all calls; a rank may wait in it for rank 0, as it would in the next collective.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch.distributed as dist

import shardwise as sw
from tests.harness.launch import Launch


def call(root: str, pause_s: float, calls: int) -> tuple[float, float]:
    """Median and largest microseconds of a call on this rank; a barrier stands for a step's collectives."""
    found = []
    with sw.Checkpointer(root, preemption=sw.PreemptionPolicy(stop_on=("SIGTERM",))) as checkpoints:
        for step in range(calls):
            time.sleep(pause_s)
            dist.barrier()
            started = time.perf_counter()
            assert not checkpoints.should_stop(step)
            found.append((time.perf_counter() - started) * 1e6)
    return statistics.median(found[10:]), max(found[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    from benchmarks.should_stop import call as by_name  # ranks import it: here it is of __main__

    for pause_s, calls in ((0.0, 2000), (0.01, 300), (0.1, 50)):
        with (
            tempfile.TemporaryDirectory() as root,
            Launch(given.ranks, by_name, root, pause_s, calls) as job,
        ):
            job.wait(120)
            medians, most = zip(*(job.result(rank) for rank in range(given.ranks)), strict=True)
        print(
            f"{given.ranks} ranks, steps of {pause_s * 1e3:g} ms: median {max(medians):.0f} us, most {max(most):.0f} us"
        )


if __name__ == "__main__":
    main()
