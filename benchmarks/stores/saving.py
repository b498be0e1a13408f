"""A checkpoint that four ranks save into a store beside a bare multipart upload of the same bytes by the same client."""

from __future__ import annotations

import gc
import tempfile
import time
from typing import Any

import obstore
import torch
import torch.distributed as dist
from obstore.store import S3Store

import shardwise as sw
from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled
from benchmarks.save import make_state
from benchmarks.stores.served import as_client, served
from shardwise.tensors.live import local_tensor
from tests.harness.object_store import BUCKET, SECRET

__all__ = ["measured_saves"]

MIB = 2**20
#: As shardwise's own writer: bytes of a part, and parts of one object that are under way.
_PART_BYTES, _PARTS_AT_ONCE = 8 * MIB, 3


def measured_saves(
    world_size: int, nbytes: int, rounds: int, server: str, latency_ms: float
) -> dict[str, Any]:
    """Both in turn, minima compared."""
    runs: dict[str, list[list[dict[str, Any]]]] = {"save": [], "bare": []}
    requests: dict[str, list[int]] = {"save": [], "bare": []}
    with served(server, latency_ms) as store:
        for turn in range(rounds):
            for kind in ("save", "bare") if turn % 2 else ("bare", "save"):
                before = store.counts()[0]
                runs[kind].append(on_fresh_ranks(world_size, _run, kind, nbytes, store.endpoint))
                requests[kind].append(store.counts()[0] - before)
                in_fresh_process(_empty, store.endpoint)
        stalls: dict[str, list[float]] = {"store": [], "directory": []}
        for turn in range(rounds):
            for kind in sorted(stalls, reverse=bool(turn % 2)):
                with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
                    root = f"s3://{BUCKET}/stall" if kind == "store" else folder
                    found = on_fresh_ranks(world_size, _stall, root, nbytes // 4, store.endpoint)
                stalls[kind].append(max(found))
                in_fresh_process(_empty, store.endpoint)
    least = {
        kind: min(max(r["ended"] for r in run) - min(r["started"] for r in run) for run in found)
        for kind, found in runs.items()
    }
    peak = max(rank["peak"] for run in runs["save"] for rank in run)
    return {
        "checkpoint MiB": round(nbytes / MIB, 1),
        "seconds, least: save, bare upload": [round(least["save"], 3), round(least["bare"], 3)],
        "save / bare": round(least["save"] / least["bare"], 3),
        "stall of an asynchronous save of a quarter, least: store, directory": [
            round(min(stalls[kind]), 3) for kind in ("store", "directory")
        ],
        "requests, most: save, bare": [max(requests["save"]), max(requests["bare"])],
        "peak of anonymous memory that a save adds, MiB": round(peak / MIB, 1),
    }


def _run(rank: int, world_size: int, kind: str, nbytes: int, endpoint: str) -> dict[str, Any]:
    as_client(endpoint)
    model = make_state(world_size, nbytes)
    tensors = [local_tensor(p).detach() for p in model.parameters()]
    pieces = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors]
    gc.collect()
    dist.barrier()
    before = anonymous_bytes()
    started = time.perf_counter()
    with sampled() as peak:
        if kind == "save":
            sw.save(sw.TrainState(model=model), f"s3://{BUCKET}/run/saved")
        else:
            _upload(_store(endpoint), f"bare/{rank}", pieces)
    return {"started": started, "ended": time.perf_counter(), "peak": peak.nbytes - before}


def _stall(rank: int, world_size: int, root: str, nbytes: int, endpoint: str) -> float:
    """Seconds that training waits for a save in the background; the second one, whose memory is there."""
    as_client(endpoint)
    state = sw.TrainState(model=make_state(world_size, nbytes))
    with sw.Checkpointer(root, mode="async") as checkpoints:
        checkpoints.save(state, 1)
        checkpoints.wait()
        dist.barrier()
        started = time.perf_counter()
        checkpoints.save(state, 2)
        return time.perf_counter() - started


def _upload(store: S3Store, key: str, pieces: list[memoryview]) -> None:
    """One object of a rank, in parts."""
    step = MIB
    content = (piece[at : at + step] for piece in pieces for at in range(0, piece.nbytes, step))
    obstore.put(
        store, key, content, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE, use_multipart=True
    )


def _store(endpoint: str) -> S3Store:
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="AKID",
        secret_access_key=SECRET,
        client_options={"allow_http": True, "timeout": "120s"},
    )


def _empty(endpoint: str) -> None:
    """Delete all objects."""
    store = _store(endpoint)
    for batch in obstore.list(store):
        for one in batch:
            obstore.delete(store, one["path"])
