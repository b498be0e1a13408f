"""A mixture of experts stored one by one: the whole sharded load beside transformers' own, on the same files.

    make bench                                        # or
    OMP_NUM_THREADS=1 python benchmarks/moe.py --ranks 4 --gib 1.3 --pairs 7

Ours is ``load_pretrained(path, mesh)``; theirs ``from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=N))``,
which shards by FSDP2 too and has each rank read its own experts only (transformers 5.17 and later). Both are timed from
the path to the filled model: config, model on meta, fully_shard, conversion of the experts, payload. Fresh processes for
every run (forked from one that has imported everything), in alternating order; minima are compared, of the slowest
rank's seconds and of all ranks' CPU time. Where other programs take the cores away, seconds measure the scheduler, and
the CPU time alone decides. A run of its own holds every shard of the one against the other's, bit by bit.

Also measured: storage bytes with a cold page cache, anonymous memory added per rank (at its peak, sampled), and the
collectives that a profiled load dispatches. ``--gib 0.3 --pairs 2`` is the short form.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import shardwise as sw
from benchmarks.load import anonymous_bytes, drop_page_cache, run, storage_bytes
from shardwise.catalog import catalog_of_safetensors

EXPERTS = 64
HIDDEN, INTERMEDIATE, VOCAB = 1024, 512, 32768
#: Seconds between two looks at the memory of a rank.
SAMPLE_S = 0.002
#: A load that takes this many times the CPU time of its ranks, spread over the cores, waited for others' programs.
MOST_BUSY = 1.3


def make_model(directory: Path, gib: float) -> None:
    """A Qwen3-MoE in bf16 of about this size, with random content, written straight to files: 3 tensors an expert."""
    from safetensors.torch import save_file

    attention = 16 * 64 * HIDDEN * 2 + 8 * 64 * HIDDEN * 2
    per_layer = EXPERTS * 3 * HIDDEN * INTERMEDIATE + attention
    layers = max(1, round((gib * 2**30 / 2 - 2 * VOCAB * HIDDEN) / per_layer))
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(directory)
    with sw.meta_init():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for stored, shape in stored_as(name, tuple(parameter.shape)).items():
            content = torch.randint(0, 2**15 - 1, shape, dtype=torch.int16, generator=generator)
            tensors[stored] = content.view(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def stored_as(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stored tensors that make up a parameter."""
    path, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        count, rows, columns = shape
        parts = {"gate_proj": (rows // 2, columns), "up_proj": (rows // 2, columns)}
    elif last == "down_proj" and path.endswith(".experts"):
        count, *rest = shape
        parts = {"down_proj": tuple(rest)}
    else:
        return {name: shape}
    return {f"{path}.{k}.{part}.weight": size for k in range(count) for part, size in parts.items()}


def ours(directory: str, world_size: int) -> tuple[Any, Any]:
    return sw.load_pretrained(directory, init_device_mesh("cpu", (world_size,)))


def theirs(directory: str, world_size: int) -> tuple[Any, Any]:
    config = DistributedConfig(fsdp_size=world_size)
    found = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", distributed_config=config, local_files_only=True
    )
    return found, None


class Peak:
    """The most anonymous memory that this process has had while it was looked at."""

    nbytes = 0


@contextmanager
def sampled() -> Iterator[Peak]:
    """Look at this process's memory again and again, in a thread."""
    peak, done = Peak(), threading.Event()

    def look() -> None:
        while not done.wait(SAMPLE_S):
            peak.nbytes = max(peak.nbytes, anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.nbytes = max(peak.nbytes, anonymous_bytes())


def worker(kind: str, rank: int, world_size: int, port: int, directory: str, out: Any) -> None:
    """One rank of one run: ``ours`` or ``theirs``, with ``, sampled`` or ``, profiled``; or ``compared``."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    who, _, how = kind.partition(", ")
    if who == "compared":
        models = [load(directory, world_size)[0] for load in (ours, theirs)]
        result: dict[str, Any] = {"different": different(*models)}
    else:
        result = measured(ours if who == "ours" else theirs, how, directory, world_size)
    dist.barrier()
    out.put({"rank": rank, **result})
    dist.destroy_process_group()


def measured(load: Any, how: str, directory: str, world_size: int) -> dict[str, Any]:
    """One load and what it took. What is sampled or profiled is not timed."""
    gc.collect()
    dist.barrier()
    before, io_before = anonymous_bytes(), storage_bytes()
    profiler = profile(activities=[ProfilerActivity.CPU]) if how == "profiled" else nullcontext()
    with sampled() if how == "sampled" else nullcontext(Peak()) as peak, profiler:
        started, cpu_before = time.perf_counter(), time.process_time()
        model, report = load(directory, world_size)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    events = profiler.events() if how == "profiled" else ()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "plan": report.seconds_plan if report else 0.0,
        "read": report.seconds_read if report else 0.0,
        "anonymous_added": peak.nbytes - before,
        "storage_bytes": storage_bytes() - io_before,
        "bytes_read": report.bytes_read if report else 0,
        "shard_bytes": sum(local(p).nbytes for p in model.parameters()),
        "collectives": sum(1 for e in events if e.name.startswith(("c10d::", "gloo:"))),
    }


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def different(model: Any, other: Any) -> list[str]:
    """Parameters whose shards on this rank are not alike, bit by bit."""
    found, expected = dict(model.named_parameters()), dict(other.named_parameters())
    return [
        name
        for name in {**found, **expected}
        if name not in found
        or name not in expected
        or tuple(found[name].placements) != tuple(expected[name].placements)
        or not torch.equal(local(found[name]).view(torch.int16), local(expected[name]).view(torch.int16))
    ]


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    _ = transformers.Qwen3MoeForCausalLM  # imported here, not by each run
    directory = Path(tempfile.mkdtemp(prefix="shardwise-bench-"))
    try:
        maker = multiprocessing.get_context("fork").Process(target=make_model, args=(directory, args.gib))
        maker.start()  # in a process of its own, so that its freed memory is not there for ranks to reuse
        maker.join()
        result = measure(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result) if args.json else "\n".join(f"{k:52} {v}" for k, v in result.items()))
    sys.exit(0 if result["contracts"] == "hold" else 1)


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    def go(kind: str) -> list[dict[str, Any]]:
        return run(kind, args.ranks, directory, worker)

    catalog = catalog_of_safetensors(directory)
    cold: dict[str, list[list[dict[str, Any]]]] = {"ours": [], "theirs": []}
    for who in ("theirs", "ours", "ours", "theirs"):  # what lies below the page cache may keep the files too
        drop_page_cache(directory)
        cold[who].append(go(who))
    unlike = sorted({name for r in go("compared") for name in r["different"]})
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
    parts: dict[str, list[float]] = {"plan": [], "read": []}
    for pair in range(args.pairs):
        for who in ("ours", "theirs") if pair % 2 else ("theirs", "ours"):
            ranks = go(who)
            times[who].append(max(r["seconds"] for r in ranks))
            cpu[who].append(sum(r["cpu_seconds"] for r in ranks))
            if who == "ours":
                for part, found in parts.items():
                    found.append(max(r[part] for r in ranks))
    beside = {
        who: max(r["anonymous_added"] - r["shard_bytes"] for r in go(f"{who}, sampled")) / 2**20
        for who in times
    }
    collectives = sum(r["collectives"] for r in go("ours, profiled"))
    asked = sum(r["bytes_read"] for r in cold["ours"][0]) / catalog.nbytes
    storage = {
        who: max(sum(r["storage_bytes"] for r in ranks) for ranks in found) / catalog.nbytes
        for who, found in cold.items()
    }
    ratio, cpu_ratio = (min(found["ours"]) / min(found["theirs"]) for found in (times, cpu))
    cores = min(args.ranks, len(os.sched_getaffinity(0)))
    busy = max(min(times[who]) / (min(cpu[who]) / cores) for who in times)
    broken = [
        text
        for text, bad in (
            (f"shards differ: {', '.join(unlike[:3])}", unlike),
            ("bytes read > 1.05 x model", max(asked, storage["ours"]) > 1.05),
            ("anonymous memory > shard + 128 MiB", beside["ours"] > 128),
            ("a load dispatches collectives", collectives > 0),
            ("slower than transformers' own", ratio > 1 and busy <= MOST_BUSY),
            ("more CPU time than transformers' own", cpu_ratio > 1),
        )
        if bad
    ]
    shown = {"ours": "load_pretrained", "theirs": "from_pretrained"}
    return {
        "ranks": args.ranks,
        "model MiB": round(catalog.nbytes / 2**20, 1),
        "stored tensors": len(catalog.tensors),
        "bytes asked / model": round(asked, 4),
        **{f"storage bytes, cold / model, {shown[w]}": round(s, 4) for w, s in storage.items()},
        **{f"anonymous peak - shard, worst MiB, {shown[w]}": round(b, 1) for w, b in beside.items()},
        "collectives in a load": collectives,
        **{
            f"cold s, minimum of 2, {shown[who]}": round(min(max(r["seconds"] for r in k) for k in found), 3)
            for who, found in cold.items()
        },
        **{f"s, min / median, {shown[w]}": _min_median(found) for w, found in times.items()},
        "of which plan / read and place s, minima": " / ".join(f"{min(f):.3f}" for f in parts.values()),
        **{f"CPU s of all ranks, min / median, {shown[w]}": _min_median(found) for w, found in cpu.items()},
        "load_pretrained / from_pretrained, minima": round(ratio, 3),
        "load_pretrained / from_pretrained, medians": round(
            statistics.median(times["ours"]) / statistics.median(times["theirs"]), 3
        ),
        "CPU time, load_pretrained / from_pretrained": round(cpu_ratio, 3),
        "seconds / CPU s per core, worse minimum": f"{busy:.2f}"
        + (f" (seconds are inconclusive: above {MOST_BUSY})" if busy > MOST_BUSY else ""),
        "pairs": args.pairs,
        "contracts": "hold" if not broken else "BROKEN: " + "; ".join(broken),
    }


def _min_median(seconds: list[float]) -> str:
    return f"{min(seconds):.3f} / {statistics.median(seconds):.3f}"


if __name__ == "__main__":
    main()
