"""Load against the floor: filling a sharded meta model beside processes that only `preadv` the same ranges into fresh memory.

    make bench                                        # or
    OMP_NUM_THREADS=1 python benchmarks/load.py --ranks 4 --gib 1 --pairs 9

Fresh processes for every run (forked from one that has imported everything), in alternating order; minima are
compared. Also measured: storage bytes with a cold page cache, anonymous memory added per rank, staging, and
the collectives that a profiled load dispatches (none: agreement goes through the store).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import shardwise as sw
from shardwise.catalog import catalog_of_safetensors
from shardwise.dtypes import itemsize
from shardwise.layout.live import describe
from shardwise.loading.load import FillOptions, fill, plan_load
from shardwise.loading.pretrained import with_callers
from shardwise.planning import IOOptions
from shardwise.ranks.ranks import Ranks
from shardwise.recipe.transformers import hub_rules


def make_model(directory: Path, gib: float) -> None:
    """A Qwen3-like dense bf16 model of about this size, with random content, written straight to files."""
    from safetensors.torch import save_file

    hidden, vocab = 1024, 65536
    per_layer = hidden * (hidden * 4 + 3 * 4096)
    layers = max(2, round((gib * 2**30 / 2 - 2 * vocab * hidden) / per_layer))
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(directory)
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2**15 - 1, p.shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, p in model.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def storage_bytes() -> int:
    """Bytes that this process caused to be fetched from storage."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("no read_bytes in /proc/self/io")


def drop_page_cache(directory: Path) -> None:
    """Let the kernel forget the files' pages (they are clean)."""
    for file in directory.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def worker(kind: str, rank: int, world_size: int, port: int, directory: str, out: Any) -> None:
    """One rank of one run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    config = AutoConfig.from_pretrained(directory)
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rules = with_callers(hub_rules(model), catalog_of_safetensors(directory), (), ())
    sw.shard(model, mesh)
    plan = None
    if kind == "floor":
        catalog = catalog_of_safetensors(directory)
        plan = plan_load(describe(model), catalog, rules, io=IOOptions())
    gc.collect()
    dist.barrier()
    before, io_before = anonymous_bytes(), storage_bytes()
    started = time.perf_counter()
    staging = 0
    collectives = 0
    if kind != "floor":
        profiler = profile(activities=[ProfilerActivity.CPU]) if kind == "profile" else nullcontext()
        with profiler:
            report = fill(
                describe(model),
                catalog_of_safetensors(directory),
                rules,
                FillOptions(io=IOOptions()),
                Ranks.current(),
            )
        staging, read, shard_bytes = report.staging_peak_bytes, report.bytes_read, report.local_bytes
        if kind == "profile":
            collectives = sum(1 for e in profiler.events() if e.name.startswith(("c10d::", "gloo:")))
    else:
        keep = floor(plan)
        read, shard_bytes = sum(k.numel() for k in keep), plan.local_nbytes
    seconds = time.perf_counter() - started
    added, fetched = anonymous_bytes() - before, storage_bytes() - io_before
    dist.barrier()
    out.put(
        {
            "rank": rank,
            "seconds": seconds,
            "anonymous_added": added,
            "storage_bytes": fetched,
            "bytes_read": read,
            "shard_bytes": shard_bytes,
            "staging": staging,
            "collectives": collectives,
        }
    )
    dist.destroy_process_group()


def floor(plan: Any) -> list[torch.Tensor]:
    """The least that a load must do: `preadv` every range of the plan into freshly allocated memory."""
    buffers, files = [], {}
    for transfer in plan.transfers:
        if transfer.path not in files:
            files[transfer.path] = os.open(transfer.path, os.O_RDONLY)
        nbytes = transfer.numel * itemsize(transfer.source_dtype)
        assert transfer.run_numel == transfer.numel, "the floor is for contiguous shards"
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view, done = memoryview(buffer.numpy()), 0
        while done < nbytes:
            done += os.preadv(files[transfer.path], [view[done:]], transfer.offset_bytes + done)
        buffers.append(buffer)
    return buffers


def run(kind: str, world_size: int, directory: Path, work: Any = worker) -> list[dict[str, Any]]:
    """One run of all ranks in fresh processes; results by rank."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = context.SimpleQueue()
    processes = [
        context.Process(target=work, args=(kind, r, world_size, port, str(directory), out))
        for r in range(world_size)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(300)
        if p.exitcode != 0:
            for other in processes:
                other.kill()
            raise SystemExit(f"{kind}: a rank ended with {p.exitcode}")
    return sorted((out.get() for _ in processes), key=lambda r: r["rank"])


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken, inconclusive floors are reported as such."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="shardwise-bench-"))
    try:
        maker = multiprocessing.get_context("fork").Process(target=make_model, args=(directory, args.gib))
        maker.start()  # in a process of its own, so that its freed memory is not there for ranks to reuse
        maker.join()
        result = measure(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result) if args.json else "\n".join(f"{k:34} {v}" for k, v in result.items()))
    sys.exit(0 if result["contracts"] == "hold" else 1)


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    model_bytes = catalog_of_safetensors(directory).nbytes
    drop_page_cache(directory)
    cold = run("load", args.ranks, directory)
    for kind in ("load", "floor"):
        run(kind, args.ranks, directory)  # warm
    times: dict[str, list[float]] = {"load": [], "floor": []}
    runs: list[list[dict[str, Any]]] = []
    for pair in range(args.pairs):
        for kind in ("load", "floor") if pair % 2 else ("floor", "load"):
            ranks = run(kind, args.ranks, directory)
            times[kind].append(max(r["seconds"] for r in ranks))
            if kind == "load":
                runs.append(ranks)
    spread = max(times["floor"]) / min(times["floor"])
    ratio = min(times["load"]) / min(times["floor"])
    worst_added = max(r["anonymous_added"] - r["shard_bytes"] for ranks in (*runs, cold) for r in ranks)
    storage = sum(r["storage_bytes"] for r in cold) / model_bytes
    asked = sum(r["bytes_read"] for r in cold) / model_bytes
    collectives = sum(r["collectives"] for r in run("profile", args.ranks, directory))
    broken = [
        text
        for text, bad in (
            ("storage bytes > 1.02 x model", storage > 1.02),
            ("anonymous memory > shard + 128 MiB", worst_added > 128 * 2**20),
            ("a load dispatches collectives", collectives > 0),
            ("load > 1.5 x floor", ratio > 1.5 and spread <= 1.5),
        )
        if bad
    ]
    return {
        "ranks": args.ranks,
        "model MiB": round(model_bytes / 2**20, 1),
        "storage bytes, cold / model": round(storage, 4),
        "bytes asked / model": round(asked, 4),
        "anonymous added - shard, worst MiB": round(worst_added / 2**20, 1),
        "collectives in a load": collectives,
        "staging bytes": max(r["staging"] for r in cold),
        "cold load s": round(max(r["seconds"] for r in cold), 3),
        "load s, min / median": f"{min(times['load']):.3f} / {statistics.median(times['load']):.3f}",
        "floor s, min / median": f"{min(times['floor']):.3f} / {statistics.median(times['floor']):.3f}",
        "load / floor, minima": round(ratio, 3),
        "load / floor, medians": round(
            statistics.median(times["load"]) / statistics.median(times["floor"]), 3
        ),
        "floor spread, max / min": f"{spread:.2f}" + (" (inconclusive: above 1.5)" if spread > 1.5 else ""),
        "pairs": args.pairs,
        "contracts": "hold" if not broken else "BROKEN: " + "; ".join(broken),
    }


if __name__ == "__main__":
    main()
