"""An entry point looks at a model once: its tree is walked once for names, geometries are worked out once.

Nor do its ranks agree more often than is held here: a round costs a trip to the group's store for every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.looks import looks
from tests.harness.models import write_hub_directory
from tests.harness.pool import RankPool
from tests.tensors import _looks_fns

#: Rounds of agreement of two ranks. A change that needs more has to say what for.
ROUNDS = {
    "load_pretrained": 6,  # one of them asks whether there is an adapter in the directory
    "load": 3,
    "save": 6,
    "restore": 16,
    "restore again": 16,
    "load of a checkpoint": 4,
    "digest": 2,
    "initialize": 0,
    "iter_full_tensors": 2,
    "export_hf": 6,
    "clone": 1,
    "Checkpointer.save": 8,
    "Checkpointer.resume": 18,
    "convert": 5,
}
#: Calls that look at more than one state of a model, alone and on two ranks: before and after it was sharded, and a second model.
WALKS = {"load_pretrained": (1, 2), "clone": (3, 4), "convert": (0, 0)}
#: Calls with a second model; initial values are drawn tensor by tensor; a conversion takes what is stored.
GEOMETRIES = {"clone": 2, "initialize": 0, "convert": 0}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("hub")
    write_hub_directory("qwen3-tied", directory, torch.float32)
    return str(directory)


def _check(found: dict[str, dict[str, Any]], world_size: int) -> None:
    assert found.keys() == ROUNDS.keys()
    walks = {name: WALKS.get(name, (1, 1))[world_size > 1] for name in found}
    assert {name: seen["walks"] for name, seen in found.items()} == walks
    geometries = {name: GEOMETRIES.get(name, 1) for name in found}
    assert {name: seen["geometries"] for name, seen in found.items()} == geometries
    rounds = ROUNDS if world_size > 1 else dict.fromkeys(ROUNDS, 0)
    assert {name: seen["rounds"] for name, seen in found.items()} == rounds


def test_one_process_looks_at_a_model_once(hub: str, tmp_path: Path) -> None:
    _check(_looks_fns.every_entry_point(hub, str(tmp_path)), 1)


def test_two_ranks_look_at_a_model_once(ranks: RankPool, hub: str, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, _looks_fns.every_entry_point, hub, str(tmp_path)):
        _check(found, 2)


def test_each_of_several_models_is_looked_at_once(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, _looks_fns.several_models, str(tmp_path)):
        assert {name: (seen["walks"], seen["geometries"]) for name, seen in found.items()} == {
            "save": (2, 2),
            "restore": (2, 2),
        }


def test_a_second_walk_is_seen(hub: str) -> None:
    """A counter that can't count holds nothing."""
    from shardwise.names import named_tensors
    from shardwise.tensors.live import describe

    model = torch.nn.Linear(2, 2)
    with looks() as seen:
        named_tensors(model)
        live = describe(model)
        assert live.geometries == live.refreshed().geometries
    assert (seen.walks, seen.geometries) == (2, 1)
    assert describe(model).geometries == live.geometries, "counted no more"
    assert (seen.walks, seen.geometries) == (2, 1)
