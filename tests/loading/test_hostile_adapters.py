"""Configs of adapters from strangers: what PEFT would choke on is refused with the file and the setting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.internals.regex import check_patterns
from tests.fuzz.seeds import make_model
from tests.harness.bombs import refused_within


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile adapters") / "model"
    folder.mkdir()
    make_model(folder)
    return folder


#: Expressions that Python would match for minutes, or far longer, with the names of a small model.
ENDLESS = {
    "a repeat within a repeat": "(.+)+X",
    "alternatives that mean the same": "(.|.)" * 31 + "X",
    "nested bounds": "((.{0,16}){0,16}){0,16}X",
    "bounds one after the other": ".{0,16}" * 12 + "X",
    "many stars": ".*" * 9 + "X",
    "optional letters": ".?" * 31 + "." * 21 + "X",
    "repeats of nothing": "(?:(?:){4000}){4000000}X",
}
#: Where PEFT takes expressions.
SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "target_modules": lambda p: {"target_modules": p},
    "exclude_modules": lambda p: {"exclude_modules": p},
    "layers_pattern": lambda p: {
        "layers_pattern": [p],
        "layers_to_transform": [0],
        "target_modules": ["q_proj"],
    },
    "rank_pattern": lambda p: {"rank_pattern": {p: 4}},
    "alpha_pattern": lambda p: {"alpha_pattern": {p: 4}},
    "modules_to_save": lambda p: {"modules_to_save": [p]},
}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a rank of no machine": ({"r": 10**12}, "rank 1000000000000"),
    "a rank that is text": ({"r": "8"}, "rank '8'"),
    "a rank of nothing": ({"r": 0}, "rank 0 is not a number from 1"),
    "a rank of a pattern": ({"rank_pattern": {"q_proj": 2**40}}, "rank 1099511627776"),
    **{name: ({"target_modules": pattern}, "target_modules ") for name, pattern in ENDLESS.items()},
    **{f"an expression in {name}": (document("(.+)+X"), f"{name} ") for name, document in SETTINGS.items()},
    "an expression that allocates": ({"target_modules": "q{99999999999}"}, "not a regular expression"),
    "no expression": ({"target_modules": "(q_proj"}, "not a regular expression"),
    "modules that are not there": ({"target_modules": ["nothing"]}, "can't add this adapter"),
    "a pattern of layers that is a number": (
        {"layers_pattern": 1, "layers_to_transform": [0]},
        "can't add this adapter",
    ),
    "modules to save that are a number": ({"modules_to_save": 1}, "can't add this adapter"),
    "alpha that is a list": ({"lora_alpha": [1]}, "can't add this adapter"),
    "dropout that is text": ({"lora_dropout": "x"}, "can't add this adapter"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    changes, expected = CONFIGS[case]
    for file in (model / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    text = refused_within(lambda: sw.load_pretrained(model, adapter=str(tmp_path)), seconds=4)
    assert "adapter_config.json" in text
    assert expected in text


#: As people write them; the first is of Unsloth.
HONEST = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|q_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|proj|linear).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:k_proj|q_proj|v_proj|o_proj|gate_proj|up_proj)))",
    r"^(?!.*visual)(?=.*(q_proj|k_proj)).*",
    r".*\.layers\.\d+\.(self_attn|mlp)\..*_proj",
    r"model\.layers\.(\d+|[a-z]+)\.(?P<kind>self_attn|mlp)\.(q|k|v|o|up|down)_proj",
    r"(\w+\.)*(q|v)_proj",
    r"^model\.[a-z]+\.\d{1,3}$",
    r"(?i).*\.Q_PROJ",
    "all-linear",
)


@pytest.mark.parametrize("layers", [2, 61])
def test_expressions_that_people_write(layers: int) -> None:
    """Also over the names of a large model of experts."""
    parts = ["self_attn.q_proj", "self_attn.o_proj", "input_layernorm"]
    parts += [f"mlp.experts.{k}.down_proj" for k in range(128)]
    names = [f"model.language_model.layers.{k}.{part}" for k in range(layers) for part in parts]
    for pattern in HONEST:
        check_patterns([pattern], names, "target_modules", None)


def test_the_count_is_of_all_ways() -> None:
    """Against all ways to match found by hand: each cut of a name into the parts of an expression."""
    from shardwise.internals.regex import _Counter, _parser

    def steps(pattern: str, name: str) -> float:
        counter = _Counter([name], int(re.UNICODE), 1e9)
        counter.all_ways(_parser.parse(pattern))
        return counter.steps

    assert steps("abc", "abc") == 3
    assert steps("aa|ba", "aa") == 4
    letters = 10
    assert steps(".*.*", "a" * letters) == 1 + (letters + 1)  # before the first, and before the second
    assert steps("(a|a)(a|a)X", "aa") > steps("(a|b)(a|b)X", "aa")
    assert steps("(a|a)" * 9 + "X", "a" * 9) > 2**9
    assert steps(r"\d*\d*X", "a" * letters) == 3
