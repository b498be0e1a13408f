"""What the calls of the public surface give and write, in numbers that may not change by accident: run on each rank."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw

#: Entries of documents that tell of the run, or of the software and machine.
_OF_THE_RUN = ("run_id", "software", "settings", "xxh3")


def everything(hub: str, root: str) -> dict[str, Any]:
    """Load, save, restore, load again, export and convert a model on this group's ranks. Values are the same on every rank, or this rank's."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    mesh = init_device_mesh("cpu", (world,))
    place = Path(root) / f"on-{world}"
    found: dict[str, Any] = {}

    model, report = sw.load_pretrained(hub, mesh, dtype=torch.float32, return_report=True)
    found["load_pretrained"] = _read(report) | {"shards": _digest_of(dict(model.named_parameters()))}
    state = _state(model)
    _fill(state)
    sw.save(state, place / "step")
    found["save"] = _written(place / "step")

    second, report = sw.load_pretrained(hub, mesh, dtype=torch.float32, return_report=True)
    other = _state(second)
    resumed = sw.restore(other, place / "step")
    found["restore"] = {
        "bytes_read": resumed.bytes_read,
        "requests": resumed.requests,
        "tensors": resumed.tensors,
        "optimizer_tensors": resumed.optimizer_tensors,
        "digest": resumed.digest,
        "moments": _digest_of(_moments(other)),
        "as saved": _moments_equal(state, other),
    }
    found["load of a checkpoint"] = _read(sw.load(second, place / "step"))

    sw.export_hf(model, place / "export")
    found["export_hf"] = _written(place / "export")
    sw.convert(place / "step", place / "converted")
    found["convert"] = _written(place / "converted")
    found["digest"] = sw.digest(model)
    return found


def _state(model: Any) -> sw.TrainState:
    return sw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def _fill(state: sw.TrainState) -> None:
    """Moments that no kernel rounds: numbers by their place in the tensor."""
    optimizer = state.optimizers["optimizer"]
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for k, values in enumerate(optimizer.state.values()):
        for name, scale in (("exp_avg", 1.0), ("exp_avg_sq", 0.5)):
            local = _local(values[name])
            local.copy_(((torch.arange(local.numel()) % 251 + k) * scale).view(local.shape))


def _moments(state: sw.TrainState) -> dict[str, torch.Tensor]:
    values = state.optimizers["optimizer"].state.values()
    return {f"{k}.{name}": t for k, one in enumerate(values) for name, t in one.items()}


def _moments_equal(first: sw.TrainState, second: sw.TrainState) -> bool:
    a, b = _moments(first), _moments(second)
    return a.keys() == b.keys() and all(torch.equal(_local(a[name]), _local(b[name])) for name in a)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the bits of this rank's shards, by name."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        local = _local(tensors[name]).contiguous().reshape(-1)
        digest.update(f"{name} {local.dtype} {local.numel()} ".encode())
        digest.update(local.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(report: Any) -> dict[str, Any]:
    return {
        "bytes_read": report.bytes_read,
        "requests": report.requests,
        "local_bytes": report.local_bytes,
        "staging_peak_bytes": report.staging_peak_bytes,
    }


def _written(directory: Path) -> dict[str, str]:
    """Every file of a directory: its size and a hash of its bytes; of a document, without what tells of the run."""
    dist.barrier()
    found = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        raw = path.read_bytes()
        if path.suffix == ".json":
            document = {key: part for key, part in json.loads(raw).items() if key not in _OF_THE_RUN}
            if path.name == "manifest.json":
                document["files"] = {n: f for n, f in document["files"].items() if n != "state.json"}
            raw = json.dumps(document).encode()
        found[str(path.relative_to(directory))] = (
            f"{len(raw)} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"
        )
    dist.barrier()
    return found
