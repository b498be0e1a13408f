"""One rank of one run: a peer loads a case, timed or inspected. Run by ``benchmarks.fresh.on_fresh_ranks``."""

from __future__ import annotations

import gc
import mmap
import time
import warnings
from typing import Any

import numpy
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.loading.cases import Case
from benchmarks.loading.counters import (
    CollectiveBytes,
    anonymous_bytes,
    pss_bytes,
    read_calls,
    sampled,
    storage_bytes,
)
from benchmarks.peers import PEERS
from tests.gpu.devices import peak_bytes, synchronize

__all__ = ["fetch_memory", "inspected", "timed"]


def timed(rank: int, world_size: int, peer: str, case: Case) -> dict[str, Any]:
    """Seconds and what the rank used. Nothing else runs inside of the time."""
    warnings.simplefilter("ignore")  # the peers' own
    load = PEERS[peer].prepare(case)
    gc.collect()
    dist.barrier()
    before = {**_memory(), **_reads()}
    fetch_memory(case.nbytes // world_size)
    dist.barrier()
    started = time.perf_counter()  # one clock for all processes of a machine
    cpu_before = time.process_time()
    loaded = load()
    synchronize(case.device)
    cpu_s = time.process_time() - cpu_before
    ended = time.perf_counter()
    after = _reads()
    dist.barrier()  # the node's memory when all have loaded
    after |= _memory()
    dist.barrier()
    del loaded
    return {
        "started": started,
        "ended": ended,
        "cpu_s": cpu_s,
        **{name: after[name] - before[name] for name in after},
    }


def fetch_memory(nbytes: int) -> None:
    """Let the kernel have this much memory free at hand, for every peer alike.

    A virtual machine gives memory that is free for two seconds back to its host, and whoever touches it first then waits
    for the host: seconds that say nothing about a load.
    """
    fetched = mmap.mmap(-1, nbytes + 32 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fetched.madvise(mmap.MADV_HUGEPAGE)
    pages = numpy.frombuffer(fetched, dtype=numpy.uint8)[:: mmap.PAGESIZE]
    pages[:] = 1
    dist.barrier()
    del pages
    fetched.close()


def _reads() -> dict[str, int]:
    return {"storage_bytes": storage_bytes(), "read_calls": read_calls()}


def _memory() -> dict[str, int]:
    return {"anonymous_bytes": anonymous_bytes(), "pss_bytes": pss_bytes()}


def inspected(rank: int, world_size: int, peer: str, case: Case) -> dict[str, Any]:
    """Peaks of anonymous and of device memory, bytes of collectives, a hash of each shard. Too slow to be timed."""
    warnings.simplefilter("ignore")  # the peers' own
    load = PEERS[peer].prepare(case)
    gc.collect()
    dist.barrier()
    before = anonymous_bytes()
    with sampled() as peak, CollectiveBytes() as collectives:
        loaded, device_peak = peak_bytes(_device(case), load)
        synchronize(case.device)
    shards = _shards(loaded)
    return {
        "peak_bytes": peak.nbytes - before,
        "device_peak_bytes": device_peak,
        "collective_bytes": collectives.nbytes,
        "shard_bytes": sum(shard.nbytes for shard in shards.values()),
        "hashes": {name: _hash(shard) for name, shard in shards.items()},
    }


def _device(case: Case) -> torch.device:
    index = None if case.device == "cpu" else torch.accelerator.current_device_index()
    return torch.device(case.device, index)


def _shards(loaded: Any) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter; of a model, or by name. Nothing of peers that hold no shards."""
    if isinstance(loaded, list):
        return {}
    tensors = dict(loaded.named_parameters()) if isinstance(loaded, nn.Module) else loaded
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
    }


def _hash(shard: torch.Tensor) -> str:
    flat = shard.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy()) if flat.numel() else "empty"
