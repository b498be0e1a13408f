"""What the ranks save on the simulated device, and how: by its counts of copies and waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.state.optimizer import TrainedBy, drain, place_scalars
from shardwise.tensors.live import describe

MIB = 1024**2
#: Less than the state of a rank.
BUDGET = 17 * MIB
Bits = dict[str, torch.Tensor]


class Wide(nn.Module):
    """Shards that are larger than a copy, one that is cut along dim 1, and small ones."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.wide = nn.Linear(3072, 2048, device=device)
        self.half = nn.Linear(96, 33, device=device, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device=device))
        self.scale = nn.Parameter(torch.ones(7, 5, device=device).t())


def sharded(model: Wide, device: torch.device) -> Wide:
    """FSDP2 over all ranks; one weight is cut along dim 1, one stays whole."""
    fully_shard(
        model,
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        shard_placement_fn=lambda p: Shard(1) if p.shape == (33, 96) else Shard(0),
        ignored_params={model.scale},
    )
    return model


def state_on(device: torch.device, seed: int) -> sw.TrainState:
    """A sharded model after a step of an optimizer that keeps its scalars on the device."""
    torch.manual_seed(seed)
    model = sharded(Wide(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, capturable=True)
    extra = {"means": [torch.full((3,), float(n), device=device) for n in range(20)]}
    state = sw.TrainState(model=model, optimizer=optimizer, extra=extra)
    step(state)
    return state


def step(state: sw.TrainState) -> None:
    """A step of the optimizer: kernels of the current stream, for which nothing waits."""
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    model.seen.add_(1)
    for mean in state.extra["means"]:
        mean.add_(1)


def tensors_of(state: sw.TrainState) -> Bits:
    """All live tensors, this rank's parts."""
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": value for key, value in states.items()}
    found |= {f"mean {n}": mean for n, mean in enumerate(state.extra["means"])}
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in found.items()}


def copies_of(state: sw.TrainState) -> Bits:
    """Copies on the device, made by the current stream."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(state).items()}


def spent(device: torch.device, call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What the call gives, and what the device counted for this thread meanwhile."""
    module: Any = torch.get_device_module(device)
    before = module.counts(own=True)
    found = call()
    after = module.counts(own=True)
    return found, {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}


def differing(path: str, device: torch.device, expected: Bits) -> list[str]:
    """Names of tensors that a restore does not give back bit for bit."""
    fresh = state_on(device, 99)
    sw.restore(fresh, path)
    found = tensors_of(fresh)
    assert found.keys() == expected.keys()
    return [n for n, t in expected.items() if not torch.equal(found[n].cpu(), t.cpu())]


def async_saves(root: str, device: torch.device, budget: int | None = None) -> dict[str, Any]:
    """Two saves, each directly after a step, and each directly before the state is overwritten."""
    module: Any = torch.get_device_module(device)
    state = state_on(device, 1)
    steps: dict[str, Any] = {}
    torch.accelerator.empty_host_cache()
    pinned_before = module.pinned_bytes()
    with sw.Checkpointer(root, mode="async", max_staging_bytes=budget) as checkpointer:
        checkpointer.prepare(sw.TrainState(model=state.models["model"]))
        checkpointer.prepare(state)  # grows
        for number in (1, 2):
            torch.accelerator.empty_host_cache()  # what the comparison of the step before left
            step(state)
            expected = copies_of(state)
            report, counts = spent(device, lambda number=number: checkpointer.save(state, number))
            for tensor in tensors_of(state).values():
                tensor.detach().fill_(3)
                # The device does so at once: the copies are late, and a kernel that nothing orders after them must show.
                torch.accelerator.current_stream(device).synchronize()
            checkpointer.wait()
            pinned = module.pinned_bytes() - pinned_before
            path = f"{root}/step-{number:08d}"
            steps[str(number)] = {
                "differing": differing(path, device, expected),
                "ok": sw.verify(path).ok,
                "counts": counts,
                "staging": report.staging_bytes,
                "pinned": pinned,
                "bytes": report.bytes_written,
            }
    return steps


def sync_saves(root: str, device: torch.device) -> dict[str, Any]:
    """A save directly after a step."""
    module: Any = torch.get_device_module(device)
    state = state_on(device, 1)
    sw.save(state, f"{root}/first", step=1)
    torch.accelerator.empty_host_cache()
    pinned_before = module.pinned_bytes()
    step(state)
    expected = copies_of(state)
    report, counts = spent(device, lambda: sw.save(state, f"{root}/second", step=2))
    pinned = module.pinned_bytes() - pinned_before
    _, restored = spent(device, lambda: sw.restore(state_on(device, 99), f"{root}/second"))
    return {
        "restored": restored,
        "differing": differing(f"{root}/second", device, expected),
        "ok": sw.verify(f"{root}/second").ok,
        "counts": counts,
        "staging": report.staging_bytes,
        "pinned": pinned,
        "bytes": report.bytes_written,
    }


def scalars(device: torch.device) -> dict[str, Any]:
    """The scalars of an optimizer, which lie on the device, taken out and put back."""
    state = state_on(device, 1)
    optimizer = state.optimizers["optimizer"]
    names = {id(p): name for name, p in state.models["model"].named_parameters()}
    drained, out = spent(device, lambda: drain(optimizer, names))
    stored = {
        name: {state_key: drained.packed[key][place] for state_key, (key, place) in index.items()}
        for name, index in drained.packed_index.items()
    }
    live = {names[id(p)]: {"step": states["step"]} for p, states in optimizer.state.items()}
    for states in live.values():
        states["step"].zero_()
    part = TrainedBy.of("optimizer", optimizer, "model", describe(state.models["model"]))
    _, back = spent(device, lambda: place_scalars(part, stored, live))
    steps = [states["step"].item() for states in optimizer.state.values()]
    return {"out": out, "back": back, "steps": steps}


def save_from_two_devices(root: str, device: torch.device) -> dict[str, Any]:
    """An async save of a model on two devices, directly after kernels on both and before others."""
    other = torch.device(device.type, 1 - (device.index or 0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, device=device), nn.Linear(30, 20, device=other))
    with sw.Checkpointer(root, mode="async") as checkpointer:
        for parameter in model.parameters():
            parameter.detach().mul_(2)
        expected = [p.detach().clone() for p in model.parameters()]
        checkpointer.save(sw.TrainState(model=model), 1)
        for parameter in model.parameters():
            parameter.detach().fill_(3)
    sw.restore(sw.TrainState(model=model), f"{root}/step-00000001")
    same = [torch.equal(p.cpu(), e.cpu()) for p, e in zip(model.parameters(), expected, strict=True)]
    return {"same": same, "ok": sw.verify(f"{root}/step-00000001").ok}


def exports(root: str, device: torch.device) -> dict[str, Any]:
    """Files of a model on the device, exported directly after a step, and of its copy on the CPU."""
    state = state_on(device, 1)
    model = state.models["model"]
    on_cpu = Wide(torch.device("cpu"))
    found = {}
    for dtype in (None, torch.bfloat16):
        step(state)
        name = str(dtype)
        _, counts = spent(device, lambda name=name, dtype=dtype: export(model, f"{root}/{name}", dtype))
        for key, full in sw.iter_full_tensors(model, naming="module"):
            on_cpu.state_dict()[key].copy_(full.cpu())
        export(on_cpu, f"{root}/{name}-cpu", dtype)
        files = [Path(root, folder, "model.safetensors").read_bytes() for folder in (name, f"{name}-cpu")]
        found[name] = {"same": files[0] == files[1], "bytes": len(files[0]), "counts": counts}
    return found


def export(model: nn.Module, path: str, dtype: torch.dtype | None) -> None:
    sw.export_hf(model, path, dtype=dtype)


def save_of_a_cpu_model(root: str, device: torch.device) -> dict[str, Any]:
    """An async save of a model on the CPU, in a process that has a device."""
    module: Any = torch.get_device_module(device)
    torch.accelerator.empty_host_cache()
    before = module.pinned_bytes()
    torch.manual_seed(0)
    state = sw.TrainState(model=nn.Linear(300, 200))
    with sw.Checkpointer(root, mode="async") as checkpointer:
        report = checkpointer.save(state, 1)
        return {"staging": report.staging_bytes, "pinned": module.pinned_bytes() - before}


def digests(device: torch.device) -> list[dict[str, int]]:
    """Copies and waits of digests of many tensors: those of the first digest, and of the next."""
    model = nn.ModuleList(nn.Linear(8 + n % 5, 8) for n in range(60)).to(device)
    return [spent(device, lambda: sw.digest(model))[1] for _ in range(2)]


def save_of_a_nameless_device(root: str, device: torch.device) -> bool:
    """A save where the device's module has no ``get_device_name``, as MPS has none."""
    kind: Any = type(torch.get_device_module(device))
    kept = kind.get_device_name
    del kind.get_device_name
    try:
        sw.save(sw.TrainState(model=nn.Linear(2, 2, device=device)), root, step=1)
    finally:
        kind.get_device_name = kept
    return sw.verify(root).ok


class Counting(torch.optim.Optimizer):
    """Keeps a tensor on the device, and one in host memory, of another shape than the parameter's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            kept["rows"] = kept.get("rows", torch.zeros(3, device=parameter.device)) + 1
            kept["seen"] = kept.get("seen", torch.zeros(2)) + 1


def optimizer_with_own_tensors(root: str, device: torch.device) -> Any:
    """Where tensors of an optimizer that are no shards come back to, into one that has stepped and a fresh one."""
    model = nn.Linear(2, 2, device=device)
    optimizer = Counting(model.parameters())
    optimizer.step()
    sw.save(sw.TrainState(model=model, optimizer=optimizer), root, step=1)
    found = []
    for steps in (1, 0):
        other = Counting(model.parameters())
        for _ in range(steps):
            other.step()
        report = sw.restore(sw.TrainState(model=model, optimizer=other), root)
        kept = other.state[next(model.parameters())]
        found.append(({k: (str(t.device), t.tolist()) for k, t in kept.items()}, report.differences))
    return found


def async_save_on_a_side_stream(root: str, device: torch.device) -> Any:
    """Of a model on the CPU and an extra that a kernel of the side stream makes directly before, and changes directly after."""
    model, side = nn.Linear(3, 3), torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with sw.Checkpointer(root, mode="async") as checkpointer, side:
        mean = torch.ones(5, device=device) * 3
        checkpointer.save(sw.TrainState(model=model, extra={"mean": mean}), 1)
        mean.fill_(9)
    state = sw.TrainState(model=model, extra={"mean": torch.zeros(5, device=device)})
    sw.restore(state, f"{root}/step-00000001")
    return state.extra["mean"].tolist()
