"""MXFP4 as gpt-oss is stored: bitwise what transformers makes of it, by boxes; and what is wrong with a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwise.errors import IntegrityError
from shardwise.quantized.formats import find_mxfp4 as mxfp4
from shardwise.quantized.open import Source
from shardwise.tensors.boxes import Box, whole
from tests.quantized.boxes import check_boxes, decoded, same_bits, source_of, stored_in, with_part, without

UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of a tiny gpt-oss: any byte is two codes, and any below 255 a scale."""
    root = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(96)}
    for name, rows, blocks in ((UP, 40, 3), (DOWN, 33, 1)):
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (3, rows, blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(0, 255, (3, rows, blocks), dtype=torch.uint8)
        tensors[f"{name}_bias"] = torch.zeros(3, rows)
    save_file(tensors, root / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return source_of(root, SETTINGS)


@pytest.mark.parametrize("name", [UP, DOWN])
def test_boxes(root: Path, source: Source, name: str) -> None:
    stored = stored_in(root)
    found = mxfp4(source)
    assert not found.problems
    assert set(found.parts()) == {f"{n}_{part}" for n in (UP, DOWN) for part in ("blocks", "scales")}
    expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert found.coded[name].tensor.dtype == "BF16"
    check_boxes(found.coded[name], expected, stored)


def test_every_code_with_every_scale(root: Path, source: Source) -> None:
    """Zeros of both signs, subnormals and overflows come out as transformers makes them."""
    weight = mxfp4(
        with_part(
            with_part(source, f"{UP}_blocks", None, (1, 255, 16, 16)), f"{UP}_scales", None, (1, 255, 16)
        )
    )
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    check_boxes(
        weight.coded[UP],
        convert_moe_packed_tensors(codes, scales),
        {f"{UP}_blocks": codes, f"{UP}_scales": scales},
    )


def test_boxes_of_parts_are_tight(source: Source) -> None:
    rule = mxfp4(source).coded[UP].rule
    assert rule.format == "MXFP4 in blocks of 32"
    assert rule.boxes(Box((1, 32, 8), (2, 96, 16))) == {
        "codes": Box((1, 8, 1, 0), (2, 16, 3, 16)),
        "scales": Box((1, 8, 1), (2, 16, 3)),
    }
    assert rule.boxes(Box((0, 35, 8), (3, 39, 9))) == {
        "codes": Box((0, 8, 1, 0), (3, 9, 2, 4)),
        "scales": Box((0, 8, 1), (3, 9, 2)),
    }


def test_parts_anywhere_in_memory(root: Path, source: Source) -> None:
    """A reader may hand parts that begin at any byte."""
    stored = stored_in(root)
    rule = mxfp4(source).coded[UP].rule
    box = whole((3, 96, 40))
    parts = {"codes": stored[f"{UP}_blocks"], "scales": stored[f"{UP}_scales"]}
    memory = torch.empty(parts["codes"].numel() + 3, dtype=torch.uint8)
    memory[3:] = parts["codes"].flatten()
    moved = parts | {"codes": memory[3:].view(parts["codes"].shape)}
    assert same_bits(rule.decode(box, parts), rule.decode(box, moved))


def test_scale_that_is_no_number(root: Path, source: Source) -> None:
    stored = stored_in(root)
    stored[f"{UP}_scales"][2, 39, 2] = 255
    weight = mxfp4(source).coded[UP]
    with pytest.raises(IntegrityError, match=f"{UP}: a scale is NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), stored)
    decoded(weight, Box((0, 0, 0), (2, 96, 40)), stored)


def test_another_method_is_left_alone(root: Path) -> None:
    found = mxfp4(source_of(root, {"quant_method": "fp8"}))
    assert not found.coded
    assert not found.problems


@pytest.mark.parametrize(
    ("part", "dtype", "shape", "sentence"),
    [
        ("blocks", "I8", None, f"{UP}_blocks has dtype I8; expected U8"),
        ("scales", "F32", None, f"{UP}_scales has dtype F32; expected U8"),
        (
            "blocks",
            None,
            (3, 40, 48),
            f"{UP}_blocks has shape (3, 40, 48); expected four dims: experts, rows, blocks and 16",
        ),
        ("blocks", None, (3, 40, 3, 32), f"{UP}_blocks has shape (3, 40, 3, 32); expected four dims"),
        (
            "scales",
            None,
            (3, 3, 40),
            f"{UP}_scales has shape (3, 3, 40); expected (3, 40, 3), one scale for each block",
        ),
    ],
)
def test_wrong_part(
    source: Source, part: str, dtype: str | None, shape: tuple[int, ...] | None, sentence: str
) -> None:
    found = mxfp4(with_part(source, f"{UP}_{part}", dtype, shape))
    assert any(sentence in problem for problem in found.problems)
    assert set(found.coded) == {DOWN}


def test_missing_and_surplus_parts(source: Source) -> None:
    (problem,) = mxfp4(without(source, f"{UP}_scales")).problems
    assert problem == f"{UP}_blocks has no {UP}_scales next to it: codes without scales are not weights"
    (problem,) = mxfp4(without(source, f"{UP}_blocks")).problems
    assert problem == f"{UP}_scales has no {UP}_blocks next to it"
    (problem,) = mxfp4(with_part(source, UP, "BF16", (3, 96, 40))).problems
    assert problem == f"{UP} is stored twice: as {UP} and as {UP}_blocks; remove one"


def test_settings_without_tensors(source: Source) -> None:
    (problem,) = mxfp4(
        without(source, *(f"{n}_{part}" for n in (UP, DOWN) for part in ("blocks", "scales")))
    ).problems
    assert "quant_method 'mxfp4', and no stored tensor ends in '_blocks' or '_scales'" in problem
