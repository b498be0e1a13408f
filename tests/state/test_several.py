"""One object that is a mapping, and several objects by name, are told apart in the same way everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwise as sw
from shardwise.checkpoint.own import reaches_others
from shardwise.checkpoint.snapshot import classes_of
from shardwise.state.data import data_caveats
from shardwise.state.documents import check_state, functions_left_out


class Readable(dict[str, Any]):
    """A mapping that only gives its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.get("steps", 0)}


class Writable(dict[str, Any]):
    """A mapping that only takes a state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self["steps"] = state["steps"]


class Whole(Writable, Readable):
    """A schedule that keeps its settings as its items, and is one object."""


class Caveat:
    """A member that counts only where the mapping is several objects."""

    caveats = ("it is a member",)
    lr_lambdas = (lambda epoch: epoch,)


def training(scheduler: Any) -> sw.TrainState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler)


def test_a_mapping_with_a_state_is_saved_and_restored_as_one_object(tmp_path: Path) -> None:
    sw.save(training(Whole(steps=3, inner=Caveat())), tmp_path / "step")
    given = Whole(steps=0, inner=Caveat())
    sw.restore(training(given), tmp_path / "step")
    assert given["steps"] == 3


@pytest.mark.parametrize("kind", [Whole, Readable, Writable])
def test_a_mapping_with_a_method_of_state_is_one_object_everywhere(kind: type[Mapping[str, Any]]) -> None:
    one = kind(inner=Caveat())  # type: ignore[call-arg]
    assert not list(functions_left_out(one))
    assert data_caveats(one) == ()
    assert classes_of(training(one)) == {"scheduler": kind.__name__}
    assert reaches_others(kind())
    check_state(one, {"steps": 1}, "extra.one")


@pytest.mark.parametrize("kind", [Readable, Writable])
def test_half_a_state_is_refused(kind: type[Mapping[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(
        sw.errors.StateError, match=r"scheduler of type (Read|Writ)able has no state_dict and load_state_dict"
    ):
        sw.save(training(kind()), tmp_path / "step")


def test_a_plain_mapping_is_several_objects_everywhere() -> None:
    several = {"inner": Caveat()}
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert list(functions_left_out(several)) == ["scheduler.inner.lr_lambdas[0]"]
    assert data_caveats(several) == ("it is a member",)
    assert isinstance(classes_of(training(several))["scheduler"], dict)
    assert not reaches_others({"inner": StepLR(optimizer, 1)})
    with pytest.raises(sw.errors.StateError, match=r"contains no extra\.one"):
        check_state(several, {}, "extra.one")
