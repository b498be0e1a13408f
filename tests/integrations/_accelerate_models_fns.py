"""What the ranks of test_accelerate_models.py run: models that a plugin's sharding alone does not do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.integrations import accelerate as swa
from tests.integrations._accelerate_fns import accelerator_with, whole


class Scaled(nn.Module):
    """A parameter without dims, as CLIP's logit scale, beside rows that don't reach every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.token = nn.Parameter(torch.ones(1, 6))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)
        nn.init.normal_(self.token)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.line(x)) * self.scale + self.token)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def steps(accelerator: Any, model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = (model(batch(step, dist.get_rank())) - 1).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def alone(state: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The same training in one process, on all ranks' rows."""
    model = Scaled()
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(count):
        rows = torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])
        (model(rows) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def loaded(source: str, root: str, compiled: bool) -> dict[str, Any]:
    """Load, ``accelerator.prepare``, train, save, go on; resumed in new objects, the same again."""
    found: dict[str, Any] = {}
    options = {"dynamo_backend": "eager"} if compiled else {}
    for life in ("first", "second"):
        with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Linear"]}, **options) as accelerator:
            with sw.meta_init():
                model: Any = Scaled()
            swa.load(accelerator, model, source)
            start = whole(model)
            found["plain"] = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
            model, optimizer = accelerator.prepare(model, optimizer)
            if life == "first":
                steps(accelerator, model, optimizer, range(3))
                found["trained"], found["alone"] = whole(model), alone(start, 3)
                swa.save_state(accelerator, root)
            else:
                found["exact"] = swa.load_state(accelerator, root).exact
            found[life] = (steps(accelerator, model, optimizer, range(3, 5)), whole(model))
    return found


def from_scratch(root: str) -> dict[str, Any]:
    """docs/howto/accelerate.md, "From scratch": shard on meta, initialize, prepare, train, save, resume."""
    found: dict[str, Any] = {}
    for life in ("first", "second"):
        with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Linear"]}) as accelerator:
            torch.manual_seed(dist.get_rank())
            with sw.meta_init():
                model: Any = Scaled()
            swa.shard(accelerator, model)
            sw.init_weights(model, seed=3)
            found["values"] = whole(model)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
            model, optimizer = accelerator.prepare(model, optimizer)
            if life == "first":
                steps(accelerator, model, optimizer, range(2))
                swa.save_state(accelerator, root)
            else:
                found["exact"] = swa.load_state(accelerator, root).exact
            found[life] = (steps(accelerator, model, optimizer, range(2, 4)), whole(model))
    return found


def bare_parameter() -> str:
    """A bare ``nn.Parameter`` in a module that has no ``reset_parameters``."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.token = nn.Linear(4, 4), nn.Parameter(torch.ones(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x) + self.token

    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Linear"]}) as accelerator:
        with sw.meta_init():
            model = Bare()
        swa.shard(accelerator, model)
        try:
            sw.init_weights(model)
        except ShardwiseError as error:
            return str(error)
    return "none"


def other_kinds(source: str, root: str) -> dict[str, str]:
    """What is no FSDP2 is named as what it is, in each function."""
    from accelerate.utils import DistributedType

    found = {}
    with accelerator_with(plugin={"transformer_cls_names_to_wrap": ["Linear"]}) as accelerator:
        model = Scaled()
        for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            accelerator.state._shared_state["distributed_type"] = kind
            accelerator.state.fsdp_plugin.fsdp_version = 1
            for name, call in (
                ("load", lambda: swa.load(accelerator, model, source)),
                ("prepare", lambda: swa.prepare(accelerator, model)),
                ("save", lambda: swa.save_state(accelerator, root)),
                ("resume", lambda: swa.load_state(accelerator, source)),
            ):
                try:
                    call()
                except ShardwiseError as error:
                    found[f"{kind.value} {name}"] = str(error)
    return found


def limited(root: str) -> dict[str, Any]:
    """Automatic names with a limit, where the deletion of the oldest is cut off in its middle, and where it is refused."""
    import os
    from unittest import mock

    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=1)
    found: dict[str, Any] = {}
    with accelerator_with(
        plugin={"transformer_cls_names_to_wrap": ["Linear"]}, project_config=project
    ) as accelerator:
        model: Any = nn.Sequential(nn.Linear(4, 4))
        swa.shard(accelerator, model)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        swa.save_state(accelerator)
        with mock.patch("shardwise.publish.places.remove_ours"):  # as if killed there
            swa.save_state(accelerator)
        dist.barrier()
        names = os.listdir(f"{root}/checkpoints")
        found["published"] = sorted(n for n in names if not n.startswith("."))
        found["remains"] = len(names) - len(found["published"])
        with mock.patch("shardwise.publish.places.discard", side_effect=PermissionError("immutable")):
            swa.save_state(accelerator)
        dist.barrier()
        found["refused"] = sorted(n for n in os.listdir(f"{root}/checkpoints") if not n.startswith("."))
        found["newest"] = swa.load_state(accelerator).exact
    return found
