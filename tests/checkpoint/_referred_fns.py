"""On ranks: a frozen base that checkpoints refer to, under a head that is trained."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.loading._load_fns import whole


class Net(nn.Module):
    """A base of two layers, one tied to a second name, a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied.weight = self.base[0].weight
        self.head = nn.Linear(24, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = torch.tanh(layer(x))
        self.seen += 1
        return self.head(self.tied(x))  # type: ignore[no-any-return]


def net(seed: int = 0, mesh: Any = None) -> Net:
    """The head's values, like the base's, are those of the seed."""
    generator = torch.Generator().manual_seed(seed)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.base.requires_grad_(False)
    if mesh is not None:
        fully_shard(model.base[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def state_of(model: Net, **options: Any) -> sw.TrainState:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return sw.TrainState(model=model, optimizer=optimizer, **{"frozen": "refer", **options})


def step(state: sw.TrainState, number: int) -> float:
    (model,), (optimizer,) = state.models.values(), state.optimizers.values()
    loss = model(torch.full((2, 24), number / 7)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mesh_of(kind: str) -> Any:
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def run(
    root: str, mode: Any, kind: str, first: int, last: int, seed: int = 0, **options: Any
) -> tuple[list[float], dict[str, str], int]:
    """Resume if there is a step; then train and save. Losses, digests, and the bytes that the last save wrote or copied here."""
    model = net(seed, mesh_of(kind))
    with torch.no_grad():
        model.head.weight.mul_(1.0 if first == 0 else 0.5)  # of another start, if it were not restored
    state = state_of(model, **options)
    with sw.Checkpointer(root, mode=mode) as checkpoints:
        report = checkpoints.resume(state)
        assert (report is None) == (first == 0)
        losses = [step(state, k) for k in range(first, last)]
        saved = checkpoints.save(state, last)
        losses.append(step(state, last))  # while an asynchronous save sums the base
        checkpoints.wait()
    found = sw.digest(model)
    assert isinstance(found, dict)
    return losses, found, saved.bytes_written


def refused(root: str, seed: int) -> tuple[str, bool]:
    """A resume over another base: what it says, and whether the head is as it was."""
    model = net(seed, mesh_of("fsdp"))
    before = whole(model.head.weight.detach()).clone()
    with sw.Checkpointer(root) as checkpoints:
        try:
            checkpoints.resume(state_of(model))
        except sw.errors.StateError as error:
            return str(error), torch.equal(whole(model.head.weight.detach()), before)
    return "", False


def frozen_on_one_rank(path: str) -> str:
    model = net(0, mesh_of("fsdp"))
    if dist.get_rank() == 1:
        model.base[1].requires_grad_(True)
    try:
        sw.save(state_of(model), path)
    except sw.errors.ShardwiseError as error:
        return str(error)
    return ""


def changed_on_one_rank(path: str, root: str) -> list[int]:
    """How many tensors each save under "auto" refers to: a base as loaded, one that rank 1 changed after a save, the changed one restored and
    loaded, and one with new rows.
    """
    from peft import LoraConfig

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
    warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`")
    found = []
    for name in ("as loaded", "changed", "restored", "loaded", "grown"):
        more = {"vocab_size": 128} if name == "grown" else {}
        adapter = LoraConfig(r=2, target_modules=["q_proj"])
        model = sw.load_pretrained(path, mesh_of("fsdp"), adapter=adapter, **more)
        state = state_of(model, frozen="auto")
        if name == "changed":
            sw.save(state, f"{root}/before")
        if name == "changed" and dist.get_rank() == 1:
            with torch.no_grad():
                next(p for p in model.parameters() if not p.requires_grad).to_local()[-1].add_(1)
        if name == "restored":
            sw.restore(state, f"{root}/changed")
        if name == "loaded":
            sw.load(model, f"{root}/changed")
        sw.save(state, f"{root}/{name}")
        found.append(sw.verify(f"{root}/{name}").referred)
    sw.export_hf(f"{root}/grown", f"{root}/adapter")
    return found
