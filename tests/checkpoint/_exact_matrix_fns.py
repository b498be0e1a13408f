"""Kinds of optimizers and modules, and one run of each: what its resume says of itself, and whether it is so."""

from __future__ import annotations

import copy
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.names import named_tensors
from shardwise.tensors.live import local_tensor

WIDTH = 6
BEFORE, AFTER = 3, 10
State = sw.TrainState


# ---------------------------------------------------------------------------------------------- optimizers


class Counting(torch.optim.SGD):
    """A counter in an attribute, which its own state dict holds, and which steps depend on."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.steps = state_dict.pop("steps")
        super().load_state_dict(state_dict)


class ByHooks(torch.optim.SGD):
    """The same by torch's hooks, inside ``param_groups`` of the state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["steps"] = optimizer.steps

    @staticmethod
    def _take(optimizer: Any, state_dict: dict[str, Any]) -> None:
        optimizer.steps = state_dict["param_groups"][0]["steps"]

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(1 / self.steps)
        return super().step(closure)


class Packed(torch.optim.Optimizer):
    """Momentum in eight bits, for all parameters in one buffer, which only its own state dict holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        count = sum(local_tensor(p).numel() for p in self.param_groups[0]["params"])
        self.codes, self.scale = torch.full((count,), 128, dtype=torch.uint8), 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        live = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        flat = torch.cat([local_tensor(p.grad).reshape(-1) for p in live])
        momentum = (self.codes.float() - 128) * self.scale * 0.9 + flat
        self.scale = 0.02
        self.codes = (momentum / self.scale).round().clamp(-127, 127).add(128).to(torch.uint8)
        for p, part in zip(live, momentum.split([local_tensor(p).numel() for p in live]), strict=True):
            local_tensor(p).add_(part.view_as(local_tensor(p)), alpha=-0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "packed": (self.codes, self.scale)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codes, self.scale = state_dict["packed"]
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


class Lookahead(torch.optim.Optimizer):
    """Wrapped around another one, with slow weights of its own; ``by_number`` or, as in a well-known one, by ``id``."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, by_number: bool) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.by_number, self.steps = by_number, 0
        for p in self._parameters():
            self.state[p]["slow"] = local_tensor(p).detach().clone() if by_number else p.detach().clone()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for p in self._parameters():
                slow, fast = local_tensor(self.state[p]["slow"]), local_tensor(p)
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        numbers = {p: k if self.by_number else id(p) for k, p in enumerate(self._parameters())}
        slow = {numbers[p]: state for p, state in self.state.items()}
        return {"fast": self.optimizer.state_dict(), "slow": slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        self.steps = state_dict["steps"]
        for k, p in enumerate(self._parameters()):
            if k in state_dict["slow"]:
                self.state[p]["slow"] = state_dict["slow"][k]["slow"]


class Transparent(torch.optim.Optimizer):
    """Around another one, as Accelerate's: everything is the inner one's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Opaque:
    """Nothing that a document can hold."""

    def __init__(self) -> None:
        self.steps = 0


class WithObject(Counting):
    """Its own state dict holds an object of a class of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.object = Opaque()

    def step(self, closure: Any = None) -> Any:
        self.steps = self.object.steps = self.object.steps + 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**torch.optim.SGD.state_dict(self), "object": self.object}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.object = state_dict["object"]
        torch.optim.SGD.load_state_dict(self, {k: state_dict[k] for k in ("state", "param_groups")})


class Silent(Counting):
    """Its own state dict can't be asked."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("not on this machine")


class Forgets(Counting):
    """Its own load does not take what its own state dict gives."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.optim.SGD.load_state_dict(self, {k: state_dict[k] for k in ("state", "param_groups")})


class OnLoad(torch.optim.SGD):
    """Keeps in an attribute what its load finds in the groups."""

    scale = 1.0

    def step(self, closure: Any = None) -> Any:
        self.scale = self.param_groups[0]["scale"] = self.param_groups[0].get("scale", 1.0) * 0.9
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(self.scale)
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.scale = self.param_groups[0]["scale"]


class Wrapping(torch.Tensor):
    """A tensor of tensors, as quantized states of other libraries are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapping, lambda w: w.inner, (args, kwargs or {}))
        return function(*plain[0], **plain[1])


class Subclassed(torch.optim.SGD):
    """State in a tensor subclass."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["wrapped"] = Wrapping(p.detach().clone())
        return super().step(closure)


class Masters(torch.optim.Optimizer):
    """fp32 copies of bf16 parameters, which torch's own load_state_dict would round."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.float())
            p.copy_(master.sub_(p.grad.float(), alpha=0.1))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


# ------------------------------------------------------------------------------------------------- modules


def mlp(width: int = WIDTH, *middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), *middle, nn.Linear(8, 3))


class Hooked(nn.Linear):
    """A number and a tensor in attributes, added to and taken from the state dict by hooks."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls, self.trace = 0, torch.rand(2)
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}calls"], state_dict[f"{prefix}trace"] = module.calls, module.trace

    @staticmethod
    def _take(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        module.calls, module.trace = state_dict.pop(f"{prefix}calls"), state_dict.pop(f"{prefix}trace")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.trace = self.trace * 0.9 + self.calls
        return super().forward(x) + 0.01 * self.trace.sum()


class Overriding(nn.Linear):
    """The same by the two methods of a module, under another's name for its bias."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls: Any = int(torch.randint(9, ()))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = self.calls

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls = state_dict[f"{prefix}calls"]
        super()._load_from_state_dict(
            {k: v for k, v in state_dict.items() if not k.endswith("calls")}, prefix, *rest
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class HoldsObject(Overriding):
    """What it saves can't be in a document."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.object = Opaque()
        self.object.steps = self.calls

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Linear._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = self.object

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.object = state_dict[f"{prefix}calls"]
        nn.Linear._load_from_state_dict(self, state_dict, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.object.steps += 1
        return nn.Linear.forward(self, x) * (1 + 0.1 * self.object.steps)


class Extra(nn.Linear):
    """``get_extra_state``."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Cached(nn.Linear):
    """Computes with a cache that its loading makes of the weights; training does not touch it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.register_load_state_dict_post_hook(lambda module, _: module.make())
        self.make()

    def make(self) -> None:
        self.cache = self.weight.detach() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.cache, self.bias)


class HalfSaved(nn.Linear):
    """Its hooks write bf16 and leave the bias out: less than is stored anyway."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_state_dict_post_hook(self._less)

    @staticmethod
    def _less(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].bfloat16()
        del state_dict[f"{prefix}bias"]


class HalfLoaded(HalfSaved):
    """And its loading rounds what is there."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


class MasterSaved(nn.Linear):
    """Stores, under the weight's name, a finer copy that it keeps aside."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.fine = self.weight.detach().double() + 1e-12 * torch.randn(self.weight.shape).double()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.fine

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.fine = state_dict[f"{prefix}weight"].double().clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fine = self.fine * (1 + 1e-6)
        return super().forward(x) + x.double().matmul(self.fine.t()).float()


class Grows(nn.Linear):
    """A buffer that grows, and takes the shape that is loaded."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("order", torch.zeros(0))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.order = torch.zeros_like(state_dict["order"])
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.order = torch.cat([self.order, x.detach().sum().reshape(1)])
        return super().forward(x) + 0.01 * self.order.sum()


class Unlisted(nn.Linear):
    """Saves a buffer that torch would not."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen.copy_(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) * (1 + 0.1 * self.seen)


class Shadow(nn.Linear):
    """Saves a sharded copy of its weight that is no parameter and no buffer."""

    shadow: torch.Tensor | None = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.shadow is not None:
            destination[f"{prefix}shadow"] = self.shadow

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.shadow = state_dict.get(f"{prefix}shadow", self.shadow)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x).tanh() + self.out(x)


class Bag(nn.Module):
    """Sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x[:, 0].abs() * 7).long() % 20)


class WithBuffer(nn.Linear):
    """A buffer of a given make."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("odd", buffer)


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3))
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    return model


def quantized() -> nn.Module:
    """A tower of packed int8 weights below a head that is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tower = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8)
    return nn.Sequential(tower, nn.Linear(3, 3))


# ------------------------------------------------------------------------------------------- runs of a kind


@dataclass(frozen=True)
class Kind:
    """How to make a run, and what its resume is expected to be. ``says`` is in the report, or in the error."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    expected: str = "exact"
    says: str = ""
    sharded: bool = False
    more: Callable[[State], None] | None = None
    """Changes the state that was made."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def torchs(name: str, **options: Any) -> Kind:
    return Kind(mlp, lambda p: getattr(torch.optim, name)(list(p), **options))


def schedule_free(name: str) -> Kind:
    def made(parameters: Any) -> torch.optim.Optimizer:
        import schedulefree

        found = getattr(schedulefree, name)(list(parameters), lr=0.05)
        found.train()
        return found  # type: ignore[no-any-return]

    return Kind(mlp, made)


def module(make: Callable[[], nn.Module], expected: str = "exact", says: str = "") -> Kind:
    return Kind(make, sgd, expected, says)


def averaged(state: State) -> None:
    """torch's running mean of the weights, and its schedule."""
    average = AveragedModel(state.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[arg-type]
    state.model = {"model": state.model, "average": average}  # type: ignore[dict-item]
    state.scheduler = SWALR(state.optimizer, swa_lr=0.02, anneal_epochs=5)  # type: ignore[arg-type]


def swa(state: State) -> None:
    average = AveragedModel(state.model, use_buffers=True)  # type: ignore[arg-type]
    state.model = {"model": state.model, "average": average}  # type: ignore[dict-item]


def ema_by_hand(state: State) -> None:
    state.model = {"model": state.model, "average": copy.deepcopy(state.model)}  # type: ignore[dict-item]


class Written:
    """An average of the weights that writes itself into the model when it is loaded, past torch's version counters."""

    def __init__(self, state: State) -> None:
        self.live = [local_tensor(p) for p in state.model.parameters()]  # type: ignore[union-attr]
        self.average = [p.detach().clone() for p in self.live]
        state.optimizer.register_step_post_hook(lambda *_: self.update())  # type: ignore[union-attr]

    def update(self) -> None:
        for average, p in zip(self.average, self.live, strict=True):
            average.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = [t.clone() for t in state["average"]]
        for average, p in zip(self.average, self.live, strict=True):
            p.data.copy_(average)


def written(state: State) -> None:
    state.extra["average"] = Written(state)


def compiled(state: State) -> None:
    state.model = torch.compile(state.model, backend="eager")  # type: ignore[assignment, arg-type]


def shadowed(state: State) -> None:
    for part in state.model.modules():  # type: ignore[union-attr]
        if isinstance(part, Shadow):
            part.shadow = part.weight.detach().clone() * torch.rand(())
            part.register_forward_hook(lambda m, args, out: out + 0 * out + m.shadow.to_local().sum())


def two_d(parameters: Any) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


KINDS: dict[str, Kind] = {
    "AdamW": torchs("AdamW", lr=0.01),
    "AdamW, amsgrad": torchs("AdamW", lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "SGD": torchs("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": torchs("Adagrad", lr=0.1),
    "Adadelta": torchs("Adadelta"),
    "Adamax": torchs("Adamax", lr=0.01),
    "NAdam": torchs("NAdam", lr=0.01),
    "RAdam": torchs("RAdam", lr=0.01),
    "RMSprop": torchs("RMSprop", lr=0.01, centered=True),
    "Rprop": torchs("Rprop"),
    "ASGD": torchs("ASGD", t0=2),
    "Adafactor": torchs("Adafactor", lr=0.1),
    "Muon": Kind(mlp, lambda p: torch.optim.Muon(two_d(p), lr=0.01)),
    "SparseAdam": Kind(Bag, lambda p: torch.optim.SparseAdam(list(p), lr=0.1)),
    "LBFGS": Kind(mlp, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2), "refused", "LBFGS keeps flat history"),
    "AdamWScheduleFree": schedule_free("AdamWScheduleFree"),
    "SGDScheduleFree": schedule_free("SGDScheduleFree"),
    "RAdamScheduleFree": schedule_free("RAdamScheduleFree"),
    "own state dict": Kind(mlp, Counting),
    "own state dict by hooks": Kind(mlp, ByHooks),
    "eight bits in one buffer": Kind(mlp, Packed),
    "Lookahead": Kind(mlp, lambda p: Lookahead(adamw(p), by_number=True)),
    "Lookahead by id": Kind(mlp, lambda p: Lookahead(adamw(p), by_number=False), "named", "slow"),
    "transparent wrapper": Kind(mlp, lambda p: Transparent(adamw(p))),
    "own state with an object": Kind(mlp, WithObject, "named", "optimizer: object"),
    "own state dict that fails": Kind(mlp, Silent, "named", "not on this machine"),
    "own load that forgets": Kind(mlp, Forgets, "named", "optimizer: steps, which the object saved itself, was not accepted"),
    "own load that derives": Kind(mlp, OnLoad),
    "masters of bf16": Kind(lambda: mlp().bfloat16(), Masters),
    "state in a tensor subclass": Kind(mlp, Subclassed, "refused", "Wrapping, a tensor subclass"),
    "BatchNorm": module(lambda: mlp(WIDTH, nn.BatchNorm1d(8))),
    "dropout": module(lambda: mlp(WIDTH, nn.Dropout(0.3))),
    "weight_norm": module(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 4)), nn.Linear(4, 3))),
    "spectral_norm": module(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), nn.Linear(4, 3))),
    "orthogonal": module(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, 4)), nn.Linear(4, 3))),
    "spectral_norm by hooks": module(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 4)), nn.Linear(4, 3))),
    "lazy, after a run": module(lazy),
    "tied": module(Tied),
    "compiled": Kind(lambda: mlp(WIDTH, Hooked(8, 8)), sgd, more=compiled),
    "checkpointed": module(lambda: mlp(WIDTH, checkpoint_wrapper(Hooked(8, 8)))),
    "state dict hooks": module(lambda: mlp(WIDTH, Hooked(8, 8))),
    "own save and load": module(lambda: mlp(WIDTH, Overriding(8, 8))),
    "own save of an object": module(lambda: mlp(WIDTH, HoldsObject(8, 8)), "named", "model: 2.calls"),
    "extra state": module(lambda: mlp(WIDTH, Extra(8, 8))),
    "cache that loading makes": module(lambda: mlp(WIDTH, Cached(8, 8))),
    "hook that saves less": module(lambda: mlp(WIDTH, HalfSaved(8, 8))),
    "finer copy under a name": module(lambda: mlp(WIDTH, MasterSaved(8, 8))),
    "buffer that grows": module(lambda: Grows(WIDTH, 3)),
    "buffer that torch leaves out": module(lambda: mlp(WIDTH, Unlisted(8, 8))),
    "quantize_dynamic": module(quantized),
    "AveragedModel, SWALR": Kind(mlp, adamw, more=averaged),
    "SWA with buffers": Kind(lambda: mlp(WIDTH, nn.BatchNorm1d(8)), adamw, more=swa),
    "EMA by hand": Kind(mlp, adamw, more=ema_by_hand),
    "EMA that writes into the model": Kind(mlp, adamw, more=written),
    "lazy": module(lambda: nn.LazyLinear(3), "refused", "weight: is lazy"),
    "sparse buffer": module(lambda: WithBuffer(torch.eye(3).to_sparse()), "refused", "odd: is a sparse_coo tensor"),
    "conjugate buffer": module(lambda: WithBuffer(torch.zeros(2, dtype=torch.complex64).conj()), "refused", "odd: is a conj"),
    "complex double buffer": module(lambda: WithBuffer(torch.zeros(2, dtype=torch.complex128)), "refused", "odd: has the dtype"),
    "meta buffer": module(lambda: WithBuffer(torch.zeros(2, device="meta")), "refused", "odd: is on the meta device"),
    "nested buffer": module(lambda: WithBuffer(torch.nested.nested_tensor([torch.ones(2)])), "refused", "odd: is a nested"),
    "quantized buffer": module(
        lambda: WithBuffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)), "refused", "odd: is a quantized"
    ),
    "subclassed buffer": module(lambda: WithBuffer(Wrapping(torch.ones(2))), "refused", "odd: is a Wrapping"),
}  # fmt: skip

SHARDED: dict[str, Kind] = {
    name: Kind(**{**vars(KINDS[name]), "sharded": True})
    for name in (
        "AdamW", "Muon", "AdamWScheduleFree", "own state dict", "own state dict by hooks", "eight bits in one buffer", "Lookahead",
        "Lookahead by id", "transparent wrapper", "own state with an object", "BatchNorm", "tied", "checkpointed", "state dict hooks",
        "own save and load", "own save of an object", "extra state", "hook that saves less", "buffer that torch leaves out",
        "masters of bf16", "own load that derives", "EMA that writes into the model",
    )
}  # fmt: skip
SHARDED["sharded state outside"] = Kind(
    lambda: mlp(WIDTH, Shadow(8, 8)), sgd, "named", "model: 2.shadow", sharded=True, more=shadowed
)


class Run:
    """A run of a kind. Data come from torch's generator, another stream on each rank."""

    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        model = kind.model()
        if kind.sharded:
            sw.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        self.state = State(model=model, optimizer=kind.optimizer(model.parameters()))
        if kind.more is not None:
            kind.more(self.state)
        torch.manual_seed(100 * seed + dist.get_rank())

    @property
    def models(self) -> list[nn.Module]:
        return list(self.state.models.values())

    def train(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        model, optimizer = self.models[0], self.state.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        dtype = next(model.parameters()).dtype
        x, wanted = torch.randn(5, WIDTH).to(dtype), torch.randint(3, (5,))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), wanted)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
        if self.state.scheduler is not None:
            self.state.scheduler.step()
        for average in self.models[1:]:
            if isinstance(average, AveragedModel):
                average.update_parameters(model)
            else:
                with torch.no_grad():
                    for p, q in zip(average.parameters(), model.parameters(), strict=True):
                        p.lerp_(q, 0.1)
        return loss.item()

    def bits(self) -> dict[str, bytes]:
        return dict(self._bits())

    def _bits(self) -> Iterator[tuple[str, bytes]]:
        for name, model in self.state.models.items():
            for t in named_tensors(model):
                yield f"{name} {t.name}", raw(t.tensor)
        for name, optimizer in self.state.optimizers.items():
            live = [p for group in optimizer.param_groups for p in group["params"]]
            for number, parameter in enumerate(live):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield (
                        f"{name} {number} {key}",
                        raw(value) if isinstance(value, torch.Tensor) else repr(value).encode(),
                    )


def raw(tensor: torch.Tensor) -> bytes:
    """All bits that a rank holds of a tensor; of a tensor subclass its class, the tensors in it and its attributes."""
    local = local_tensor(tensor)
    if hasattr(local, "__tensor_flatten__"):
        names, attributes = local.__tensor_flatten__()
        held = b"".join(raw(getattr(local, name)) for name in names)
        return f"{type(local)} {attributes} {local.shape} {local.dtype}".encode() + held
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(kind: Kind, path: str) -> dict[str, Any]:
    """One run that goes on past its save, one that is restored from it: what was said, and whether all bits are the same."""
    first = Run(kind, 1)
    runs = not (kind.expected == "refused" and "odd: " in kind.says) and kind.says != "weight: is lazy"
    if runs:
        first.train(BEFORE)
    try:
        saved = sw.save(first.state, path)
    except ShardwiseError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    losses = first.train(AFTER)
    second = Run(kind, 2)
    report = sw.restore(second.state, path)
    again = second.train(AFTER)
    return {
        "exact": report.exact,
        "bitwise": losses == again and first.bits() == second.bits(),
        "skipped": saved.skipped,
        "lines": (*report.differences, *report.skipped, *report.caveats),
        "verify": sw.verify(path).problems if dist.get_rank() == 0 else (),
    }


def outcomes(root: str, names: list[str], sharded: bool) -> dict[str, dict[str, Any]]:
    """Of these kinds, in one launch."""
    kinds = SHARDED if sharded else KINDS
    return outcomes_of({name: kinds[name] for name in names}, root)


def outcomes_of(kinds: Mapping[str, Kind], root: str) -> dict[str, dict[str, Any]]:
    """Of these kinds. An exception that is not the library's is an outcome, too."""
    found = {}
    for number, (name, kind) in enumerate(kinds.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = outcome(kind, os.path.join(root, str(number)))
            except Exception as error:
                found[name] = {"raised": f"{type(error).__name__}: {error}"}
    return found
