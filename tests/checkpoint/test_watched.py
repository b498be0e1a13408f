"""What an object does to models, optimizers and others when it takes its state is put right, or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR

import shardwise as sw
from shardwise.checkpoint import restore as restoring
from shardwise.checkpoint.own import reaches_others
from shardwise.state.documents import class_text


class Meddler:
    """An extra that does something to a state of training when it is loaded."""

    def __init__(self, state: sw.TrainState, does: Callable[[Meddler, Any], object]) -> None:
        self.state, self.does = state, does
        self.shadow = torch.randn(2, 3)

    @property
    def optimizer(self) -> Any:
        return self.state.optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"].clone()
        self.does(self, self.state.model)


class Counts(nn.Linear):
    """A layer whose state dict holds a number."""

    calls = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = self.calls

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls = state_dict[f"{prefix}calls"]
        super()._load_from_state_dict(state_dict, prefix, *rest)


def run(seed: int, does: Callable[[Meddler, Any], object]) -> sw.TrainState:
    torch.manual_seed(seed)
    model = Counts(3, 2)
    model.calls = seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1 * seed), foreach=False)
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1 + seed))
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.extra["meddler"] = Meddler(state, does)
    return state


def bits(state: Any) -> list[Any]:
    optimizer = state.optimizer
    tensors = [*state.model.parameters(), *(s[k] for s in optimizer.state.values() for k in sorted(s))]
    return [t.detach().clone() for t in (*tensors, optimizer.param_groups[0]["lr"])]


@torch.no_grad()
def in_place(meddler: Meddler, model: Any) -> None:
    model.weight.copy_(meddler.shadow)


PUT_RIGHT: dict[str, Callable[[Meddler, Any], object]] = {
    "in place": in_place,
    "past the version counter": lambda m, model: model.weight.data.copy_(m.shadow),
    "other memory": lambda m, model: setattr(model.weight, "data", m.shadow.clone()),
    "the rate": lambda m, model: m.optimizer.param_groups[0].update(lr=7.0),
    "the rate, in place": lambda m, model: m.optimizer.param_groups[0]["lr"].fill_(7),
    "other state": lambda m, model: m.optimizer.state[model.weight].update(exp_avg=m.shadow),
    "another group": lambda m, model: m.optimizer.add_param_group({"params": [nn.Parameter(m.shadow)]}),
}


@pytest.mark.parametrize("name", PUT_RIGHT)
def test_what_is_changed_is_put_right(tmp_path: Path, name: str) -> None:
    first = run(1, PUT_RIGHT[name])
    sw.save(first, tmp_path / "step")
    second = run(2, PUT_RIGHT[name])
    report = sw.restore(second, tmp_path / "step")
    assert (report.exact, report.differences, report.skipped) == (True, (), ())
    assert all(map(torch.equal, bits(first), bits(second)))
    assert len(second.optimizer.param_groups) == 1  # type: ignore[union-attr]


def aliased(meddler: Meddler, model: Any) -> None:
    model.weight.data.copy_(meddler.shadow)
    meddler.shadow = model.weight.detach()


NAMED: dict[str, tuple[Callable[[Meddler, Any], object], str]] = {
    "state in place": (
        lambda m, model: m.optimizer.state[model.weight]["exp_avg"].add_(1),
        "optimizer: state[0].exp_avg was changed when another object was restored",
    ),
    "another parameter": (
        lambda m, model: setattr(model, "weight", nn.Parameter(m.shadow.clone())),
        "model: weight was replaced with a different tensor when another object was restored",
    ),
    "itself, by what was put right": (
        aliased,
        "extra.meddler: the object that received it returned a different state than the stored one ('shadow')",
    ),
    "a scheduler that has its state": (
        lambda m, model: setattr(m.state.scheduler, "gamma", 0.7),
        "scheduler: the object that received it returned a different state than the stored one ('gamma')",
    ),
    "what the model says": (
        lambda m, model: setattr(model, "calls", 99),
        "model: calls, which the object saved itself, was not accepted by its load_state_dict",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_can_not_be_put_right_is_named(tmp_path: Path, name: str) -> None:
    does, line = NAMED[name]
    sw.save(run(1, does), tmp_path / "step")
    report = sw.restore(run(2, does), tmp_path / "step")
    assert not report.exact
    assert any(found.startswith(line) for found in (*report.differences, *report.skipped)), report


class Around:
    """Like Accelerate's wrapper; what else it does is unknown."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)


class OwnSchedule(StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            group["lr"] = 3.0


def test_a_scheduler_of_ones_own_is_watched(tmp_path: Path) -> None:
    def state(rate: float) -> sw.TrainState:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return sw.TrainState(model=model, optimizer=optimizer, scheduler=OwnSchedule(optimizer, 3))

    sw.save(state(0.5), tmp_path / "step")
    second = state(0.25)
    assert sw.restore(second, tmp_path / "step").exact
    assert second.optimizer.param_groups[0]["lr"] == 0.5  # type: ignore[union-attr]


def test_objects_of_torch_are_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = [StepLR(optimizer, 3), LambdaLR(optimizer, lambda epoch: 1.0)]
    scheduler = SequentialLR(optimizer, schedulers, [2])  # type: ignore[arg-type]
    assert not reaches_others(scheduler)
    assert reaches_others(SequentialLR(optimizer, [schedulers[0], OwnSchedule(optimizer, 3)], [2]))
    assert reaches_others({"a": scheduler, "b": model})
    assert not reaches_others(AcceleratedScheduler(scheduler, optimizer))
    assert reaches_others(Around(scheduler))
    schedulers[0].whole = scheduler  # type: ignore[attr-defined]  # one that knows the one that it is in
    assert not reaches_others(scheduler)
    assert class_text(scheduler) == "SequentialLR(StepLR, LambdaLR)"
    del schedulers[0].whole  # type: ignore[attr-defined]

    def watched(*_: Any) -> Any:
        raise AssertionError("every tensor was read for nothing")

    monkeypatch.setattr(restoring, "Watched", watched)
    scaler = torch.amp.GradScaler("cpu")
    state = sw.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra={"n": 3}
    )
    sw.save(state, tmp_path / "step")
    assert sw.restore(state, tmp_path / "step").exact
