"""What the ranks of test_low_bit.py run: torchao's real optimizers, saved, resumed on other ranks, and placed by hand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

import shardwise as sw
from shardwise.errors import IntegrityError, StateError
from shardwise.names import named_tensors
from tests.checkpoint._exact_matrix_fns import raw

NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
WIDTH = 96
BEFORE, AFTER = 3, 2
#: A state by rank: for each parameter and state the codes and scales, or the plain values.
Gathered = dict[str, dict[str, torch.Tensor]]


class Net(nn.Module):
    """Eight rows of ``odd`` are three blocks of 256. ``two`` has two rows, so that a third rank holds none. Biases stay plain."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.two = nn.Parameter(torch.randn(2, 48 * WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.wide(x + self.odd(x)))
        return (
            self.down(y).sum()
            + torch.einsum("rkc,bc->brk", self.two.view(2, 16, 3 * WIDTH), y).square().sum()
        )


class Mixed(nn.Module):
    """Over two ranks torchao keeps two of the rows in few bits and the third in full."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2048, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.repeat(1, 22)[:, :2048]).square().sum()


def eagerly(work: Callable[[], Any]) -> Any:
    """torchao compiles its steps, which takes longer than all the rest."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile with fullgraph=True found no compiled", UserWarning)
        return work()


def build(name: str, mesh_kind: str = "fsdp", seed: int = 0, model: type[nn.Module] = Net) -> sw.TrainState:
    torch.manual_seed(seed)
    made = model()
    if mesh_kind != "plain":
        world = dist.get_world_size()
        hsdp = mesh_kind == "hsdp"
        sizes, names = ((2, world // 2), ("replicate", "shard")) if hsdp else ((world,), ("shard",))
        fully_shard(made, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = getattr(torchao.optim, name)(list(made.parameters()), lr=1e-3)
    return sw.TrainState(model=made, optimizer=optimizer)


def train(state: sw.TrainState, first: int, steps: int, *, alike: bool = False) -> list[float]:
    """``alike``: with the same data on every rank, as runs without sharding need it."""
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + (0 if alike else dist.get_rank()))
        loss = state.model(torch.randn(4, WIDTH, generator=generator))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def live_states(state: sw.TrainState) -> Iterator[tuple[str, Any, str, Any]]:
    names = {id(t.tensor): t.name for t in named_tensors(state.model)}
    for parameter, states in state.optimizer.state.items():
        for key, value in states.items():
            yield names[id(parameter)], parameter, key, value


def local_of(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def bits(state: sw.TrainState) -> dict[str, bytes]:
    found = {t.name: raw(t.tensor) for t in named_tensors(state.model)}
    states = {f"{name} {key}": value for name, _, key, value in live_states(state)}
    return found | {n: raw(v) if isinstance(v, torch.Tensor) else repr(v).encode() for n, v in states.items()}


def gathered(state: sw.TrainState) -> Gathered:
    """This rank's own rows of all states and parameters, flat."""
    found: Gathered = {
        t.name: {"plain": local_of(t.tensor).detach().flatten().clone()} for t in named_tensors(state.model)
    }
    for name, _, key, value in live_states(state):
        local = local_of(value)
        parts = {a: getattr(local, a) for a in ("codes", "scale") if hasattr(local, a)} or {"plain": local}
        found[f"{name} {key}"] = {part: _to_send(t) for part, t in parts.items()}
    return found


def _to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Codes as bytes: pickles of torch do not take FP8."""
    flat = tensor.detach().flatten().clone()
    return flat.view(torch.uint8) if flat.dtype is torch.float8_e4m3fn else flat


def joined(by_rank: list[Gathered]) -> Gathered:
    """Of all ranks: rows follow each other, so do blocks. A rank without rows holds an empty plain tensor."""
    found: Gathered = {}
    for name in by_rank[0]:
        each = [g[name] for g in by_rank if any(t.numel() for t in g[name].values())]
        if name.endswith(" step"):
            each = each[:1]
        found[name] = {part: torch.cat([e[part] for e in each]) for part in each[0]}
    return found


# ---------------------------------------------------------------------------------------------- by hand


def rows_of(parameter: Any) -> tuple[int, int]:
    """The elements of a parameter that this rank holds, as torch cuts rows."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    mesh = parameter.device_mesh
    size = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    row = parameter.numel() // parameter.shape[0]
    begin = min(mesh.get_local_rank(mesh.ndim - 1) * size, parameter.shape[0])
    return begin * row, min(begin + size, parameter.shape[0]) * row


def place_by_hand(state: sw.TrainState, name: str, whole: Gathered) -> None:
    """Fill parameters and states from the gathered ones, by torchao's own classes and this rank's rows alone."""
    for t in named_tensors(state.model):
        begin, end = rows_of(t.tensor)
        local = local_of(t.tensor)
        local.detach().copy_(whole[t.name]["plain"][begin:end].view(local.shape))
    for t in named_tensors(state.model):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            parts = whole[f"{t.name} {key}"]
            if key == "step":
                state.optimizer.state[t.tensor][key] = parts["plain"].view(()).clone()
                continue
            state.optimizer.state[t.tensor][key] = _state_by_hand(name, t.tensor, key == "exp_avg", parts)


def _state_by_hand(name: str, parameter: Any, signed: bool, parts: dict[str, torch.Tensor]) -> Any:
    begin, end = rows_of(parameter)
    local = torch.zeros_like(local_of(parameter).detach())
    if "plain" in parts:
        local.copy_(parts["plain"][begin:end].view(local.shape))
    elif local.numel():
        block = 128 if name == "AdamW4bit" else 256
        made: Any
        if name == "AdamWFp8":
            made = OptimStateFp8.zeros(local.shape, block)
        else:
            kind = OptimState4bit if name == "AdamW4bit" else OptimState8bit
            made = kind.zeros(local.shape, signed, block)
        each = 2 if name == "AdamW4bit" else 1
        made.codes.view(-1).view(torch.uint8).copy_(parts["codes"][begin // each : end // each])
        made.scale.copy_(parts["scale"][begin // block : end // block])
        local = made
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- runs


def saved(
    root: str, name: str, mode: str, mesh_kind: str = "fsdp", model: type[nn.Module] = Net
) -> dict[str, Any]:
    """A run that goes on past its save."""

    def work() -> dict[str, Any]:
        state = build(name, mesh_kind, model=model)
        train(state, 0, BEFORE, alike=mesh_kind == "plain")
        held = gathered(state)
        with sw.Checkpointer(root, mode=mode) as checkpointer:
            checkpointer.save(state, BEFORE)
            losses = train(state, BEFORE, AFTER, alike=mesh_kind == "plain")  # while a background save writes
        kinds = {type(local_of(value)).__name__ for _, _, _, value in live_states(state)}
        return {"held": held, "losses": losses, "bits": bits(state), "kinds": kinds}

    return eagerly(work)


def resumed(
    root: str, name: str, whole: Gathered, mesh_kind: str = "fsdp", again: bool = False
) -> dict[str, Any]:
    """A run that resumes, and goes on as the one whose states were placed by hand. ``again``: resumes over its own states."""

    def work() -> dict[str, Any]:
        state = build(name, mesh_kind, seed=1)
        before: dict[int, int] = {}
        if again:
            train(state, 50, 1, alike=mesh_kind == "plain")
            before = {
                id(v): local_of(v).codes.data_ptr()
                for *_, v in live_states(state)
                if hasattr(local_of(v), "codes")
            }
        with sw.Checkpointer(root) as checkpointer:
            report = checkpointer.resume(state)
        assert report is not None
        held = gathered(state)
        now = {
            id(v): local_of(v).codes.data_ptr()
            for *_, v in live_states(state)
            if hasattr(local_of(v), "codes")
        }
        by_hand = build(name, mesh_kind, seed=2)
        place_by_hand(by_hand, name, whole)
        same_start = bits(state) == bits(by_hand)
        losses = train(state, BEFORE, AFTER, alike=mesh_kind == "plain")
        losses_by_hand = train(by_hand, BEFORE, AFTER, alike=mesh_kind == "plain")
        return {
            "exact": report.exact,
            "lines": (*report.differences, *report.skipped),
            "held": held,
            "in place": before == now,
            "as by hand": (same_start, losses == losses_by_hand, bits(state) == bits(by_hand)),
            "losses": losses,
            "bits": bits(state),
            "kinds": {type(local_of(value)).__name__ for _, _, _, value in live_states(state)},
        }

    return eagerly(work)


def resumed_alone(root: str, name: str, model: type[nn.Module]) -> dict[str, Any]:
    """A run that resumes and goes on."""

    def work() -> dict[str, Any]:
        state = build(name, seed=1, model=model)
        with sw.Checkpointer(root) as checkpointer:
            report = checkpointer.resume(state)
        assert report is not None
        losses = train(state, BEFORE, AFTER)
        return {"exact": report.exact, "losses": losses, "bits": bits(state)}

    return eagerly(work)


def passed_on(root: str, target: str, name: str, mesh_kind: str) -> Gathered:
    """Resumes and saves again, on other ranks."""

    def work() -> Gathered:
        state = build(name, mesh_kind, seed=1)
        sw.restore(state, root)
        sw.save(state, target, step=BEFORE)
        return gathered(state)

    return eagerly(work)


def refused(path: str, name: str, model: type[nn.Module] = Net) -> dict[str, Any]:
    """What a restore says, and whether anything changed."""

    def work() -> dict[str, Any]:
        state = build(name, seed=1, model=model)
        before = bits(state)
        try:
            sw.restore(state, path)
        except (StateError, IntegrityError) as error:
            return {"kind": type(error).__name__, "text": str(error), "unchanged": bits(state) == before}
        return {"kind": "", "text": "", "unchanged": False}

    return eagerly(work)


def columns(path: str) -> dict[str, Any]:
    """A weight cut by columns, so that each block lies in two rows: saved by rank, and resumed on the same mesh."""

    def run(seed: int) -> sw.TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(256, 64, bias=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
        return sw.TrainState(
            model=model, optimizer=torchao.optim.AdamW8bit(list(model.parameters()), lr=1e-3)
        )

    def step(state: sw.TrainState, number: int) -> None:
        for p in state.model.parameters():
            p.grad = (p.detach() * (number + 1)).sin()
        state.optimizer.step()
        state.optimizer.zero_grad()

    def work() -> dict[str, Any]:
        first, second = run(0), run(1)
        for number in range(BEFORE):
            step(first, number)
        sw.save(first, path)
        report = sw.restore(second, path)
        for number in range(BEFORE, BEFORE + AFTER):
            step(first, number)
            step(second, number)
        return {"exact": report.exact, "bitwise": bits(first) == bits(second), "names": os.listdir(path)}

    return eagerly(work)


# ---------------------------------------------------------------------------------------------- bitsandbytes


def _eight_bits(seed: int) -> sw.TrainState:
    import bitsandbytes

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64))
    optimizer = bitsandbytes.optim.AdamW8bit(list(model.parameters()), lr=1e-2)
    return sw.TrainState(model=model, optimizer=optimizer)


def _eight_bit_steps(state: sw.TrainState, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        state.model(torch.randn(4, 128, generator=generator)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def eight_bits(path: str) -> dict[str, Any]:
    first, second = _eight_bits(0), _eight_bits(1)
    _eight_bit_steps(first, 0, BEFORE)
    sw.save(first, path)
    report = sw.restore(second, path)
    _eight_bit_steps(first, BEFORE, AFTER)
    _eight_bit_steps(second, BEFORE, AFTER)
    return {"exact": report.exact, "bitwise": bits(first) == bits(second)}


def eight_bits_refused(path: str) -> str:
    try:
        sw.restore(_eight_bits(1), path)
    except StateError as error:
        return f"StateError: {error}"
    return ""


def eight_bits_over_shards() -> dict[str, Any]:
    """What happens with the DTensors themselves, and with the shards of which they are made."""
    import bitsandbytes

    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    parameters = list(model.parameters())
    model(torch.randn(4, 128)).sum().backward()
    found: dict[str, Any] = {"its own step": "", "save": ""}
    try:
        bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2).step()
    except RuntimeError as error:
        found["its own step"] = str(error)
    shards = [nn.Parameter(p._local_tensor.detach()) for p in parameters]
    for shard, parameter in zip(shards, parameters, strict=True):
        shard.grad = parameter.grad.to_local()
    optimizer = bitsandbytes.optim.AdamW8bit(shards, lr=1e-2)
    before = parameters[0].to_local().clone()
    optimizer.step()
    found["steps"] = not torch.equal(before, parameters[0].to_local())
    try:
        sw.save(sw.TrainState(model=model, optimizer=optimizer), os.devnull)
    except StateError as error:
        found["save"] = str(error)
    return found
