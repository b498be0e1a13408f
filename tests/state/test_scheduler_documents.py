"""A scheduler's document that lost something is damage, or makes the resume say so: schedulers in others, and wrapped ones, too."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import lr_scheduler as lr
from transformers import get_scheduler

import shardwise as sw
from shardwise.errors import FormatError, StateError
from tests.harness.hostile import edit_documents

Make = Callable[[torch.optim.Optimizer, int], Any]


class Decay:
    """A callable object, whose attributes are stored."""

    def __init__(self, rate: int) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return 1 / (1 + self.rate * epoch)


class Counted:
    """A wrapper with a counter of its own beside the state of its scheduler."""

    def __init__(self, inner: Any, count: int) -> None:
        self.inner, self.count = inner, count

    def step(self) -> None:
        self.count += 1
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.inner.load_state_dict(state["inner"])


def step_lr(optimizer: Any, other: int) -> Any:
    return lr.StepLR(optimizer, 3 + other, gamma=0.5 + other / 10)


def sequence(optimizer: Any, other: int) -> Any:
    return lr.SequentialLR(
        optimizer, [lr.ConstantLR(optimizer, 0.5 / (1 + other)), step_lr(optimizer, other)], [2 + other]
    )


#: The second argument is 1 in the run that resumes: what is lost keeps another value then.
KINDS: dict[str, Make] = {
    "StepLR": step_lr,
    "MultiStepLR": lambda o, k: lr.MultiStepLR(o, [2 + k, 5], gamma=0.5 + k / 10),
    "OneCycleLR": lambda o, k: lr.OneCycleLR(o, 0.1 + k, 30 + k),
    "CyclicLR": lambda o, k: lr.CyclicLR(o, 0.1 + k, 2.2 + k),
    "ReduceLROnPlateau": lambda o, k: lr.ReduceLROnPlateau(o, factor=0.1 + k / 10, patience=2 + k),
    "LambdaLR": lambda o, k: lr.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LambdaLR of an object": lambda o, k: lr.LambdaLR(o, Decay(2 + k)),
    "MultiplicativeLR": lambda o, k: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    "SequentialLR": sequence,
    "ChainedScheduler": lambda o, k: lr.ChainedScheduler([lr.ConstantLR(o, 0.5 / (1 + k)), step_lr(o, k)]),
    "SequentialLR in another": lambda o, k: lr.SequentialLR(
        o, [sequence(o, k), lr.ExponentialLR(o, 0.5 + k / 10)], [4]
    ),
    "transformers, cosine": lambda o, k: get_scheduler("cosine", o, 2 + k, 20 + k),
    "transformers, linear": lambda o, k: get_scheduler("linear", o, 2 + k, 20 + k),
    "Accelerate, StepLR": lambda o, k: AcceleratedScheduler(step_lr(o, k), o),
    "Accelerate, SequentialLR": lambda o, k: AcceleratedScheduler(sequence(o, k), o),
    "Accelerate, transformers": lambda o, k: AcceleratedScheduler(
        get_scheduler("cosine", o, 2 + k, 20 + k), o
    ),
    "wrapped": lambda o, k: Counted(step_lr(o, k), k),
}


def run(make: Make, other: int = 0, steps: int = 0) -> sw.TrainState:
    PartialState(cpu=True)
    torch.manual_seed(other)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + other), momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's SequentialLR calls steps that torch warns of
        scheduler = make(optimizer, other)
        plain = getattr(scheduler, "scheduler", scheduler)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            plain.step(*([1.0] if isinstance(plain, lr.ReduceLROnPlateau) else []))
    return sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all keys of mappings in a state."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield (*path, key)
            yield from paths(one, (*path, key))
    elif isinstance(value, list):
        for k, one in enumerate(value):
            yield from paths(one, (*path, k))


def without(document: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        document = document[key]
    del document[path[-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_documents_are_exact(tmp_path: Path, kind: str) -> None:
    sw.save(run(KINDS[kind], steps=4), tmp_path / "step")
    report = sw.restore(run(KINDS[kind], other=1), tmp_path / "step")
    assert report.skipped == ()
    if "transformers" in kind:  # its function is a partial with other numbers, which no document has
        assert not report.exact
        assert all("num_" in line and "when saved" in line for line in report.differences)
    else:
        assert (report.exact, report.differences) == (True, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_key_is_damage_or_named(tmp_path: Path, kind: str) -> None:
    saved = run(KINDS[kind], steps=4)
    sw.save(saved, tmp_path / "step")
    whole = json.loads((tmp_path / "step" / "state.json").read_text())
    document = saved.scheduler.state_dict()
    seen = 0
    for path in paths(document):
        if "milestones" in path[:-1]:
            continue  # a Counter, in which each number may be or not
        live = run(KINDS[kind], other=1)
        before = live.model.weight.clone()  # type: ignore[union-attr]
        edit_documents(tmp_path / "step", lambda documents, path=path: without(documents["scheduler"], path))
        try:
            report = sw.restore(live, tmp_path / "step")
        except (FormatError, StateError):
            its_own = kind == "wrapped" and len(path) == 1  # which only the wrapper knows to be needed
            assert its_own or torch.equal(live.model.weight, before), path  # type: ignore[union-attr, arg-type]
        else:
            assert not report.exact, path
            assert any(str(path[-1]) in line for line in report.skipped), (path, report.skipped)
        edit_documents(tmp_path / "step", lambda documents: documents.update(whole))
        seen += 1
    assert seen >= 6


def test_wrapped_schedulers_are_checked_before_anything_changes(tmp_path: Path) -> None:
    for name in ("Accelerate, SequentialLR", "wrapped"):
        place: tuple[Any, ...] = ("inner",) if name == "wrapped" else ("_schedulers", 1)
        sw.save(run(KINDS[name], steps=2), tmp_path / name)

        def hide(documents: dict[str, Any], place: tuple[Any, ...] = place) -> None:
            inner = documents["scheduler"]
            for key in place:
                inner = inner[key]
            inner["step"] = 5

        edit_documents(tmp_path / name, hide)
        live = run(KINDS[name], other=1)
        before = live.model.weight.clone()  # type: ignore[union-attr]
        with pytest.raises(FormatError, match="'step' is not part of the state of a StepLR"):
            sw.restore(live, tmp_path / name)
        assert torch.equal(live.model.weight, before)  # type: ignore[union-attr, arg-type]


def chained(*kinds: Any) -> Make:
    return lambda optimizer, other: lr.ChainedScheduler([kind(optimizer) for kind in kinds])


def test_schedulers_in_one_are_of_the_saved_classes(tmp_path: Path) -> None:
    exponential, stairs = (lambda o: lr.ExponentialLR(o, 0.5)), (lambda o: lr.StepLR(o, 2, 0.5))
    sw.save(run(chained(exponential, stairs), steps=2), tmp_path / "step")
    live = run(chained(stairs, stairs), other=1)
    with pytest.raises(
        StateError, match=r"ChainedScheduler\(ExponentialLR, StepLR\), but this run has a Chained"
    ):
        sw.restore(live, tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["classes"].update(scheduler="ChainedScheduler"))
    report = sw.restore(run(chained(exponential, stairs)), tmp_path / "step")
    assert report.skipped == (
        "scheduler: the checkpoint does not record the classes of the schedulers in it",
    )
    many = chained(*[exponential] * 40)
    sw.save(run(many, steps=2), tmp_path / "many")
    assert sw.restore(run(many), tmp_path / "many").exact


def test_lists_by_group_are_of_this_runs_length(tmp_path: Path) -> None:
    sw.save(run(step_lr, steps=2), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["scheduler"]["base_lrs"].append(0.1))
    with pytest.raises(StateError, match=r"scheduler.base_lrs: was saved for 2 groups, this run has 1"):
        sw.restore(run(step_lr, other=1), tmp_path / "step")


def test_schedulers_among_extras(tmp_path: Path) -> None:
    def state(make: Make) -> sw.TrainState:
        found = run(make, steps=2)
        found.extra["warmup"], found.scheduler = found.scheduler, None
        return found

    sw.save(state(step_lr), tmp_path / "step")
    assert sw.restore(state(step_lr), tmp_path / "step").exact
    with pytest.raises(
        StateError, match=r"extra.warmup: the checkpoint contains the state of a StepLR, but this run has"
    ):
        sw.restore(state(lambda optimizer, _: lr.ExponentialLR(optimizer, 0.5)), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["extra.warmup"].update(step=5))
    with pytest.raises(FormatError, match="'step' is not part of the state of a StepLR"):
        sw.restore(state(step_lr), tmp_path / "step")
