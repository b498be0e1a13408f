"""What the ranks load onto the simulated device, and how: by its counts of copies and waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardwise as sw
from shardwise.engine import engine as lanes
from tests.device._save_fns import MIB, spent
from tests.harness import models

#: The least: slots of 256 KiB, so that each is used many times.
IO = sw.IOOptions(staging_bytes=MIB)


class Mixed(nn.Module):
    """Contiguous shards, shards along dim 1 in short and in long runs, casts, a tie, a small tensor and a buffer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.rows = nn.Linear(768, 1025)
            self.columns = nn.Linear(640, 512, bias=False)
            self.narrow = nn.Linear(64, 4096, bias=False)
            self.cast = nn.Linear(512, 512, dtype=torch.bfloat16)
            self.tied = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)
            self.tied.weight = self.cast.weight
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def source(directory: Path) -> dict[str, torch.Tensor]:
    """A file of tensors for :class:`Mixed`, some in another dtype, with the tied one twice; the values to expect."""
    generator = torch.Generator().manual_seed(0)
    model = Mixed()
    stored = {n: torch.randn(t.shape, generator=generator) for n, t in model.state_dict().items()}
    stored["tied.weight"] = stored["cast.weight"]
    stored["rows.bias"] = stored["rows.bias"].to(torch.float64)
    stored["seen"] = torch.tensor([1, 2, 3])
    directory.mkdir(parents=True)
    save_file({n: t.clone() for n, t in stored.items()}, directory / "model.safetensors")
    return {n: t.to(model.state_dict()[n].dtype) for n, t in stored.items()}


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2 over all ranks; two weights are cut along dim 1."""
    along_columns = {(512, 640), (4096, 64)}
    fully_shard(
        model,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        shard_placement_fn=lambda p: Shard(1) if tuple(p.shape) in along_columns else Shard(0),
    )
    return model


def waits_and_memory(sources: str, root: str, device: torch.device) -> dict[str, Any]:
    """Loads of one kind each, onto this rank's device: copies, waits, and memory on device and host."""
    directory = Path(root) / f"one-kind-{dist.get_rank()}"
    directory.mkdir(parents=True)
    weight = torch.randn(24576, 64, generator=torch.Generator().manual_seed(0))
    save_file({"weight": weight}, directory / "model.safetensors")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def linear(dim: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.device("meta"):
            model = nn.Linear(64, 24576, bias=False, dtype=dtype)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dim))
        return model

    tied = directory / "tied"
    tied.mkdir()
    save_file({"0.weight": weight, "1.weight": weight.clone()}, tied / "model.safetensors")
    other = weight.clone()
    other[-1, -1] += 1
    wrong = directory / "wrong"
    wrong.mkdir()
    save_file({"0.weight": weight, "1.weight": other}, wrong / "model.safetensors")

    def twice() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 24576, bias=False), nn.Linear(64, 24576, bias=False))
        model[1].weight = model[0].weight
        fully_shard(model, mesh=mesh)
        return model

    def experts() -> nn.Module:
        import transformers  # the checks of a GPU run without it, too

        name, config = models.hub_model("mixtral")
        with sw.meta_init():
            model: nn.Module = getattr(transformers, name)._from_config(config)
        sw.shard(model, mesh)
        return model

    made: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
        "direct": (directory, linear),
        "cast": (directory, lambda: linear(dtype=torch.bfloat16)),
        "strided": (directory, lambda: linear(dim=1)),
        "strided, cast": (directory, lambda: linear(dim=1, dtype=torch.bfloat16)),
        "second copy": (tied, twice),
        "experts": (f"{sources}/mixtral", experts),
    }
    found: dict[str, Any] = {}
    for name, (source, make) in made.items():
        found[name] = _load_of(make(), source, device)
        if name != "experts":
            (full,) = dict(sw.iter_full_tensors(found[name].pop("model"), naming="module")).values()
            assert torch.equal(full.cpu(), weight.to(full.dtype)), name
        else:
            del found[name]["model"]
    try:
        sw.load(twice(), wrong, io=IO)
    except sw.errors.RankError as error:
        return {"refused": str(error), "kinds": found}
    raise AssertionError("a second copy that differs was taken")


def strategies(root: str, device: torch.device) -> dict[str, Any]:
    """Loads that ranks read for each other, under a group for the device alone; what differs."""
    directory = Path(root) / f"shared-{dist.get_rank()}"  # equal files
    expected = source(directory)
    found: dict[str, Any] = {}
    for strategy in ("own", "node", "once"):
        model = sharded(Mixed("meta"), device)
        io = sw.IOOptions(staging_bytes=2 * MIB, strategy=strategy)
        report, counts = spent(device, lambda model=model, io=io: sw.load(model, directory, io=io))
        full = {n: t.cpu() for n, t in sw.iter_full_tensors(model, naming="module")}
        differing = [n for n, t in full.items() if not torch.equal(t, expected[n])]
        found[strategy] = {
            "differing": differing,
            "names": len(full),
            "strategy": report.strategy,
            "read": report.bytes_read,
            "file": (directory / "model.safetensors").stat().st_size,
            "counts": counts,
        }
    return found


def _load_of(model: nn.Module, source: Any, device: torch.device) -> dict[str, Any]:
    module: Any = torch.get_device_module(device)
    torch.accelerator.synchronize()
    torch.accelerator.empty_host_cache()
    pinned, before = module.pinned_bytes(), module.used_bytes()
    module.reset_peak()
    report, counts = spent(device, lambda: sw.load(model, source, io=IO))
    return {
        "model": model,
        "counts": counts,
        "shards": module.used_bytes() - before,
        "beyond the shards": module.peak_bytes() - module.used_bytes(),
        "staging": report.staging_peak_bytes,
        "pinned": module.pinned_bytes() - pinned,
    }


def onto_device_and_cpu(root: str, device: torch.device) -> Any:
    """One load onto both, the CPU first: the device's ring is pinned all the same."""
    directory = Path(root) / f"both-{dist.get_rank()}"
    directory.mkdir(parents=True)
    stored = {f"{n}.weight": torch.randn(300, 400) for n in range(2)}
    save_file(stored, directory / "model.safetensors")
    model = nn.Sequential(
        nn.Linear(400, 300, bias=False), nn.Linear(400, 300, bias=False, dtype=torch.bfloat16, device=device)
    )
    found = _load_of(model, directory, device)
    wanted = [stored["0.weight"], stored["1.weight"].bfloat16()]
    same = [torch.equal(p.cpu(), w) for p, w in zip(model.parameters(), wanted, strict=True)]
    return same, found["counts"], [str(p.device) for p in found.pop("model").parameters()]


def loads(root: str, device: torch.device) -> dict[str, Any]:
    """Loads into a model on meta, into one whose kernels are not finished, and by four threads; none is followed by a wait."""
    module: Any = torch.get_device_module(device)
    directory = Path(root) / f"source-{dist.get_rank()}"
    expected = source(directory)
    found: dict[str, Any] = {}
    for name in ("meta", "live", "in lanes"):
        torch.accelerator.empty_host_cache()
        pinned_before = module.pinned_bytes()
        model = sharded(Mixed("meta" if name == "meta" else str(device)), device)
        io, least = (IO, lanes.LEAST_FOR_THREADS) if name != "in lanes" else (replace(IO, read_threads=4), 0)
        if name != "meta":
            for parameter in model.parameters():
                parameter.detach().fill_(7)
        with mock.patch.object(lanes, "LEAST_FOR_THREADS", least):
            report, counts = spent(device, lambda model=model, io=io: sw.load(model, directory, io=io))
        pinned = module.pinned_bytes() - pinned_before  # here: gloo pins copies of what it gathers from a GPU
        for parameter in model.parameters():
            parameter.detach().mul_(2)  # a kernel of the current stream, directly after
        halves = {n: t.detach().cpu() for n, t in sw.iter_full_tensors(model, naming="module")}
        floating = {n for n, t in expected.items() if t.is_floating_point()}
        found[name] = {
            "differing": [
                n
                for n, t in halves.items()
                if not torch.equal(t, expected[n] * 2 if n in floating else expected[n])
            ],
            "names": len(halves),
            "counts": counts,
            "reads": report.reads,
            "staging": report.staging_peak_bytes,
            "pinned": pinned,
            "bytes": report.bytes_read,
        }
    return found
