"""``load_pretrained`` returns the model; its report is found later."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import shardwise as sw
from tests.harness import models


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    models.write_hub_directory("qwen3", folder, torch.float32)
    return folder


def test_the_model_alone_or_with_its_report(hub: Path) -> None:
    model = sw.load_pretrained(hub)
    assert isinstance(model, nn.Module)
    again, report = sw.load_pretrained(hub, return_report=True)
    assert report is sw.reports.load_report(again)
    assert sw.reports.load_report(model).source == report.source == str(hub)
    assert sw.reports.load_report(model).bytes_read == report.bytes_read


def test_the_last_load_counts(hub: Path) -> None:
    model = sw.load_pretrained(hub)
    first = sw.reports.load_report(model)
    sw.export_hf(model, hub.parent / "out", overwrite=True)
    last = sw.load(model, hub.parent / "out")
    assert sw.reports.load_report(model) is last is not first


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_inside_wrappers_and_around_them(hub: Path) -> None:
    model = sw.load_pretrained(hub)
    report = sw.reports.load_report(model)
    assert sw.reports.load_report(nn.DataParallel(model)) is report
    config = peft.LoraConfig(target_modules=["q_proj"])
    assert sw.reports.load_report(peft.get_peft_model(model, config)) is report
    adapted = sw.load_pretrained(hub, adapter=config)
    assert sw.reports.load_report(adapted).source == str(hub)


def test_a_model_that_was_not_loaded_has_none(hub: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(hub)
    with pytest.raises(ValueError, match=r"load_report: this Qwen3ForCausalLM was not filled by sw\.load"):
        sw.reports.load_report(plain)
    with pytest.raises(ValueError, match="a copy of a model"):
        sw.reports.load_report(copy.deepcopy(sw.load_pretrained(hub)))
