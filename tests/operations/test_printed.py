"""Reports print as tables; a resume logs one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.operations.host_budget import HostBudget
from shardwise.operations.printed import Printed


def state(**more: object) -> sw.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    return sw.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), **more)  # type: ignore[arg-type]


def test_every_report_of_the_package_prints_as_a_table() -> None:
    reports = [getattr(sw.reports, name) for name in sw.reports.__all__ if name.endswith("Report")]
    assert len(reports) >= 8
    assert all(issubclass(report, Printed) for report in reports)


def test_what_reports_print(tmp_path: Path) -> None:
    saved = sw.save(state(), tmp_path / "step", step=7)
    lines = str(saved).splitlines()
    assert lines[0] == "SaveReport"
    assert any(line.split() == ["step", "7"] for line in lines)
    assert any(line.split()[:1] == ["written"] and line.endswith("KiB") for line in lines), lines
    assert not any("failure" in line for line in lines), "empty fields are left out"
    exported = sw.export_hf(tmp_path / "step", tmp_path / "out")
    assert "model.safetensors" in str(exported)
    resumed = sw.restore(state(), tmp_path / "step")
    assert "step 7, saved on 1 rank, now on 1" in str(resumed)
    assert "<td" in resumed._repr_html_()
    assert "ResumeReport(" in repr(resumed), "repr has all fields"
    assert all(len(line) <= 100 for line in str(resumed).splitlines())


def test_a_record_in_a_report_is_shown_in_words() -> None:
    budget = HostBudget(
        limit_bytes=2**34, limit_from="MemTotal in /proc/meminfo", with_swap_bytes=2**34, free_bytes=2**33
    )
    assert str(budget) == "8.00 GiB free of 16.0 GiB (MemTotal in /proc/meminfo)"


def test_a_resume_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardwise")
    sw.save(state(extra={"ema": 0.9}), tmp_path / "step", step=7)
    sw.restore(state(extra={"ema": 0.5}), tmp_path / "step")
    sw.restore(state(), tmp_path / "step")  # without "extra"
    found = [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("restored")]
    assert [level for level, _ in found] == ["INFO", "WARNING"]
    says = "restored step 7, saved on 1 rank, now on 1; exact: yes, for the state you passed (no dataloader)"
    assert found[0][1] == says
    assert "exact: no: extra" in found[1][1]


def test_what_a_report_says_of_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardwise")
    loader = sw.ResumableLoader(torch.utils.data.DataLoader([1, 2, 3]))
    sw.save(state(dataloader=loader), tmp_path / "step", step=7)
    given = state(dataloader=loader)
    assert given.optimizer is not None
    assert (sw.restore(given, tmp_path / "step").not_given, caplog.records[-1].levelname) == ((), "INFO")
    assert caplog.messages[-1].endswith("; exact: yes")
    given.optimizer.param_groups[0]["lr"] = 0.5  # type: ignore[attr-defined]
    report = sw.restore(given, tmp_path / "step")
    assert caplog.records[-1].levelname == "WARNING"
    assert caplog.messages[-1].endswith(
        "; exact: yes; optimizer.lr: this program's 0.5 was replaced by the checkpoint's 0.001"
    )
    assert report.rows()["settings replaced"] == report.replaced[0]
    given.optimizer.param_groups[0].update(lr=1, eps=1, weight_decay=1, maximize=True)  # type: ignore[attr-defined]
    sw.restore(given, tmp_path / "step")
    assert caplog.messages[-1].endswith("; and 1 more")
    sw.save(sw.TrainState(given.model), tmp_path / "model", step=7)
    report = sw.restore(sw.TrainState(given.model), tmp_path / "model")
    assert report.exact
    assert report.rows()["exact"] == "yes, for the state you passed (no optimizer, no dataloader)"


def test_what_a_report_says_of_a_checkpoint_without_digests(tmp_path: Path) -> None:
    given = state()
    torch.save(given.model.state_dict(), tmp_path / "pytorch_model.bin")  # type: ignore[union-attr]
    torch.save(given.optimizer.state_dict(), tmp_path / "optimizer.bin")  # type: ignore[union-attr]
    given.optimizer.param_groups[0]["lr"] = 0.5  # type: ignore[union-attr]
    report = sw.restore(given, tmp_path)
    rows = report.rows()
    assert rows["digests compared"] == "none: the checkpoint has no digests"
    assert rows["restored unchecked"] == "2 model tensors, 0 optimizer tensors"
    assert rows["resumed from"] == "step 0, saved on an unknown number of ranks, now on 1"
    assert report.replaced == ("optimizer.lr: this program's 0.5 was replaced by the checkpoint's 0.001",)
