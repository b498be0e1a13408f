"""Loads from an object store beside a client that only fetches the same bytes and beside other loaders, with a delay before each reply.

    OMP_NUM_THREADS=1 python benchmarks/store.py --rounds 5 --latency-ms 20
    OMP_NUM_THREADS=1 python benchmarks/store.py --save
    OMP_NUM_THREADS=1 python benchmarks/store.py --short

The server (Ceph after ``make servers``, else moto's) has processes of its own, with a proxy that delays replies and counts. Fresh processes
for every run, all in turn, minima compared; the bare client has the same number of requests at a time, of the same size, and keeps what it
got. Peers whose package is not installed are left out: pip install s3torchconnector 'runai-model-streamer[s3]'. ``--save``: a checkpoint
beside a bare multipart upload of the same bytes (moto holds it in memory, several times over). The exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from benchmarks.loading import models
from benchmarks.loading.cases import Case, sharded_model, unsharded_before_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled
from benchmarks.peers import FROM_STORES
from benchmarks.stores.saving import measured_saves
from benchmarks.stores.served import as_client, served
from shardwise.engine.objects import PART_BYTES
from tests.harness.servers import ceph_is_installed

MIB = 2**20
RANKS = 4
#: Files of a DCP checkpoint that one rank writes: as many as the model has in all.
_DCP_FILES = 6
_SIZES = {"num_hidden_layers": 16, "vocab_size": 16384}


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--server", choices=("moto", "ceph"), help="without it, Ceph where it is installed")
    parser.add_argument("--small-objects", action="store_true", help="24 objects of 23 MiB, as with moto")
    parser.add_argument("--save", action="store_true", help="saves; without it, loads")
    parser.add_argument("--gib", type=float, default=2.0, help="of a checkpoint that is saved")
    parser.add_argument("--short", action="store_true", help="tiny, once, both; no contract on seconds")
    args = parser.parse_args()
    args.server = args.server or ("ceph" if ceph_is_installed() and not args.short else "moto")
    _ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM
    results: dict[str, Any] = {"server": args.server}
    if args.save or args.short:
        gib, rounds = (0.02, 1) if args.short else (args.gib, args.rounds)
        results["save"] = measured_saves(RANKS, int(gib * 2**30), rounds, args.server, args.latency_ms)
    if not args.save:
        with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
            for kind in ("dense", "moe"):
                results[kind] = _measured(kind, f"{root}/{kind}", args)
    print(json.dumps(results, indent=1))
    broken = [name for kind in results.keys() - {"server"} for name in results[kind].get("broken", ())]
    sys.exit(bool(broken))


def _measured(kind: str, directory: str, args: argparse.Namespace) -> dict[str, Any]:
    _write(
        kind, f"{directory}/model", short=args.short, large=args.server == "ceph" and not args.small_objects
    )
    case = Case(kind, f"{directory}/model", "dim 0", RANKS)
    left_out = {peer.NAME: reason for peer in FROM_STORES.values() if (reason := peer.supports(case))}
    peers = [name for name, peer in FROM_STORES.items() if peer.NAME not in left_out]
    unsharded_before_ranks(case)
    if "s3_connector" in peers:
        on_fresh_ranks(RANKS, _write_dcp, case, f"{directory}/dcp")
    nbytes = sum(file.stat().st_size for file in case.files)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in peers}
    asked: dict[str, list[tuple[int, int]]] = {name: [] for name in peers}
    with served(args.server, args.latency_ms, directory) as store:
        for turn in range(1 if args.short else args.rounds):
            first = turn % len(peers)  # another one comes first in each round
            for one in [*peers[first:], *peers[:first]]:
                before = store.counts()
                try:
                    runs[one].append(on_fresh_ranks(RANKS, _run, one, case, store.endpoint, timeout_s=120))
                except SystemExit as error:
                    if one in ("ours", "bare"):
                        raise
                    left_out[FROM_STORES[one].NAME] = f"failed: {error}"
                    peers.remove(one)
                    continue
                after = store.counts()
                asked[one].append((after[0] - before[0], after[1] - before[1]))
    runs = {name: runs[name] for name in peers}
    least = {
        name: min(max(r["ended"] for r in run) - min(r["started"] for r in run) for run in found)
        for name, found in runs.items()
    }
    digests = {name: {rank["digest"] for run in found for rank in run} for name, found in runs.items()}
    peak = max(rank["peak"] - rank["shard"] for run in runs["ours"] for rank in run)
    requests, got = (max(counts) for counts in zip(*asked["ours"], strict=True))
    found = {
        "model MiB": round(nbytes / MIB, 1),
        "files": len(case.files),
        "seconds, least": {FROM_STORES[name].NAME: round(seconds, 3) for name, seconds in least.items()},
        "ours / bare": round(least["ours"] / least["bare"], 3),
        "requests, most": {FROM_STORES[name].NAME: max(n for n, _ in asked[name]) for name in peers},
        "bytes sent by the store / model, most": {
            FROM_STORES[name].NAME: round(max(n for _, n in asked[name]) / nbytes, 4) for name in peers
        },
        "peak of anonymous memory beside the shard, MiB": {
            FROM_STORES[name].NAME: round(
                max(r["peak"] - r["shard"] for run in runs[name] for r in run) / MIB, 1
            )
            for name in peers
        },
        "not measured": left_out,
    }
    files = len(case.files)
    most = 1.05 * (nbytes / PART_BYTES) + files + (8 if args.short else 0)
    limits = {
        "bytes <= 1.02 (converted: 1.05)": got <= (1.02 if kind == "dense" else 1.05) * nbytes or args.short,
        "memory <= 128 MiB": peak <= 128 * MIB,
        "requests": requests <= most,
        "seconds <= 1.15 x bare": args.short or least["ours"] <= 1.15 * least["bare"],
        "same bits": len({tuple(d) for name, d in digests.items() if name != "bare"}) == 1,
    }
    return {**found, "broken": [f"{kind}: {name}" for name, holds in limits.items() if not holds]}


def _write(kind: str, directory: str, *, short: bool, large: bool) -> None:
    """A model in a few ``large`` files, as on the hub, or in files of a few parts: moto reads an object whole for every range of it."""
    full = models.MODELS[kind]
    less = full.short if short else {} if large else _SIZES if kind == "dense" else {"num_hidden_layers": 2}
    sizes = {**full.full, **less}
    files = 2 if short else RANKS if large else RANKS * _DCP_FILES
    models.MODELS[kind] = models.Kind(full.config, sizes, {}, files)
    models.write_model(kind, directory, short=False)
    gc.collect()


def _write_dcp(rank: int, world_size: int, case: Case, directory: str) -> None:
    """What ``s3_connector`` loads."""
    model = sharded_model(case)
    sw.load(model, case.directory)
    writer = dcp.FileSystemWriter(directory, thread_count=_DCP_FILES)
    dcp.save(dict(model.named_parameters()), storage_writer=writer)


def _run(rank: int, world_size: int, which: str, case: Case, endpoint: str) -> dict[str, Any]:
    as_client(endpoint)
    load = FROM_STORES[which].prepare(case)
    gc.collect()
    dist.barrier()
    before = anonymous_bytes()
    started = time.perf_counter()
    with sampled() as peak:
        loaded = load()
    ended = time.perf_counter()
    if isinstance(loaded, nn.Module):
        shard = sum(p.to_local().nbytes for p in loaded.parameters())  # type: ignore[attr-defined]
        digest = str(sw.digest(loaded))
    else:
        shard, digest = sum(tensor.nbytes for tensor in loaded.values()), ""
    found = {"started": started, "ended": ended, "peak": peak.nbytes - before, "shard": shard}
    return {**found, "digest": digest}


if __name__ == "__main__":
    main()
