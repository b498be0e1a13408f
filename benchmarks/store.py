"""Loads from an object store beside a client that only fetches the same bytes, with a delay before each reply.

    OMP_NUM_THREADS=1 python benchmarks/store.py --rounds 5 --latency-ms 20
    OMP_NUM_THREADS=1 python benchmarks/store.py --short

The server is moto's, in a process of its own, with a proxy that delays replies and counts. Fresh processes for every run, both in
turn, minima compared; the bare client has the same number of requests at a time, of the same size, and keeps what it got. The
exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from benchmarks.loading import models
from benchmarks.loading.cases import Case, sharded_model, unsharded_before_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled
from shardwise.catalog.open import open_catalog
from shardwise.storage import fetch
from shardwise.transfer.objects import PART_BYTES, REQUESTS
from tests.harness.object_store import BUCKET, COUNTS, Do, Proxy, s3_server

MIB = 2**20
RANKS = 4
_SIZES = {"num_hidden_layers": 16, "vocab_size": 16384}


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--short", action="store_true", help="a tiny model, once; no contract on seconds")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(Path(args.serve), args.latency_ms / 1000)
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        _ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM, sw.load
        results = {kind: _measured(kind, f"{root}/{kind}", args) for kind in ("dense", "moe")}
    print(json.dumps(results, indent=1))
    broken = [name for found in results.values() for name in found["broken"]]
    sys.exit(bool(broken))


def _serve(folder: Path, latency_s: float) -> None:
    """A server with the files of a folder, until standard input ends."""
    with tempfile.TemporaryDirectory() as logs, s3_server(Path(logs)) as server:
        server.put_directory(folder, "model")
        with Proxy(server.port, lambda asked: Do(wait_s=latency_s)) as proxy:
            print(proxy.endpoint, flush=True)
            sys.stdin.read()


def _measured(kind: str, directory: str, args: argparse.Namespace) -> dict[str, Any]:
    _write(kind, directory, short=args.short)
    case = Case(kind, directory, "dim 0", RANKS)
    catalog = open_catalog(directory)
    parts = [(f.path.rpartition("/")[2], f.nbytes) for f in catalog.files]
    nbytes = sum(size for _, size in parts)
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", directory, "--latency-ms", str(args.latency_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin
    assert server.stdout
    try:
        endpoint = server.stdout.readline().strip()
        unsharded_before_ranks(case)
        runs: dict[str, list[list[dict[str, Any]]]] = {"ours": [], "bare": []}
        asked: dict[str, list[tuple[int, int]]] = {"ours": [], "bare": []}
        for turn in range(1 if args.short else args.rounds):
            for one in ("ours", "bare") if turn % 2 else ("bare", "ours"):
                before = _counts(endpoint)
                runs[one].append(on_fresh_ranks(RANKS, _run, one, case, endpoint, parts))
                after = _counts(endpoint)
                asked[one].append((after[0] - before[0], after[1] - before[1]))
    finally:
        server.stdin.close()
        server.wait()
    least = {
        name: min(max(r["ended"] for r in run) - min(r["started"] for r in run) for run in found)
        for name, found in runs.items()
    }
    peak = max(rank["peak"] - rank["shard"] for run in runs["ours"] for rank in run)
    requests, got = (max(counts) for counts in zip(*asked["ours"], strict=True))
    found = {
        "model MiB": round(nbytes / MIB, 1),
        "files": len(parts),
        "seconds, least: ours, bare": [round(least["ours"], 3), round(least["bare"], 3)],
        "ours / bare": round(least["ours"] / least["bare"], 3),
        "requests, most: ours, bare": [requests, max(n for n, _ in asked["bare"])],
        "bytes sent by the store / model, most": round(got / nbytes, 4),
        "peak of anonymous memory beside the shard, MiB": round(peak / MIB, 1),
    }
    most = 1.05 * (nbytes / PART_BYTES) + 2 * len(parts) + 8  # a header and a part of each file, and looks
    limits = {
        "bytes <= 1.02 (converted: 1.05)": got <= (1.02 if kind == "dense" else 1.05) * nbytes or args.short,
        "memory <= 128 MiB": peak <= 128 * MIB,
        "requests": requests <= most,
        "seconds <= 1.15 x bare": args.short or least["ours"] <= 1.15 * least["bare"],
    }
    return {**found, "broken": [f"{kind}: {name}" for name, holds in limits.items() if not holds]}


def _write(kind: str, directory: str, *, short: bool) -> None:
    """A model in files of at most a few parts: moto reads an object whole for every range of it."""
    full = models.MODELS[kind]
    sizes = {
        **full.full,
        **(full.short if short else _SIZES if kind == "dense" else {"num_hidden_layers": 2}),
    }
    files = 2 if short else 24
    models.MODELS[kind] = models.Kind(full.config, sizes, {}, files)
    models.write_model(kind, directory, short=False)
    gc.collect()


def _counts(endpoint: str) -> tuple[int, int]:
    with urllib.request.urlopen(endpoint + COUNTS) as reply:
        found = json.loads(reply.read())
    return sum(found["requests"].values()), found["bytes_out"]


def _run(
    rank: int, world_size: int, which: str, case: Case, endpoint: str, files: list[tuple[str, int]]
) -> Any:
    sw.storage_options(
        f"s3://{BUCKET}", endpoint=endpoint, region="us-east-1", access_key_id="AKID", secret_access_key="x"
    )
    model = sharded_model(case)
    gc.collect()
    dist.barrier()
    before = anonymous_bytes()
    started = time.perf_counter()
    with sampled() as peak:
        if which == "ours":
            sw.load(model, f"s3://{BUCKET}/model")
            shard = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
        else:
            shard = _bare(files, rank, world_size)
    ended = time.perf_counter()
    return {"started": started, "ended": ended, "peak": peak.nbytes - before, "shard": shard}


def _bare(files: list[tuple[str, int]], rank: int, world_size: int) -> int:
    """Fetch every ``world_size``-th part of all files into fresh memory."""
    parts = [
        (name, at, min(at + PART_BYTES, size)) for name, size in files for at in range(0, size, PART_BYTES)
    ]
    own = parts[rank::world_size]
    held = [torch.empty(stop - start, dtype=torch.uint8) for _, start, stop in own]

    def get(k: int) -> None:
        fetch(f"s3://{BUCKET}/model/{own[k][0]}", own[k][1], held[k].numpy().data)

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(get, range(len(own))))
    return sum(t.nbytes for t in held)


if __name__ == "__main__":
    main()
