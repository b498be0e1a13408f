"""A model for ZeRO: its training by DeepSpeed (``torchrun … -m tests.runs._zero_fns OUT STAGE DTYPE``), and what ranks of ours restore.

With it DeepSpeed leaves out nothing that its checkpoints can have: a shared and a frozen parameter, buffers, two groups of parameters.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.catalog._dcp_fns import whole

MOMENTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 36)
        self.body = nn.Sequential(nn.Linear(36, 47), nn.Linear(47, 25, bias=False), nn.Linear(25, 36))
        self.norm = nn.LayerNorm(36)
        self.frozen = nn.Linear(36, 36).requires_grad_(False)
        self.conv = nn.Conv1d(36, 36, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(36, 41, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.randn(5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(self.body(self.embed(x)))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.head(self.frozen(h) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """AdamW's two groups: with and without weight decay."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    bare = {n for n in trained if "bias" in n or "norm" in n}
    return [
        {"params": [p for n, p in trained.items() if n not in bare], "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if n in bare], "weight_decay": 0.0},
    ]


def _state(seed: int) -> sw.TrainState:
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(groups_of(model), lr=1.0))


def takes_over(path: str) -> dict[str, Any]:
    """What a rank has after the restore, whole, and the bytes that it read."""
    state = _state(7)
    report = sw.restore(state, path)
    model, optimizer = state.models["model"], state.optimizers["optimizer"]
    found = {**whole(model), **dict(model.named_buffers())}
    moments = {
        f"{name}.{key}": optimizer.state[p][key].full_tensor()
        for name, p in model.named_parameters()
        if p.requires_grad
        for key in MOMENTS
    }
    steps = {float(optimizer.state[p]["step"]) for p in model.parameters() if p.requires_grad}
    return {
        "model": found,
        "moments": moments,
        "steps": steps,
        "rates": [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups],
        "step": report.step,
        "read": report.bytes_read,
    }


def errors_of(paths: list[str]) -> list[tuple[str, bool]]:
    """The error of each restore, and whether the model is as before."""
    state, found = _state(7), []
    before = whole(state.models["model"])
    for path in paths:
        text = ""
        try:
            sw.restore(state, path)
        except ShardwiseError as error:
            text = str(error)
        after = whole(state.models["model"])
        found.append((text, all(torch.equal(after[name], before[name]) for name in before)))
    return found


# ----------------------------------------------------------------------------------------------------
# DeepSpeed itself


def main(out: str, stage: int, dtype: str, *options: str) -> None:
    """Two steps of AdamW, and the checkpoint in ``out``."""
    deepspeed = importlib.import_module("deepspeed")  # a dependency of nothing
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # it asks for kernels of mkldnn, which this doesn't need
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if "subgroups" in options:
        zero["sub_group_size"] = 2000
    zero["round_robin_gradients"] = "dealt" in options
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config[dtype]["initial_scale_power"] = 4
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups_of(model), lr=1e-2), config=config
    )
    for k in range(2):
        ids = torch.arange(8)[None].roll(k + dist.get_rank(), 1)
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
