"""What the ranks of test_several_models.py run: an actor and a critic with optimizers and schedulers of their own."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.checkpoint._checkpointer_fns import Small
from tests.checkpoint._resume_fns import Bits, assert_same_bits
from tests.harness.models import Mixed


def build(seed: int, *, critic: bool = True) -> sw.TrainState:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models: dict[str, nn.Module] = {"actor": Mixed()}
    fully_shard(models["actor"], mesh=mesh, ignored_params={models["actor"].gate})
    models["actor"].gate.requires_grad_(False)
    if critic:
        models["critic"] = Small(8)  # layer.weight is a name that both could have
        fully_shard(models["critic"], mesh=mesh)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "policy": torch.optim.AdamW([p for p in models["actor"].parameters() if p.requires_grad], lr=1e-3)
    }
    schedulers: dict[str, Any] = {"policy": CosineAnnealingLR(optimizers["policy"], 20)}
    if critic:
        optimizers["value"] = torch.optim.SGD(models["critic"].parameters(), lr=1e-2, momentum=0.9)
        schedulers["value"] = StepLR(optimizers["value"], 3)
    return sw.TrainState(model=models, optimizer=optimizers, scheduler=schedulers, extra={"note": seed})


def train(state: sw.TrainState, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(len(losses)))
        loss = state.models["actor"](x).square().mean() + state.models["critic"](x).square().mean()
        loss.backward()
        for name, optimizer in state.optimizers.items():
            optimizer.step()
            optimizer.zero_grad()
            state.scheduler[name].step()
        losses.append(float(loss.detach()))
    return losses


def all_bits(state: sw.TrainState) -> Bits:
    found: Bits = {}
    for name, model in state.models.items():
        for key, tensor in model.state_dict().items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found[f"{name} {key}"] = (tensor.dtype, local.detach().clone())
    for name, optimizer in state.optimizers.items():
        for k, states in enumerate(optimizer.state.values()):
            for key, value in states.items():
                local = value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)
                found[f"{name} {k} {key}"] = (local.dtype, local.detach().clone())
    return found


def goes_on_exactly(root: str, mode: str) -> dict[str, Any]:
    state = build(0)
    train(state, 3)
    with sw.Checkpointer(root, mode=mode) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(state, 3)
        expected = train(state, 4)
        last = all_bits(state)
    fresh = build(9)
    with sw.Checkpointer(root) as checkpointer:
        report = checkpointer.resume(fresh)
    assert report is not None
    found = train(fresh, 4)
    assert_same_bits(all_bits(fresh), last)
    return {
        "same": found == expected,
        "report": (report.step, report.exact, report.skipped, report.tensors, report.optimizer_tensors),
        "note": fresh.extra["note"],
        "folders": sorted(os.listdir(f"{root}/step-00000003")),
        "verify": sw.verify(f"{root}/step-00000003").problems,
        "rates": [optimizer.param_groups[0]["lr"] for optimizer in fresh.optimizers.values()],
    }


def digests_of(path: str, save: bool) -> dict[str, str]:
    """Digests of both models after a restore from ``path``; then saved there again under another name."""
    state = build(5)
    if not os.path.exists(path):
        train(state, 2)
        sw.save(state, path)
    else:
        sw.restore(state, path)
    if save:
        sw.save(state, f"{path}-{dist.get_world_size()}")
    return {f"{m} {n}": d for m, model in state.models.items() for n, d in sw.digest(model).items()}  # type: ignore[union-attr]


def errors(path: str) -> dict[str, str]:
    """A run that asks for less, for more, and with names that are no words."""
    found = {}
    report = sw.restore(build(1, critic=False), path)
    found["less"] = " | ".join(report.skipped)
    more = build(1)
    attempts = {
        "more": {**more.models, "judge": nn.Linear(2, 2)},
        "single": more.models["actor"],
        "name": {"../evil": nn.Linear(2, 2)},
        "none": {},
    }
    for name, models in attempts.items():
        try:
            sw.restore(sw.TrainState(model=models), path)
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def ema_as_a_model(path: str) -> dict[str, Any]:
    """A sharded copy of the weights: stored as a model and as an extra; refused outside a state dict."""
    state = build(0)
    average = Mixed()
    fully_shard(
        average, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params={average.gate}
    )
    actor = state.models["actor"]
    found: dict[str, Any] = {"equal": {}}
    try:
        weights = [p.detach() for p in average.parameters()]
        sw.save(sw.TrainState(model=actor, extra={"ema": {"weights": weights}}), f"{path}-refused")
    except ShardwiseError as error:
        found["refused"] = str(error)
    expected = sw.digest(average)
    for name, averaged in {
        "model": sw.TrainState(model={"actor": actor, "ema": average}),
        "extra": sw.TrainState(model=actor, extra={"ema": average}),
    }.items():
        sw.save(averaged, f"{path}-{name}")
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
        report = sw.restore(averaged, f"{path}-{name}")
        found["equal"][name] = sw.digest(average) == expected and report.exact
    return found


def onto_another_model(path: str) -> dict[str, str]:
    """The optimizer of one model, restored onto another of the same architecture; and one over a shared part."""
    found = {}
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(a.parameters(), lr=1.0, momentum=0.9)
    a(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sw.save(sw.TrainState(model={"a": a, "b": b}, optimizer={"o": optimizer}), path)
    other = torch.optim.SGD(b.parameters(), lr=1.0, momentum=0.9)
    try:
        sw.restore(sw.TrainState(model={"a": a, "b": b}, optimizer={"o": other}), path)
    except ShardwiseError as error:
        found["other"] = f"{type(error).__name__}: {error}"
    c = nn.Sequential(a, nn.Linear(3, 2))
    shared = torch.optim.SGD(c.parameters(), lr=1.0)
    sw.save(sw.TrainState(model={"a": a, "c": c}, optimizer={"o": shared}), f"{path}-shared")
    found["shared"] = "saved"
    return found
