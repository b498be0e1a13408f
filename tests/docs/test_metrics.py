"""The page of metrics, with the real loggers and no network: its blocks, and what each logger has afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.docs.blocks import DOCS, blocks

#: What every logger must have, of two saves and a resume.
EXPECTED = {"save/stall_seconds", "save/seconds", "save/bytes", "save/step", "resume/exact", "resume/failed"}


def code(word: str) -> str:
    (found,) = (block.text for block in blocks(DOCS / "howto" / "metrics.md") if word in block.text)
    return found


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Two saves in the background, and a resume."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = sw.TrainState(model=model, optimizer=optimizer)

    def run() -> None:
        with sw.Checkpointer("runs/a", mode="async") as checkpoints:
            checkpoints.save(state, 10)
            checkpoints.save(state, 20)
            checkpoints.wait()
            assert checkpoints.resume(state) is not None

    return run


def check(found: dict[str, Any]) -> None:
    ours = {name.removeprefix("shardwise/") for name in found if name.startswith("shardwise/")}
    assert ours >= EXPECTED
    assert found["shardwise/save/step"] == 20
    assert found["shardwise/save/failed"] == 0
    assert found["shardwise/resume/exact"] == 1


def test_print(train: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    exec(code("print(metrics)"), {"train": train})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("/")[2].partition("/")[0] for line in lines] == ["save", "save", "resume"]


@pytest.mark.filterwarnings("default")
def test_wandb(train: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="`make loggers` installs it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def logging_steps() -> None:
        wandb.log({"loss": 2.0}, step=1)
        train()
        wandb.log({"loss": 1.0}, step=2, commit=True)

    exec(code("import wandb"), {"train": logging_steps})
    found = dict(wandb.run.summary)
    wandb.finish()
    check(found)
    assert found["loss"] == 1.0, "no row of the loop was dropped"


@pytest.mark.filterwarnings("default")
def test_tensorboard(train: Callable[[], None]) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="`make loggers` installs it"
    )
    exec(code("SummaryWriter"), {"train": train})
    events = accumulator.EventAccumulator("logs")
    events.Reload()
    check({name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]})
    assert [one.step for one in events.Scalars("shardwise/save/seconds")] == [10, 20]


@pytest.mark.filterwarnings("default")
def test_mlflow(train: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="`make loggers` installs it")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
    names: dict[str, Any] = {"train": train}
    exec(code("import mlflow"), names)
    check(mlflow.get_run(names["run"].info.run_id).data.metrics)
    assert len(mlflow.search_runs(output_format="list")) == 1, (
        "the background thread starts no run of its own"
    )
