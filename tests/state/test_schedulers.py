"""Every scheduler of torch and of transformers, and the GradScaler: equal through a checkpoint, and equal in going on.

The classes are found by looking: one that is new, and has no case here, fails a test.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lrs
import torch.optim.swa_utils as swa
from torch import nn
from transformers import optimization

import shardwise as sw
from shardwise.state.typed_json import decode, encode

pytestmark = [
    # SequentialLR and ChainedScheduler call the deprecated form of step themselves.
    pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning"),
]


class Warmup:
    """A callable object: torch stores its attributes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def half(step: int) -> float:
    return 0.5**step


def nested(o: torch.optim.Optimizer) -> lrs.LRScheduler:
    inner = lrs.SequentialLR(o, [lrs.LambdaLR(o, [half, Warmup(3)]), lrs.CosineAnnealingLR(o, 4)], [6])
    return lrs.ChainedScheduler([lrs.LinearLR(o, 0.5), inner, lrs.MultiplicativeLR(o, lambda step: 0.9)])


Make = Callable[[torch.optim.Optimizer], Any]
OF_TORCH: dict[str, Make] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, half),
    "LambdaLR of objects": lambda o: lrs.LambdaLR(o, [Warmup(4), Warmup(9)]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 7, 7]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=8),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1), lrs.ExponentialLR(o, 0.9)], [6]),
    "inside each other": nested,
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, cooldown=1, min_lr=[1e-4, 1e-3]),
    "CyclicLR": lambda o: lrs.CyclicLR(o, [0.01, 0.02], 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR with a function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=half),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], total_steps=20),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 12, power=2.0),
    "SWALR": lambda o: swa.SWALR(o, swa_lr=[0.05, 0.01], anneal_epochs=8),
}
OF_TRANSFORMERS: dict[str, Make] = {
    "AdafactorSchedule": lambda o: optimization.AdafactorSchedule(o, initial_lr=0.02),
}
#: transformers has it from 5.4.
GREEDY: type | tuple[()] = getattr(optimization, "GreedyLR", ())
if GREEDY:
    OF_TRANSFORMERS["GreedyLR"] = lambda o: optimization.GreedyLR(o, patience=1, min_lr=1e-3, smooth=True)
#: What the functions of transformers need beside the numbers of steps.
SPECIFIC: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 0.01},
    "cosine_warmup_with_min_lr": {"min_lr": 0.01},
    "warmup_stable_decay": {"num_decay_steps": 6},
    "cosine_with_restarts": {"num_cycles": 2},
}
CASES = {
    **OF_TORCH,
    **OF_TRANSFORMERS,
    **{
        f"get_scheduler {kind.value}": functools.partial(
            lambda o, kind: optimization.get_scheduler(
                kind, o, 3, 14, scheduler_specific_kwargs=SPECIFIC.get(kind.value)
            ),
            kind=kind,
        )
        for kind in optimization.SchedulerType
    },
}
FUNCTIONS = {
    "LambdaLR": 2,
    "MultiplicativeLR": 2,
    "inside each other": 3,
    "CyclicLR with a function": 1,
    "AdafactorSchedule": 1,
}


def schedulers_in(module: Any) -> set[str]:
    """Names of the scheduler classes that a module defines, abstract ones and aliases left out."""
    return {
        name
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and cls.__module__ == module.__name__
        and cls is not lrs.LRScheduler
        and cls.__name__ != "_LRScheduler"
        and (issubclass(cls, lrs.LRScheduler) or name.endswith(("LR", "Schedule", "Scheduler")))
    }


def test_every_scheduler_has_a_case() -> None:
    of_torch = schedulers_in(lrs) | schedulers_in(swa)
    assert len(of_torch) >= 16
    assert of_torch <= OF_TORCH.keys()
    assert set(lrs.__all__) - {"LRScheduler"} <= OF_TORCH.keys()
    assert schedulers_in(optimization) == OF_TRANSFORMERS.keys()
    # Those that functions make are enumerated by their kinds.
    assert set(optimization.TYPE_TO_SCHEDULER_FUNCTION) == set(optimization.SchedulerType)


def run(name: str) -> sw.TrainState:
    """Two groups, with real steps: cyclic schedules change momentum, Adafactor's asks its optimizer."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
    if name == "AdafactorSchedule":
        optimizer: Any = optimization.Adafactor(model.parameters(), warmup_init=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return sw.TrainState(model=model, optimizer=optimizer, scheduler=CASES[name](optimizer))


def advance(state: sw.TrainState, begin: int, count: int) -> list[Any]:
    """(learning rates, momenta) after each step. The metric falls, rises and stays."""
    found = []
    optimizer: Any = state.optimizer
    for index in range(begin, begin + count):
        optimizer.zero_grad()
        state.model(torch.full((2, 3), 0.1 * index)).square().sum().backward()  # type: ignore[operator]
        optimizer.step()
        metric = [1.0, 0.5, 0.7, 0.6, 0.6, 0.61][index % 6]
        by_metric = isinstance(state.scheduler, (lrs.ReduceLROnPlateau, GREEDY))
        state.scheduler.step(metric) if by_metric else state.scheduler.step()
        last = None if by_metric else state.scheduler.get_last_lr()
        found.append(([(g["lr"], g.get("momentum")) for g in optimizer.param_groups], last))
    return found


def text(value: Any) -> str:
    """Everything of a state, with its types."""
    encoded = encode(value)
    tensors = {key: tensor.tolist() for key, tensor in encoded.tensors.items()}
    return json.dumps([encoded.document, str(tensors)])


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_scheduler_goes_on_alike(tmp_path: Path, name: str) -> None:
    first = run(name)
    advance(first, 0, 5)
    state = first.scheduler.state_dict()
    encoded = encode(state)
    functions = {key for key, value in state.items() if inspect.isfunction(value)}  # SWALR's, of torch 2.9
    stored = {key: value for key, value in state.items() if key not in functions}
    assert text(decode(json.loads(json.dumps(encoded.document, allow_nan=False)), encoded.tensors)) == text(
        stored
    )
    report = sw.save(first, tmp_path / "step")
    at_save = text(state)
    expected = advance(first, 5, 8)

    second = run(name)
    advance(second, 0, 2)  # a position of its own, which must not shine through
    second = run(name)
    resumed = sw.restore(second, tmp_path / "step")
    assert resumed.differences == tuple(
        f"scheduler.{key}: a function is not stored; this run may have another" for key in functions
    )
    assert "scheduler" in resumed.documents
    assert text(second.scheduler.state_dict()) == at_save
    assert advance(second, 5, 8) == expected
    assert text(second.scheduler.state_dict()) == text(first.scheduler.state_dict())
    if not name.startswith("get_scheduler"):
        assert len(report.skipped) == FUNCTIONS.get(name, 0) + len(functions), report.skipped


def test_functions_that_are_not_stored_are_reported_by_path(tmp_path: Path) -> None:
    state = run("inside each other")
    assert sw.save(state, tmp_path / "nested").skipped == (
        "scheduler.schedulers[1].schedulers[0].lr_lambdas[0]",
        "scheduler.schedulers[2].lr_lambdas[0]",
        "scheduler.schedulers[2].lr_lambdas[1]",
    )
    state.scheduler = {
        "a": run("CyclicLR with a function").scheduler,
        "b": run("LambdaLR of objects").scheduler,
    }
    assert sw.save(state, tmp_path / "several").skipped == ("scheduler.a.scale_fn",)
    state = run("get_scheduler linear")  # a partial: its numbers of steps are not stored, either
    assert sw.save(state, tmp_path / "partial").skipped == (
        "scheduler.lr_lambdas[0]",
        "scheduler.lr_lambdas[1]",
    )


def scaled(scaler: torch.amp.GradScaler, parameter: nn.Parameter, values: list[float]) -> list[Any]:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    found = []
    for value in values:
        optimizer.zero_grad()
        scaler.scale((parameter * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), scaler._get_growth_tracker(), parameter.tolist()))
    return found


def test_grad_scaler(tmp_path: Path) -> None:
    first = sw.TrainState(
        model=nn.Linear(2, 1, bias=False), scaler=torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    )
    scaled(first.scaler, first.model.weight, [1.0, float("inf"), 1.0, 1.0, 1.0, 2.0])  # type: ignore[union-attr]
    state = first.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 1), "halved, then doubled"
    assert text(decode(json.loads(json.dumps(encode(state).document)), encode(state).tensors)) == text(state)
    sw.save(first, tmp_path / "step")
    second = sw.TrainState(model=nn.Linear(2, 1, bias=False), scaler=torch.amp.GradScaler("cpu"))
    sw.restore(second, tmp_path / "step")
    assert text(second.scaler.state_dict()) == text(state)
    values = [1.0, 0.5, float("nan"), 1.0]
    assert scaled(second.scaler, second.model.weight, values) == scaled(
        first.scaler, first.model.weight, values
    )  # type: ignore[union-attr]
