"""What the ranks of test_case_05_resume.py run: a training under Accelerate that is stopped and taken up again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import shardwise as sw
from shardwise.integrations import accelerate as swa
from tests.harness.models import Block
from tests.integrations._accelerate_fns import accelerator_with

ROWS = 12  # of a global batch; divides by 1, 2, 3 and 4 ranks


class Curve(nn.Module):
    """Learns a fixed function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a global batch that is the same at every world size."""
    x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
    mine = x[dist.get_rank() :: dist.get_world_size()]
    return mine, mine[:, :8].sin()


def losses(
    source: str,
    begin: int,
    end: int,
    dtype: torch.dtype,
    *,
    resume: str = "",
    save: str = "",
    own: bool = False,
) -> list[float]:
    """Mean losses of steps [begin, end). ``own``: with Accelerate's own save_state and load_state."""
    plugin = {"state_dict_type": "SHARDED_STATE_DICT"}
    with accelerator_with(plugin=plugin, step_scheduler_with_optimizer=False) as accelerator:
        with sw.meta_init():
            model: nn.Module = Curve().to(dtype)
        swa.load(accelerator, model, source)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if resume:
            if own:
                accelerator.load_state(resume)
            else:
                swa.load_state(accelerator, resume)
        found = []
        for step in range(begin, end):
            x, target = batch(step)
            loss = (model(x.to(dtype)).float() - target).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
        if save:
            if own:
                accelerator.save_state(save)
            else:
                swa.save_state(accelerator, save, step=end)
        return found


def stored_dtypes(folder: str, own: bool) -> set[str]:
    """Of the parameters in a checkpoint."""
    if own:
        metadata = FileSystemReader(f"{folder}/pytorch_model_fsdp_0").read_metadata()
        return {str(t.properties.dtype) for t in metadata.state_dict_metadata.values()}
    from shardwise.catalog.open import open_catalog

    return {t.dtype for t in open_catalog(folder).tensors.values()}


def a_life(jobs: list[dict[str, Any]], source: str, dtype: str) -> list[list[float]]:
    """Several runs, one after the other, each with objects of its own."""
    return [losses(source, job.pop("begin"), job.pop("end"), getattr(torch, dtype), **job) for job in jobs]
