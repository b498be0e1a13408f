"""What a checkpoint of a Trainer says of its place in the data: of its form, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.checkpoint.sites import Hosts
from shardwise.errors import FormatError, LockedError
from shardwise.format.manifest import read_manifest
from shardwise.integrations._folders import trainer_line_of
from shardwise.integrations._trainer_data import DataPlace, check_place, contents
from shardwise.integrations._trainer_files import (
    Run,
    _without_best,
    newest,
    set_newer_aside,
)
from shardwise.publish.lock import DirectoryLock
from shardwise.rng import capture_host_rng
from tests.harness.hostile import edit_documents, run

TRAINER = {
    "global_batch_size": 4,
    "epoch": 0,
    "batches": 2,
    "accumulation": 1,
    "batches_in_epoch": 4,
    "seeds": {"sampler": 2**63},
}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    place = DataPlace(print, True)
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    batches = iter(place.open(loader, 0, 0, False, None))
    next(batches), next(batches)
    state = dataclasses.replace(run(), extra={"trainer": copy.deepcopy(TRAINER), "data": place})
    sw.save(state, tmp_path / "checkpoint-3", step=3)
    return tmp_path / "checkpoint-3"


def stem_of(step: Path) -> str:
    return "rank/00000" if "extra.data" in read_manifest(step).local_documents else "state"


def test_what_a_trainer_writes_is_taken(step: Path) -> None:
    assert check_place(str(step), read_manifest(step), stem_of(step))["extra.data"]["consumed"] == 2
    assert contents(str(step))["trainer"]["global_batch_size"] == 4
    assert newest([trainer_line_of(str(step.parent))], {}, Hosts()) == str(step)


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], "x", 3, {}),
        *({"global_batch_size": wrong} for wrong in ("x", 0, -4, True)),
        *({**TRAINER, **wrong} for wrong in ({"accumulation": 0}, {"batches": -1}, {"seeds": [1]})),
    ],
)
def test_a_malformed_extra_of_the_trainer(step: Path, value: Any) -> None:
    edit_documents(step, lambda d: d.update({"extra.trainer": value}))
    with pytest.raises(FormatError, match=r"state.json: extra.trainer"):
        contents(str(step))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"without {key}": lambda d, key=key: d.pop(key)
        for key in ("epoch", "consumed", "now", "loader", "batch")
    },
    "nothing": lambda d: d.clear(),
    "consumed a text": lambda d: d.update(consumed="2"),
    "start a number": lambda d: d.update(start=1),
    "start without states": lambda d: d["start"].pop("rng"),
    "loader empty": lambda d: d.update(loader={}),
    "asked of nothing": lambda d: d.update(asked=[1]),
    "attributes a list": lambda d: d["now"].update(attributes=[]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_place(step: Path, name: str) -> None:
    stem = stem_of(step)
    edit_documents(step, lambda d: CHANGES[name](d["extra.data"]), stem)
    with pytest.raises(FormatError, match=rf"{stem}.json: .*extra.data"):
        check_place(str(step), read_manifest(step), stem)


def test_the_search_passes_a_malformed_one_by(step: Path) -> None:
    edit_documents(step, lambda d: d.pop("extra.trainer"))
    damaged: dict[str, tuple[int, str]] = {}
    with pytest.raises(sw.errors.NoCheckpointError):
        newest([trainer_line_of(str(step.parent))], damaged, Hosts())
    assert "contains no extra.trainer" in damaged[str(step)][1]


def test_a_run_that_lost_the_directory_renames_nothing(step: Path) -> None:
    root = step.parent
    lock = DirectoryLock(str(root), name="_lock")
    try:
        (root / "_lock").unlink()
        (root / "_lock").touch()
        with pytest.raises(LockedError, match="has lost its lock"):
            set_newer_aside([trainer_line_of(str(root))], Run(resumed_step=1))
    finally:
        lock.release()
    assert step.is_dir()


class Understated(DataLoader[int]):
    """Gives more batches than it says."""

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("kind", "skipped", "stand_ins", "rest"),
    [
        (DataLoader, 3, 3, [[6, 7]]),
        (DataLoader, 4, 4, []),
        (DataLoader, 10**15, 4, []),  # looped for years
        (Understated, 3, 3, [[6, 7]]),
        (Understated, 10**15, 2, []),
    ],
)
@pytest.mark.parametrize("goes_on", [True, False])
def test_skipping_ends_with_the_data(
    kind: type[DataLoader[int]], skipped: int, stand_ins: int, rest: list[list[int]], goes_on: bool
) -> None:
    loader: Any = kind(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    said: list[str] = []
    place = DataPlace(said.append, reads_again=True)
    rng = capture_host_rng()
    if goes_on:
        before = DataPlace(print, reads_again=True)
        next(iter(before.open(loader, 0, 0, False, None)))
        place.load_state_dict({**before.state_dict(), "consumed": skipped})
    given = list(place.open(loader, 0, skipped, goes_on, rng))
    assert given[:stand_ins] == [None] * stand_ins
    assert [batch.tolist() for batch in given[stand_ins:]] == rest
    assert bool(said) == goes_on, "the last batch before the place is not the stored one"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_trainers_state_that_is_none_is_named(content: bytes) -> None:
    with pytest.raises(FormatError, match=r"trainer_state\.json: .*Trainer's state"):
        _without_best(content, "checkpoint-3/trainer_state.json")
