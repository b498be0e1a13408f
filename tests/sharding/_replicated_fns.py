"""What the ranks run in the tests of parameters that stay whole on every rank, and of groups for a dtype."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.internals.fsdp import fsdp_groups
from shardwise.names import named_tensors
from shardwise.sharding.fsdp import describe_groups
from tests.sharding._replicated_models import MODELS, WIDTH, Dtypes, Net, loss_of

STEPS = 5


def mesh_of(shape: tuple[int, ...] | None = None) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that every rank holds whole."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}


def on_all_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a tensor on each rank."""
    mine = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def assert_same_everywhere(model: nn.Module) -> None:
    """Plain parameters and their gradients have the same bits on every rank."""
    for name, parameter in plain_parameters(model).items():
        for tensor in (parameter, parameter.grad):
            if tensor is not None:
                first, *others = on_all_ranks(tensor)
                assert all(torch.equal(first, other) for other in others), name


def assert_not_reduced(model: nn.Module) -> None:
    """Gradients of plain parameters are those of this rank."""
    for parameter in plain_parameters(model).values():
        if parameter.grad is not None:
            first, *others = on_all_ranks(parameter.grad)
            assert not all(torch.equal(first, other) for other in others)


@contextmanager
def views_are_returned() -> Iterator[None]:
    """torch's warning about modules that return a view; nothing here writes into one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        yield


# ----------------------------------------------------------------------------------------------------
# Training


def follow(plain: nn.Module, model: nn.Module) -> None:
    """Give a whole model the values of the sharded one."""
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(whole(theirs[name]))


def expected_gradients(kind: str, plain: nn.Module, seeds: list[int]) -> dict[str, torch.Tensor]:
    """Mean over the ranks of what one process finds for each rank's batches, summed up in fp64."""
    sums: dict[str, torch.Tensor] = {}
    for seed in seeds:
        plain.zero_grad()
        loss_of(kind, plain, seed).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.double() / dist.get_world_size()
                sums[name] = sums[name] + gradient if name in sums else gradient
    return sums


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, gradient in found.items():
        # What is stored in bf16 is rounded to it after each micro-batch, FSDP2's own reduction too.
        close = {"rtol": 1e-4, "atol": 1e-6}
        if gradient.dtype is torch.bfloat16:
            close = {"rtol": 0.05, "atol": 0.05 * float(expected[name].abs().max())}
        torch.testing.assert_close(
            gradient.double(), expected[name], msg=lambda m, n=name: f"{n}: {m}", **close
        )


def trains_as_one_process(kind: str, shape: tuple[int, ...] | None, how: str) -> dict[str, str]:
    """Five steps: gradients are those of one process on all batches; replicas stay the same to the bit.

    ``how``: one batch a step, or two that are both reduced, the last only, or only at last over the replicas.
    Returns the dtype of each parameter that is whole on every rank.
    """
    torch.manual_seed(0)
    model = MODELS[kind]().eval()  # no dropout
    plain = copy.deepcopy(model)
    sw.shard(model, mesh_of(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    world, micro_batches = dist.get_world_size(), 1 if how == "one batch" else 2
    before = {n: whole(p).detach().clone() for n, p in model.named_parameters()}
    for step in range(STEPS):
        first = step * micro_batches * world
        expected = expected_gradients(kind, plain, list(range(first, first + micro_batches * world)))
        for k in range(micro_batches):
            if how == "no sync":
                model.set_requires_gradient_sync(k == 1)
            elif how == "no all-reduce":
                model.set_requires_all_reduce(k == 1)
            with views_are_returned():
                loss_of(kind, model, first + k * world + dist.get_rank()).backward()
            if how.startswith("no ") and k == 0:
                assert_not_reduced(model)
        assert_gradients(model, expected)
        assert_same_everywhere(model)
        optimizer.step()
        optimizer.zero_grad()
        assert_same_everywhere(model)
        follow(plain, model)
    for name in (n for n in expected if before[n].numel()):
        assert not torch.equal(whole(dict(model.named_parameters())[name]), before[name]), (
            f"{name} never moved"
        )
    return {n: str(p.dtype).removeprefix("torch.") for n, p in plain_parameters(model).items()}


class Branches(nn.Module):
    """Uses the parameters that it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        for name in ("all", "one", "none", "frozen"):
            self.register_parameter(name, nn.Parameter(torch.tensor(2.0), requires_grad=name != "frozen"))

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        x = self.lin(x)
        for name in names:
            x = x * self.get_parameter(name)
        return x.sum()


class Around(nn.Module):
    """Holds a model that is sharded already."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.shift, "all")  # type: ignore[no-any-return]


def settings() -> list[float]:
    """The gradient as it is by default, under FSDP2's divide factor, and if reducing it is up to the caller."""
    x = torch.ones(2, WIDTH) * (dist.get_rank() + 1)
    found = []
    for factor, ignored in ((None, ()), (1.0, ()), (None, ("all",))):
        torch.manual_seed(0)
        model: Any = sw.shard(Branches(), mesh_of(), sw.ShardPolicy(exclude=ignored))
        if factor is not None:
            model.set_force_sum_reduction_for_comms(True)  # gloo has no other
            model.set_gradient_divide_factor(factor)
        model(x, "all").backward()
        found.append(float(model.all.grad))
    return found


def moved_and_loaded(file: str) -> None:
    """Built on meta, filled by ``load``, made fp64, moved: it is still reduced, and what is shared still is."""
    with sw.meta_init():
        model = Net()
    sw.shard(model, mesh_of())
    identity = [id(p) for p in model.parameters()]
    report = sw.load(model, file)
    assert report.tensors == len(identity)
    assert identity == [id(p) for p in model.parameters()]
    plain = Net()
    follow(plain, model)
    plain.double()
    for where in (torch.float64, "cpu"):
        model.to(where)
        with views_are_returned():
            loss_of("net", model, dist.get_rank()).backward()
        assert_gradients(model, expected_gradients("net", plain, list(range(dist.get_world_size()))))
        assert_same_everywhere(model)
        model.zero_grad()
        assert model.blocks[0].shared is model.blocks[1].shared


def clipped_and_stepped(kind: str) -> tuple[str, str]:
    """torch's own clipping and foreach AdamW do as with a whole model; or what each says."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = copy.deepcopy(model)
    sw.shard(model, mesh_of())
    with views_are_returned():
        loss_of(kind, model, dist.get_rank()).backward()
    for name, parameter in plain.named_parameters():
        gradient = dict(model.named_parameters())[name].grad
        parameter.grad = None if gradient is None else whole(gradient).clone()

    def attempt(act: Callable[[nn.Module], Any]) -> str:
        try:
            mine, theirs = act(model), act(plain)
        except RuntimeError as error:
            return str(error)
        if mine is not None:
            torch.testing.assert_close(
                whole(mine), theirs, rtol=1e-2 if kind == "olmo_hybrid" else 1e-5, atol=0
            )
        return ""

    clip = attempt(lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01))
    if not clip:
        assert_gradients(
            model, {n: p.grad.double() for n, p in plain.named_parameters() if p.grad is not None}
        )
    step = attempt(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True).step())
    if not clip and not step:
        for name, parameter in plain.named_parameters():
            mine = whole(dict(model.named_parameters())[name])
            close = 1e-3 if mine.dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(mine, parameter, rtol=1e-5, atol=close, msg=name)
    assert_same_everywhere(model)
    return clip, step


def saved(root: str) -> None:
    state = _state()
    for step in range(2):
        _step(state, step)
    sw.save(state, root)


def resumed(root: str) -> dict[str, torch.Tensor]:
    """Values and optimizer state of what is whole on every rank, at any number of ranks; and another step works."""
    state = _state()
    sw.restore(state, root)
    plain = plain_parameters(state.model)
    found = {n: p.detach().clone() for n, p in plain.items()}
    for name, parameter in plain.items():
        for key, value in state.optimizer.state[parameter].items():
            found[f"{name} {key}"] = value.clone()
    _step(state, 2)
    return found


def _state() -> Any:
    torch.manual_seed(0)
    model = sw.shard(Net(), mesh_of())
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def _step(state: Any, step: int) -> None:
    with views_are_returned():
        loss_of("net", state.model, 100 * step + dist.get_rank()).backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    assert_same_everywhere(state.model)


def groups_for_dtypes() -> dict[str, list[str]]:
    """The parameters of each group for a dtype, as FSDP2 has them."""
    model = sw.shard(Dtypes(), mesh_of())
    names = {id(t.tensor): t.name for t in named_tensors(model)}
    described = {g.name: g for g in describe_groups(model)}
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            parameters = [p.sharded_param for each in fsdp_groups(module) for p in each.group.fsdp_params]
            found[path] = [names[id(p)] for p in parameters]
            assert described[path].parameter_count == sum(p.numel() for p in parameters)
    return found
