"""Real models and checkpoints, to be spoilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

import shardwise as sw
from tests.doctor.real import WHERE, found
from tests.loading.test_plan_promises import make_model


@pytest.fixture(scope="module")
def here() -> set[str]:
    """The rules that have a finding on this machine alone."""
    return {f.rule for f in found()} | WHERE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model in two files, with an index."""
    return make_model(tmp_path_factory.mktemp("doctor") / "qwen")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("doctor") / "steps"
    with sw.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(sw.TrainState(model=nn.Linear(4, 4)), step)
    return root
