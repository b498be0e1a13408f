"""Whatever is published, a reader takes: what no reader would take is refused by the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import limits
from shardwise.errors import StateError
from shardwise.store import document_files


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


def with_class_of_long_name() -> sw.TrainState:
    made = state()
    kind = type("x" * 301, (torch.optim.SGD,), {})
    made.optimizer = kind(made.model.parameters(), lr=0.1)  # type: ignore[union-attr]
    return made


#: 79 whole numbers with one hash.
COLLIDING = {k * (2**61 - 1): k for k in range(1, 80)}

REFUSED: dict[str, tuple[Any, str]] = {
    "option": (lambda: with_option(5), "document 'optimizer'"),
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


def test_too_much_text_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered: the real one takes seconds to reach."""
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
