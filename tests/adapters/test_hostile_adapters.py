"""Configs of adapters from strangers: what PEFT would choke on is refused with the file and the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import FormatError
from tests.fuzz.seeds import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile adapters") / "model"
    folder.mkdir()
    make_model(folder)
    return folder


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank of no machine": ({"r": 10**12}, "rank 1000000000000"),
    "a rank that is text": ({"r": "8"}, "rank '8'"),
    "a rank of nothing": ({"r": 0}, "rank 0 is not a number from 1"),
    "a rank of a pattern": ({"rank_pattern": {"q_proj": 2**40}}, "rank 1099511627776"),
    "an expression that never ends": ({"target_modules": "(a+)+q_proj"}, "a repeat within a repeat"),
    "an expression in a key": ({"alpha_pattern": {"(.*)*x": 1}}, "a repeat within a repeat"),
    "many repeats": ({"target_modules": ".*.*.*.*.*q_proj"}, "5 repeats"),
    "no expression": ({"target_modules": "(q_proj"}, "not a regular expression"),
    "modules that are not there": ({"target_modules": ["nothing"]}, "can't put this adapter"),
    "alpha that is a list": ({"lora_alpha": [1]}, "can't put this adapter"),
    "dropout that is text": ({"lora_dropout": "x"}, "can't put this adapter"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    changes, expected = CONFIGS[case]
    for file in (model / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(FormatError, match=r"adapter_config\.json") as refusal:
        sw.load_pretrained(model, adapter=str(tmp_path))
    assert expected in str(refusal.value)


def test_expressions_that_people_write(tmp_path: Path) -> None:
    from shardwise.limits import check_pattern

    for pattern in (
        r".*\.layers\.\d+\.(self_attn|mlp)\..*_proj",
        r"(q|v)_proj",
        r"^model\.[a-z]+\.\d{1,3}$",
        "all-linear",
    ):
        check_pattern(pattern, "target_modules", str(tmp_path))
