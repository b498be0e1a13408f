"""Cold loads that give their pages back, beside cold loads that keep them: seconds, and what is left in the page cache.

    OMP_NUM_THREADS=1 python benchmarks/page_cache.py --ranks 2 --pairs 9

Fresh processes for every run, nothing of the files cached before it, both kinds in alternating order; medians are
compared. Exit status 1 if more than 64 MiB are left after ``page_cache="release"``, or if it takes more than 1.1 times as
long as ``"keep"``. ``--columns`` cuts every matrix along dim 1, so that each page holds bytes of all ranks.
"""

from __future__ import annotations

import argparse
import json
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

import shardwise as sw
from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.cases import Case, sharded_model
from benchmarks.loading.counters import storage_bytes
from benchmarks.loading.models import write_model
from tests.harness.page_cache import cached_bytes, drop

MIB = 2**20


def worker(rank: int, world_size: int, kind: Any, case: Case) -> dict[str, float]:
    """One rank of one load; ``kind`` is the option."""
    model = sharded_model(case)
    dist.barrier()
    before, started = storage_bytes(), time.perf_counter()
    report = sw.load(model, case.directory, io=sw.IOOptions(page_cache=kind))
    seconds = time.perf_counter() - started
    assert report.page_cache == kind
    dist.barrier()
    return {"seconds": seconds, "storage": storage_bytes() - before}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--columns", action="store_true", help="cut matrices along dim 1")
    parser.add_argument("--directory", help="on the disk to be measured; not in memory")
    parser.add_argument("--short", action="store_true", help="a tiny model")
    args = parser.parse_args()
    root = tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.directory)
    case = Case("dense", f"{root}/dense", "dim 1" if args.columns else "dim 0", args.ranks)
    try:
        in_fresh_process(partial(write_model, short=args.short), case.model, case.directory)
        result = measure(case, args.pairs)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["contracts"] == "hold" else 1)


def measure(case: Case, pairs: int) -> dict[str, Any]:
    model_bytes = case.nbytes
    times: dict[str, list[float]] = {"keep": [], "release": []}
    left: dict[str, list[int]] = {"keep": [], "release": []}
    storage: dict[str, list[float]] = {"keep": [], "release": []}
    for pair in range(pairs + 1):
        for kind in ("keep", "release") if pair % 2 else ("release", "keep"):
            drop(*case.files)
            if cached_bytes(*case.files) > MIB:
                raise SystemExit(f"{case.directory}: its pages can't be dropped; give --directory on a disk")
            ranks = on_fresh_ranks(case.ranks, worker, kind, case)
            if pair:  # the first warms up all but the files
                times[kind].append(max(r["seconds"] for r in ranks))
                left[kind].append(cached_bytes(*case.files))
                storage[kind].append(sum(r["storage"] for r in ranks) / model_bytes)
    ratio = statistics.median(times["release"]) / statistics.median(times["keep"])
    broken = [
        text
        for text, bad in (
            ("more than 64 MiB left", max(left["release"]) > 64 * MIB),
            ("release > 1.1 x keep", ratio > 1.1),
        )
        if bad
    ]
    return {
        "ranks": case.ranks,
        "model MiB": round(model_bytes / MIB, 1),
        "pairs": pairs,
        **{f"{k}: s, median (min, max)": _three(v) for k, v in times.items()},
        **{f"{k}: MiB left, median (min, max)": _three([n / MIB for n in v]) for k, v in left.items()},
        **{f"{k}: storage bytes / model, median (min, max)": _three(v) for k, v in storage.items()},
        "release / keep, medians": round(ratio, 3),
        "contracts": "hold" if not broken else "BROKEN: " + "; ".join(broken),
    }


def _three(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}, {max(values):.3f})"


if __name__ == "__main__":
    main()
