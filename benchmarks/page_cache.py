"""Cold loads that give their pages back, beside cold loads that keep them: seconds, and what is left in the page cache.

    OMP_NUM_THREADS=1 python benchmarks/page_cache.py --ranks 2 --gib 1.25 --pairs 9

Fresh processes for every run, nothing of the files cached before it, both kinds in alternating order; medians are
compared. Exit status 1 if more than 64 MiB are left after ``page_cache="release"``, or if it takes more than 1.1 times as
long as ``"keep"``. ``--columns`` cuts every matrix along dim 1, so that each page holds bytes of all ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.load import drop_page_cache, make_model, run, storage_bytes

MIB = 2**20


def cached_bytes(directory: Path) -> int:
    """How much of the model's files is in the page cache (mincore)."""
    libc, total = ctypes.CDLL(None), 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(mapped)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), resident):
            raise OSError("mincore failed")
        del anchor
        mapped.close()
        total += sum(page & 1 for page in resident) * mmap.PAGESIZE
    return total


def cut(parameter: nn.Parameter, *, columns: bool) -> Shard:
    return Shard(1 if columns and parameter.dim() == 2 else 0)


def worker(
    kind: str, rank: int, world_size: int, port: int, directory: str, out: Any, *, columns: bool = False
) -> None:
    """One rank of one load; ``kind`` is the option."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    config = AutoConfig.from_pretrained(directory)
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, shard_placement_fn=partial(cut, columns=columns))
    dist.barrier()
    before, started = storage_bytes(), time.perf_counter()
    report = sw.load(model, directory, io=sw.IOOptions(page_cache=kind))  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    assert report.page_cache == kind
    dist.barrier()
    out.put({"rank": rank, "seconds": seconds, "storage": storage_bytes() - before})
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.25)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--columns", action="store_true", help="cut matrices along dim 1")
    parser.add_argument("--directory", help="on the disk to be measured; not in memory")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.directory))
    try:
        maker = multiprocessing.get_context("fork").Process(target=make_model, args=(directory, args.gib))
        maker.start()
        maker.join()
        result = measure(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["contracts"] == "hold" else 1)


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    model_bytes = sum(os.path.getsize(f) for f in directory.glob("*.safetensors"))
    times: dict[str, list[float]] = {"keep": [], "release": []}
    left: dict[str, list[int]] = {"keep": [], "release": []}
    storage: dict[str, list[float]] = {"keep": [], "release": []}
    for pair in range(args.pairs + 1):
        for kind in ("keep", "release") if pair % 2 else ("release", "keep"):
            drop_page_cache(directory)
            if cached_bytes(directory) > MIB:
                raise SystemExit(f"{directory}: its pages can't be dropped; give --directory on a disk")
            ranks = run(kind, args.ranks, directory, partial(worker, columns=args.columns))
            if pair:  # the first warms up all but the files
                times[kind].append(max(r["seconds"] for r in ranks))
                left[kind].append(cached_bytes(directory))
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
        "ranks": args.ranks,
        "model MiB": round(model_bytes / MIB, 1),
        "pairs": args.pairs,
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
