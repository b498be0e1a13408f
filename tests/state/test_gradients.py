"""Gradients that wait for a step are state; gradients that a step has used are not, however the loop clears them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.snapshot import take_snapshot
from shardwise.errors import IntegrityError, StateError
from shardwise.format.manifest import GRADIENT, read_manifest
from shardwise.state.optimizer import UNSEEN_GRADIENTS, has_unseen_gradients, waiting_gradients


class Net(nn.Module):
    """A weight, a bias, a scalar, and a frozen part that no optimizer holds but that gets gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.other = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.layer(x)) * self.scale)


TRAINED = ("layer.weight", "layer.bias", "scale")


def run(seed: int = 0) -> sw.TrainState:
    torch.manual_seed(seed)
    model = Net()
    return sw.TrainState(
        model=model, optimizer=torch.optim.AdamW([*model.layer.parameters(), model.scale], lr=0.1)
    )


def backward(state: sw.TrainState, value: float = 1.0) -> None:
    state.model(torch.full((2, 4), value)).square().sum().backward()  # type: ignore[operator]


def gradients(state: sw.TrainState) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in state.model.named_parameters()}  # type: ignore[union-attr]


def waiting(state: sw.TrainState) -> int:
    return sum(1 for _ in waiting_gradients(state.optimizer))  # type: ignore[arg-type]


def test_reading_a_state_registers_nothing() -> None:
    """Making it, a save and a restore do: also for an optimizer that was given later."""
    state = run()
    later = torch.optim.SGD(state.model.parameters())  # type: ignore[union-attr]
    hooks = later._optimizer_step_post_hooks
    state.optimizer = later
    assert state.optimizers == {"optimizer": later}
    assert not hooks
    for _ in range(2):
        state.watch()
    assert len(hooks) == 1
    state.optimizer = torch.optim.SGD(state.model.parameters())  # type: ignore[union-attr]
    take_snapshot(state, 1)
    assert len(state.optimizer._optimizer_step_post_hooks) == 1


def test_an_optimizer_that_takes_no_hooks() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state = {}

    model = Net()
    optimizer = Bare(model.parameters())
    state = sw.TrainState(model=model, optimizer=optimizer)
    backward(state)
    assert has_unseen_gradients(optimizer)
    assert not waiting(state)


def zero_first(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        backward(state)
        optimizer.step()


def zero_last(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        backward(state)
        optimizer.step()
        optimizer.zero_grad()


def clip_and_keep(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    backward(state)
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
    optimizer.step()


def accumulate(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    zero_last(state, optimizer)
    backward(state, 2.0)


def accumulate_onto_used(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    zero_first(state, optimizer)
    backward(state, 2.0)


def scaled_in_place(state: sw.TrainState, optimizer: torch.optim.Optimizer) -> None:
    zero_first(state, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(2)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (zero_first, 0),
        (zero_last, 0),
        (clip_and_keep, 0),
        (accumulate, 3),
        (accumulate_onto_used, 3),
        (scaled_in_place, 3),
    ],
)
def test_waiting_gradients_are_stored_and_come_back(
    tmp_path: Path, loop: Callable[[sw.TrainState, torch.optim.Optimizer], None], expected: int
) -> None:
    first = run()
    assert isinstance(first.optimizer, torch.optim.Optimizer)
    loop(first, first.optimizer)
    report = sw.save(first, tmp_path / "step")
    assert report.gradients == expected
    assert report.to_json()["gradients"] == expected
    states = read_manifest(str(tmp_path / "step")).models["model"]
    stored = {n for n, t in states.items() if GRADIENT in t.states.get("optimizer", {})}
    assert stored == (set(TRAINED) if expected else set())

    second = run(seed=1)
    backward(second, 5.0)  # gradients of its own, which must not shine through
    strange = second.model.other.weight.grad.clone()  # type: ignore[union-attr]
    resumed = sw.restore(second, tmp_path / "step")
    assert (resumed.gradients, resumed.exact) == (expected, True)
    found, saved = gradients(second), gradients(first)
    for name in TRAINED:
        if expected:
            assert torch.equal(found[name], saved[name]), name  # type: ignore[arg-type]
        else:
            assert found[name] is None
    assert torch.equal(found["other.weight"], strange), "no optimizer holds it"  # type: ignore[arg-type]
    assert waiting(second) == expected
    assert all(GRADIENT not in s for s in second.optimizer.state.values())  # type: ignore[union-attr]

    for state in (first, second):  # and on: the cycle is finished, or the next one done
        if not expected:
            state.optimizer.zero_grad()  # type: ignore[union-attr]
        backward(state, 3.0)
        state.optimizer.step()  # type: ignore[union-attr]
        assert waiting(state) == 0
    for name in TRAINED:
        a, b = first.model.get_parameter(name), second.model.get_parameter(name)  # type: ignore[union-attr]
        assert torch.equal(a, b), name


def test_new_gradients_at_the_address_of_used_ones_wait() -> None:
    """Freed gradients and their successors share addresses, and versions."""
    state = run()
    optimizer: Any = state.optimizer
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    reused, others = 0, []
    for tries in range(2_000):
        if reused > 20:
            break
        if tries % 7 == 0:
            others.append(torch.empty(1))  # or else freed memory could always be taken by another object
        backward(state)
        optimizer.step()
        used = {(id(p.grad), p.grad._version) for p in parameters}
        optimizer.zero_grad()
        backward(state)
        reused += len(used & {(id(p.grad), p.grad._version) for p in parameters})
        assert waiting(state) == 3
        optimizer.zero_grad()
    assert reused, "nothing was tried"


def test_gradients_of_unseen_steps_are_reported(tmp_path: Path) -> None:
    """Kept, they would be used twice by a loop that clears after saving; dropped, an accumulation would lose them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> None:
        model(torch.ones(2, 4)).sum().backward()

    def reports(name: str) -> tuple[sw.reports.SaveReport, sw.reports.ResumeReport]:
        fresh = Net()
        other = sw.TrainState(model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1))
        return sw.save(state, tmp_path / name), sw.restore(other, tmp_path / name)

    backward()
    optimizer.step()
    state = sw.TrainState(model=model, optimizer=optimizer)
    for name in ("as they were", "added to"):
        saved, resumed = reports(name)
        assert (saved.gradients, resumed.gradients, resumed.exact) == (0, 0, False)
        assert saved.skipped == (f"optimizer: {UNSEEN_GRADIENTS}",)
        assert resumed.skipped == (f"optimizer: not stored: {UNSEEN_GRADIENTS}",)
        backward()
    optimizer.step()
    saved, resumed = reports("seen")
    assert (saved.gradients, saved.skipped, resumed.exact) == (0, (), True)
    optimizer.zero_grad()
    backward()
    saved, resumed = reports("waiting")
    assert (saved.gradients, resumed.gradients, resumed.exact) == (5, 5, True)


def test_one_hook_an_optimizer_that_dies_with_it() -> None:
    state = run()
    optimizer = state.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    for _ in range(3):
        sw.TrainState(model=state.model, optimizer={"a": optimizer})
    assert len(optimizer._optimizer_step_post_hooks) == 1
    backward(state)
    optimizer.step()
    optimizer.zero_grad()
    alive = weakref.ref(optimizer)
    del state, optimizer
    gc.collect()
    assert alive() is None


def test_a_step_of_one_optimizer_is_not_a_step_of_the_other(tmp_path: Path) -> None:
    model = Net()
    optimizers = {
        "a": torch.optim.SGD(model.layer.parameters(), lr=0.1),
        "b": torch.optim.SGD(model.other.parameters(), lr=0.1),
    }
    state = sw.TrainState(model=model, optimizer=optimizers)
    backward(state)
    optimizers["a"].step()
    assert sw.save(state, tmp_path / "step").gradients == 2
    fresh_model = Net()
    fresh = sw.TrainState(
        model=fresh_model,
        optimizer={
            "a": torch.optim.SGD(fresh_model.layer.parameters(), lr=0.1),
            "b": torch.optim.SGD(fresh_model.other.parameters(), lr=0.1),
        },
    )
    assert sw.restore(fresh, tmp_path / "step").gradients == 2
    assert [n for n, g in gradients(fresh).items() if g is not None] == ["other.weight", "other.bias"]


def test_a_skipped_step_of_a_scaler_uses_nothing() -> None:
    state = run()
    optimizer: Any = state.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(state.model(torch.full((2, 4), float("inf"))).sum()).backward()  # type: ignore[operator]
    scaler.step(optimizer)
    assert waiting(state) == 3
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(state.model(torch.ones(2, 4)).sum()).backward()  # type: ignore[operator]
    scaler.step(optimizer)
    assert waiting(state) == 0


def low_precision(*, grad_dtype: torch.dtype | None) -> sw.TrainState:
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    model.weight.grad_dtype = grad_dtype
    return sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.needs("torch>=2.10", "knows no dtype of gradients of their own")
def test_gradients_keep_a_dtype_of_their_own(tmp_path: Path) -> None:
    first = low_precision(grad_dtype=torch.float32)
    gradient = torch.randn(2, 3)
    first.model.weight.grad = gradient  # type: ignore[union-attr]
    sw.save(first, tmp_path / "step")
    for allowed in (torch.float32, None):
        same = low_precision(grad_dtype=allowed)
        report = sw.restore(same, tmp_path / "step")
        assert report.exact
        assert torch.equal(same.model.weight.grad, gradient)  # type: ignore[union-attr, arg-type]
    other = low_precision(grad_dtype=torch.bfloat16)
    report = sw.restore(other, tmp_path / "step")
    assert not report.exact
    assert report.differences == ("gradient of weight: torch.float32 when saved, torch.bfloat16 now",)
    assert torch.equal(other.model.weight.grad, gradient.bfloat16())  # type: ignore[union-attr, arg-type]


def test_what_can_not_be_stored_is_named(tmp_path: Path) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    state = sw.TrainState(model=table, optimizer=torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StateError, match=r"gradient of weight .*sparse.*Save after the step"):
        sw.save(state, tmp_path / "step")
    state.optimizer.step()  # type: ignore[union-attr]
    assert sw.save(state, tmp_path / "step").gradients == 0

    own = run()
    optimizer: Any = own.optimizer
    backward(own)
    optimizer.state[own.model.scale][GRADIENT] = torch.zeros(())  # type: ignore[union-attr]
    with pytest.raises(StateError, match="'__grad__' of scale"):
        sw.save(own, tmp_path / "other")


def test_gradients_are_verified_like_every_tensor(tmp_path: Path) -> None:
    state = run()
    backward(state)
    sw.save(state, tmp_path / "step")
    assert sw.verify(tmp_path / "step").ok
    (path,) = (tmp_path / "step" / "optimizer").iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not sw.verify(tmp_path / "step").ok
    with pytest.raises(IntegrityError, match=GRADIENT):
        sw.restore(run(), tmp_path / "step")
