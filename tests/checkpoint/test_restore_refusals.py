"""What a checkpoint does not fit is named before, or where, it is applied; and what a report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

import shardwise as sw
from shardwise.errors import StateError
from tests.harness.hostile import edit_documents


class Strict:
    """Takes the state of its own kind only, and says so in its own words."""

    def __init__(self, key: str) -> None:
        self.key = key

    def state_dict(self) -> dict[str, int]:
        return {self.key: 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        _ = state[self.key]


def run(**more: Any) -> sw.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), **more)


def scheduled(kind: type[LRScheduler], argument: int) -> sw.TrainState:
    state = run()
    state.scheduler = kind(state.optimizer, argument)  # type: ignore[arg-type, call-arg]
    return state


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    sw.save(scheduled(StepLR, 3), tmp_path / "step")
    assert sw.restore(scheduled(StepLR, 5), tmp_path / "step").exact
    other = scheduled(CosineAnnealingLR, 5)
    before = sw.digest(other.model)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"scheduler: .*a StepLR, but this run has a CosineAnnealingLR"):
        sw.restore(other, tmp_path / "step")
    assert sw.digest(other.model) == before, "refused before anything is changed"  # type: ignore[arg-type]


def test_schedulers_by_name(tmp_path: Path) -> None:
    state = scheduled(StepLR, 3)
    state.scheduler = {"a": state.scheduler}
    sw.save(state, tmp_path / "step")
    other = scheduled(CosineAnnealingLR, 3)
    other.scheduler = {"a": other.scheduler}
    with pytest.raises(StateError, match=r"scheduler\.a: "):
        sw.restore(other, tmp_path / "step")


def scaled(*, enabled: bool = True) -> sw.TrainState:
    return run(scaler=torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled))


def test_a_scaler_that_is_disabled_now_is_reported(tmp_path: Path) -> None:
    sw.save(scaled(), tmp_path / "step")
    report = sw.restore(scaled(enabled=False), tmp_path / "step")
    assert not report.exact
    assert report.skipped == ("scaler: it is disabled in this run",)
    sw.save(scaled(enabled=False), tmp_path / "off")
    assert sw.restore(scaled(enabled=False), tmp_path / "off").exact
    with pytest.raises(
        StateError, match=r"scaler: the checkpoint contains the state of a disabled GradScaler"
    ):
        sw.restore(scaled(), tmp_path / "off")


def test_a_scaler_in_the_middle_of_a_step_is_refused(tmp_path: Path) -> None:
    state = scaled()
    scaler, optimizer = state.scaler, state.optimizer
    scaler.scale(state.model(torch.ones(1, 3)).sum()).backward()  # type: ignore[operator]
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match="can't save between unscale_ and step"):
        sw.save(state, tmp_path / "step")
    scaler.step(optimizer)
    with pytest.raises(StateError, match="between step and update"):
        sw.save(state, tmp_path / "step")
    scaler.update()
    sw.save(state, tmp_path / "step")


def test_errors_of_objects_name_them(tmp_path: Path) -> None:
    sw.save(run(extra={"mine": Strict("x")}), tmp_path / "step")
    with pytest.raises(StateError, match=r"extra\.mine: Strict\.load_state_dict .*KeyError: 'y'"):
        sw.restore(run(extra={"mine": Strict("y")}), tmp_path / "step")


def shared() -> sw.TrainState:
    """Two optimizers over the same parameters, of which only the first has stepped."""
    state = run()
    second = torch.optim.SGD(state.model.parameters(), lr=0.1)  # type: ignore[union-attr]
    return sw.TrainState(model=state.model, optimizer={"a": state.optimizer, "b": second})  # type: ignore[dict-item]


def test_optimizers_that_share_parameters_share_gradients(tmp_path: Path) -> None:
    first, second = shared(), shared()
    first.model(torch.ones(1, 3)).sum().backward()  # type: ignore[operator]
    first.optimizer["b"].step()  # type: ignore[index]
    assert sw.save(first, tmp_path / "step").gradients == 2, "they wait for a's step"
    assert sw.restore(second, tmp_path / "step").gradients == 2
    for parameter, other in zip(first.model.parameters(), second.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "x"}, r"model: expected a torch.*Module, or several by name, got a str"),
        ({"model": {"a": 1}}, r"model: .* got a int \('a'\)"),
        ({"model": nn.Linear(1, 1), "optimizer": "x"}, "optimizer: expected a .*Optimizer, .* got a str"),
    ],
)
def test_what_is_no_model_or_optimizer(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(StateError, match=expected):
        sw.TrainState(**given)


@pytest.mark.parametrize("step", [None, -1, 1.5, "a"])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    state = sw.TrainState(model=nn.Linear(2, 2))
    with sw.Checkpointer(tmp_path / "run") as checkpoints, pytest.raises(StateError, match="an integer"):
        checkpoints.save(state, step)
    with pytest.raises(StateError, match="an integer"):
        sw.save(state, tmp_path / "one", step=step)
    assert not (tmp_path / "one").exists()


def grouped(*sizes: int, rate: Any = 0.1, seed: int = 0) -> sw.TrainState:
    """An optimizer over the parameters of a layer, in groups of these sizes."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    parameters = list(model.parameters())
    groups = [{"params": [parameters.pop(0) for _ in range(size)]} for size in sizes]
    optimizer = torch.optim.AdamW(groups, lr=rate, foreach=False)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return sw.TrainState(model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("live", "says"),
    [
        (
            lambda: grouped(1, 1, seed=1),
            "has 2 parameter groups, the checkpoint 1 parameter group: 1 parameter .bias. is in other groups: bias in group 1, in "
            "the checkpoint in group 0",
        ),
        (lambda: grouped(1, seed=1), r"1 parameter \(bias\) is only in the checkpoint's"),
        (
            lambda: grouped(2, rate=torch.full((1,), 0.1), seed=1),
            "'lr' of the optimizer is a tensor of shape",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused_before_anything_changes(
    tmp_path: Path, live: Any, says: str
) -> None:
    sw.save(grouped(2, rate=torch.tensor(0.1)), tmp_path / "step")
    state = live()
    before = [p.detach().clone() for p in state.model.parameters()]
    told = repr(state.optimizer.state_dict())
    with pytest.raises(StateError, match=says):
        sw.restore(state, tmp_path / "step")
    assert all(map(torch.equal, state.model.parameters(), before))
    assert repr(state.optimizer.state_dict()) == told


def unfrozen(*layers: int) -> sw.TrainState:
    """A model of three layers, and an optimizer with a group for each of these."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(model[k].parameters())} for k in layers]
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(groups))


@pytest.mark.parametrize(
    ("saved", "live", "says"),
    [
        (
            (1, 0),
            (1,),
            r"has 1 parameter group, the checkpoint 2 parameter groups: 2 parameters \(0.weight, 0.bias\) are only in the "
            "checkpoint's. Give this optimizer the same groups before the resume",
        ),
        (
            (1,),
            (1, 0),
            r"has 2 parameter groups, the checkpoint 1 parameter group: 2 parameters \(0.weight, 0.bias\) are only in this "
            "optimizer's. Resume with the parameters of the saved run, and add the others after the resume",
        ),
        (
            (0, 1),
            (1, 2),
            r"\(2.weight, 2.bias\) are only in this .*\(0.weight, 0.bias\) are only in the checkpoint's",
        ),
        (
            (0, 1),
            (1, 0),
            "has 2 parameter groups, the checkpoint 2 parameter groups: the same in another order",
        ),
    ],
)
def test_groups_that_differ_are_named_as_they_are(
    tmp_path: Path, saved: tuple[int, ...], live: tuple[int, ...], says: str
) -> None:
    sw.save(unfrozen(*saved), tmp_path / "step")
    with pytest.raises(StateError, match=says) as error:
        sw.restore(unfrozen(*live), tmp_path / "step")
    shared = {f"{k}.{kind}" for k in {*saved} & {*live} for kind in ("weight", "bias")}
    assert not any(name in str(error.value) for name in shared), "what both have is no difference"


def test_parameters_can_be_added_after_the_resume(tmp_path: Path) -> None:
    """As the error advises."""
    sw.save(unfrozen(1), tmp_path / "step")
    state = unfrozen(1)
    assert sw.restore(state, tmp_path / "step").exact
    state.optimizer.add_param_group({"params": list(state.model[0].parameters())})  # type: ignore[union-attr, index]
    sw.save(state, tmp_path / "next")
    assert sw.restore(unfrozen(1, 0), tmp_path / "next").exact


def test_state_of_a_parameter_that_is_not_optimized_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    sw.save(grouped(2), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda d: d["optimizer"]["groups"][0]["names"].remove("bias"))
    state = grouped(1, seed=1)
    before = state.model.weight.detach().clone()  # type: ignore[union-attr, operator]
    with pytest.raises(
        StateError, match="optimizer state of 1 parameters that this optimizer does not optimize: bias"
    ):
        sw.restore(state, tmp_path / "step")
    assert torch.equal(state.model.weight, before)  # type: ignore[union-attr, arg-type]


def test_another_models_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def two(order: tuple[str, str]) -> sw.TrainState:
        models = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
        optimizers = {
            n: torch.optim.SGD(models[m].parameters(), 0.1) for n, m in zip("xy", order, strict=True)
        }
        return sw.TrainState(model=models, optimizer=optimizers)

    sw.save(two(("a", "b")), tmp_path / "step")
    state = two(("b", "a"))
    before = state.models["a"].weight.detach().clone()  # type: ignore[operator]
    with pytest.raises(
        StateError, match="optimizer 'x' trained the model 'a' when it was saved, and 'b' now"
    ):
        sw.restore(state, tmp_path / "step")
    assert torch.equal(state.models["a"].weight, before)  # type: ignore[arg-type]
