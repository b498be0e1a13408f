"""States of few bits in one process: their parts, their document, and documents that lie about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from torch import nn

import shardwise as sw
from shardwise.checkpoint.optimizer import OptimizerInCheckpoint, trained_by
from shardwise.checkpoint.stored import StoredCheckpoint, decode_documents, read_documents
from shardwise.errors import FormatError, StateError
from shardwise.format.manifest import Manifest, checksum_of, parse_manifest, read_manifest
from shardwise.limits import parse_json
from shardwise.state.documents import check_form
from shardwise.state.typed_json import Places
from shardwise.tensors.live import describe

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.compile with fullgraph=True found no compiled frames:UserWarning"
)  # torch 2.12, of what it was told not to compile


def trained(name: str = "AdamW8bit", dtype: torch.dtype = torch.float32, layers: int = 1) -> sw.TrainState:
    torch.manual_seed(0)
    each = [nn.Linear(96, 96) for _ in range(layers)]
    model = (nn.Sequential(*each) if layers > 1 else each[0]).to(dtype)
    optimizer = getattr(torchao.optim, name)(list(model.parameters()), lr=1e-3)
    with torch.compiler.set_stance("force_eager"):
        model(torch.randn(2, 96, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def stored(path: Path) -> tuple[Manifest, dict[str, Any]]:
    manifest = read_manifest(path)
    return manifest, decode_documents(read_documents(str(path), manifest, "state"), str(path), Places())


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_state_says_what_dtype_it_is_again(tmp_path: Path, name: str) -> None:
    state = trained(name, torch.bfloat16)
    sw.save(state, tmp_path / "step")
    other = trained(name, torch.bfloat16)
    assert other.optimizer is not None
    other.optimizer.state.clear()
    report = sw.restore(other, tmp_path / "step")
    assert report.exact
    before, after = (
        run.optimizer.state[next(iter(run.model.parameters()))]["exp_avg"]  # type: ignore[union-attr]
        for run in (state, other)
    )
    assert type(after) is type(before)
    assert after.dtype is before.dtype  # bfloat16; torchao before 0.17 calls every state float32
    assert torch.equal(after.codes.view(torch.uint8), before.codes.view(torch.uint8))
    assert torch.equal(after.scale, before.scale)


def test_the_code_book_of_the_saved_run_is_taken_also_into_states_that_are_there(tmp_path: Path) -> None:
    state, other = trained(), trained()
    for value in books(state):
        value.mul_(0.5)
    sw.save(state, tmp_path / "step")
    sw.restore(other, tmp_path / "step")
    for before, after in zip(books(state), books(other), strict=True):
        assert torch.equal(before, after)


def books(state: sw.TrainState) -> list[torch.Tensor]:
    assert state.optimizer is not None
    values = [v for states in state.optimizer.state.values() for v in states.values()]
    return [v.qmap for v in values if hasattr(v, "qmap")]


def test_two_code_books_of_one_kind_are_refused(tmp_path: Path) -> None:
    """A signed one and an unsigned one are two kinds."""
    state = trained(layers=2)
    books(state)[2][0] = 0.5
    with pytest.raises(StateError, match=r"1\.weight\.exp_avg has another code book than 0\.weight\.exp_avg"):
        sw.save(state, tmp_path / "step")


def test_a_state_under_the_name_of_a_part_is_refused(tmp_path: Path) -> None:
    state = trained()
    assert state.optimizer is not None
    weight = state.optimizer.param_groups[0]["params"][0]
    state.optimizer.state[weight]["exp_avg:codes"] = torch.zeros_like(weight)
    with pytest.raises(
        StateError, match=r"a state weight\.exp_avg:codes, under which a part of the state exp_avg"
    ):
        sw.save(state, tmp_path / "step")


LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no books": (lambda d: d.pop("books"), "expected books, states and by_rank"),
    "no such kind": (lambda d: form(d).update(kind="OptimState3bit"), "a kind 'OptimState3bit' of states"),
    "kind of kinds": (lambda d: form(d).update(kind=["OptimState8bit"]), "a kind"),
    "empty blocks": (lambda d: form(d).update(block=0), "blocks of 0 elements"),
    "other blocks": (lambda d: form(d).update(block=128), "its scale is not in the manifest as"),
    "blocks that do not fill it": (lambda d: form(d).update(block=7), "has no blocks of 7 elements"),
    "a sign of another type": (lambda d: form(d).update(signed=1), "signed is 1"),
    "a dtype of integers": (lambda d: form(d).update(dtype="I8"), "the dtype 'I8'"),
    "more fields": (lambda d: form(d).update(more=1), "expected kind, block"),
    "another parameter": (lambda d: d["states"].update(lost={"exp_avg": form(d)}), "'lost' has no state"),
    "a short book": (lambda d: cut(d["books"]), "of 256 numbers"),
    "by rank without a book": (
        lambda d: d.update(by_rank={"weight": {"s": {**form(d), "kind": "OptimState4bit"}}}),
        "of 16 numbers",
    ),
}


def form(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["states"]["weight"]["exp_avg"]
    return found


def cut(books: dict[str, torch.Tensor]) -> None:
    books["OptimState8bit.signed"] = books["OptimState8bit.signed"][:100]


@pytest.mark.parametrize("lie", LIES)
def test_a_document_that_lies_is_damage(tmp_path: Path, lie: str) -> None:
    sw.save(trained(), tmp_path / "step")
    manifest, documents = stored(tmp_path / "step")
    check_form(documents, manifest, "here")
    change, says = LIES[lie]
    change(documents["optimizer.low_bit"])
    with pytest.raises(FormatError) as raised:
        check_form(documents, manifest, "here")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([2**40, 2**40], "has more than 64 dims, or more bytes than 2^62"),
        ([-1], "not a number"),
        (3, "not a list"),
    ],
)
def test_a_state_with_a_shape_that_no_tensor_has(tmp_path: Path, shape: Any, says: str) -> None:
    sw.save(trained(), tmp_path / "step")
    document = parse_json((tmp_path / "step/manifest.json").read_bytes(), "here")
    document["models"]["model"]["weight"]["states"]["optimizer"]["exp_avg:scale"]["shape"] = shape
    document["xxh3"] = checksum_of(document)
    with pytest.raises(FormatError, match=says.replace("^", r"\^")):
        parse_manifest(json.dumps(document).encode(), "here")


def test_parts_without_their_document_are_damage(tmp_path: Path) -> None:
    state = trained()
    sw.save(state, tmp_path / "step")
    manifest, documents = stored(tmp_path / "step")
    part = trained_by("optimizer", state.optimizer, {"model": describe(state.model)})  # type: ignore[arg-type]
    checkpoint = StoredCheckpoint("here", manifest, documents, Places(), manifest)
    OptimizerInCheckpoint(part, checkpoint).check_cuts()
    del documents["optimizer.low_bit"]
    with pytest.raises(FormatError, match=r"'exp_avg:scale' of 'weight' has a different shape"):
        OptimizerInCheckpoint(part, checkpoint).check_cuts()
