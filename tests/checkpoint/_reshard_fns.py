"""What the ranks of test_reshard.py run: one training state under one mesh after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.format.manifest import read_manifest

WIDTH, INNER, OUT = 10, 13, 7  # nothing divides by 2, 3 or 4 everywhere


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def build(mesh_kind: str, optimizer: str) -> sw.TrainState:
    """``1d``, ``hsdp`` (2 × 2) or ``tp`` (FSDP 2 × TP 2)."""
    torch.manual_seed(0)
    model = Net()
    if mesh_kind == "1d":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        names = ("replicate", "shard") if mesh_kind == "hsdp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    if mesh_kind == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kinds: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    }
    made = kinds[optimizer](list(model.parameters()))
    return sw.TrainState(model=model, optimizer=made)


def train(state: sw.TrainState, steps: int) -> None:
    assert isinstance(state.optimizer, torch.optim.Optimizer)
    for k in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k))
        state.model(x).square().mean().backward()  # type: ignore[operator]
        state.optimizer.step()
        state.optimizer.zero_grad()


def stage(
    source: str | None, target: str, mesh_kind: str, optimizer: str, *, train_steps: int
) -> dict[str, Any]:
    """Restore, perhaps train, save; the digests that the new manifest records, and what was read."""
    state = build(mesh_kind, optimizer)
    read = 0
    if source is not None:
        report = sw.restore(state, source)
        read = report.bytes_read
    train(state, train_steps)
    sw.save(state, target)
    manifest = read_manifest(target)
    digests = {n: t.digest for n, t in manifest.models["model"].items()}
    for n, t in manifest.models["model"].items():
        digests |= {
            f"{n}.{k}": s.digest for k, s in t.states.get("optimizer", {}).items() if s.packed is None
        }
    digests |= {f"packed {k}": p.digest for k, p in manifest.packed["optimizer"].items()}
    return {
        "digests": digests,
        "read": read,
        "held": held_bytes(state),
        "rows": bytes_of_rows(state),
        "problems": sw.verify(target).problems,
    }


def held_bytes(state: sw.TrainState) -> int:
    """What this rank holds of the model and the optimizer: its shards, and what is not sharded."""
    return sum(local.numel() * local.element_size() for _, local in _tensors(state))


def bytes_of_rows(state: sw.TrainState) -> int:
    """As :func:`held_bytes`, with every row whole of which this rank holds a part."""
    return sum(
        t.element_size() * (local.shape[0] * t.shape[1:].numel() if local.dim() else 1)
        for t, local in _tensors(state)
    )


def _tensors(state: sw.TrainState) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of the model and the optimizer, and this rank's part of it."""
    tensors = list(state.model.state_dict().values())  # type: ignore[union-attr]
    tensors += [v for s in state.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]  # type: ignore[union-attr]
    for t in tensors:
        yield t, t.to_local() if isinstance(t, DTensor) else t
