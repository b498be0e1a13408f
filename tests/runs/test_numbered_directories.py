"""``inspect``, ``verify`` and ``report`` of a Trainer's ``output_dir`` and of an Accelerate project, ours and their own."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import shardwise as sw
from shardwise.cli.commands import main
from shardwise.runs.history import others_steps
from tests.harness.command import runner


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 6)
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output_dir of a plain Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    out = tmp_path_factory.mktemp("trainer") / "out"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    asked: dict[str, Any] = {
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
    }
    args = TrainingArguments(output_dir=str(out), use_cpu=True, report_to=[], disable_tqdm=True, **asked)
    Trainer(model, args, train_dataset=Numbers()).train()
    return out


def run(*words: object) -> tuple[int, str]:
    done = runner().invoke(main, list(map(str, words)), env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_a_trainers_own(trained: Path, tmp_path: Path) -> None:
    status, shown = run("inspect", trained)
    assert status == 0, shown
    assert [line.split()[1:3] for line in shown.splitlines() if " of the HF Trainer " in line] == [
        ["not", "checked"]
    ] * 2
    assert "not checked: no checksums; shardwise doctor" in shown
    assert (
        "Checkpoints of the HF Trainer, at step 4 of 4: they don't record which step a launch resumed from"
        in shown
    )
    assert_narrow("inspect", trained)
    found = json.loads(run("inspect", trained, "--json")[1])
    assert [step["ok"] for step in found["steps"]] == [None, None]
    assert [step["step"] for step in found["steps"]] == [4, 2]
    assert all(step["file_bytes"] > 10_000 for step in found["steps"])
    status, shown = run("verify", trained)
    assert status == 1
    assert "have no checksums" in shown
    command = re.search(r"shardwise (doctor .+?) Causes", " ".join(shown.split()))
    assert command is not None
    status, shown = run(*shlex.split(command[1]))
    assert status == 0, shown
    assert "a run of the HF Trainer or Accelerate, steps 2, 4" in shown
    status, shown = run("report", trained, "--out", tmp_path / "report.html")
    assert status == 0, shown
    page = (tmp_path / "report.html").read_text()
    losses = json.loads((trained / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert "trainer_state.json" in page
    assert "record which step a launch resumed from" in page
    assert page.count("not checked") >= 2
    assert "No valid checkpoint" not in page
    assert sum("loss" in entry for entry in losses) == 4
    assert "<svg" in page, "the losses are drawn"


def test_the_newest_step_of_a_trainer(trained: Path, tmp_path: Path) -> None:
    status, shown = run("export", trained, tmp_path / "export")
    assert status == 0, shown
    assert f"using step 4, the newest one (not checked): {trained}/checkpoint-4" in shown
    assert (tmp_path / "export" / "config.json").is_file()


def test_ours_below_a_trainers_names(tmp_path: Path) -> None:
    for step in (2, 10):
        state = sw.TrainState(model=nn.Linear(3, 2))
        sw.save(state, tmp_path / "out" / f"checkpoint-{step}", step=step)
    for given in (tmp_path / "out",):
        status, shown = run("verify", given)
        assert status == 0, shown
        assert "checkpoint-10" in shown
        assert [s["step"] for s in json.loads(run("inspect", given, "--json")[1])["steps"]] == [10, 2]
    payload = next((tmp_path / "out" / "checkpoint-2" / "model").glob("*.safetensors"))
    payload.write_bytes(payload.read_bytes()[:-1])
    assert run("verify", tmp_path / "out")[0] == 1
    assert run("inspect", tmp_path / "out")[0] == 1, "a step of ours that lacks a byte"


def test_an_accelerate_project(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True),
    )
    accelerator.prepare(nn.Linear(3, 2))
    for _ in range(2):
        accelerator.save_state()
    for given in (tmp_path / "project", tmp_path / "project" / "checkpoints"):
        status, shown = run("inspect", given)
        assert status == 0, shown
        assert shown.count(" of another program ") == 2
        assert shown.count("not checked ") == 2
        assert "Checkpoints of another program: they don't record" in shown


def test_a_model_with_checkpoints_below_is_a_model(trained: Path, tmp_path: Path) -> None:
    """As a Trainer's output_dir is after save_model."""
    both = tmp_path / "both"
    both.mkdir()
    for path in trained.iterdir():
        (both / path.name).symlink_to(path)
    for path in (trained / "checkpoint-4").iterdir():
        if path.name in ("config.json", "model.safetensors"):
            (both / path.name).symlink_to(path)
    assert others_steps(str(both)) == {}
    status, shown = run("inspect", both)
    assert status == 0, shown
    assert "directory of checkpoints" not in shown
    status, shown = run("report", both, "--out", tmp_path / "report.html")
    assert status == 0, shown
    page = (tmp_path / "report.html").read_text()
    assert "checkpoint-4/trainer_state.json" in page
    assert "at step 4 of 4" in page, "the steps are told of, too"


def test_one_level_above_names_what_to_give(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with sw.Checkpointer(tmp_path / "runs" / name) as checkpoints:
            checkpoints.save(sw.TrainState(model=nn.Linear(3, 2)), 1)
    status, shown = run("inspect", tmp_path / "runs")
    assert status == 1
    assert f"give one of them: {tmp_path / 'runs' / 'a'}, {tmp_path / 'runs' / 'b'}" in " ".join(
        shown.split()
    )
    assert_narrow("inspect", tmp_path / "runs" / "a")


def assert_narrow(*words: object) -> None:
    """On a terminal of 80 columns each row is on one line."""
    listed = runner().invoke(main, list(map(str, words)), env={"COLUMNS": "80"}).output.splitlines()
    head = next(k for k, line in enumerate(listed) if line.split()[:2] == ["step", "valid"])
    assert all(len(line) <= 80 for line in listed[head:] if not line.startswith("Checkpoints of"))
    assert all(
        line.split()[0].isdecimal() for line in listed[head + 2 :] if line.startswith(" ") and line.strip()
    )
