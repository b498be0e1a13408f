"""State that an object saves by itself: found, kept small, named where it can't be kept, and compared after a resume."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import shardwise as sw
from shardwise.errors import FormatError, ShardwiseError, StateError
from shardwise.state import beyond
from shardwise.state.beyond import leaves_beyond, path_text, same, with_leaves
from shardwise.state.typed_json import decode, encode
from tests.harness.holder import Holder

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


def resumed(held: Any, other: Any, path: Path) -> tuple[Any, sw.reports.SaveReport, sw.reports.ResumeReport]:
    saved = sw.save(sw.TrainState(model=Holder(held)), path)
    second = Holder(other)
    return second.held, saved, sw.restore(sw.TrainState(model=second), path)


with warnings.catch_warnings():  # torch 2.13 says that it will have no such tensors some day
    warnings.simplefilter("ignore")
    PER_CHANNEL = torch.quantize_per_channel(
        torch.randn(3, 2), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.quint8
    )
    PER_TENSOR = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)


@pytest.mark.parametrize(
    "held",
    [
        3,
        float("nan"),
        "text",
        {"a": [1, (2.5, None)], 7: torch.arange(3)},
        [torch.tensor([1.0, -0.0])],
        (PER_TENSOR, nn.Parameter(torch.ones(2))),
        PER_CHANNEL,
    ],
)
def test_plain_values_come_back(tmp_path: Path, held: Any) -> None:
    saved = sw.save(sw.TrainState(model=Holder(held)), tmp_path / "c")
    second = Holder(0)
    report = sw.restore(sw.TrainState(model=second), tmp_path / "c")
    assert saved.skipped == ()
    assert (report.exact, report.differences, report.documents) == (True, (), ("own",))
    found = decode(json.loads(json.dumps(encode(second.held).document)), encode(second.held).tensors)
    assert same(found, held) or isinstance(held, dict)
    if isinstance(held, dict):
        assert found["a"] == held["a"]
        assert torch.equal(found[7], held[7])


@pytest.mark.parametrize("held", [object(), len, {1: {2: object()}}, torch.eye(2).to_sparse()])
def test_what_no_document_holds_is_named_in_both_reports(tmp_path: Path, held: Any) -> None:
    _, saved, report = resumed(held, 5, tmp_path / "c")
    assert len(saved.skipped) == 1
    assert saved.skipped[0].startswith("model: held")
    assert not report.exact
    assert saved.skipped[0] in report.differences


def test_large_state_is_named_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beyond, "MAX_BEYOND_BYTES", 100)
    _, saved, report = resumed({"small": torch.ones(2), "large": torch.ones(40)}, {}, tmp_path / "c")
    (line,) = saved.skipped
    assert "held.large" in line
    assert "the limit is 100" in line
    assert line in report.differences


def test_a_checkpoint_from_before_there_were_such_documents(tmp_path: Path) -> None:
    sw.save(sw.TrainState(model=nn.Linear(2, 2)), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=Holder(3)), tmp_path / "c")
    assert not report.exact
    assert report.differences == (
        "model: held, which the object would save itself, is not in the checkpoint",
        "model: Linear when saved, Holder now",
    )


def test_an_object_that_does_not_take_it_now(tmp_path: Path) -> None:
    sw.save(sw.TrainState(model=Holder(3)), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=nn.Linear(2, 2)), tmp_path / "c")
    assert not report.exact
    assert "model: held, which the object saved itself, was not accepted" in report.differences[0]


class Fails(Holder):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            self.weight.fill_(7)
        raise KeyError("x")


def test_a_load_that_fails_is_a_difference_and_ruins_nothing(tmp_path: Path) -> None:
    first, second = Fails(1), Fails(2)
    sw.save(sw.TrainState(model=first), tmp_path / "c")
    report = sw.restore(sw.TrainState(model=second), tmp_path / "c")
    assert "its own load_state_dict failed (KeyError: 'x')" in report.differences[0]
    assert torch.equal(first.weight, second.weight), "filled again"


def test_a_model_without_state_of_its_own_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(nn.Module, "state_dict", asked)
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", asked)
    state = sw.TrainState(model=model, optimizer=optimizer)
    sw.save(state, tmp_path / "c")
    assert sw.restore(state, tmp_path / "c").exact


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("own", 3),
        ("own", [[1, 2]]),
        ("own", [{"$type": "tuple", "items": [{"$type": "tuple", "items": []}, 1]}]),
        ("not_stored", [1]),
        ("not_stored", {"own": {"a": 1}}),
    ],
)
def test_documents_of_another_shape_are_refused(tmp_path: Path, name: str, document: Any) -> None:
    sw.save(sw.TrainState(model=Holder(3)), tmp_path / "c")
    file, manifest = tmp_path / "c" / "state.json", tmp_path / "c" / "manifest.json"
    text = json.dumps({**json.loads(file.read_text()), name: document}).encode()
    file.write_bytes(text)
    found = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "xxh3"}
    found["files"]["state.json"] = {
        "nbytes": len(text), "header_bytes": len(text), "header_xxh3": xxhash.xxh3_64_hexdigest(text)
    }  # fmt: skip
    whole = json.dumps(found, separators=(",", ":"), sort_keys=True).encode()
    manifest.write_text(json.dumps(found | {"xxh3": xxhash.xxh3_64_hexdigest(whole)}))
    with pytest.raises(FormatError, match=f"document '{name}'"):
        sw.restore(sw.TrainState(model=Holder(3)), tmp_path / "c")


@pytest.mark.parametrize(
    "change", [{"dtype": "qint32"}, {"parts": []}, {"parts": [1, 2, 3, None]}, {"parts": 4}, {"axis": 9}]
)
def test_quantized_documents_of_another_shape_are_refused(change: dict[str, Any]) -> None:
    encoded = encode(PER_CHANNEL)
    document = {**encoded.document, **change}
    if "axis" in change:
        document["parts"] = [*document["parts"][:3], change["axis"]]
    with pytest.raises(ShardwiseError):
        decode(document, encoded.tensors)


def test_a_tensor_that_follows_from_a_stored_one_adds_nothing() -> None:
    weight = torch.randn(3)
    fine = weight.double() + 1e-12
    own = {"a": weight.bfloat16(), "b": weight.clone(), "c": fine, "d": weight, "e": {"f": weight}, "g": {}}
    plain = {"a": weight, "b": weight, "c": weight}
    assert [path for path, _ in leaves_beyond(own, plain, {id(weight)})] == [("c",)]


def test_paths_and_copies() -> None:
    own = {"state": {0: {"x": 1}}, "groups": [{"lr": 2}], "old": 3}
    made = with_leaves(own, [(("state", 0, "y"), 4), (("groups", 0, "lr"), 5), (("new", "z"), 6)], [("old",)])
    assert made == {"state": {0: {"x": 1, "y": 4}}, "groups": [{"lr": 5}], "new": {"z": 6}}
    assert own == {"state": {0: {"x": 1}}, "groups": [{"lr": 2}], "old": 3}
    assert path_text(("state", 0, "y")) == "state[0].y"


def test_unstorable_optimizer_state_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["odd"] = torch.eye(2).to_sparse()
    with pytest.raises(StateError, match=r"optimizer state weight\.odd: is a sparse_coo tensor"):
        sw.save(sw.TrainState(model=model, optimizer=optimizer), tmp_path / "c")
