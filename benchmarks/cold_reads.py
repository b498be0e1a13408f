"""Loads with and without look-ahead (``IOOptions.reads``), of files that are not in the page cache and of files that are.

    OMP_NUM_THREADS=1 python benchmarks/cold_reads.py --ranks 1 2 4 --rounds 5
    OMP_NUM_THREADS=1 python benchmarks/cold_reads.py --ranks 1 --model small --warm

Fresh processes for every run, all kinds in turn. Medians and minima of seconds (wall) and of CPU seconds of all ranks; bytes that
the ranks fetched from storage over the model's.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
import transformers

import shardwise as sw
from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.cases import Case, sharded_model
from benchmarks.loading.counters import storage_bytes
from benchmarks.loading.models import MODELS, write_model
from benchmarks.loading.rank import fetch_memory
from tests.harness.page_cache import cached_bytes, drop

KINDS = ("plain", "auto", "ahead")


def worker(rank: int, world_size: int, kind: Any, case: Case) -> dict[str, Any]:
    """One rank of one load; ``kind`` is the option."""
    model = sharded_model(case)
    fetch_memory(2 * case.nbytes // world_size)  # the shards, and the pages of the files
    before, started, cpu = storage_bytes(), time.perf_counter(), time.process_time()
    report = sw.load(model, case.directory, io=sw.IOOptions(reads=kind))
    found = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    dist.barrier()
    return {**found, "storage": storage_bytes() - before, "reads": report.reads}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--layout", default="dim 0", help="of benchmarks/loading/cases.py")
    parser.add_argument("--warm", action="store_true", help="with the files in the page cache")
    parser.add_argument("--directory", help="on the disk to be measured; not in memory")
    parser.add_argument("--short", action="store_true", help="a tiny model")
    args = parser.parse_args()
    _ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM  # imported here, so that no run does
    root = tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.directory)
    case = Case(args.model, f"{root}/{args.model}", args.layout, 1)
    try:
        in_fresh_process(partial(write_model, short=args.short), case.model, case.directory)
        for ranks in args.ranks:
            measure(Case(args.model, case.directory, args.layout, ranks), args.rounds, warm=args.warm)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(case: Case, rounds: int, *, warm: bool) -> None:
    """Print a line for each kind."""
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS if number % 2 else reversed(KINDS):
            if not warm:
                drop(*case.files)
                if cached_bytes(*case.files):
                    raise SystemExit(
                        f"{case.directory}: its pages can't be dropped; give --directory on a disk"
                    )
            found = on_fresh_ranks(case.ranks, worker, kind, case)
            if number:  # the first warms up all but the files
                runs[kind].append(found)
    for kind, by_run in runs.items():
        seconds = [max(r["seconds"] for r in run) for run in by_run]
        cpu = [sum(r["cpu_s"] for r in run) for run in by_run]
        storage = max(sum(r["storage"] for r in run) for run in by_run) / case.nbytes
        print(
            f"{case.model}, {case.layout}, {case.ranks} ranks, {'warm' if warm else 'cold'}, {kind:5}: "
            f"median {statistics.median(seconds):.3f} s, least {min(seconds):.3f} s; CPU {statistics.median(cpu):.3f} s, "
            f"least {min(cpu):.3f} s; storage at most {storage:.3f}; {by_run[0][0]['reads']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
