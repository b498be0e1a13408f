"""What the ranks run on the simulated device. Each rank is a process that a test started for it."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks import device_ring
from tests.device import _alike_fns as alike
from tests.device import _load_fns as loads
from tests.device import _save_fns as saves
from tests.device import schedules
from tests.harness.worker import GROUP_TIMEOUT


def enter(visible: int, backend: str = "simccl") -> torch.device:
    """See so many devices, take this rank's, and leave gloo's group for one of ``backend``. The rank's device."""
    os.environ["SIMGPU_DEVICES"] = str(visible)
    from tests.device import simgpu

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=GROUP_TIMEOUT)
    store = dist.PrefixStore("entered", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    if not visible:
        return torch.device("cpu")
    device = torch.device(simgpu.NAME, rank % visible)
    torch.get_device_module(device).set_device(device)
    return device


def outcome(part: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """``("ok", result)``, or ``("raised", traceback)``, so that one launch serves several tests."""
    try:
        return "ok", part(*args)
    except Exception:
        return "raised", traceback.format_exc()


def draws(device: torch.device) -> list[float]:
    """What torch's generators of the host and of the device give next."""
    return [*torch.rand(3).tolist(), *torch.rand(3, device=device).tolist()]


# ------------------------------------------------------------------------------------- the device itself


def what_the_device_shows() -> dict[str, Any]:
    """Copies that nothing waited for, memory of the device read by the CPU, devices mixed, a CPU tensor in simccl."""
    from shardwise.rng import capture_rng
    from tests.device import simgpu

    unused = (
        capture_rng()["accelerator"] is None and not torch.get_device_module(simgpu.NAME).is_initialized()
    )
    device = enter(2)
    host, there = torch.ones(4, pin_memory=True), torch.empty(4, device=device)
    there.copy_(host, non_blocking=True)
    host.fill_(2)
    reused = there.cpu()[0].item()
    back = torch.zeros(4, pin_memory=True)
    back.copy_(there, non_blocking=True)
    early = back[0].item()
    torch.accelerator.synchronize()
    found: dict[str, Any] = {"unused": unused, "reused": reused, "early": early, "late": back[0].item()}
    found["peek"] = _status_of_a_peek(there)
    found["streams"] = [copied_on_a_side_stream(device, waits) for waits in (False, True)]
    for name, mixed in (
        ("add", lambda: torch.ones(4) + there),
        ("sum", lambda: dist.all_reduce(torch.ones(4))),
    ):
        status, text = outcome(mixed)
        found[name] = text if status == "raised" else status
    x = torch.arange(6.0, device=device).view(2, 3)
    found["product"] = (x @ x.T).relu().cpu().tolist()
    found["races"] = outcome(schedules.races, 500, 0)
    found["ratios"] = outcome(device_ring.ratios)
    found["mutants"] = {
        name: outcome(lambda name=name: schedules.races(200, 0, schedules.mutant(name), stop_at_first=True))
        for name in schedules.MUTANTS
    }
    return found


def copied_on_a_side_stream(device: torch.device, waits: bool) -> float:
    """A sum that a kernel made on the current stream, read by a kernel on another one and copied from there."""
    made, host, side = torch.ones(4, device=device) + 1, torch.zeros(4, pin_memory=True), torch.Stream(device)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = made * 2
        host.copy_(doubled, non_blocking=True)
    side.synchronize()
    return host[0].item()


def _status_of_a_peek(tensor: torch.Tensor) -> int:
    address = tensor.data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads: this child only looks and ends
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    return -os.WTERMSIG(os.waitpid(child, 0)[1])


# ---------------------------------------------------- load, train, save; resume where other devices are visible


class Run:
    """A GPT-2 with dropout from pretrained weights, whose next losses hang on the device's generator."""

    def __init__(self, source: str, device: torch.device) -> None:
        self.device = device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.model: Any = sw.load_pretrained(source, mesh)
        self.model.train()
        assert all(p.device == device for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.state = sw.TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 101, (2, 16)).to(self.device)  # by the host's generator
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
        return losses

    def go_on(self) -> tuple[list[str], alike.Bits, list[float]]:
        """Two steps more, and all that they led to."""
        return self.train(2), alike.bits_of(self.model, self.optimizer), draws(self.device)


def begin(source: str, root: str, device: torch.device) -> Any:
    """Train, save, and go on without a stop; and the same with random states as older versions stored them."""
    torch.manual_seed(100 + dist.get_rank())
    run = Run(source, device)
    run.train(2)
    sw.save(run.state, f"{root}/now", step=2)
    _save_as_before(run.state, f"{root}/before")
    return run.go_on()


def _save_as_before(state: sw.TrainState, path: str) -> None:
    """A checkpoint that holds the generators of all devices that the rank sees."""
    from shardwise.checkpoint import snapshot
    from shardwise.rng import capture_host_rng

    def capture(*_: object) -> dict[str, Any]:
        module = torch.get_device_module("simgpu")
        return {
            **capture_host_rng(),
            "accelerator": {"type": "simgpu", "devices": module.get_rng_state_all()},
        }

    kept, snapshot.capture_rng = snapshot.capture_rng, capture
    try:
        sw.save(state, path, step=2)
    finally:
        snapshot.capture_rng = kept


def resume(source: str, path: str, device: torch.device) -> Any:
    """A new run that resumes: its report, and what the next steps lead to."""
    torch.manual_seed(999)
    run = Run(source, device)
    report = sw.restore(run.state, path)
    return report.to_json(), run.go_on()


# ------------------------------------------------------------------------------------------- state on the device


class Counter(nn.Module):
    """Keeps a tensor beside parameters and buffers, on the device that it works on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, device=device)
        self.mean = torch.zeros(8, device=device)

    def get_extra_state(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Holder:
    """An extra that takes its state as it is given."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [(self.value, 1)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ((self.value, _),) = state["nested"]


def small_state(device: torch.device, fill: float) -> sw.TrainState:
    """Tensors everywhere that a document can hold one; ``baseline`` and ``device`` mean the same on all ranks."""
    torch.manual_seed(0)
    model = Counter(device)
    model.mean.fill_(fill)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    betas = (torch.tensor(0.9, device=device), torch.tensor(0.99, device=device))
    lr = torch.tensor(fill, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, foreach=False, capturable=True)
    shared = torch.full((3,), fill, device=device)
    return sw.TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        extra={
            "baseline": {"value": shared, "again": [shared], "host": torch.full((2,), fill)},
            "own": torch.full((2,), fill + dist.get_rank(), device=device),
            "holder": Holder(torch.full((2,), fill, device=device)),
            "device": device,
        },
    )


def save_small(root: str, device: torch.device) -> list[str]:
    """Names of the documents that are stored per rank."""
    sw.save(small_state(device, 0.5), f"{root}/small", step=1)
    return per_rank(f"{root}/small")


def per_rank(path: str) -> list[str]:
    return sorted(json.loads(Path(path, "manifest.json").read_text())["local_documents"])


def save_extra_alone(root: str, device: torch.device) -> list[str]:
    """The same of one tensor on the device, and one on the CPU, among extras."""
    model = nn.Linear(2, 2, device=device)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    state = sw.TrainState(
        model=model, extra={"baseline": torch.arange(4.0, device=device), "host": torch.ones(2)}
    )
    sw.save(state, f"{root}/extra", step=1)
    return per_rank(f"{root}/extra")


def restore_extra_alone(root: str, device: torch.device) -> Any:
    """Into a run whose own tensor lies on the device, and into one that has none yet."""
    found = []
    for live in (torch.zeros(4, device=device), None):
        host = None if live is None else torch.zeros(2, device=device)
        extra = {"baseline": live, "host": host}
        state = sw.TrainState(model=nn.Linear(2, 2, device=device), extra=extra)
        report = sw.restore(state, f"{root}/extra")
        baseline = state.extra["baseline"]
        baseline.add_(torch.ones(4, device=device))
        host_now = state.extra["host"].device
        found.append((str(baseline.device), baseline.tolist(), str(host_now), report.differences))
    return found


def restore_small(root: str, device: torch.device) -> Any:
    """Where each tensor is, with its value, and why the resume is not exact."""
    state = small_state(device, 0.25)
    report = sw.restore(state, f"{root}/small")
    group: Any = state.optimizers["optimizer"].param_groups[0]
    baseline, holder = state.extra["baseline"], state.extra["holder"]
    assert baseline["value"] is baseline["again"][0], "one tensor that is met twice stays one"
    tensors = {
        "lr": group["lr"],
        "beta": group["betas"][1],
        "base_lr": state.scheduler.base_lrs[0],
        "extra": baseline["value"],
        "own": state.extra["own"],
        "holder": holder.value,
        "module": state.models["model"].mean,
        "host": baseline["host"],
    }
    places = {name: (str(tensor.device), tensor.flatten()[0].item()) for name, tensor in tensors.items()}
    return places, str(state.extra["device"]), report.differences, report.exact


def full_of_a_cpu_model(device: torch.device) -> Any:
    """``iter_full_tensors`` of a model on the CPU under a group that refuses CPU tensors, and of one on the device."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    moved = nn.Linear(5, 3).to(device)
    moved.load_state_dict(model.state_dict())
    found = []
    for live in (model, moved):
        given = list(sw.iter_full_tensors(live, naming="module"))
        same = [torch.equal(t.cpu(), dict(model.state_dict())[name]) for name, t in given]
        found.append((sorted({str(t.device) for _, t in given}), same))
    return found


# --------------------------------------------------------------------------------------------- generators


def generators_of_other_processes(device: torch.device) -> dict[str, Any]:
    """What is planned for states of other kinds of processes, and that planning changes nothing."""
    from shardwise.errors import StateError
    from shardwise.rng import capture_host_rng, capture_rng, plan_rng, restore_rng

    numbers = {"seed": 1, "step": 2, "rank": dist.get_rank()}
    state = capture_rng()
    kept = state["accelerator"]["own"]
    strangers: dict[str, Any] = {
        "unused": {**state, "accelerator": None},
        "another kind": {**state, "accelerator": {"type": "cuda", "own": kept}},
        "two of one process": {**state, "accelerator": {"type": "simgpu", "own": kept * 2}},
        "one visible, before": {**state, "accelerator": {"type": "simgpu", "devices": kept}},
        "nine visible, before": {**state, "accelerator": {"type": "simgpu", "devices": kept * 9}},
    }
    expected = draws(device)
    found = {}
    for name, strange in strangers.items():
        restore_rng(state)
        plan = plan_rng(strange, **numbers)
        assert draws(device) == expected, "a plan changed a generator"
        plan.apply()
        first = draws(device)
        plan.apply()
        assert draws(device) == first, "a rule gives the same draws every time"
        found[name] = (plan.rule, plan.differences, first[:3] == expected[:3], first[3:] == expected[3:])
    restore_rng(state)
    for bad in ({"type": "simgpu", "own": [torch.zeros(3)]}, {"type": "simgpu"}, {"own": kept}):
        try:
            plan_rng({**capture_host_rng(), "accelerator": bad}, **numbers)
        except StateError:
            continue
        raise AssertionError(f"taken for a state of generators: {bad}")
    assert draws(device) == expected
    return found


def generators_of_several_devices(device: torch.device) -> list[bool]:
    """A process whose model lies on two devices: both generators come back."""
    other = torch.device(device.type, 1 - (device.index or 0))
    model = nn.Sequential(nn.Linear(2, 2, device=device), nn.Linear(2, 2, device=other))
    from shardwise.rng import capture_rng, devices_of, plan_rng

    devices = devices_of([model])
    state = capture_rng(devices)
    expected = draws(device), draws(other)
    plan = plan_rng(state, seed=0, step=0, rank=0, devices=devices)
    plan.apply()
    found = [draws(device) == expected[0], draws(other) == expected[1], not plan.differences]
    alone = plan_rng(state, seed=0, step=0, rank=0)
    return [*found, "this process uses 1" in alone.differences[0]]


# ----------------------------------------------------------------------------------------------- one launch each


def parts_alike(sources: str, root: str, device: torch.device) -> dict[str, tuple[str, Any]]:
    """What is the same on the device and on the CPU, except for the operators of attention."""
    directory = f"{root}/alike-{device.type}"
    found = {
        name: outcome(part, sources, f"{directory}/{name}", device) for name, part in alike.PARTS.items()
    }
    return found | {"attention": outcome(alike.attended, device)}


def in_a_ledger(root: str, device: torch.device) -> tuple[dict[str, Any], int, int, int]:
    """What a ledger says as a phase ends that holds 5 MiB and held 8; beside bytes used before, now, and at most."""
    module: Any = torch.get_device_module(device)
    devices = range(module.device_count())
    before = sum(module.used_bytes(d) for d in devices)
    for d in devices:
        module.reset_peak(d)
    with sw.reports.memory_ledger(root) as ledger, ledger.phase("hold"):
        kept = torch.empty(5 * 2**20, dtype=torch.uint8, device=device)
        torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
    used, peak = (sum(of(d) for d in devices) for of in (module.used_bytes, module.peak_bytes))
    del kept
    (ended,) = [r for r in map(json.loads, ledger.file.read_text().splitlines()) if r["kind"] == "phase-end"]
    return ended, before, used, peak


def on_two_visible(source: str, root: str, sources: str) -> dict[str, tuple[str, Any]]:
    """All that a process sees which sees both devices, as under torchrun."""
    device = enter(2)
    return {
        **parts_alike(sources, root, device),
        "begin": outcome(begin, source, root, device),
        "as before": outcome(resume, source, f"{root}/before", device),
        "small": outcome(save_small, root, device),
        "extra": outcome(save_extra_alone, root, device),
        "restored extra": outcome(restore_extra_alone, root, device),
        "full": outcome(full_of_a_cpu_model, device),
        "generators": outcome(generators_of_other_processes, device),
        "several": outcome(generators_of_several_devices, device),
        "load": outcome(loads.loads, f"{root}/load", device),
        "one kind": outcome(loads.waits_and_memory, sources, f"{root}/load", device),
        "strategies": outcome(loads.strategies, f"{root}/load", device),
        "both": outcome(loads.onto_device_and_cpu, f"{root}/load", device),
        "async": outcome(saves.async_saves, f"{root}/async", device),
        "waves": outcome(saves.async_saves, f"{root}/waves", device, saves.BUDGET),
        "sync": outcome(saves.sync_saves, f"{root}/sync", device),
        "scalars": outcome(saves.scalars, device),
        "two devices": outcome(saves.save_from_two_devices, f"{root}/two", device),
        "export": outcome(saves.exports, f"{root}/export", device),
        "digests": outcome(saves.digests, device),
        "nameless": outcome(saves.save_of_a_nameless_device, f"{root}/nameless", device),
        "own tensors": outcome(saves.optimizer_with_own_tensors, f"{root}/own", device),
        "side stream": outcome(saves.async_save_on_a_side_stream, f"{root}/side", device),
        "on the cpu": outcome(saves.save_of_a_cpu_model, f"{root}/cpu", device),
        "ledger": outcome(in_a_ledger, f"{root}/ledger", device),
    }


def on_others_visible(source: str, root: str) -> dict[str, tuple[str, Any]]:
    """Rank 0 sees four devices now, rank 1 its own alone."""
    device = enter(4 if dist.get_rank() == 0 else 1)
    return {
        "now": outcome(resume, source, f"{root}/now", device),
        "before": outcome(resume, source, f"{root}/before", device),
        "small": outcome(restore_small, root, device),
    }


def on_none(source: str, root: str, sources: str) -> dict[str, tuple[str, Any]]:
    """The checkpoints of devices, on the CPU; and what the CPU gives."""
    device = enter(0, "gloo")
    return {
        **parts_alike(sources, root, device),
        "now": outcome(resume, source, f"{root}/now", device),
        "small": outcome(restore_small, root, device),
    }
