"""Whatever is published, a reader takes: what no reader would take is refused by the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwise as sw
from shardwise.errors import CheckpointError, FormatError, StateError
from tests.harness.hostile import edit_documents


def state(**more: Any) -> sw.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)


class OddKeys:
    """Keeps its state under a number."""

    def state_dict(self) -> dict[int, int]:
        return {5: 1}

    def load_state_dict(self, state: dict[int, int]) -> None:
        pass


def with_option(key: Any) -> sw.TrainState:
    made = state()
    made.optimizer.param_groups[0][key] = 1  # type: ignore[union-attr]
    return made


def with_scheduler_key() -> sw.TrainState:
    made = state()
    made.scheduler = StepLR(made.optimizer, 3)  # type: ignore[arg-type]
    made.scheduler.__dict__[5] = 1
    return made


def with_class_of_long_name() -> sw.TrainState:
    made = state()
    kind = type("x" * 301, (torch.optim.SGD,), {})
    made.optimizer = kind(made.model.parameters(), lr=0.1)  # type: ignore[union-attr]
    return made


#: 79 whole numbers with one hash.
COLLIDING = {k * (2**61 - 1): k for k in range(1, 80)}

REFUSED: dict[str, tuple[Any, str]] = {
    "option": (lambda: with_option(5), "document 'optimizer'"),
    "scheduler": (with_scheduler_key, "scheduler: the state of the StepLR has the key 5"),
    "class": (with_class_of_long_name, "document 'optimizer'"),
    "hashes": (
        lambda: state(extra={"table": COLLIDING}),
        r"document 'extra\.table': .*79 keys have one hash",
    ),
}


def published(made: sw.TrainState, root: Path, how: str) -> None:
    if how == "save":
        sw.save(made, root / "step", step=1)
        return
    with sw.Checkpointer(root, mode="async" if how == "behind" else "sync") as checkpoints:
        checkpoints.save(made, 1)
        checkpoints.wait()


@pytest.mark.parametrize("how", ["save", "checkpointer", "behind"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_reader_takes_is_not_published(tmp_path: Path, name: str, how: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(StateError, match=expected):
        published(make(), tmp_path / "run", how)
    assert not [p for p in (tmp_path / "run").glob("*") if p.is_dir()], "not even what was begun is left"


def test_a_name_of_another_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="step-00000009: is the name of another step, but this is step 5"
    ):
        sw.save(state(), tmp_path / "step-00000009", step=5)
    sw.save(state(), tmp_path / "step-00000005", step=5)
    with pytest.raises(
        CheckpointError, match="step-00000077: is the name of another step, but this is step 5"
    ):
        sw.convert(tmp_path / "step-00000005", tmp_path / "step-00000077")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"], "not even what was begun is left"
    sw.convert(tmp_path / "step-00000005", tmp_path / "any name")
    assert sw.verify(tmp_path / "any name").ok


@pytest.mark.parametrize("key", [5, ("a", 1)])
def test_a_state_under_no_text_is_refused(tmp_path: Path, key: object) -> None:
    made = state()
    made.optimizer.state[made.model.weight][key] = 1  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"keeps a state of weight under .*, which is not text"):
        sw.save(made, tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_a_setting_that_needs_a_gradient(tmp_path: Path) -> None:
    def learned(rate: float) -> sw.TrainState:
        made = state()
        made.optimizer.param_groups[0]["lr"] = torch.tensor(rate, requires_grad=True)  # type: ignore[union-attr]
        return made

    sw.save(learned(0.5), tmp_path / "step")
    live = learned(0.1)
    rate = live.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
    assert sw.restore(live, tmp_path / "step").exact
    assert rate.item() == 0.5
    assert rate.requires_grad
    assert live.optimizer.param_groups[0]["lr"] is rate  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "stem"), [("rng", "rank/00000"), ("step", "state")])
def test_a_lost_document_is_damage(tmp_path: Path, name: str, stem: str) -> None:
    sw.save(state(), tmp_path / "step")
    edit_documents(tmp_path / "step", lambda documents: documents.pop(name), stem)
    with pytest.raises(FormatError, match=f"lacks the document '{name}'"):
        sw.restore(state(), tmp_path / "step")
    assert any(f"lacks the document '{name}'" in problem for problem in sw.verify(tmp_path / "step").problems)


def test_what_was_converted_has_no_generators_and_is_not_exact(tmp_path: Path) -> None:
    sw.save(state(), tmp_path / "step")
    sw.convert(tmp_path / "step", tmp_path / "converted")
    assert sw.verify(tmp_path / "converted").ok
    report = sw.restore(state(), tmp_path / "converted")
    assert not report.exact
    assert "derived" in report.rng


def test_a_scheduler_of_no_class_is_not_exact(tmp_path: Path) -> None:
    def scheduled() -> sw.TrainState:
        made = state()
        made.scheduler = StepLR(made.optimizer, 3)  # type: ignore[arg-type]
        return made

    sw.save(scheduled(), tmp_path / "step")
    assert sw.restore(scheduled(), tmp_path / "step").exact
    edit_documents(tmp_path / "step", lambda documents: documents.pop("classes"))
    report = sw.restore(scheduled(), tmp_path / "step")
    assert report.differences == ("scheduler: the checkpoint does not name its class",)
    assert not report.exact


def test_nothing_changes_before_documents_are_checked(tmp_path: Path) -> None:
    """A model that takes buffers of any shape gets them when all documents were found to fit."""

    class Grows(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("seen", torch.zeros(1))

        def _load_from_state_dict(self, given: dict[str, Any], prefix: str, *rest: Any) -> None:
            self.seen = torch.zeros_like(given[prefix + "seen"])
            super()._load_from_state_dict(given, prefix, *rest)

    def growing(size: int) -> sw.TrainState:
        made = state()
        made.model = Grows()
        made.model.seen = torch.full((size,), 3.0)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        return made

    sw.save(growing(4), tmp_path / "step")
    live = growing(1)
    sw.restore(live, tmp_path / "step")
    assert live.model.seen.tolist() == [3.0] * 4  # type: ignore[union-attr]
    edit_documents(tmp_path / "step", lambda documents: documents["optimizer"].update({"class": "Adam"}))
    live = growing(1)
    with pytest.raises(StateError, match="contains state for Adam"):
        sw.restore(live, tmp_path / "step")
    assert live.model.seen.tolist() == [3.0]  # type: ignore[union-attr]


def test_too_much_text_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered: the real one takes seconds to reach."""
    from shardwise import limits
    from shardwise.checkpoint import save as document_files

    monkeypatch.setattr(document_files, "MAX_JSON_BYTES", 10_000)
    with pytest.raises(StateError, match=r"the limit is 10000; most are of 'extra\.text'"):
        sw.save(state(extra={"text": "x" * 20_000}), tmp_path / "step")
    sw.save(state(extra={"numbers": torch.zeros(20_000)}), tmp_path / "step")
    assert limits.MAX_JSON_BYTES > 10_000
    assert sw.restore(state(extra={"numbers": None}), tmp_path / "step").exact


def test_odd_keys_where_any_value_may_be(tmp_path: Path) -> None:
    """An extra may hold any value that typed JSON does."""
    sw.save(state(extra={"odd": OddKeys(), "few": dict(list(COLLIDING.items())[:9])}), tmp_path / "step")
    live = state(extra={"odd": OddKeys(), "few": None})
    assert sw.restore(live, tmp_path / "step").exact
    assert len(live.extra["few"]) == 9
    assert sw.verify(tmp_path / "step").ok
