"""What documents hold is compared bit for bit and by path, and with what the objects say after they took it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.checkpoint.own import OwnState
from shardwise.checkpoint.receivers import receivers_of, restore_documents
from shardwise.checkpoint.stored import StoredCheckpoint
from shardwise.cli.program import rows_of
from shardwise.errors import StateError
from shardwise.format.manifest import read_manifest
from shardwise.ranks.ranks import Ranks
from shardwise.state.beyond import differing_leaves, same, split_storable
from shardwise.state.typed_json import Places
from shardwise.tensors.live import describe
from tests.harness.holder import Holder


def test_same_compares_bits() -> None:
    zeros: list[tuple[Any, Any]] = [
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (np.float32(0.0), np.float32(-0.0)),
        ([{"a": 0.0}], [{"a": -0.0}]),
    ]
    for positive, negative in zeros:
        assert same(positive, positive)
        assert not same(positive, negative)
    assert same(float("nan"), float("nan"))


def test_paths_that_read_alike_are_two() -> None:
    one, two = ("a.b",), ("a", "b")
    assert list(differing_leaves([(one, 7), (two, 8)], [(one, 7), (two, 8)], (), "model")) == []
    (line,) = differing_leaves([(one, 9), (two, 8)], [(one, 7), (two, 8)], (), "model")
    assert "was not accepted" in line
    lost = split_storable([(one, object()), (two, object())], "model").not_stored
    assert len(lost) == 2
    only = split_storable([(one, object())], "model").not_stored
    assert len(list(differing_leaves([(two, 9)], [(two, 8)], only, "model"))) == 1


def cycles() -> list[Any]:
    mapping: dict[str, Any] = {"n": 1}
    mapping["self"] = mapping
    items: list[Any] = [1]
    items.append(items)
    return [mapping, items]


@pytest.mark.parametrize("held", cycles(), ids=("dict", "list"))
def test_a_cycle_is_named(tmp_path: Path, held: Any) -> None:
    saved = sw.save(sw.TrainState(model=Holder(held)), tmp_path / "c")
    (line,) = saved.skipped
    assert line.startswith("model: held")
    assert "contains itself" in line
    report = sw.restore(sw.TrainState(model=Holder(held)), tmp_path / "c")
    assert not report.exact
    assert line in report.differences


class Forgets:
    """An extra whose ``load_state_dict`` drops a field."""

    def __init__(self, step: int, best: float) -> None:
        self.step, self.best = step, best

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Remembers(Forgets):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best = state.pop("step"), state.pop("best")  # what it is given is its own


class Scheduler(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "gamma"})


class Extra(nn.Linear):
    def __init__(self, held: int) -> None:
        super().__init__(2, 2)
        self.held = held

    def get_extra_state(self) -> Any:
        return {"held": self.held, "tensor": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.held = state["held"]


class Ignores(Extra):
    def set_extra_state(self, state: Any) -> None:
        pass


class Zeroes(Extra):
    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        with torch.no_grad():
            self.weight.zero_()


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (Extra, ()),
        (
            Ignores,
            (
                "modules['']: the object that received it returned a different state than the stored one ('held')",
            ),
        ),
        (Zeroes, ()),  # the weight is filled again
    ],
)
def test_extra_state_is_asked_for_again(tmp_path: Path, kind: type[Extra], lines: tuple[str, ...]) -> None:
    first, second = kind(3), kind(4)
    sw.save(sw.TrainState(model=first), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=second), tmp_path / "c")
    assert (report.exact, report.skipped) == (not lines, lines)
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (Remembers, ()),
        (
            Forgets,
            (
                "extra.meter: the object that received it returned a different state than the stored one ('best')",
            ),
        ),
    ],
)
def test_an_extra_is_asked_again(tmp_path: Path, kind: type[Forgets], lines: tuple[str, ...]) -> None:
    sw.save(sw.TrainState(model=nn.Linear(2, 2), extra={"meter": kind(3, 0.5)}), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=nn.Linear(2, 2), extra={"meter": kind(0, 0.0)}), tmp_path / "c")
    assert (report.exact, report.skipped) == (not lines, lines)


def test_a_scheduler_is_asked_again(tmp_path: Path) -> None:
    def state(gamma: float) -> sw.TrainState:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sw.TrainState(
            model=model, optimizer=optimizer, scheduler=Scheduler(optimizer, step_size=2, gamma=gamma)
        )

    sw.save(state(0.5), tmp_path / "c")
    report = sw.restore(state(0.25), tmp_path / "c")
    assert not report.exact
    (line,) = report.skipped
    assert (
        line
        == "scheduler: the object that received it returned a different state than the stored one ('gamma')"
    )
    assert sw.restore(state(0.5), tmp_path / "c").exact


def rewritten(path: Path, change: Any) -> None:
    """The checkpoint with ``state.json`` as ``change`` makes it from its text."""
    file, manifest = path / "state.json", path / "manifest.json"
    text = change(file.read_text()).encode()
    file.write_bytes(text)
    found = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "xxh3"}
    found["files"]["state.json"] = {
        "nbytes": len(text), "header_bytes": len(text), "header_xxh3": xxhash.xxh3_64_hexdigest(text)
    }  # fmt: skip
    whole = json.dumps(found, separators=(",", ":"), sort_keys=True).encode()
    manifest.write_text(json.dumps(found | {"xxh3": xxhash.xxh3_64_hexdigest(whole)}))


class Wrapper(torch.optim.SGD):
    def __init__(self, model: nn.Module, held: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": self.held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = state_dict["held"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "held"})


def test_tensors_of_own_documents_go_to_their_device(tmp_path: Path) -> None:
    def state(value: float) -> sw.TrainState:
        model = Holder([torch.full((2,), value)])
        return sw.TrainState(model=model, optimizer=Wrapper(model, torch.full((3,), value)))

    sw.save(state(1), tmp_path / "c")
    assert sw.restore(state(2), tmp_path / "c").exact
    text = (tmp_path / "c" / "state.json").read_text()
    assert text.count('"cpu"') == 2
    rewritten(tmp_path / "c", lambda text: text.replace('"cpu"', '"xla"'))
    second = state(3)
    report = sw.restore(second, tmp_path / "c")
    assert not report.exact
    lines = [line for line in report.differences if "a tensor on xla when saved, on cpu now" in line]
    assert len(lines) == 2
    assert any(line.startswith("own") for line in lines)
    assert any(line.startswith("optimizer.own") for line in lines)
    assert torch.equal(second.models["model"].held[0], torch.ones(2))


def test_what_each_rank_saved_by_itself_is_named_at_another_world_size(tmp_path: Path) -> None:
    state = sw.TrainState(model=Holder(3))
    sw.save(state, tmp_path / "c")
    manifest = replace(read_manifest(tmp_path / "c"), local_documents=("own",), world_size=8)
    own = OwnState({}, manifest, Places())
    lives = {name: describe(model) for name, model in state.models.items()}
    own.give_to_models(lives, Ranks())
    assert not own.differences, "it is not said that the checkpoint lacks it"
    _, left = restore_documents([], state, lives, {}, manifest)
    assert left == ("own: stored per rank, but this run has a different number of ranks",)


def test_a_position_of_other_ranks_names_the_sampler_that_fits_any_number(tmp_path: Path) -> None:
    """Of a run on 8 ranks; this one has 1."""
    state = sw.TrainState(model=Holder(3), dataloader=sw.ResumableLoader(DataLoader(range(8))))
    sw.save(state, tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    manifest = replace(manifest, local_documents=("dataloader",), world_size=8)
    stored = StoredCheckpoint(str(tmp_path / "c"), manifest, {}, Places(), manifest)
    (receiver,) = (one for one in receivers_of(state, {}, stored) if one.name == "dataloader")
    with pytest.raises(
        StateError, match=r"was stored per rank by 8 ranks.*Launch on 8 ranks.*sw\.ElasticSampler"
    ) as raised:
        receiver.missing()
    assert rows_of(str(raised.value)), "shardwise explain finds its row"


def function() -> None:
    pass


def test_functions_are_named_when_a_run_resumes(tmp_path: Path) -> None:
    def state() -> sw.TrainState:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sw.TrainState(
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        )

    saved = sw.save(state(), tmp_path / "scheduler")
    report = sw.restore(state(), tmp_path / "scheduler")
    assert (report.exact, report.functions) == (True, saved.skipped)
    assert report.functions == ("scheduler.lr_lambdas[0]",)

    first, second = state(), state()
    first.optimizers["optimizer"].param_groups[0]["odd"] = function
    first.extra["more"] = {"f": function}
    saved = sw.save(first, tmp_path / "plain")
    second.extra["more"] = {}
    report = sw.restore(second, tmp_path / "plain")
    assert not report.exact
    assert [line.partition(":")[0] for line in report.differences] == [
        path for path in saved.skipped if not path.startswith("scheduler")
    ]
    assert len(report.differences) == 2
