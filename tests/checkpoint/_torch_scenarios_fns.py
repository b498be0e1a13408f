"""Scenarios in which torch's own state-dict functions are used, with ours in their place; and what we refuse."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.names import named_tensors
from shardwise.tensors.live import local_tensor, reshard

WIDTH = 8


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


class Composite(nn.Module):
    """Units, a plain layer, a plain parameter and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.u1, self.u2, self.layer = Unit(), Unit(), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("not_kept", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.u2(self.u1(x * self.scale))) + self.kept.sum() * 0.1


class Fusion(nn.Module):
    """Hooks give a weight another name in the state dict, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self._register_state_dict_hook(Fusion._save_hook)
        self._register_load_state_dict_pre_hook(Fusion._load_hook, with_module=True)

    def _save_hook(self, destination: Any, prefix: str, metadata: Any) -> None:
        destination[f"{prefix}weight"] = destination.pop(f"{prefix}embedding.weight")

    def _load_hook(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}embedding.weight"] = state_dict.pop(f"{prefix}weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x).relu())


class WithExtra(Unit):
    def __init__(self) -> None:
        super().__init__()
        self.note = torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"note": self.note, "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note = self.note + 1
        return super().forward(x) * self.note.sum()


# --------------------------------------------------------------------------------------- how it is spread


def fsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def by_units(model: nn.Module) -> nn.Module:
    for unit in (m for m in model.modules() if isinstance(m, Unit)):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    return fsdp(model)


def hsdp(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model: nn.Module) -> nn.Module:
    plan = {"u1.first": ColwiseParallel(), "u1.rest.1": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def on_meta(model: nn.Module) -> nn.Module:
    """As a program that resumes has it: sharded on meta, then given memory of any content, with the buffer that no checkpoint has."""
    found = fsdp(model.to("meta")).to_empty(device="cpu")
    found.get_buffer("not_kept").fill_(1)  # left as it is, it has any content, and the report names it
    return found


def activations(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Unit))
    return by_units(model)


# ---------------------------------------------------------------------------------------------- optimizers


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def several_groups(model: nn.Module) -> torch.optim.Optimizer:
    flat, deep = ([p for p in model.parameters() if (p.ndim < 2) is flat] for flat in (True, False))
    groups = [{"params": deep}, {"params": []}, {"params": flat, "lr": 0.05, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def one_each(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {f"o{k}": torch.optim.Adam([p], lr=0.01) for k, p in enumerate(model.parameters())}


@dataclass(frozen=True)
class Scenario:
    model: Callable[[], nn.Module] = Composite
    spread: Callable[[nn.Module], nn.Module] = fsdp
    optimizer: Callable[[nn.Module], Any] = adamw
    frozen: tuple[str, ...] = ()
    resumed: Callable[[nn.Module], nn.Module] | None = None
    """How it is spread when it is resumed; None: the same."""


SCENARIOS: dict[str, Scenario] = {
    "root": Scenario(),
    "units": Scenario(spread=by_units),
    "hybrid": Scenario(spread=hsdp),
    "tensor parallel": Scenario(spread=tensor_parallel),
    "ddp": Scenario(spread=DistributedDataParallel),
    "replicate": Scenario(spread=replicate),
    "meta": Scenario(resumed=on_meta),
    "activation checkpoints": Scenario(spread=activations),
    "compiled": Scenario(spread=lambda m: torch.compile(fsdp(m), backend="eager")),
    "saved compiled, restored plain": Scenario(spread=lambda m: torch.compile(fsdp(m), backend="eager"), resumed=fsdp),
    "renaming hooks": Scenario(model=lambda: nn.Sequential(Unit(), Fusion()), spread=by_units),
    "tied": Scenario(model=Tied),
    "extra state": Scenario(model=lambda: nn.Sequential(WithExtra(), Unit()), spread=by_units),
    "frozen": Scenario(frozen=("u1", "kept")),
    "ddp to fsdp": Scenario(spread=DistributedDataParallel, resumed=fsdp),
    "fsdp to ddp": Scenario(resumed=DistributedDataParallel),
    "fused": Scenario(optimizer=lambda m: adamw(m, fused=True)),
    "foreach": Scenario(optimizer=lambda m: adamw(m, foreach=True)),
    "tensor lr": Scenario(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), amsgrad=True)),
    "several groups, one empty": Scenario(optimizer=several_groups),
    "an optimizer for each parameter": Scenario(optimizer=one_each),
}  # fmt: skip


class Run:
    def __init__(self, one: Scenario, spread: Callable[[nn.Module], nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        bare = one.model()
        for name, parameter in bare.named_parameters():
            parameter.requires_grad_(not name.startswith(one.frozen or "-"))
        self.model = spread(bare)
        self.state = sw.TrainState(model=self.model, optimizer=one.optimizer(self.model))
        own = 0 if one.spread is tensor_parallel else dist.get_rank()  # its ranks see the same data
        torch.manual_seed(seed + own)

    def train(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            for optimizer in self.state.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    def bits(self) -> dict[str, Any]:
        reshard(self.model.modules())
        found = {t.name: raw(t.tensor) for t in named_tensors(self.model) if t.persistent}
        names = {id(t.tensor): t.name for t in named_tensors(self.model)}
        for optimizer in self.state.optimizers.values():
            for p, state in optimizer.state.items():
                found |= {
                    f"{names[id(p)]}.{k}": raw(v) for k, v in state.items() if isinstance(v, torch.Tensor)
                }
        return found


def raw(tensor: torch.Tensor) -> bytes:
    return local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def scenarios(root: str) -> dict[str, Any]:
    """By name: whether two more steps are bitwise the same, and what the report says; of other placements the digest."""
    found: dict[str, Any] = {}
    for number, (name, one) in enumerate(SCENARIOS.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first = Run(one, one.spread, 1)
            first.train(2)
            path = os.path.join(root, str(number))
            saved = sw.save(first.state, path)
            before = sw.digest(first.model)
            losses = first.train(2)
            second = Run(one, one.resumed or one.spread, 5)
            report = sw.restore(second.state, path)
            same_digest = sw.digest(second.model) == before
            bitwise = losses == second.train(2) and first.bits() == second.bits()
            found[name] = (report.exact, bitwise, same_digest, saved.skipped, report.differences)
    return found


# ------------------------------------------------------------------------------------------------ refusals


class Stage(nn.Module):
    """The layers of one stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(2 * dist.get_rank() + k): nn.Linear(WIDTH, WIDTH) for k in range(2)})


def own_experts() -> nn.Module:
    """A shared layer, and an expert of the rank's own."""
    model = nn.Module()
    model.shared = nn.Linear(WIDTH, WIDTH)
    model.add_module(f"expert{dist.get_rank()}", nn.Linear(WIDTH, WIDTH))
    return model


def text_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(root: str) -> dict[str, str]:
    found = {}
    for original in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old = FullyShardedDataParallel(
                nn.Sequential(Unit(), Unit()), use_orig_params=original, device_id=torch.device("cpu")
            )
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
        found[f"FSDP1 {original}"] = text_of(
            lambda old=old, optimizer=optimizer: sw.save(  # type: ignore[misc]
                sw.TrainState(model=old, optimizer=optimizer), f"{root}/fsdp1"
            )
        )
    sw.save(sw.TrainState(model=Unit()), f"{root}/unit")
    found["restore into FSDP1"] = text_of(lambda: sw.restore(sw.TrainState(model=old), f"{root}/unit"))
    found["pipeline"] = text_of(lambda: sw.save(sw.TrainState(model=Stage()), f"{root}/stages"))
    found["experts"] = text_of(lambda: sw.save(sw.TrainState(model=own_experts()), f"{root}/experts"))
    state = sw.TrainState(model=Unit(), extra={"file": io.BytesIO(b"x")})
    found["BytesIO"] = text_of(lambda: sw.save(state, f"{root}/bytes"))
    found["left"] = ",".join(sorted(os.listdir(root)))
    return found


def staging_without_memory(root: str) -> tuple[str, str]:
    """An asynchronous save whose staging one rank can't allocate; then one that it can."""
    state = sw.TrainState(model=Unit())
    with sw.Checkpointer(root, mode="async") as checkpoints:
        buffer = checkpoints._buffer
        assert buffer is not None
        if dist.get_rank() == 1:
            reserve = buffer.reserve
            buffer.reserve = lambda *_, **__: reserve(2**60)  # type: ignore[method-assign]
        failed = text_of(lambda: checkpoints.save(state, 1))
        if dist.get_rank() == 1:
            buffer.reserve = reserve  # type: ignore[method-assign]
        checkpoints.save(state, 2)
        checkpoints.wait()
    return failed, ",".join(sorted(n for n in os.listdir(root) if n.startswith("step")))
