"""What the ranks of test_dcp.py run: torch's own saves, and our loads of them."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.checkpoint._reshard_fns import held_bytes
from tests.harness.models import Block, Mixed
from tests.integrations._accelerate_fns import accelerator_with


def sharded(seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Blocks and the rest sharded; one plain parameter, buffers, a 0-d one among them."""
    torch.manual_seed(seed)
    model = Mixed().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.gate})
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, gathered."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def save_with_torch(folder: str, kind: str, dtype: str) -> dict[str, torch.Tensor]:
    """As Accelerate does (model in an entry of its own), as torch's examples do, or flat."""
    model = sharded(1, dtype=getattr(torch, dtype))
    if kind == "flat":
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions())
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer, "step": 7, "rng": torch.get_rng_state()}
        state = {"app": state} if kind == "app" else state
    dcp.save(state, checkpoint_id=folder)
    return whole(model)


def saves_its_own(folder: str) -> None:
    """As RL engines do, on every rank."""
    torch.save(sharded(1).state_dict(), f"{folder}/of_rank_{dist.get_rank()}.pt")


def load_with_us(folder: str, dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    model = sharded(2, dtype=getattr(torch, dtype))
    report = sw.load(model, folder, allow_plain=("gate",))
    return whole(model), report.bytes_read


def error_of(folder: str) -> tuple[str, str]:
    model = sharded(2)
    try:
        sw.load(model, folder, allow_plain=("gate",))
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "none", ""


# --------------------------------------------------------------------------------- Accelerate


class Lines(nn.Module):
    """Blocks and a head, no buffers: what Accelerate's own loader takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        for block in self.blocks:
            del block.seen
            block.seen = 0.0
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Lines()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)


def batch(step: int) -> torch.Tensor:
    """Every rank its own rows."""
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def accelerate_trains(root: str, kind: str, steps: int, more: int, use_dcp: bool = True) -> list[float]:
    """Real Accelerate with FSDP2: trains, saves its state, goes on. The losses after the save."""
    plugin = {"reshard_after_forward": True, "state_dict_type": kind}
    with accelerator_with(plugin=plugin) as accelerator:
        model, optimizer, _ = parts(0)
        model, optimizer = accelerator.prepare(model, optimizer)
        # Not prepared: Accelerate steps a prepared one once per process.
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 4, gamma=0.5)
        accelerator.register_for_checkpointing(scheduler)
        accelerator._schedulers.append(scheduler)
        accelerator._custom_objects.clear()
        losses = []
        for step in range(steps + more):
            if step == steps:
                accelerator.save_state(root)
                if not use_dcp:
                    _save_by_ranks(accelerator, model, optimizer, root)
            loss = model(batch(step)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses[steps:]


def _save_by_ranks(accelerator: Any, model: Any, optimizer: Any, root: str) -> None:
    """Model and optimizer as ``use_dcp=False`` saves them, in place of DCP's directories."""
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            shutil.rmtree(os.path.join(root, name))
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, root, use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, root, use_dcp=False)


def goes_on_here(root: str, steps: int, more: int) -> dict[str, Any]:
    """An own loop that takes over."""
    model, optimizer, scheduler = parts(7)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    named = {id(p): n for n, p in model.named_parameters()}
    order = [[named[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    live = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [live[n] for n in names]} for names in order], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)
    report = sw.restore(state, root)
    losses = []
    for step in range(steps, steps + more):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "exact": report.exact,
        "documents": report.documents,
        "tensors": (report.tensors, report.optimizer_tensors),
        "saved_world_size": report.saved_world_size,
        "step": report.step,
        "read": report.bytes_read,
        "held": held_bytes(state),
    }


def asks_for_too_much(root: str) -> dict[str, str]:
    found = {}
    model = sharded(1)
    states = {
        "scaler": sw.TrainState(model=model, scaler=torch.amp.GradScaler("cpu")),
        "dataloader": sw.TrainState(
            model=model, dataloader=sw.ResumableLoader(torch.utils.data.DataLoader([1]))
        ),
        "scheduler": sw.TrainState(model=model, scheduler=parts(0)[2]),
    }
    for name, state in states.items():
        try:
            sw.restore(state, root)
        except ShardwiseError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def restores_nested(root: str, flat_optimizer: bool) -> dict[str, Any]:
    """torch's own layout: model and optimizer in one state dict; or, as torchtitan, its optimizer flattened."""
    if flat_optimizer:
        model = sharded(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        of_model, of_optimizer = get_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        dcp.save({"model": of_model, "optimizer": of_optimizer, "step": 7}, checkpoint_id=root)
    model = sharded(2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=9.0)
    report = sw.restore(sw.TrainState(model=model, optimizer=optimizer), root)
    states = list(optimizer.state.values())
    return {
        "model": whole(model),
        "moments": {
            float(v)
            for s in states
            for v in (s["exp_avg"].to_local() if isinstance(s["exp_avg"], DTensor) else s["exp_avg"])
            .flatten()
            .unique()
        },
        "steps": {float(s["step"]) for s in states},
        "rate": optimizer.param_groups[0]["lr"],
        "step": report.step,
        "tensors": report.optimizer_tensors,
    }


def another_optimizer(root: str) -> dict[str, str]:
    """AdamW's state into SGD; and settings that were apart into one group."""
    found = {}
    model = sharded(2)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)
    try:
        sw.restore(sw.TrainState(model=model, optimizer=sgd), root)
    except ShardwiseError as error:
        found["kind"] = f"{type(error).__name__}: {error}"
    model = sharded(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    apart = torch.optim.AdamW(
        [{"params": parameters[:3], "weight_decay": 0.5}, {"params": parameters[3:]}], lr=0.1
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    apart.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, apart, options=options)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=f"{root}-apart")
    together = torch.optim.AdamW(parameters, lr=0.1)
    report = None
    try:
        report = sw.restore(
            sw.TrainState(model=model, optimizer=together, extra={"tokens": 0}), f"{root}-apart"
        )
    except ShardwiseError as error:
        found["groups"] = f"{type(error).__name__}: {error}"
    assert report is None
    report = sw.restore(sw.TrainState(model=model, extra={"tokens": 0}), f"{root}-apart")
    found["left"] = " | ".join(report.skipped)
    return found
