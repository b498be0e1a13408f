"""A resume with one argument changed is bitwise, or it is not called exact and the report (or a refusal) names the argument."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from re import sub
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shardwise as sw
from shardwise.errors import FormatError, StateError
from tests.harness.hostile import edit_documents

WIDTH, SAMPLES = 6, 26
BEFORE, AFTER = 3, 9

# ------------------------------------------------------------------------------------------------ parts of a run


def samples(count: int = SAMPLES, *, scale: float = 1.0, flip: bool = False) -> TensorDataset:
    made = torch.Generator().manual_seed(7)
    x, y = torch.randn(count, WIDTH, generator=made) * scale, torch.randint(3, (count,), generator=made)
    return TensorDataset(x.flip(0), y.flip(0)) if flip else TensorDataset(x, y)


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Noisy(Dataset[Any]):
    """Draws from torch's generator for each sample."""

    def __init__(self, noise: float, transform: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.held, self.noise, self.transform = samples(), noise, transform or Scale(1.0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = self.held[index]
        return self.transform(x + self.noise * torch.randn(WIDTH)), y


class Stream(IterableDataset[Any]):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __iter__(self) -> Iterator[Any]:
        yield from samples(scale=self.scale)


class Pairs(BatchSampler):
    """The same batches, each backwards."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


def collated(by: float) -> Callable[[Any], Any]:
    def collate(batch: Any) -> Any:
        x, y = torch.utils.data.default_collate(batch)
        return x * by, y

    return collate


def reseed(worker: int) -> None:
    pass


class Net(nn.Module):
    """Arguments of all kinds, of which no state dict has any."""

    def __init__(
        self,
        *,
        p: float = 0.2,
        activation: Any = nn.functional.gelu,
        middle: Callable[[], nn.Module] = nn.Tanh,
        eps: float = 1e-5,
        scale: float = 1.0,
        alpha: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.p, self.activation, self.alpha = p, activation, alpha or {"default": 1.0}
        self.first, self.norm, self.middle = nn.Linear(WIDTH, 8), nn.LayerNorm(8, eps=eps), middle()
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(8, 3)
        self.register_buffer("by", torch.full((3,), scale), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.activation(self.first(x)), self.p)
        return self.last(self.dropout(self.middle(self.norm(x)))) * self.by * self.alpha["default"]  # type: ignore[no-any-return]


def net(**given: Any) -> Callable[[], nn.Module]:
    return lambda: Net(**given)


def decorated(kind: Any) -> Any:
    """With another constructor, as transformers' ``use_kernelized_func`` makes one: it doesn't say what it replaced."""
    own = kind.__init__

    def made(self: Any, *args: Any, **given: Any) -> None:
        own(self, *args, **given)

    kind.__init__ = made
    return kind


@decorated
class Rated(Net):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.rate


def frozen() -> nn.Module:
    found = Net()
    found.first.weight.requires_grad_(False)
    return found


def with_dropout(p: float) -> nn.Module:
    found = Net()
    found.dropout.p = p
    return found


def compiled() -> nn.Module:
    return torch.compile(Net(), backend="aot_eager")  # type: ignore[return-value]


class Slow(Optimizer):
    """Lookahead: ``k`` and ``alpha`` are in no state dict."""

    def __init__(self, optimizer: Optimizer, k: int, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.steps = optimizer, k, alpha, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.slow = [p.detach().clone() for p in self.parameters()]

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.k == 0:
            for slow, p in zip(self.slow, self.parameters(), strict=True):
                p.copy_(slow.lerp_(p, self.alpha))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.slow = state_dict["steps"], [t.clone() for t in state_dict["slow"]]
        self.optimizer.load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


def adamw(**given: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW(model.parameters(), **{"lr": 0.01, **given})


def sgd(**given: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **given})


def grouped(*order: str, other: float = 0.02, turned: bool = False) -> Callable[[nn.Module], Optimizer]:
    """A group for each letter: biases, weights of matrices, the rest of the weights."""

    def make(model: nn.Module) -> Optimizer:
        members: dict[str, list[nn.Parameter]] = {"b": [], "m": [], "w": []}
        for name, p in model.named_parameters():
            members["b" if name.endswith("bias") else "m" if p.dim() > 1 else "w"].append(p)
        groups = [
            {"params": [p for letter in letters for p in members[letter]], "lr": 0.01 if k == 0 else other}
            for k, letters in enumerate(order)
        ]
        return AdamW([{**g, "params": g["params"][:: -1 if turned else 1]} for g in groups])  # type: ignore[index]

    return make


WARM_UP = 4


def by_global() -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / WARM_UP)


def warm(step: int, *, steps: int) -> float:
    return min(1.0, (step + 1) / steps)


def warm_up(steps: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / steps)


def decay(steps: int) -> Callable[[int], float]:
    return lambda step: max(0.0, 1 - step / steps)


def lambdas(function: Callable[[int], float]) -> Callable[[Optimizer], Any]:
    return lambda optimizer: LambdaLR(optimizer, function)


class Halving(LRScheduler):
    """Its state dict forgets its own argument."""

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self.every = every
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Average:
    """An average of the weights, by which training goes on: the loop pulls the model to it. ``says_decay``: in its state."""

    def __init__(self, model: nn.Module, decay: float, says_decay: bool = True) -> None:
        self.decay, self.says_decay = decay, says_decay
        self.parameters = list(model.parameters())
        self.held, self.updates = [p.detach().clone() for p in self.parameters], 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for held, p in zip(self.held, self.parameters, strict=True):
            held.lerp_(p, 1 - min(self.decay, self.updates / (10 + self.updates)))
            p.lerp_(held, 0.1)

    def state_dict(self) -> dict[str, Any]:
        found = {"held": self.held, "updates": self.updates}
        return {**found, "decay": self.decay} if self.says_decay else found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held, self.updates = [t.clone() for t in state["held"]], state["updates"]
        self.decay = state.get("decay", self.decay)


def replayed(**given: Any) -> Callable[[], Any]:
    """A ``ResumableLoader``. Arguments that are functions of no argument are made anew for each run."""

    def make() -> Any:
        named = {"dataset": samples, "batch_size": 4, "shuffle": True, **given}
        if "sampler" in named or isinstance(named["dataset"](), IterableDataset):
            del named["shuffle"]
        data = named.pop("dataset")()
        for key in ("sampler", "batch_sampler"):
            if key in named:
                named[key] = named[key](data)
        if "batch_sampler" in named:
            named = {k: v for k, v in named.items() if k not in ("batch_size", "shuffle", "drop_last")}
        if "generator" in named:
            named["generator"] = named["generator"]()
        return sw.ResumableLoader(DataLoader(data, **named))

    return make


def elastic(count: int = SAMPLES, **given: Any) -> Callable[[], Any]:
    def sampler(data: Any) -> Any:
        return sw.ElasticSampler(data, **{"global_batch_size": 4, **given})

    return replayed(dataset=lambda: samples(count), batch_sampler=sampler)


def distributed(**given: Any) -> Callable[[], Any]:
    named = {"num_replicas": 2, "rank": 0, **given}
    return replayed(sampler=lambda data: DistributedSampler(data, **named), batch_size=2)


def stateful(**given: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        named = {"dataset": samples, "batch_size": 4, "shuffle": True, **given}
        return StatefulDataLoader(named.pop("dataset")(), **named)

    return make


@contextmanager
def flag(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def nothing() -> Iterator[None]:
    yield


# -------------------------------------------------------------------------------------------------- one run


ADAMW, IN_GLOBAL_BATCHES = adamw(), elastic()


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a run is made."""

    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], Optimizer] = ADAMW
    scheduler: Callable[[Optimizer], Any] | None = None
    loader: Callable[[], Any] = IN_GLOBAL_BATCHES
    scaler: Callable[[], Any] | None = None
    extra: Mapping[str, Callable[[nn.Module], Any]] = field(default_factory=dict)
    around: Callable[[], Any] = nothing


class Run:
    def __init__(self, made: Made, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = made.model()
        self.optimizer = made.optimizer(self.model)
        self.scheduler = None if made.scheduler is None else made.scheduler(self.optimizer)
        self.scaler = None if made.scaler is None else made.scaler()
        self.loader = made.loader()
        self.state = sw.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            dataloader=self.loader,
            extra={name: make(self.model) for name, make in made.extra.items()},
        )
        self.seen: list[Any] = []

    def train(self, steps: int) -> list[Any]:
        """The losses of so many steps, over as many epochs as they take."""
        self.seen, end = [], len(self.seen) + steps
        while len(self.seen) < end:
            for x, y in self.loader:
                self.seen.append(self._step(x, y))
                if len(self.seen) == end:
                    break
        return self.seen

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        dtype = next(self.model.parameters()).dtype
        loss = nn.functional.cross_entropy(self.model(x.to(dtype)).float(), y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        for extra in self.state.extra.values():
            if isinstance(extra, Average):
                extra.update()
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        return loss.item(), lrs, self.scaler and self.scaler.get_scale(), self.state.extra.get("plain")

    def bits(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        for p in self.model.parameters():
            tensors += [v for _, v in sorted(self.optimizer.state.get(p, {}).items()) if isinstance(v, torch.Tensor)]  # fmt: skip
        return [t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


@dataclass(frozen=True)
class Row:
    base: Made
    change: Mapping[str, Any]
    expected: str
    """``bitwise``, ``named`` or ``refused``."""
    says: str = ""
    replaced: str = ""
    """A setting that the report says the checkpoint's replaced."""


def named(base: Made, says: str, **change: Any) -> Row:
    return Row(base, change, "named", says)


def refused(base: Made, says: str, **change: Any) -> Row:
    return Row(base, change, "refused", says)


def bitwise(base: Made, replaced: str = "", **change: Any) -> Row:
    return Row(base, change, "bitwise", replaced=replaced)


REPLAYED = Made(loader=replayed())
NOISY = Made(loader=replayed(dataset=lambda: Noisy(0.1)))
ELASTIC = Made()
DISTRIBUTED = Made(loader=distributed())
STATEFUL = Made(loader=stateful())
COLLATED = Made(loader=replayed(collate_fn=collated(1.0)))
OWN_GENERATOR = Made(loader=replayed(generator=torch.Generator))
MOMENTUM = Made(optimizer=sgd())
AMSGRAD = Made(optimizer=adamw(amsgrad=True))
GROUPED = Made(optimizer=grouped("b", "mw"))
LOOKAHEAD = Made(optimizer=lambda m: Slow(sgd()(m), 2))
STEP = Made(scheduler=lambda o: StepLR(o, 2, gamma=0.5))
COSINE = Made(scheduler=lambda o: CosineAnnealingLR(o, 20))
CYCLE = Made(scheduler=lambda o: OneCycleLR(o, 0.05, total_steps=30))
CYCLIC = Made(
    optimizer=sgd(), scheduler=lambda o: CyclicLR(o, 0.01, 0.05, step_size_up=3, scale_fn=decay(40))
)
LAMBDA = Made(scheduler=lambdas(warm_up(6)))
PARTIAL = Made(scheduler=lambdas(functools.partial(warm, steps=6)))
HALVING = Made(scheduler=lambda o: Halving(o, 2))
RATED = Made(model=lambda: Rated(0.5))
SEVERAL = Made(scheduler=lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2, gamma=0.5)], milestones=[5]))
SCALED = Made(scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4))
AVERAGED = Made(extra={"average": lambda m: Average(m, 0.5)})
FORGETFUL = Made(extra={"average": lambda m: Average(m, 0.5, says_decay=False)})
PLAIN = Made(extra={"plain": lambda m: 1})


def sampled(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return replayed(sampler=make)


ROWS: dict[str, Row] = {
    # the data: DataLoader
    "batch_size": refused(REPLAYED, "batch size", loader=replayed(batch_size=2)),
    "shuffle": refused(REPLAYED, "sampler was 'RandomSampler'", loader=replayed(shuffle=False)),
    "drop_last": refused(REPLAYED, "drop_last", loader=replayed(drop_last=True)),
    "num_workers": refused(REPLAYED, "num_workers", loader=replayed(num_workers=1)),
    "dataset length": refused(REPLAYED, "dataset length", loader=replayed(dataset=lambda: samples(30))),
    "dataset content": named(REPLAYED, "dataset.tensors[0]", loader=replayed(dataset=lambda: samples(scale=2.0))),
    "dataset order": named(REPLAYED, "dataset.tensors[1]", loader=replayed(dataset=lambda: samples(flip=True))),
    "dataset class": named(REPLAYED, "dataset: TensorDataset", loader=replayed(dataset=lambda: Noisy(0.1))),
    "dataset's argument": named(NOISY, "dataset.noise: 0.1", loader=replayed(dataset=lambda: Noisy(0.2))),
    "transform's argument": named(
        NOISY, "dataset.transform.by: 1.0", loader=replayed(dataset=lambda: Noisy(0.1, Scale(2.0)))
    ),
    "transform": named(NOISY, "dataset.transform: Scale", loader=replayed(dataset=lambda: Noisy(0.1, torch.abs))),
    "subset": named(
        Made(loader=replayed(dataset=lambda: Subset(samples(), range(0, 12)))),
        "dataset.indices: range(0, 12)",
        loader=replayed(dataset=lambda: Subset(samples(), range(1, 13))),
    ),
    "list of samples": named(
        Made(loader=replayed(dataset=lambda: list(samples()))),
        "dataset: list of 26",
        loader=replayed(dataset=lambda: list(samples(scale=2.0))),
    ),
    "iterable dataset's argument": named(
        Made(loader=replayed(dataset=lambda: Stream(1.0))), "dataset.scale: 1.0", loader=replayed(dataset=lambda: Stream(2.0))
    ),
    "collate_fn": named(REPLAYED, "collate_fn: function default_collate", loader=replayed(collate_fn=collated(2.0))),
    "collate_fn's value": named(COLLATED, "collate_fn.by: 1.0", loader=replayed(collate_fn=collated(2.0))),
    "worker_init_fn": named(REPLAYED, "worker_init_fn", loader=replayed(worker_init_fn=reseed)),
    "generator": refused(REPLAYED, "generators", loader=OWN_GENERATOR.loader),
    "generator's seed": bitwise(OWN_GENERATOR, loader=replayed(generator=lambda: torch.Generator().manual_seed(9))),
    "pin_memory": bitwise(REPLAYED, loader=replayed(pin_memory=True)),
    "in_order": named(REPLAYED, "in_order", loader=replayed(in_order=False)),
    "sampler's replacement": named(
        REPLAYED, "sampler.replacement: False", loader=sampled(lambda data: RandomSampler(data, replacement=True))
    ),
    "sampler's weights": named(
        Made(loader=sampled(lambda data: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))),
        "sampler.weights",
        loader=sampled(lambda data: WeightedRandomSampler([1.0, 3.0] * (SAMPLES // 2), SAMPLES)),
    ),
    "sampler's indices": named(
        Made(loader=sampled(lambda data: SubsetRandomSampler(range(12)))),
        "sampler.indices",
        loader=sampled(lambda data: SubsetRandomSampler(range(2, 14))),
    ),
    "batch_sampler": named(
        Made(loader=replayed(batch_sampler=lambda data: BatchSampler(SequentialSampler(data), 4, False))),
        "batch_sampler: BatchSampler",
        loader=replayed(batch_sampler=lambda data: Pairs(SequentialSampler(data), 4, False)),
    ),
    "batch_sampler's argument": refused(
        Made(loader=replayed(batch_sampler=lambda data: BatchSampler(SequentialSampler(data), 4, False))),
        "batches per epoch",
        loader=replayed(batch_sampler=lambda data: BatchSampler(SequentialSampler(data), 2, False)),
    ),
    "DistributedSampler's seed": named(DISTRIBUTED, "sampler.seed: 0", loader=distributed(seed=1)),
    "DistributedSampler's shuffle": named(DISTRIBUTED, "sampler.shuffle: True", loader=distributed(shuffle=False)),
    "DistributedSampler's drop_last": named(DISTRIBUTED, "sampler.drop_last: False", loader=distributed(drop_last=True)),
    "DistributedSampler's num_replicas": refused(DISTRIBUTED, "replicas", loader=distributed(num_replicas=4)),
    "DistributedSampler's rank": refused(DISTRIBUTED, "rank", loader=distributed(rank=1)),
    # the data: ElasticSampler
    "half the global batch": named(ELASTIC, "global_batch_size: 4", loader=elastic(global_batch_size=2)),
    "twice the global batch": named(ELASTIC, "global_batch_size: 4", loader=elastic(global_batch_size=8)),
    "ElasticSampler's drop_last": named(ELASTIC, "drop_last: False", loader=elastic(drop_last=True)),
    "ElasticSampler's seed": refused(ELASTIC, "seed was 0", loader=elastic(seed=1)),
    "ElasticSampler's shuffle": refused(ELASTIC, "shuffle was True", loader=elastic(shuffle=False)),
    "ElasticSampler's dataset": refused(ELASTIC, "dataset length", loader=elastic(30)),
    "ElasticSampler's num_replicas": named(ELASTIC, "num_replicas: the number of processes when saved, 2 now", loader=elastic(num_replicas=2, rank=0)),
    "ElasticSampler's rank": named(
        Made(loader=elastic(num_replicas=2, rank=0)), "rank: the process's own when saved, 1 now", loader=elastic(num_replicas=2, rank=1)
    ),
    "another kind of loader": refused(ELASTIC, "ElasticSampler", loader=replayed()),
    # the data: torchdata
    "StatefulDataLoader's batch_size": named(STATEFUL, "batch_size: 4", loader=stateful(batch_size=2)),
    "StatefulDataLoader's shuffle": refused(STATEFUL, "dataloader: StatefulDataLoader", loader=stateful(shuffle=False)),
    "StatefulDataLoader's drop_last": named(STATEFUL, "drop_last: False", loader=stateful(drop_last=True)),
    "StatefulDataLoader's dataset": named(STATEFUL, "dataset.tensors", loader=stateful(dataset=lambda: samples(scale=2.0))),
    "StatefulDataLoader's collate_fn": named(STATEFUL, "collate_fn", loader=stateful(collate_fn=collated(2.0))),
    "snapshot_every_n_steps": named(STATEFUL, "snapshot_every_n_steps", loader=stateful(snapshot_every_n_steps=2)),
    # the optimizer
    "lr": bitwise(ELASTIC, "optimizer.lr: this program's 0.1 was replaced by the checkpoint's 0.01", optimizer=adamw(lr=0.1)),
    "lr, a tensor": bitwise(ELASTIC, "optimizer.lr", optimizer=adamw(lr=torch.tensor(0.1), foreach=False)),
    "betas": bitwise(ELASTIC, "optimizer.betas", optimizer=adamw(betas=(0.5, 0.6))),
    "eps": bitwise(ELASTIC, "optimizer.eps", optimizer=adamw(eps=0.1)),
    "weight_decay": bitwise(ELASTIC, "optimizer.weight_decay", optimizer=adamw(weight_decay=0.5)),
    "amsgrad": bitwise(ELASTIC, "optimizer.amsgrad", optimizer=adamw(amsgrad=True)),
    "amsgrad left out": bitwise(AMSGRAD, "optimizer.amsgrad", optimizer=adamw()),
    "maximize": bitwise(ELASTIC, "optimizer.maximize", optimizer=adamw(maximize=True)),
    "foreach": bitwise(ELASTIC, "optimizer.foreach", optimizer=adamw(foreach=True)),
    "fused": bitwise(ELASTIC, "optimizer.fused", optimizer=adamw(fused=True)),
    "capturable": bitwise(ELASTIC, "optimizer.capturable", optimizer=adamw(capturable=True)),
    "momentum": bitwise(MOMENTUM, "optimizer.momentum", optimizer=sgd(momentum=0.1)),
    "dampening": bitwise(MOMENTUM, "optimizer.dampening", optimizer=sgd(dampening=0.1)),
    "nesterov": bitwise(MOMENTUM, "optimizer.nesterov", optimizer=sgd(nesterov=True)),
    "class of the optimizer": refused(
        ELASTIC, "contains state for AdamW, but the optimizer is Adam", optimizer=lambda m: Adam(m.parameters())
    ),
    "a group's lr": bitwise(GROUPED, "optimizer.param_groups[1].lr", optimizer=grouped("b", "mw", other=0.5)),
    "order of groups": refused(GROUPED, "in another order", optimizer=grouped("mw", "b")),
    "members of groups": refused(GROUPED, "parameter groups", optimizer=grouped("bw", "m")),
    "one group more": refused(GROUPED, "parameter groups", optimizer=grouped("b", "m", "w")),
    "one group fewer": refused(GROUPED, "parameter groups", optimizer=grouped("b")),
    "order of parameters": named(GROUPED, "another order", optimizer=grouped("b", "mw", turned=True)),
    "a wrapper's k": named(LOOKAHEAD, "optimizer.k: 2", optimizer=lambda m: Slow(sgd()(m), 3)),
    "a wrapper's alpha": named(LOOKAHEAD, "optimizer.alpha: 0.5", optimizer=lambda m: Slow(sgd()(m), 2, 0.25)),
    # the schedule
    "step_size": bitwise(STEP, "scheduler.step_size", scheduler=lambda o: StepLR(o, 3, gamma=0.5)),
    "gamma": bitwise(STEP, "scheduler.gamma", scheduler=lambda o: StepLR(o, 2, gamma=0.1)),
    "class of the scheduler": refused(STEP, "StepLR", scheduler=lambda o: ExponentialLR(o, gamma=0.5)),
    "no scheduler": named(STEP, "scheduler: not given", scheduler=None),
    "a scheduler more": refused(ELASTIC, "contains no scheduler", scheduler=STEP.scheduler),
    "lr under a scheduler": bitwise(STEP, "optimizer.initial_lr", optimizer=adamw(lr=0.1)),
    "T_max": bitwise(COSINE, "scheduler.T_max", scheduler=lambda o: CosineAnnealingLR(o, 50)),
    "eta_min": bitwise(COSINE, "scheduler.eta_min", scheduler=lambda o: CosineAnnealingLR(o, 20, eta_min=0.005)),
    "max_lr": bitwise(CYCLE, scheduler=lambda o: OneCycleLR(o, 0.5, total_steps=30)),
    "total_steps": bitwise(CYCLE, "scheduler.total_steps", scheduler=lambda o: OneCycleLR(o, 0.05, total_steps=60)),
    "a lambda's value": named(LAMBDA, "lr_lambdas[0].steps: 6", scheduler=lambdas(warm_up(9))),
    "a lambda's code": named(LAMBDA, "lr_lambdas[0]: function warm_up", scheduler=lambdas(decay(6))),
    "a lambda's lr": bitwise(LAMBDA, "optimizer.initial_lr", optimizer=adamw(lr=0.1)),
    "a partial's value": named(PARTIAL, "lr_lambdas[0].steps: 6", scheduler=lambdas(functools.partial(warm, steps=9))),
    "scale_fn": named(
        CYCLIC, "scale_fn", scheduler=lambda o: CyclicLR(o, 0.01, 0.05, step_size_up=3, scale_fn=decay(20))
    ),
    "milestones": bitwise(
        SEVERAL,
        scheduler=lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2, gamma=0.5)], milestones=[7]),
    ),
    "an inner scheduler's argument": bitwise(
        SEVERAL,
        scheduler=lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 3, gamma=0.5)], milestones=[5]),
    ),
    "an own scheduler's argument": named(HALVING, "scheduler.every: 2", scheduler=lambda o: Halving(o, 3)),
    # the scaler
    "init_scale": bitwise(SCALED, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)),
    "growth_interval": bitwise(SCALED, scaler=lambda: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)),
    "a scaler that is off": named(SCALED, "scaler", scaler=lambda: torch.amp.GradScaler("cpu", enabled=False)),
    "no scaler": named(SCALED, "scaler: not given", scaler=None),
    "a scaler more": refused(ELASTIC, "scaler", scaler=SCALED.scaler),
    # the model
    "p of a function": named(ELASTIC, "model.p: 0.2", model=net(p=0.4)),
    "p of a module": named(ELASTIC, "model.dropout.p: 0.1", model=lambda: with_dropout(0.3)),
    "activation, a function": named(ELASTIC, "model.activation", model=net(activation=nn.functional.silu)),
    "activation, a module": named(ELASTIC, "model.middle: Tanh", model=net(middle=nn.ReLU)),
    "an argument behind a decorator": named(RATED, "model.rate: 0.5", model=lambda: Rated(0.25)),
    "a mapping": named(ELASTIC, "model.alpha.default: 1.0", model=net(alpha={"default": 2.0})),
    "eps of a norm": named(ELASTIC, "model.norm.eps: 1e-05", model=net(eps=0.1)),
    "a buffer that is made again": named(ELASTIC, "model.by", model=net(scale=2.0)),
    "requires_grad": named(ELASTIC, "model.first.weight.requires_grad: True", model=frozen),
    "dtype": named(MOMENTUM, "F32 when saved, BF16 now", model=lambda: Net().bfloat16()),
    "torch.compile": named(ELASTIC, "model.compiled: not set when saved", model=compiled),
    # torch
    "deterministic algorithms": named(
        ELASTIC,
        "torch: deterministic algorithms: False",
        around=lambda: flag(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "precision of matmul": named(
        ELASTIC,
        "torch: float32 matmul precision",
        around=lambda: flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    ),
    "threads": named(ELASTIC, "threads", around=lambda: flag(torch.get_num_threads, torch.set_num_threads, 2)),
    # further state
    "an average's decay, stored": bitwise(AVERAGED, extra={"average": lambda m: Average(m, 0.1)}),
    "an average's decay, not stored": named(
        FORGETFUL, "extra.average.decay: 0.5", extra={"average": lambda m: Average(m, 0.1, says_decay=False)}
    ),
    "a plain value": bitwise(PLAIN, extra={"plain": lambda m: 2}),
    "an extra left out": named(AVERAGED, "extra.average: not among", extra={}),
}  # fmt: skip

BASES = {id(row.base): row.base for row in ROWS.values()}

# ------------------------------------------------------------------------------------------------- the property


@pytest.fixture(scope="module")
def never_stopped(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Made], tuple[Path, list[Any], list[bytes]]]:
    """By how a run was made: its checkpoint, and the steps after it of a run that did not stop."""
    found: dict[int, tuple[Path, list[Any], list[bytes]]] = {}

    def get(base: Made) -> tuple[Path, list[Any], list[bytes]]:
        if id(base) not in found:
            path = tmp_path_factory.mktemp("saved") / "checkpoint"
            run = Run(base, 1)
            seen, steps = [], iter(endless(run))
            seen = [next(steps) for _ in range(BEFORE)]
            sw.save(run.state, path)
            seen = [next(steps) for _ in range(AFTER)]
            found[id(base)] = path, seen, run.bits()
        return found[id(base)]

    return get


def endless(run: Run) -> Iterator[Any]:
    while True:
        for x, y in run.loader:
            yield run._step(x, y)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata 0.11
        warnings.filterwarnings("ignore", "'pin_memory' argument is set", UserWarning)
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        warnings.filterwarnings("ignore", "The epoch parameter in", UserWarning)  # SequentialLR itself
        yield


def resumed(made: Made, path: Path) -> tuple[sw.reports.ResumeReport, list[Any], list[bytes]]:
    run = Run(made, 2)
    report = sw.restore(run.state, path)
    steps = iter(endless(run))
    seen = [next(steps) for _ in range(AFTER)]
    return report, seen, run.bits()


@pytest.mark.parametrize("base", BASES.values())
def test_a_run_that_changes_nothing_is_exact_and_bitwise(never_stopped: Any, base: Made) -> None:
    path, seen, bits = never_stopped(base)
    report, again, now = resumed(base, path)
    assert (report.differences, report.skipped) == ((), ())
    assert report.exact or report.caveats
    assert report.replaced == ()
    assert (again, now) == (seen, bits)


@pytest.mark.parametrize("name", ROWS)
def test_a_changed_argument_is_bitwise_or_named(never_stopped: Any, name: str) -> None:
    row = ROWS[name]
    path, seen, bits = never_stopped(row.base)
    changed = Made(**{**vars(row.base), **row.change})
    if row.expected == "refused":
        with pytest.raises(StateError) as error:
            resumed(changed, path)
        assert row.says in str(error.value)
        return
    with changed.around():
        report, again, now = resumed(changed, path)
    lines = (*report.differences, *report.skipped, *report.caveats)
    is_bitwise = (again, now) == (seen, bits)
    assert report.exact <= is_bitwise, "called exact, and is not"
    assert report.exact == (row.expected == "bitwise"), lines
    assert any(row.says in line for line in lines) or not row.says, lines
    assert any(row.replaced in line for line in report.replaced) or not row.replaced, report.replaced


def test_there_are_rows_enough() -> None:
    assert len(ROWS) >= 60


def test_a_global_that_a_lambda_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(scheduler=lambdas(by_global()))
    sw.save(Run(made, 1).state, tmp_path / "c")
    assert sw.restore(Run(made, 2).state, tmp_path / "c").exact
    monkeypatch.setitem(globals(), "WARM_UP", 8)
    report = sw.restore(Run(made, 2).state, tmp_path / "c")
    assert report.differences == ("scheduler.lr_lambdas[0].WARM_UP: 4 when saved, 8 now",)


class Limits:
    longest = 8


@dataclass
class Options:
    longest: int = 8
    resume: bool = False


MAXLEN, CF, WINDOWS = 8, {"longest": 8, "inner": {"longest": 8}}, [8, 16]
ARGS, SPACE = (
    argparse.Namespace(longest=8, resume=False, job=0),
    types.SimpleNamespace(inner=types.SimpleNamespace(longest=8)),
)
OPTIONS, LIMITS, SCALING = Options(), Limits(), Scale(8.0)
CFGMODULE = types.ModuleType("cfgmodule")
CFGMODULE.MAX, CFGMODULE.unused, CFGMODULE.inner = 8, 1, types.SimpleNamespace(longest=8)  # type: ignore[attr-defined]


def in_a_comprehension(batch: Any) -> Any:
    return [x[:MAXLEN] for x in batch]


def in_a_generator(batch: Any) -> Any:
    return tuple(x[:MAXLEN] for x in batch)


def in_an_inner_function(batch: Any) -> Any:
    def cut(x: Any) -> Any:
        return x[:MAXLEN]

    return list(map(cut, batch))


def in_a_lambda(batch: Any) -> Any:
    return sorted(batch, key=lambda x: x[:MAXLEN])


def in_a_called_function(batch: Any) -> Any:
    return [in_a_comprehension(x) for x in batch]


def in_a_namespace(batch: Any) -> Any:
    return [x[: ARGS.longest] for x in batch]


def cut_by(x: Any, args: Any) -> Any:
    return x[: args.longest]


def in_a_function_that_is_given_it(batch: Any) -> Any:
    return [cut_by(x, ARGS) for x in batch][:: -1 if ARGS.resume is None else 1]


def in_a_space_in_a_space(batch: Any) -> Any:
    return [x[: SPACE.inner.longest] for x in batch]


def in_a_dataclass(batch: Any) -> Any:
    return batch[: OPTIONS.longest]


def in_a_class(batch: Any) -> Any:
    return batch[: Limits.longest]


def in_an_object(batch: Any) -> Any:
    return batch[: LIMITS.longest]


def in_an_object_that_is_called(batch: Any) -> Any:
    return SCALING(batch)


def in_a_module(batch: Any) -> Any:
    return batch[: CFGMODULE.MAX]


def in_an_object_of_a_module(batch: Any) -> Any:
    return [x[: CFGMODULE.inner.longest] for x in batch]


def in_a_dict(batch: Any) -> Any:
    return batch[: CF["longest"]]


def in_a_dict_in_a_dict(batch: Any) -> Any:
    return batch[: CF["inner"]["longest"]]  # type: ignore[index]


def in_a_list(batch: Any) -> Any:
    return batch[: WINDOWS[0]]


def closing_over(args: Any) -> Callable[[Any], Any]:
    return lambda batch: [x[: args.longest] for x in batch]


def by_default(batch: Any, args: Any = ARGS) -> Any:
    return batch[: args.longest]


def given(batch: Any, args: Any) -> Any:
    return batch[: args.longest]


class Cut(Dataset[Any]):
    """Takes the whole program's arguments, and reads one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.held = args, samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = self.held[index]
        return x * self.args.longest, y


def collate_fn(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return replayed(collate_fn=function)


HERE = sys.modules[__name__]
SIBLINGS: dict[str, tuple[Callable[[], Any], Any, str, Any]] = {
    "a comprehension": (collate_fn(in_a_comprehension), HERE, "MAXLEN", 4),
    "a generator": (collate_fn(in_a_generator), HERE, "MAXLEN", 4),
    "an inner function": (collate_fn(in_an_inner_function), HERE, "MAXLEN", 4),
    "a lambda": (collate_fn(in_a_lambda), HERE, "MAXLEN", 4),
    "a called function": (collate_fn(in_a_called_function), HERE, "MAXLEN", 4),
    "a namespace": (collate_fn(in_a_namespace), ARGS, "longest", 4),
    "a function that is given it": (collate_fn(in_a_function_that_is_given_it), ARGS, "longest", 4),
    "a space in a space": (collate_fn(in_a_space_in_a_space), SPACE.inner, "longest", 4),
    "a dataclass": (collate_fn(in_a_dataclass), OPTIONS, "longest", 4),
    "a class": (collate_fn(in_a_class), Limits, "longest", 4),
    "an object": (collate_fn(in_an_object), LIMITS, "longest", 4),
    "an object's class": (collate_fn(in_an_object), Limits, "longest", 4),
    "an object that is called": (collate_fn(in_an_object_that_is_called), SCALING, "by", 4.0),
    "a module": (collate_fn(in_a_module), CFGMODULE, "MAX", 4),
    "an object of a module": (collate_fn(in_an_object_of_a_module), CFGMODULE, "inner", types.SimpleNamespace(longest=4)),
    "a dict": (collate_fn(in_a_dict), HERE, "CF", {**CF, "longest": 4}),
    "a dict in a dict": (collate_fn(in_a_dict_in_a_dict), HERE, "CF", {**CF, "inner": {"longest": 4}}),
    "a list": (collate_fn(in_a_list), HERE, "WINDOWS", [4, 16]),
    "a closure": (collate_fn(closing_over(ARGS)), ARGS, "longest", 4),
    "a default": (collate_fn(by_default), ARGS, "longest", 4),
    "a partial": (collate_fn(functools.partial(given, args=ARGS)), ARGS, "longest", 4),
    "a dataset": (replayed(dataset=lambda: Cut(ARGS)), ARGS, "longest", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_value_that_code_reads_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    loader, holder, attribute, value = SIBLINGS[name]
    made = Made(loader=loader)
    sw.save(Run(made, 1).state, tmp_path / "c")
    monkeypatch.setattr(ARGS, "job", 1)  # no part reads it
    monkeypatch.setattr(CFGMODULE, "unused", 2)
    report = sw.restore(Run(made, 2).state, tmp_path / "c")
    assert (report.differences, report.skipped) == ((), ())
    monkeypatch.setattr(holder, attribute, value)
    report = sw.restore(Run(made, 2).state, tmp_path / "c")
    assert not report.exact
    assert len(report.differences) == 1
    assert "8" in report.differences[0]
    assert "4" in report.differences[0]


def by_a_dict(step: int) -> float:
    return min(1.0, (step + 1) / CF["longest"])  # type: ignore[operator]


def test_a_dict_that_a_schedule_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(scheduler=lambdas(by_a_dict))
    sw.save(Run(made, 1).state, tmp_path / "c")
    assert sw.restore(Run(made, 2).state, tmp_path / "c").exact
    monkeypatch.setitem(CF, "longest", 20)
    report = sw.restore(Run(made, 2).state, tmp_path / "c")
    assert report.differences == ("scheduler.lr_lambdas[0].CF.longest: 8 when saved, 20 now",)


def test_libraries_that_code_reads_are_no_settings(tmp_path: Path) -> None:
    sw.save(Run(Made(loader=collate_fn(with_libraries)), 1).state, tmp_path / "c")
    LOG.setLevel("ERROR")
    assert re.sub(r"an expression that was not in the cache", "", "") == ""
    report = sw.restore(Run(Made(loader=collate_fn(with_libraries)), 2).state, tmp_path / "c")
    assert (report.differences, report.skipped) == ((), ())


LOG = logging.getLogger("collate")


def with_libraries(batch: Any) -> Any:
    LOG.debug("%s %s", os.environ.get("HOME"), sub("a", "b", str(np.asarray(len(batch)))))
    return torch.utils.data.default_collate(deepcopy(batch))


class Caching(nn.Module):
    """Buffers that ``forward`` fills: empty, not set, and too short at first."""

    def __init__(self, scale: float = 1.0, length: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for layer in self.layers:
            layer.register_buffer("rotary", torch.ones(length) * scale, persistent=False)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache, self.mask = torch.arange(float(len(x))), torch.ones(len(x), 1)
        for k, layer in enumerate(self.layers):
            layer.rotary = torch.ones(WIDTH) * (k + 1)
            x = layer(x) * layer.rotary
        return self.last(x) * self.mask  # type: ignore[no-any-return]


def test_a_buffer_that_forward_fills_is_a_cache(never_stopped: Any) -> None:
    made = Made(model=Caching)
    path, seen, bits = never_stopped(made)
    report, again, now = resumed(made, path)
    assert (report.exact, report.differences) == (True, ())
    assert (again, now) == (seen, bits)


def test_a_buffer_of_the_same_shape_and_a_larger_one_are_compared(tmp_path: Path) -> None:
    sw.save(Run(Made(model=Caching), 1).state, tmp_path / "c")
    for other in (lambda: Caching(scale=2.0), lambda: Caching(length=3)):
        report = sw.restore(Run(Made(model=other), 2).state, tmp_path / "c")
        assert not report.exact
        assert all("rotary" in line for line in report.differences)


class Files(Dataset[Any]):
    def __init__(self, root: str | Path) -> None:
        self.root, self.held = root, samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.held[index]


def scratch(folder: Path, *contents: str) -> Path:
    (folder / "inner").mkdir(parents=True)
    for k, content in enumerate(contents):
        (folder / "inner" / f"{k}.txt").write_text(content)
    return folder


@pytest.mark.parametrize("kind", [str, Path])
def test_the_same_files_in_another_place_are_no_difference(tmp_path: Path, kind: Any) -> None:
    first, second = scratch(tmp_path / "job1", "a", "bc"), scratch(tmp_path / "job2", "a", "bc")
    other, empty = scratch(tmp_path / "val", "x", "bc"), scratch(tmp_path / "empty")

    def of(root: Path) -> Made:
        return Made(loader=replayed(dataset=lambda: Files(kind(root))))

    sw.save(Run(of(first), 1).state, tmp_path / "c")
    assert sw.restore(Run(of(second), 2).state, tmp_path / "c").exact
    for root in (other, empty, tmp_path / "missing"):
        report = sw.restore(Run(of(root), 2).state, tmp_path / "c")
        assert len(report.differences) == 1
        assert "dataset.root" in report.differences[0]
    (first / "log").write_text("written by the first run")
    assert sw.restore(Run(of(first), 2).state, tmp_path / "c").exact, "the same path"
    first.rename(tmp_path / "gone")
    assert sw.restore(Run(of(first), 2).state, tmp_path / "c").exact, "the same path"


def test_the_same_rows_of_another_file_are_no_difference(tmp_path: Path) -> None:
    import datasets

    rows = [{"x": [float(k)] * WIDTH, "y": k % 3} for k in range(SAMPLES)]
    folders = [tmp_path / name for name in ("job1", "job2", "other")]
    for k, folder in enumerate(folders):
        made = datasets.Dataset.from_list([{**rows[0], "y": k // 2}, *rows[1:]])
        made.save_to_disk(folder)

    def of(folder: Path, transform: Any = None) -> Made:
        (file,) = folder.glob("*.arrow")
        os.utime(file, (int(folder.name == "job1"),) * 2)  # fingerprints depend on it

        def dataset() -> Any:
            found = datasets.Dataset.from_file(str(file))
            return found.with_transform(transform) if transform else found

        return Made(loader=replayed(dataset=dataset))

    sw.save(Run(of(folders[0]), 1).state, tmp_path / "c")
    report = sw.restore(Run(of(folders[1]), 2).state, tmp_path / "c")
    assert (report.exact, report.differences) == (True, ())
    report = sw.restore(Run(of(folders[2]), 2).state, tmp_path / "c")
    assert any("dataset.fingerprint" in line for line in report.differences)
    report = sw.restore(Run(of(folders[1], in_a_list), 2).state, tmp_path / "c")
    assert any("dataset.format" in line for line in report.differences)


def test_another_learning_rate_after_the_resume(tmp_path: Path) -> None:
    """As docs/howto/own-loop.md says: with a scheduler, all its values are scaled by one factor."""
    made = Made(scheduler=lambda o: CosineAnnealingLR(o, 10), optimizer=sgd())
    first = Run(made, 1)
    steps = iter(endless(first))
    for _ in range(BEFORE):
        next(steps)
    sw.save(first.state, tmp_path / "c")
    expected = [next(steps)[1][0] * 3 for _ in range(AFTER)]

    second = Run(Made(**{**vars(made), "optimizer": sgd(lr=0.15)}), 2)
    report = sw.restore(second.state, tmp_path / "c")
    line = "optimizer.initial_lr: this program's 0.15 was replaced by the checkpoint's 0.05"
    assert report.exact
    assert line in report.replaced
    scheduler = second.scheduler
    factor = 0.15 / scheduler.base_lrs[0]
    scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
    for group in second.optimizer.param_groups:
        for key in {"lr", "initial_lr", "max_lr", "min_lr"} & group.keys():
            group[key] *= factor
    steps = iter(endless(second))
    assert [next(steps)[1][0] for _ in range(AFTER)] == pytest.approx(expected)


def test_an_older_checkpoint_without_settings_resumes(tmp_path: Path) -> None:
    made = Made(loader=elastic())
    sw.save(Run(made, 1).state, tmp_path / "c")
    edit_documents(tmp_path / "c", lambda d: (d.pop("settings"), d.pop("data_settings")))
    report = sw.restore(Run(Made(loader=elastic(global_batch_size=2)), 2).state, tmp_path / "c")
    assert report.exact, "what was not recorded is not compared"


@pytest.mark.parametrize("damage", [["a"], {"a": 1}, {"a": None}])
def test_malformed_settings_are_damage(tmp_path: Path, damage: Any) -> None:
    sw.save(Run(Made(), 1).state, tmp_path / "c")
    edit_documents(tmp_path / "c", lambda d: d.update(settings=damage))
    with pytest.raises(FormatError, match="settings"):
        sw.restore(Run(Made(), 2).state, tmp_path / "c")
