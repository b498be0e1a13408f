"""States that torch would take without a word, and fail on in the next step, are damage before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

import shardwise as sw
from shardwise.errors import FormatError, StateError
from tests.harness.hostile import edit_documents

Change = Callable[[dict[str, Any]], object]
KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr.StepLR(o, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5]),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 10),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.1, 0.2),
    "Plateau": lambda o: lr.ReduceLROnPlateau(o),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "WarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.StepLR(o, 3)], [2]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.StepLR(o, 3)]),
}


def run(kind: str = "StepLR", steps: int = 0) -> sw.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = KINDS[kind](optimizer)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([1.0] if kind == "Plateau" else []))
    scaler = torch.amp.GradScaler("cpu")
    return sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)


def all_of(state: sw.TrainState) -> str:
    return repr(
        (
            list(state.model.parameters()),
            state.optimizer.state_dict(),
            state.scheduler.state_dict(),
            state.scaler.state_dict(),
        )
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_scheduler_saved_fits_a_new_one(tmp_path: Path, kind: str) -> None:
    before = run(kind, steps=4)
    before.scheduler.mine = "an attribute of the program's own"
    sw.save(before, tmp_path / "step")
    live = run(kind)
    sw.restore(live, tmp_path / "step")
    assert repr(live.scheduler.state_dict()) == repr(before.scheduler.state_dict())


def of(name: str, **changes: Any) -> Change:
    return lambda documents: documents[name].update(changes)


def option(**changes: Any) -> Change:
    return lambda documents: documents["optimizer"]["groups"][0]["options"].update(changes)


MALFORMED: dict[str, Change] = {
    "a method": of("scheduler", step=5),
    "the optimizer": of("scheduler", optimizer=None),
    "an epoch of text": of("scheduler", last_epoch="x"),
    "an epoch of nothing": of("scheduler", last_epoch=None),
    "rates no list": of("scheduler", base_lrs=0.1),
    "rates of text": of("scheduler", base_lrs=["x"]),
    "a scheduler of nothing": lambda d: d.update(scheduler={}),
    "a scaler without scale": lambda d: d["scaler"].pop("scale"),
    "a scale of text": of("scaler", scale="x"),
    "a tracker of a list": of("scaler", _growth_tracker=[1]),
    "no groups": lambda d: d["optimizer"].update(groups=[]),
    "a rate of text": option(lr="x"),
    "a rate of nothing": option(lr=None),
    "a first rate of text": option(initial_lr="x"),
    "a momentum of a list": option(momentum=[0.9]),
    "a switch of text": option(nesterov="no"),
    "a momentum buffer of a number": lambda d: d["optimizer"].update(
        values={"weight": {"momentum_buffer": 1}}
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_the_next_step_would_fail_on_is_damage(tmp_path: Path, name: str) -> None:
    sw.save(run(steps=1), tmp_path / "step")
    edit_documents(tmp_path / "step", MALFORMED[name])
    live = run()
    before = all_of(live)
    with pytest.raises(FormatError):
        sw.restore(live, tmp_path / "step")
    assert all_of(live) == before


def test_milestones_of_nothing(tmp_path: Path) -> None:
    sw.save(run("MultiStepLR", steps=1), tmp_path / "step")
    edit_documents(tmp_path / "step", of("scheduler", milestones=None))
    with pytest.raises(FormatError, match=r"scheduler\.milestones: expected a mapping"):
        sw.restore(run("MultiStepLR"), tmp_path / "step")


def test_schedulers_within_one(tmp_path: Path) -> None:
    sw.save(run("SequentialLR", steps=1), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["scheduler"]["_schedulers"][1].update(step=5))
    with pytest.raises(
        FormatError, match=r"scheduler\._schedulers\[1\]: 'step' is not part of the state of a StepLR"
    ):
        sw.restore(run("SequentialLR"), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["scheduler"]["_schedulers"].pop())
    with pytest.raises(StateError, match="was saved with 1 schedulers in it, this run has 2"):
        sw.restore(run("SequentialLR"), tmp_path / "step")


def test_settings_of_tuples_and_tensors_fit(tmp_path: Path) -> None:
    def adam(rate: Any) -> sw.TrainState:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        return sw.TrainState(model=model, optimizer=optimizer)

    sw.save(adam(0.5), tmp_path / "number")
    sw.save(adam(torch.tensor(0.5)), tmp_path / "tensor")
    for name in ("number", "tensor"):
        for live in (adam(0.1), adam(torch.tensor(0.1))):
            sw.restore(live, tmp_path / name)
            assert float(live.optimizer.param_groups[0]["lr"]) == 0.5  # type: ignore[union-attr]
    for betas in ("x", {"$type": "tuple", "items": ["a", "b"]}, {"$type": "tuple", "items": [0.9]}):
        edit_documents(tmp_path / "number", option(betas=betas))
        with pytest.raises(FormatError, match="betas"):
            sw.restore(adam(0.1), tmp_path / "number")
