"""Documents of a checkpoint reach a closed list of receivers, are checked whole before anything changes, or are damage."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import FormatError, IntegrityError, ShardwiseError, StateError, VersionError
from tests.harness.hostile import edit_documents, edit_manifest, put_file, run

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    sw.save(run(), tmp_path / "step", step=7)
    return tmp_path / "step"


def all_of(state: sw.TrainState) -> list[Any]:
    """Everything that a restore changes but random generators, in plain values."""
    values = [t.tolist() for t in state.model.state_dict().values() if isinstance(t, torch.Tensor)]  # type: ignore[union-attr]
    optimizer = state.optimizer.state_dict()  # type: ignore[union-attr]
    return [
        values,
        state.model.calls,  # type: ignore[union-attr]
        repr(optimizer),
        state.scheduler.state_dict(),
        state.scaler.state_dict(),
        state.dataloader.consumed,
        dict(state.extra),
    ]


def test_documents_are_compared_with_their_checksum(step: Path) -> None:
    """Also where the change has a right form and the same length."""
    file = step / "state.json"
    text = file.read_text()
    assert '"extra.label":0' in text
    file.write_text(text.replace('"extra.label":0', '"extra.label":7'))
    live = run(1)
    before = all_of(live)
    with pytest.raises(IntegrityError, match=r"state\.json: content differs from its checksum"):
        sw.restore(live, step)
    assert all_of(live) == before


def test_a_document_named_like_an_attribute_changes_nothing(step: Path) -> None:
    stranger = {"weight": [[9.0] * 3] * 2, "bias": [9.0, 9.0]}
    for name in ("model", "optimizer_", "models", "__class__", "files"):
        edit_documents(step, lambda d, name=name: d.update({name: stranger}))  # type: ignore[misc]
        live = run(1)
        before = all_of(live)
        with pytest.raises(VersionError, match=rf"a document '{name}', which this release does not know"):
            sw.restore(live, step)
        assert all_of(live) == before
        assert any(f"a document '{name}'" in problem for problem in sw.verify(step).problems)
        edit_documents(step, lambda d, name=name: d.pop(name))  # type: ignore[misc]
    assert sw.verify(step).ok
    edit_manifest(step, lambda m: m["local_documents"].append("model"))
    with pytest.raises(VersionError, match="a document 'model'"):
        sw.restore(run(1), step)
    assert not sw.verify(step).ok


def of_optimizer(change: Change) -> Change:
    return lambda documents: change(documents["optimizer"])


def of_position(change: Change) -> tuple[Change, str]:
    return lambda documents: change(documents["dataloader"]), "state"


def of_rng(change: Change) -> tuple[Change, str]:
    return lambda documents: change(documents["rng"]), "rank/00000"


#: What a stranger may write, all checksums right, and the file in which.
MALFORMED: dict[str, tuple[Change, str]] = {
    "step of another type": (lambda d: d.update(step="7"), "state"),
    "step of another number": (lambda d: d.update(step=8), "state"),
    "optimizer a list": (lambda d: d.update(optimizer=[]), "state"),
    "optimizer without groups": (of_optimizer(lambda o: o.pop("groups")), "state"),
    "optimizer without class": (of_optimizer(lambda o: o.pop("class")), "state"),
    "optimizer without values": (of_optimizer(lambda o: o.pop("values")), "state"),
    "optimizer of a class of endless name": (
        of_optimizer(lambda o: o.update({"class": "x" * 10**6})),
        "state",
    ),
    "optimizer of a model that is not there": (of_optimizer(lambda o: o.update(model="critic")), "state"),
    "groups no list": (of_optimizer(lambda o: o.update(groups=3)), "state"),
    "group no mapping": (of_optimizer(lambda o: o.update(groups=[3])), "state"),
    "group without names": (of_optimizer(lambda o: o["groups"][0].pop("names")), "state"),
    "group of numbers": (of_optimizer(lambda o: o["groups"][0].update(names=[1])), "state"),
    "group of lists": (of_optimizer(lambda o: o["groups"][0].update(names=[["a"]])), "state"),
    "options no mapping": (of_optimizer(lambda o: o["groups"][0].update(options=[1])), "state"),
    "options that hold the parameters": (
        of_optimizer(lambda o: o["groups"][0]["options"].update(params=[])),
        "state",
    ),
    "values of no mapping": (of_optimizer(lambda o: o.update(values={"layer.weight": 3})), "state"),
    "classes a list": (lambda d: d.update(classes=[]), "state"),
    "classes of numbers": (lambda d: d.update(classes={"scheduler": 3}), "state"),
    "modules a text": (lambda d: d.update(modules="x"), "state"),
    "scheduler a number": (lambda d: d.update(scheduler=3), "state"),
    "scaler a list": (lambda d: d.update(scaler=[1]), "state"),
    "buffers of another shape": (lambda d: d.update(buffers={"mean": 3}), "rank/00000"),
    "opaque state of a number": (
        lambda d: d.update({"optimizer.opaque": {"layer.weight": {"row": 1}}}),
        "rank/00000",
    ),
    "position a number": (lambda d: d.update(dataloader=3), "state"),
    "position at a text": of_position(lambda p: p.update(consumed="x")),
    "position before the first": of_position(lambda p: p.update(consumed=-1)),
    "position without a start": of_position(lambda p: p.update(start={})),
    "position in other parts": of_position(lambda p: p["start"]["epochs"].update(nowhere=1)),
    "position with other numbers": of_position(lambda p: p["start"]["rng"].pop("numpy")),
    "generators a list": (lambda d: d.update(rng=[]), "rank/00000"),
    "generators without Python's": of_rng(lambda r: r.pop("python")),
    "generators of no words": of_rng(lambda r: r["python"].update(words=[1, 2])),
    "generators of a large number": of_rng(lambda r: r["numpy"].update(position=2**70)),
    "generators beyond their words": of_rng(lambda r: r["numpy"].update(position=4000)),
    "generators of another version": of_rng(lambda r: r["python"].update(version="x")),
    "generators of a text": of_rng(lambda r: r["numpy"].update(cached_gauss="x")),
    "accelerator without a type": of_rng(lambda r: r.update(accelerator={"devices": []})),
    "accelerator with states of text": of_rng(
        lambda r: r.update(accelerator={"type": "cuda", "devices": ["x"]})
    ),
    "a lost tensor": (lambda d: d.update({"extra.x": {"$type": "numpy.array", "key": "k"}}), "state"),
    "a dtype of nothing": (
        lambda d: d.update({"extra.x": {"$type": "numpy.dtype", "dtype": {"$type": "tuple", "items": []}}}),
        "state",
    ),
    "an unknown kind": (lambda d: d.update({"extra.x": {"$type": "exec"}}), "state"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_document_is_damage_and_changes_nothing(step: Path, name: str) -> None:
    change, stem = MALFORMED[name]
    edit_documents(step, change, stem)
    if not name.startswith(
        ("position", "scheduler", "scaler")
    ):  # what they must be depends on the live objects
        assert any(problem.startswith(f"{stem}.json: ") for problem in sw.verify(step).problems)
    live = run(1)
    before, generator = all_of(live), torch.get_rng_state()
    with pytest.raises(FormatError) as caught:
        sw.restore(live, step)
    assert len(str(caught.value)) < 2000
    assert all_of(live) == before
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b"null"],
    ids=["empty", "cut", "no UTF-8", "list", "number", "deep", "digits", "null"],
)
@pytest.mark.parametrize("name", ["state.json", "rank/00000.json"])
def test_documents_that_are_no_json_object(step: Path, name: str, content: bytes) -> None:
    put_file(step, name, content)
    with pytest.raises(FormatError, match=name):
        sw.restore(run(1), step)
    assert any(name in problem for problem in sw.verify(step).problems)
    if name == "state.json":
        with pytest.raises(FormatError, match=name):
            sw.convert(step, step.with_name("out"))
        assert not step.with_name("out").exists()


def test_tensors_of_documents_that_are_no_safetensors(step: Path) -> None:
    for content in (b"", b"12345678", (2**62).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0[]"):
        put_file(step, "rank/00000.safetensors", content)
        with pytest.raises(FormatError, match=r"rank/00000\.safetensors: not a safetensors file"):
            sw.restore(run(1), step)


class Strict(nn.Module):
    """Keeps its state under a name of its own."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.key = key

    def get_extra_state(self) -> dict[str, int]:
        return {self.key: 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        _ = state[self.key]


def test_what_does_not_fit_is_no_damage(step: Path, tmp_path: Path) -> None:
    """A document of the right form that this run can't take: nothing is set aside for it."""
    other = run(1)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)  # type: ignore[union-attr]
    with pytest.raises(StateError, match="contains state for AdamW, but the optimizer is SGD"):
        sw.restore(other, step)
    sw.save(sw.TrainState(model=Strict("x")), tmp_path / "strict")
    with pytest.raises(StateError, match=r"modules\[''\]: Strict\.set_extra_state .*KeyError: 'y'"):
        sw.restore(sw.TrainState(model=Strict("y")), tmp_path / "strict")
    edit_documents(tmp_path / "strict", lambda d: d.update(modules={"elsewhere": 1}))
    with pytest.raises(StateError, match="no extra state of the module ''"):
        sw.restore(sw.TrainState(model=Strict("x")), tmp_path / "strict")


def test_optimizer_tensors_without_their_document(step: Path) -> None:
    edit_documents(step, lambda d: d.pop("optimizer"))
    with pytest.raises(FormatError, match="holds tensors of optimizer, and not its document"):
        sw.restore(run(1), step)


def test_a_setting_of_another_shape_is_named(tmp_path: Path) -> None:
    def tensor_lr(lr: torch.Tensor) -> sw.TrainState:
        model = nn.Linear(2, 2)
        return sw.TrainState(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr, capturable=False)
        )

    state = tensor_lr(torch.tensor(0.1))
    sw.save(state, tmp_path / "step")
    other = tensor_lr(torch.tensor(0.1))
    other.optimizer.param_groups[0]["lr"] = torch.ones(2)  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"the setting 'lr' .* shape \[2\], but was saved with shape \[\]"):
        sw.restore(other, tmp_path / "step")


def mutated(value: Any, draw: random.Random) -> Any:
    """A JSON value with one node somewhere exchanged, lost, or doubled."""
    strange = [None, True, -1, 2**63, 1e300, "", "x", "\ud800", [], {}, [[]], {"$type": "tuple", "items": []}]
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return draw.choice(strange)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    if draw.random() < 0.1:
        del value[key]
    else:
        value[key] = mutated(value[key], draw)
    return value


@pytest.mark.hypothesis  # a random search, by a seed
@pytest.mark.parametrize("stem", ["state", "rank/00000"])
def test_mutated_documents_raise_our_errors_only(step: Path, stem: str) -> None:
    draw = random.Random(stem)
    original = (step / f"{stem}.json").read_bytes()
    outcomes: dict[str, int] = {}
    for _ in range(150):
        put_file(step, f"{stem}.json", json.dumps(mutated(json.loads(original), draw)).encode())
        live = run(1)
        try:
            sw.restore(live, step)
            kind = "restored"
        except ShardwiseError as error:
            kind = type(error).__name__
        outcomes[kind] = outcomes.get(kind, 0) + 1
    assert outcomes["FormatError"] > 50, outcomes
