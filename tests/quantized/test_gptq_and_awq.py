"""Checkpoints packed as GPTQModel and AutoAWQ pack them: every box decodes to the bits that those libraries make of the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from shardwise.errors import IntegrityError
from shardwise.quantized.formats import find_awq, find_gptq
from shardwise.tensors.boxes import Box, whole
from tests.quantized import _reference_awq, _reference_gptq
from tests.quantized._boxes import State, check_boxes, cut, found_in, read_elements, stored
from tests.quantized._packed import awq_parts, gptq_parts

_CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
)
_Q = "model.layers.0.self_attn.q_proj."
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_KINDS: dict[str, dict[str, Any]] = {
    "4 bits": _GPTQ,
    "4 bits, v2": {**_GPTQ, "checkpoint_format": "gptq_v2"},
    "2 bits": {**_GPTQ, "bits": 2, "format": "gptq"},
    "8 bits": {**_GPTQ, "bits": 8},
    "8 bits, symmetric": {**_GPTQ, "bits": 8, "sym": True, "group_size": 16},
    "by activation": {**_GPTQ, "desc_act": True},
    "by activation, v2": {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2", "bits": 8},
    "by activation, symmetric": {**_GPTQ, "desc_act": True, "sym": True},
    "one group": {**_GPTQ, "group_size": -1},
    "short group": {**_GPTQ, "group_size": 40},
    "awq": _AWQ,
    "awq, one group": {**_AWQ, "group_size": -1, "version": "GEMM"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """A tiny model in every format, and its weights as the libraries make them of it."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(_CONFIG)
    found = {}
    for kind, settings in _KINDS.items():
        root = tmp_path_factory.mktemp("packed")
        state, expected = {}, {}
        for name, tensor in model.state_dict().items():
            if name.endswith("proj.weight"):
                pack = awq_parts if settings["quant_method"] == "awq" else gptq_parts
                parts, expected[name] = pack(tensor * 20, settings)
                state |= {f"{name[:-6]}{last}": part.contiguous() for last, part in parts.items()}
            else:
                state[name] = tensor.half().clone()
        save_file(state, root / "model.safetensors", metadata={"format": "pt"})
        (root / "config.json").write_text(json.dumps({**_CONFIG.to_dict(), "quantization_config": settings}))
        found[kind] = (root, expected)
    return found


@pytest.mark.parametrize("kind", _KINDS)
def test_every_box_is_what_the_library_makes(
    kind: str, checkpoints: dict[str, tuple[Path, State]], tmp_path: Path
) -> None:
    root, expected = checkpoints[kind]
    state, settings = stored(root)
    found = found_in(_family(settings), tmp_path, state, settings)
    assert found.problems == []
    assert found.coded.keys() == expected.keys()
    for name, one in found.coded.items():
        assert one.tensor.dtype == "F16"
        assert one.tensor.shape == tuple(_CONFIG_SHAPES[name])
        check_boxes(one, state, expected[name])
    assert {n for n in state if "proj." in n} == set(found.parts())


_CONFIG_SHAPES = {n: p.shape for n, p in transformers.LlamaForCausalLM(_CONFIG).state_dict().items()}


def _family(settings: dict[str, Any]) -> Any:
    return find_awq if settings["quant_method"] == "awq" else find_gptq


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("shape", [(7, 31), (33, 5), (1, 1), (16, 100)], ids=str)
def test_sizes_that_cut_words(shape: tuple[int, int], desc_act: bool, bits: int, tmp_path: Path) -> None:
    settings = {**_GPTQ, "bits": bits, "desc_act": desc_act, "group_size": 16}
    parts, expected = gptq_parts(torch.randn(shape), settings)
    state = {f"one.{last}": part.contiguous() for last, part in parts.items()}
    found = found_in(find_gptq, tmp_path, state, settings)
    assert found.problems == []
    check_boxes(found.coded["one.weight"], state, expected)


def test_every_code_and_zero_point(tmp_path: Path) -> None:
    """Any bits that a file may hold, zero points that wrap included, decode as the libraries decode them."""
    for settings in (_GPTQ, {**_GPTQ, "bits": 2}, {**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, _AWQ):
        words, bits = 64 * settings["bits"] // 32, settings["bits"]
        columns = (words, 48) if settings["quant_method"] == "gptq" else (64, 6)
        state = {
            "one.qweight": torch.randint(-(2**31), 2**31 - 1, columns, dtype=torch.int32),
            "one.qzeros": torch.randint(-(2**31), 2**31 - 1, (2, 48 * bits // 32), dtype=torch.int32),
            "one.scales": torch.randn(2, 48).half() * 300,
            "one.g_idx": torch.arange(64, dtype=torch.int32) // 32,
        }
        parts = [state[f"one.{last}"] for last in ("qweight", "qzeros", "scales", "g_idx")]
        if settings["quant_method"] == "awq":
            expected = _reference_awq.dequantize_gemm(*parts[:3], 4, 32)
        else:
            module = _reference_gptq.Module(bits, *(part.clone() for part in parts))
            if "checkpoint_format" not in settings:
                _reference_gptq.convert_gptq_v1_to_v2_format_module(module)
            expected = _reference_gptq.dequantize_weight(module)
        found = found_in(_family(settings), tmp_path, state, settings)
        check_boxes(found.coded["one.weight"], state, expected.t())


def test_cuts_on_boundaries_read_nothing_else(
    checkpoints: dict[str, tuple[Path, State]], tmp_path: Path
) -> None:
    def box_of(kind: str) -> Any:
        state, settings = stored(checkpoints[kind][0])
        return found_in(_family(settings), tmp_path, state, settings).coded[f"{_Q}weight"]

    box = Box((8, 32), (24, 64))  # 16 outputs, 32 inputs
    assert read_elements(box_of("4 bits"), box) == {"codes": 64, "zeros": 2, "scales": 16, "groups": 32}
    assert read_elements(box_of("8 bits"), box) == {"codes": 128, "zeros": 4, "scales": 16, "groups": 32}
    assert read_elements(box_of("by activation"), box) == {
        "codes": 64,
        "zeros": 4,
        "scales": 32,
        "groups": 32,
    }
    assert read_elements(box_of("awq"), box) == {"codes": 64, "zeros": 2, "scales": 16}
    assert box_of("4 bits").rule.format == "GPTQ with 4 bits in groups of 32"
    assert box_of("by activation").rule.format == "GPTQ with 4 bits in groups by activation order"
    assert box_of("awq").rule.format == "AWQ with 4 bits in groups of 32"


@pytest.mark.parametrize("kind", ["4 bits", "by activation", "awq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_must_be_numbers(
    kind: str, value: float, checkpoints: dict[str, tuple[Path, State]], tmp_path: Path
) -> None:
    state, settings = stored(checkpoints[kind][0])
    state[f"{_Q}scales"][0, 3] = value
    one = found_in(_family(settings), tmp_path, state, settings).coded[f"{_Q}weight"]
    with pytest.raises(IntegrityError, match=f"{_Q}weight: a scale is NaN or infinite"):
        cut(one, state, whole(one.tensor.shape))


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        ("4 bits", 1, "g_idx is not in order, which config.json says it is: expected desc_act true"),
        ("by activation", 2, "expected groups from 0 to 1 in g_idx, found 0 to 2"),
        ("by activation", -1, "expected groups from 0 to 1 in g_idx, found -1 to 1"),
    ],
)
def test_groups_that_do_not_exist(
    kind: str, value: int, sentence: str, checkpoints: dict[str, tuple[Path, State]], tmp_path: Path
) -> None:
    state, settings = stored(checkpoints[kind][0])
    state[f"{_Q}g_idx"][0] = value
    one = found_in(_family(settings), tmp_path, state, settings).coded[f"{_Q}weight"]
    with pytest.raises(IntegrityError, match=sentence):
        cut(one, state, whole(one.tensor.shape))


def test_modules_with_bits_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``: patterns of modules that have other bits and groups. The tensors tell."""
    settings = {**_GPTQ, "dynamic": {r"+:.*down.*": {"bits": 8, "group_size": 16}}}
    usual, first = gptq_parts(torch.randn(16, 64), settings)
    other, second = gptq_parts(torch.randn(16, 64), {**settings, "bits": 8, "group_size": 16})
    state = {f"up.{n}": t.contiguous() for n, t in usual.items()} | {
        f"down.{n}": t.contiguous() for n, t in other.items()
    }
    found = found_in(find_gptq, tmp_path, state, settings)
    assert found.problems == []
    check_boxes(found.coded["up.weight"], state, first)
    check_boxes(found.coded["down.weight"], state, second)


Change = Callable[[State, dict[str, Any]], object]


def _puts(**tensors: torch.Tensor | None) -> Change:
    def change(state: State, _: dict[str, Any]) -> None:
        for last, tensor in tensors.items():
            state.pop(f"{_Q}{last}", None)
            if tensor is not None:
                state[f"{_Q}{last}"] = tensor

    return change


def _turned(last: str) -> Change:
    return lambda state, _: state.update({f"{_Q}{last}": state[f"{_Q}{last}"].t().contiguous()})


def _says(**changes: Any) -> Change:
    return lambda _, settings: settings.update(changes)


_W = f"{_Q}weight"
_ALL = "model.layers.0.mlp.down_proj.qweight can't be decoded, as 7 modules in all: "
#: The kind of checkpoint, what happens to it, and the one sentence about it.
_PROBLEMS: dict[str, tuple[str, Change, str]] = {
    "no codes": ("4 bits", _puts(qweight=None), f"{_Q}qweight: missing: {_W} can't be decoded without it"),
    "no scales": ("4 bits", _puts(scales=None), f"{_Q}scales: missing: {_W} can't be decoded without it"),
    "no zero points": (
        "4 bits",
        _puts(qzeros=None),
        f"{_Q}qzeros: missing: {_W} can't be decoded without it",
    ),
    "no groups": ("4 bits", _puts(g_idx=None), f"{_Q}g_idx: missing: {_W} can't be decoded without it"),
    "plain, too": (
        "4 bits",
        _puts(weight=torch.ones(64, 64)),
        f"{_W}: stored plainly, too: expected either it or {_Q}qweight",
    ),
    "codes turned": (
        "4 bits",
        _turned("qweight"),
        f"{_Q}qweight: expected I32 [8, 8] for 64 inputs (as {_Q}g_idx) of 4 bits, found I32 [64, 8]",
    ),
    "scales turned": (
        "4 bits",
        _turned("scales"),
        f"{_Q}scales: expected F16 [2, 64] for 64 inputs in groups of 32 and 64 outputs, found F16 [64, 2]",
    ),
    "zero points turned": (
        "4 bits",
        _turned("qzeros"),
        f"{_Q}qzeros: expected I32 [2, 8] for 2 groups and 64 outputs of 4 bits, found I32 [8, 2]",
    ),
    "codes of another dtype": (
        "4 bits",
        _puts(qweight=torch.ones(8, 64, dtype=torch.int64)),
        f"{_Q}qweight: expected I32 in two dims, found I64 [8, 64]",
    ),
    "scales of another dtype": (
        "4 bits",
        _puts(scales=torch.ones(2, 64)),
        f"{_Q}scales: expected F16 in two dims, found F32 [2, 64]",
    ),
    "groups of another dtype": (
        "4 bits",
        _puts(g_idx=torch.zeros(64, dtype=torch.int64)),
        f"{_Q}g_idx: expected I32 in one dim, found I64 [64]",
    ),
    "other bits": (
        "4 bits",
        _says(bits=8),
        f"{_Q}qweight: expected I32 [16, 64] for 64 inputs (as {_Q}g_idx) of 8 bits",
    ),
    "other groups": (
        "4 bits",
        _says(group_size=16),
        f"{_Q}scales: expected F16 [4, 64] for 64 inputs in groups of 16",
    ),
    "3 bits": ("4 bits", _says(bits=3), f"{_ALL}expected 2, 4 or 8 as bits in config.json, found 3"),
    "no bits": (
        "4 bits",
        lambda _, says: says.pop("bits"),
        f"{_ALL}expected 2, 4 or 8 as bits in config.json, found None",
    ),
    "groups of none": (
        "4 bits",
        _says(group_size=0),
        f"{_ALL}expected a positive number or -1 as group_size",
    ),
    "order is a word": (
        "4 bits",
        _says(desc_act="no"),
        f"{_ALL}expected true or false as desc_act in config.json, found 'no'",
    ),
    "marlin": (
        "4 bits",
        _says(checkpoint_format="marlin"),
        f"{_ALL}expected gptq or gptq_v2 as checkpoint_format in config.json, found 'marlin'",
    ),
    "marlin of old": (
        "4 bits",
        _says(is_marlin_format=True),
        f"{_ALL}expected gptq or gptq_v2 as checkpoint_format",
    ),
    "format is a list": ("4 bits", _says(checkpoint_format=["gptq"]), f"{_ALL}expected gptq or gptq_v2"),
    "rotated": ("4 bits", _says(rotation="hadamard"), f"{_ALL}config.json says rotation = 'hadamard'"),
    "awq without scales": (
        "awq",
        _puts(scales=None),
        f"{_Q}scales: missing: {_W} can't be decoded without it",
    ),
    "awq codes turned": (
        "awq",
        _turned("qweight"),
        f"{_Q}scales: expected F16 [1, 512] for 8 inputs in groups of 32 and 512 outputs (as {_Q}qweight), found F16 [2, 64]",
    ),
    "awq zero points turned": (
        "awq",
        _turned("qzeros"),
        f"{_Q}qzeros: expected I32 [2, 8] for 64 inputs in groups of 32",
    ),
    "awq scales of another dtype": (
        "awq",
        _puts(scales=torch.ones(2, 64).bfloat16()),
        f"{_Q}scales: expected F16 in two dims",
    ),
    "awq of other bits": ("awq", _says(bits=8), f"{_ALL}expected 4 as bits in config.json, found 8"),
    "awq gemv": (
        "awq",
        _says(version="gemv"),
        f"{_ALL}expected gemm as version in config.json, found 'gemv'",
    ),
    "awq exllama": (
        "awq",
        _says(version="exllama"),
        f"{_ALL}expected gemm as version in config.json, found 'exllama'",
    ),
    "awq marlin": (
        "awq",
        _says(version="marlin"),
        f"{_ALL}expected gemm as version in config.json, found 'marlin'",
    ),
    "awq version is a number": (
        "awq",
        _says(version=2),
        f"{_ALL}expected gemm as version in config.json, found 2",
    ),
    "awq groups of none": (
        "awq",
        _says(group_size="32"),
        f"{_ALL}expected a positive number or -1 as group_size",
    ),
}


@pytest.mark.parametrize("what", _PROBLEMS)
def test_what_is_wrong_is_one_sentence(
    what: str, checkpoints: dict[str, tuple[Path, State]], tmp_path: Path
) -> None:
    kind, change, sentence = _PROBLEMS[what]
    state, settings = stored(checkpoints[kind][0])
    family = _family(settings)
    change(state, settings)
    found = found_in(family, tmp_path, state, settings)
    (problem,) = [one for one in found.problems if "q_proj" in one or one.startswith(_ALL)]
    assert problem.startswith(sentence), problem
    assert _W not in found.coded


def test_other_families_are_left_alone(checkpoints: dict[str, tuple[Path, State]], tmp_path: Path) -> None:
    for kind in ("4 bits", "awq"):
        state, _ = stored(checkpoints[kind][0])
        for find in (find_gptq, find_awq):
            found = found_in(find, tmp_path, state, {"quant_method": "compressed-tensors"})
            assert not found.coded
            assert not found.problems
