"""What must hold on every device. A rank calls each check with a directory of its own and its device, all ranks together.

A check raises AssertionError, or returns facts to be shown. ``Skipped`` says why a machine can't run one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.loading.models import write_model
from tests.device import _load_fns as loads
from tests.device import _save_fns as saves
from tests.gpu.devices import GIVES_PINNED_BACK, SIMULATED, host_waits, peak_bytes
from tests.gpu.image import transformers_problem

__all__ = ["AGAIN", "CHECKS", "Skipped"]

MIB = 1024**2
Facts = dict[str, Any]


class Skipped(Exception):
    """This machine can't run the check; says why."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, on the CPU."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit, or that one side lacks."""
    both = found.keys() & expected.keys()
    return sorted(found.keys() ^ expected.keys()) + sorted(
        name for name in both if bits(found[name]) != bits(expected[name])
    )


def bits(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    """This rank's shard: NaN equals NaN, and -0 differs from 0."""
    part = own_part(tensor)
    return part.shape, part.dtype, part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def drawn(device: torch.device) -> list[float]:
    """What the generators of host and device give next."""
    return [*torch.rand(2).tolist(), *torch.rand(2, device=device).tolist()]


# ------------------------------------------------------------------------------------------------- load


def load(root: str, device: torch.device) -> Facts:
    """Direct, cast, dim-1, tied and buffers, into a model on meta and a live one; read again by the next kernel."""
    facts: Facts = {}
    for name, found in loads.loads(root, device).items():
        assert not found["differing"], (name, found["differing"])
        assert found["names"] == 7
        assert found["staging"] <= loads.IO.ring_bytes, "more than the ring was pinned"
        assert found["pinned"] <= 0 or not GIVES_PINNED_BACK, "pinned memory that a load does not give back"
        facts = {"ring_bytes": found["staging"], "bytes_read": found["bytes"]}
    return facts


def strategies(root: str, device: torch.device) -> Facts:
    """The same bits whoever reads: each rank, one for each host, or one for all, under a group of the device alone."""
    if dist.get_world_size() == 1:
        raise Skipped("one rank reads for itself")
    directory = Path(root)
    if dist.get_rank() == 0:
        loads.source(directory)
    dist.barrier()
    shards = {}
    known: tuple[Literal["own", "node", "once"], ...] = ("own", "node", "once")
    if device.type == SIMULATED and not exchanges(device):
        known = ("own", "node")
    for strategy in known:
        model = loads.sharded(loads.Mixed("meta"), device)
        options = sw.IOOptions(staging_bytes=4 * MIB, strategy=strategy)
        report = sw.load(model, directory, io=options)
        assert report.strategy.startswith(strategy), report.strategy
        most = options.ring_bytes + (0 if strategy == "own" else options.staging_bytes)
        assert report.staging_peak_bytes <= most, (strategy, report.staging_peak_bytes)
        shards[strategy] = {name: own_part(tensor) for name, tensor in model.state_dict().items()}
    differing = [strategy for strategy, found in shards.items() if unequal(found, shards["own"])]
    assert not differing
    return {"tried": ", ".join(known)}


def exchanges(device: torch.device) -> bool:
    """Whether the group can exchange tensors between all ranks, as one reader for all needs it."""
    try:
        one = torch.zeros(dist.get_world_size(), device=device)
        dist.all_to_all_single(torch.empty_like(one), one)
    except RuntimeError:
        return False
    return True


def waits(root: str, device: torch.device) -> Facts:
    """At most two waits of the host beside those for free slots of the ring."""
    directory = Path(root) / f"source-{dist.get_rank()}"
    loads.source(directory)
    model = loads.sharded(loads.Mixed("meta"), device)
    _, counted = host_waits(device, lambda: sw.load(model, directory))
    if counted is None:
        raise Skipped("nothing counts waits of the host here")
    assert counted["streams"] <= 2, counted
    return counted


class Large(nn.Module):
    """Eight matrices of 4 MiB in bf16, one of 32 MiB that is cast, and one that is sharded along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.register_module(f"block{number}", nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16))
        self.cast = nn.Linear(4096, 2048, bias=False, dtype=torch.bfloat16)
        self.columns = nn.Linear(640, 512, bias=False, dtype=torch.bfloat16)


def memory(root: str, device: torch.device) -> Facts:
    """Peak memory on the device: the shards and the ring."""
    if dist.get_rank() == 0:
        Path(root).mkdir(parents=True)
        stored = {n: torch.randn(t.shape).to(t.dtype) for n, t in Large().state_dict().items()}
        stored["cast.weight"] = stored["cast.weight"].float()
        save_file(stored, Path(root) / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Large()
    model = loads.sharded(model, device)  # type: ignore[assignment]
    options = sw.IOOptions(staging_bytes=4 * MIB)
    report, peak = peak_bytes(device, lambda: sw.load(model, root, io=options))
    facts = {"shard_bytes": report.local_bytes, "ring_bytes": report.staging_peak_bytes, "peak_bytes": peak}
    assert report.staging_peak_bytes <= options.ring_bytes
    if peak is None:
        raise Skipped("the device's allocator keeps no count")
    assert peak <= report.local_bytes + options.ring_bytes, facts
    return facts


def moe(root: str, device: torch.device) -> Facts:
    """Experts that the hub stores one by one, stacked in the model, from the path to full tensors again."""
    problem = transformers_problem()
    if problem is not None:
        raise Skipped(problem)
    directory = f"{root}/moe"
    if dist.get_rank() == 0:
        write_model("moe", directory, short=True)
    dist.barrier()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, report = sw.load_pretrained(directory, mesh, return_report=True)
    assert {p.device.type for p in model.parameters()} == {device.type}
    full = dict(sw.iter_full_tensors(model))
    assert {t.device.type for t in full.values()} == {device.type}
    assert not unequal(full, load_file(f"{directory}/model.safetensors"))
    return {"tensors": report.tensors, "stored": len(full)}


# ------------------------------------------------------------------------------------------------- save


def async_save(root: str, device: torch.device) -> Facts:
    """Saved directly after a step and directly before the state is overwritten."""
    return _async(root, device, None)


def waves(root: str, device: torch.device) -> Facts:
    """The same through a buffer that holds a part of the state."""
    return _async(root, device, 2 * saves.BUDGET // dist.get_world_size())


def _async(root: str, device: torch.device, budget: int | None) -> Facts:
    steps = saves.async_saves(root, device, budget)
    for found in steps.values():
        _assert_saved(found)
        assert budget is None or found["staging"] <= budget < found["bytes"]
    return {name: steps["2"][name] for name in ("bytes", "staging", "pinned")}


def sync_save(root: str, device: torch.device) -> Facts:
    """Directly after a step, through a small ring."""
    found = saves.sync_saves(root, device)
    _assert_saved(found)
    assert found["staging"] < found["bytes"]
    return {name: found[name] for name in ("bytes", "staging", "pinned")}


def _assert_saved(found: dict[str, Any]) -> None:
    assert not found["differing"], found["differing"]
    assert found["ok"]
    # 0 where the device does not say it.
    assert found["pinned"] <= found["staging"], (found["pinned"], found["staging"])


def two_devices(root: str, device: torch.device) -> Facts:
    """An asynchronous save of a model on two devices of one process."""
    if torch.accelerator.device_count() < 2:
        raise Skipped("the process sees one device")
    found = saves.save_from_two_devices(root, device)
    assert found == {"same": [True] * 4, "ok": True}
    return {}


def export(root: str, device: torch.device) -> Facts:
    """As stored, and cast on the device: the files of a copy on the CPU, byte for byte."""
    found = saves.exports(root, device)
    assert all(one["same"] for one in found.values()), found
    return {"bytes": [one["bytes"] for one in found.values()]}


# ---------------------------------------------------------------------------------------- of live models


def digest(root: str, device: torch.device) -> Facts:
    """Shards on the device have the digests of the whole model on the CPU."""
    state = saves.state_on(device, 1)
    model = state.models["model"]
    whole = saves.Wide(torch.device("cpu"))
    for name, full in sw.iter_full_tensors(model, naming="module"):
        whole.state_dict()[name].copy_(full.cpu())
    found = sw.digest(model)
    assert found == sw.digest(whole)
    return {"tensors": len(found)}


def clone(root: str, device: torch.device) -> Facts:
    """A frozen copy on the device, which keeps its values when the model goes on."""
    state = saves.state_on(device, 1)
    model = state.models["model"]

    def build() -> nn.Module:
        with sw.meta_init():
            second = saves.Wide(torch.device("meta"))
        return saves.sharded(second, device)

    expected = {name: own_part(t) for name, t in model.state_dict().items()}
    copy = sw.clone(model, build=build)
    for parameter in model.parameters():
        parameter.detach().fill_(3)
    assert {p.device.type for p in copy.parameters()} == {device.type}
    assert not unequal(dict(copy.state_dict()), expected)
    return {}


def full(root: str, device: torch.device) -> Facts:
    """Full tensors of a model on the CPU and of one on the device, under a group that has the device's backend alone."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    moved = nn.Linear(5, 3).to(device)
    moved.load_state_dict(model.state_dict())
    for live in (model, moved):
        given = dict(sw.iter_full_tensors(live, naming="module"))
        assert not unequal(given, model.state_dict())
        assert {t.device.type for t in given.values()} == {next(live.parameters()).device.type}
    return {"backend": dist.get_backend()}


# ----------------------------------------------------------------------------------------------- resume


def go_on(state: sw.TrainState, device: torch.device) -> tuple[saves.Bits, list[float]]:
    """Two steps more: all tensors, and what the generators give then."""
    saves.step(state)
    saves.step(state)
    return {name: own_part(tensor) for name, tensor in saves.tensors_of(state).items()}, drawn(device)


def begin(root: str, device: torch.device) -> Facts:
    """Save, and go on without a stop. Keeps what that led to for :func:`resume`."""
    state = saves.state_on(device, 1 + dist.get_rank())
    drawn(device)
    sw.save(state, f"{root}/step", step=1)
    torch.save(go_on(state, device), f"{root}/expected-{dist.get_rank()}")
    return {"visible": torch.accelerator.device_count()}


def resume(root: str, device: torch.device) -> Facts:
    """In new processes, which may see other devices: exact, and the next steps and draws are those without a stop."""
    state = saves.state_on(device, 99)
    report = sw.restore(state, f"{root}/step")
    bits, draws = go_on(state, device)
    expected_bits, expected_draws = torch.load(f"{root}/expected-{dist.get_rank()}")
    assert report.exact, report.differences
    assert not unequal(bits, expected_bits)
    assert draws == expected_draws
    return {"visible": torch.accelerator.device_count()}


Check = Callable[[str, torch.device], Facts]

#: By name, in one launch: every rank sees all devices.
CHECKS: dict[str, Check] = {
    "load": load,
    "strategies": strategies,
    "waits of the host": waits,
    "memory of the device": memory,
    "mixture of experts": moe,
    "async save": async_save,
    "async save in waves": waves,
    "sync save": sync_save,
    "save from two devices": two_devices,
    "export": export,
    "digest": digest,
    "clone": clone,
    "full tensors": full,
    "resume": begin,
}
#: In a second launch: every rank sees its own device alone.
AGAIN: dict[str, Check] = {"resume": resume}
