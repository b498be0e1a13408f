"""What ranks load, restore, convert and export in the tests of the page cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardwise as sw
from benchmarks.loading.counters import storage_bytes
from tests.harness.page_cache import cached_bytes, drop

MIB = 1024**2
LAYERS, WIDTH = 24, 1024  # 4 MiB a layer


def write_model(directory: str) -> int:
    """Two files of 48 MiB; their size."""
    for k in range(2):
        tensors = {
            f"{i}.weight": torch.full((WIDTH, WIDTH), float(i))
            for i in range(k * LAYERS // 2, (k + 1) * LAYERS // 2)
        }
        save_file(tensors, Path(directory) / f"model-{k}.safetensors")
    return sum(f.stat().st_size for f in Path(directory).iterdir())


def _model(cut: Literal["rows", "columns"]) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    dim = 0 if cut == "rows" else 1
    fully_shard(
        model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), shard_placement_fn=lambda _: Shard(dim)
    )
    return model


def _measured(directory: str, work: Any) -> tuple[Any, int]:
    """What ``work`` returns, and how much of the directory's files is cached after it, where nothing was before."""
    files = [f for f in Path(directory).rglob("*.safetensors") if f.is_file()]
    dist.barrier()
    if dist.get_rank() == 0:
        drop(*files)
        assert (stay := cached_bytes(*files)) == 0, f"{stay} bytes of {directory} can't be dropped"
    dist.barrier()
    result = work()
    dist.barrier()
    left = cached_bytes(*files)
    dist.barrier()
    return result, left


def cold_reads(directory: str) -> dict[str, list[tuple[int, str]]]:
    """By ``IOOptions.reads``, for each of three cold loads of rows: bytes that this rank fetched from storage, and the report's
    words."""
    found: dict[str, list[tuple[int, str]]] = {"plain": [], "auto": [], "ahead": []}
    for reads in [*found] * 3:
        model = _model("rows")

        def load(model: nn.Module = model, reads: Any = reads) -> tuple[int, str]:
            before = storage_bytes()
            report = sw.load(model, directory, io=sw.IOOptions(reads=reads))
            return storage_bytes() - before, report.reads

        found[reads].append(_measured(directory, load)[0])
        values = {int(n.split(".")[0]): p.to_local().unique().tolist() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        assert values == {k: [float(k)] for k in range(LAYERS)}
    return found


def loads(directory: str, scratch: str) -> dict[str, Any]:
    """Cold loads with each setting, of rows and of columns; then of a checkpoint made of it: what is left in the cache."""
    found: dict[str, Any] = {}
    release = sw.IOOptions(page_cache="release")
    for cut in ("rows", "columns"):
        for io in (sw.IOOptions(), sw.IOOptions(page_cache="keep"), release):
            model = _model(cut)  # type: ignore[arg-type]
            report, left = _measured(directory, lambda model=model, io=io: sw.load(model, directory, io=io))
            values = {
                int(n.split(".")[0]): p.to_local().unique().tolist() for n, p in model.named_parameters()
            }  # type: ignore[attr-defined]
            assert values == {k: [float(k)] for k in range(LAYERS)}
            found[f"{cut}, {io.page_cache}"] = (report.page_cache, left)
    state = sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    step = f"{scratch}/step"
    sw.save(state, step)
    for io in (sw.IOOptions(page_cache="keep"), release):
        which = io.page_cache
        _, found[f"restore, {which}"] = _measured(step, lambda io=io: sw.restore(state, step, io=io))
        out = f"{scratch}/{which}"
        _, found[f"convert, {which}"] = _measured(
            directory, lambda io=io, out=out: sw.convert(directory, out, io=io)
        )
        out = f"{scratch}/{which}-hub"
        _, found[f"export, {which}"] = _measured(step, lambda io=io, out=out: sw.export_hf(step, out, io=io))
    return found
