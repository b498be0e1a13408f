"""What the ranks of test_third_party.py run: real writers of third-party layouts, and our restores of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType, fully_shard
from torch.optim.lr_scheduler import MultiStepLR

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.catalog._dcp_fns import Lines, batch, whole

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def run_of(seed: int, rate: float = 1e-2) -> sw.TrainState:
    """A sharded model with AdamW, and a scheduler whose state has numbers for keys (a Counter of milestones)."""
    torch.manual_seed(seed)
    model = Lines()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return sw.TrainState(
        model=model, optimizer=optimizer, scheduler=MultiStepLR(optimizer, [2, 5, 5], gamma=0.5)
    )


def train(state: sw.TrainState, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = state.models["model"](batch(step)).square().mean()
        loss.backward()
        state.optimizers["optimizer"].step()
        state.scheduler.step()
        state.optimizers["optimizer"].zero_grad()
        losses.append(float(loss.detach()))
    return losses


def titan_saves(folder: str) -> list[float]:
    """The state dict of torchtitan's CheckpointManager: the model's keys at the top, the optimizer's flattened."""
    state = run_of(0)
    train(state, 0, 3)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    dcp.save(
        {
            **get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
            "lr_scheduler": state.scheduler.state_dict(),
            "dataloader": {"dp_rank_0": b"somebody's pickle", "world_size": dist.get_world_size()},
            "train_state": {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(9)},
        },
        checkpoint_id=folder,
    )
    return train(state, 3, 5)


def takes_over(path: str, steps: int = 5) -> dict[str, Any]:
    """Our own loop from a third-party (or a converted) checkpoint."""
    state = run_of(7, rate=1.0)
    report = sw.restore(state, path)
    return {
        "step": report.step,
        "documents": report.documents,
        "read": report.bytes_read,
        "exact": report.exact,
        "losses": train(state, 3, steps),
        "tensors": (report.tensors, report.optimizer_tensors),
    }


def state_bytes() -> int:
    """Of the model and AdamW's state, once."""
    model = Lines()
    return sum(p.numel() * 4 * 3 + 4 for p in model.parameters())


def loads_model_only(path: str) -> dict[str, torch.Tensor]:
    state = run_of(3)
    sw.load(state.models["model"], path)
    return whole(state.models["model"])


# --------------------------------------------------------------------------------- transformers' own save


def transformers_saves(source: str, folder: str, beside: bool) -> dict[str, torch.Tensor]:
    """``from_pretrained(distributed_config=…)``, one step of AdamW, ``save_pretrained(distributed_checkpoint=True)``."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig, save_optimizer_distributed

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(8).reshape(2, 4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(folder, distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, folder if beside else os.path.join(folder, "optimizer"))
    moments = {f"{n}.exp_avg": _full(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    return {**{n: _full(p) for n, p in model.named_parameters()}, **moments}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def restores_transformers(source: str, folder: str, out: str) -> dict[str, torch.Tensor]:
    model = sw.load_pretrained(source, init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    sw.restore(sw.TrainState(model=model, optimizer=optimizer), folder)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    sw.export_hf(model, out)
    moments = {f"{n}.exp_avg": _full(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    return {**{n: _full(p) for n, p in model.named_parameters()}, **moments}


# --------------------------------------------------------------------------------- what can't be read


def errors_of(paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        try:
            sw.restore(run_of(1), path)
            found.append("none")
        except ShardwiseError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def asks_too_much_of_dcp(folder: str) -> dict[str, Any]:
    """A run that saved each object's own ``state_dict()``, and no scheduler."""
    state, scaler = run_of(0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(state, 0, 1)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    content = {"model": model, "optimizer": optimizer, "scaler": scaler}
    dcp.save({name: found.state_dict() for name, found in content.items()}, checkpoint_id=folder)
    other = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    asked = {"optimizer": {"optimizer": other}, "scheduler": {"scheduler": state.scheduler}, "model": {}}
    found: dict[str, Any] = {}
    for name, more in asked.items():
        try:
            sw.restore(sw.TrainState(model=model, **more), folder)
            found[name] = "restored"
        except ShardwiseError as error:
            found[name] = type(error).__name__, str(error)
    fresh = torch.amp.GradScaler("cpu")
    sw.restore(sw.TrainState(model=model, scaler=fresh), folder)
    again = run_of(5, rate=1.0)
    taken = again.optimizers["optimizer"]
    report = sw.restore(sw.TrainState(model=again.models["model"], optimizer=taken), folder)
    pairs = zip(model.parameters(), again.models["model"].parameters(), strict=True)
    same = [
        torch.equal(_full(optimizer.state[a][k]), _full(taken.state[b][k]))
        for a, b in pairs
        for k in ("exp_avg", "exp_avg_sq", "step")
    ]
    return {
        **found,
        "scaler": fresh.get_scale(),
        "same": same,
        "rate": taken.param_groups[0]["lr"],
        "said": report.differences,
    }


def accelerate_saves_per_rank(root: str, folder: str) -> None:
    """Files of single ranks with plain local tensors, which don't say where they belong, named as ``use_dcp=False`` names them."""
    os.makedirs(folder, exist_ok=True)
    state = run_of(0)
    local = {n: p.to_local().detach().clone() for n, p in state.models["model"].named_parameters()}  # type: ignore[attr-defined]
    torch.save(local, f"{folder}/pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(root, f"{folder}-numbered")
        plain: nn.Module = Lines()
        first, *rest = plain.parameters()
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
        torch.save(optimizer.state_dict() | {"state": {0: {"step": 1}}}, f"{folder}-numbered/optimizer.bin")
    dist.barrier()


# --------------------------------------------------------------------------------- files of each rank


def ranks_save(
    folder: str, kind: str, sizes: tuple[int, ...], steps: int = 3
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """As verl's FSDPCheckpointManager.save_checkpoint (0.9.1). Gives the whole state, and the losses of the next five steps.

    ``kind``: fully_shard over a mesh of these ``sizes``, or FSDP1 with or without a mesh.
    """
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(0)
    model: Any = Lines()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    context: Any = contextlib.nullcontext()
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        warnings.simplefilter("ignore")
        mesh_of_fsdp1 = mesh if kind == "fsdp1 with a mesh" else None
        model = FSDP(model, device_mesh=mesh_of_fsdp1, device_id=torch.device("cpu"))
        config = ShardedStateDictConfig(offload_to_cpu=False)
        context = FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = MultiStepLR(optimizer, [2, 5, 5], gamma=0.5)
    state: Any = SimpleNamespace(
        models={"model": model}, optimizers={"optimizer": optimizer}, scheduler=scheduler
    )
    train(state, 0, steps)
    of_rank = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    with context:
        torch.save(model.state_dict(), f"{folder}/model_{of_rank}")
        torch.save(optimizer.state_dict(), f"{folder}/optim_{of_rank}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, f"{folder}/extra_state_{of_rank}")
    if kind == "fsdp2":
        return _whole_state(model, optimizer), train(state, steps, 5)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = {name: value.clone() for name, value in model.state_dict().items()}
    return found, train(state, steps, 5)


def _whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {
        f"{name}.{key}": _full(optimizer.state[p][key])
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {**whole(model), **moments}


def each_takes_over(paths: list[str]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        state = run_of(7, rate=1.0)
        sw.restore(state, path)
        model, optimizer = state.models["model"], state.optimizers["optimizer"]
        found.append({"state": _whole_state(model, optimizer), **takes_over(path)})
    return found


def each_loads(paths: list[str]) -> list[dict[str, torch.Tensor]]:
    return [loads_model_only(path) for path in paths]


def _qwen(folder: str) -> tuple[Any, torch.optim.Optimizer]:
    model = sw.load_pretrained(f"{folder}/huggingface", init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _names_of_rank(folder: str) -> tuple[str, str]:
    of_rank = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    return f"{folder}/model_{of_rank}", f"{folder}/optim_{of_rank}"


def qwen_saves(folder: str) -> None:
    model, optimizer = _qwen(folder)
    ids = torch.arange(8).reshape(2, 4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for content, path in zip(
        (model.state_dict(), optimizer.state_dict()), _names_of_rank(folder), strict=True
    ):
        torch.save(content, path)


def qwen_restores(folder: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """As verl's load_checkpoint: torch alone, on the same ranks."""
    model, optimizer = _qwen(folder)
    for target, path in zip((model, optimizer), _names_of_rank(folder), strict=True):
        target.load_state_dict(torch.load(path, weights_only=False))
    return {name: (_full(p), _full(optimizer.state[p]["exp_avg_sq"])) for name, p in model.named_parameters()}
