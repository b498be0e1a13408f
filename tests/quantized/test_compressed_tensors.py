"""compressed-tensors: checkpoints that it writes, each weight by boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import IntegrityError
from shardwise.quantized.compressed_tensors import find_compressed_tensors as compressed_tensors
from shardwise.tensors.boxes import Box, whole
from tests.quantized.boxes import check_boxes, decoded, same_bits, source_of, with_part
from tests.quantized.compressed_cases import BF16, CASES, FP8_INPUT, MXFP4, Checkpoint, floats, group, ints
from tests.quantized.compressed_models import whole_weights, write

Written = Callable[[str], Checkpoint]


@pytest.mark.parametrize("case", CASES)
def test_boxes(written: Written, case: str) -> None:
    made = written(case)
    assert made.settings["format"] == CASES[case][2]
    found = compressed_tensors(made.source)
    expected = whole_weights(made.root, made.settings)
    assert not found.problems
    assert found.coded.keys() == expected.keys()
    assert expected
    used = {*found.parts(), *found.unused}
    assert all(t.dtype == CASES[case][1] for n, t in made.stored.items() if n not in used)
    for name, weight in expected.items():
        check_boxes(found.coded[name], weight, made.stored)


def test_boxes_of_parts_are_tight(written: Written) -> None:
    made = written("w4-group-zeros")
    rule = compressed_tensors(made.source).coded["model.layers.0.mlp.up_proj.weight"].rule
    assert rule.boxes(Box((8, 32), (24, 96))) == {
        "codes": Box((8, 4), (24, 12)),
        "scales": Box((8, 1), (24, 3)),
        "zeros": Box((1, 1), (3, 3)),
    }
    assert rule.boxes(Box((9, 39), (10, 41))) == {
        "codes": Box((9, 4), (10, 6)),
        "scales": Box((9, 1), (10, 2)),
        "zeros": Box((1, 1), (2, 2)),
    }


def test_formats_in_words(written: Written) -> None:
    words = {}
    for case in ("fp8-tensor", "fp8-blocks", "int8-channel", "w4-group-zeros", "nvfp4", "mxfp4", "mxfp8"):
        found = compressed_tensors(written(case).source)
        words[case] = found.coded["model.layers.0.mlp.up_proj.weight"].rule.format
    assert words == {
        "fp8-tensor": "FP8 per tensor",
        "fp8-blocks": "FP8 in blocks of 64 x 32",
        "int8-channel": "INT8 per channel",
        "w4-group-zeros": "packed INT4 in groups of 32, with zero points",
        "nvfp4": "NVFP4 in groups of 16",
        "mxfp4": "MXFP4 in groups of 32",
        "mxfp8": "MXFP8 in groups of 32",
    }


def test_columns_of_any_group(written: Written) -> None:
    """``weight_g_idx``: the library's rule until 0.16 sorts columns by their groups, decodes, and puts them back."""
    made = written("w4-group-zeros")
    module = "model.layers.0.mlp.up_proj"
    torch.manual_seed(1)
    order = (torch.arange(96) // 32)[torch.randperm(96)].to(torch.int32)
    stored = made.stored | {f"{module}.weight_g_idx": order}
    source = with_part(made.source, f"{module}.weight_g_idx", "I32", (96,))
    source = replace(source, content=lambda name: stored[name].numpy().tobytes())
    found = compressed_tensors(source)
    assert not found.problems

    plain = whole_weights(made.root, made.settings)[f"{module}.weight"]
    units = compressed_tensors(made.source).coded[f"{module}.weight"]
    by_group = order.argsort(stable=True)
    packed = stored[f"{module}.weight_packed"]
    codes = torch.stack([packed >> (4 * k) & 15 for k in range(8)], -1).flatten(1) - 8
    zeros = (
        torch.stack([stored[f"{module}.weight_zero_point"] >> (4 * k) & 15 for k in range(8)], 1).flatten(
            0, 1
        )
        - 8
    )
    scale = stored[f"{module}.weight_scale"]

    def decode(codes: torch.Tensor) -> torch.Tensor:
        grouped = codes.unflatten(1, (3, 32)).to(BF16) - zeros[..., None].to(BF16)
        return (grouped * scale[..., None]).flatten(1)

    assert same_bits(decode(codes), plain)
    assert same_bits(decoded(units, whole(units.tensor.shape), stored), plain)
    check_boxes(found.coded[f"{module}.weight"], decode(codes[:, by_group])[:, by_group.argsort()], stored)


def test_marked_groups_leave_columns_in_place(written: Written) -> None:
    made = written("w4-group")
    name = "model.layers.0.mlp.up_proj.weight_g_idx"
    source = replace(
        with_part(made.source, name, "I32", (96,)),
        content=lambda _: torch.full((96,), -1, dtype=torch.int32).numpy().tobytes(),
    )
    weight = compressed_tensors(source).coded["model.layers.0.mlp.up_proj.weight"]
    assert {"codes", "scales"} == weight.rule.boxes(whole(weight.tensor.shape)).keys()
    assert name in {part.name for part in weight.parts.values()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", ["fp8-blocks", "int8-channel", "w4-group"])
def test_scale_that_is_no_number(written: Written, case: str, value: float) -> None:
    made = written(case)
    name = "model.layers.0.mlp.up_proj.weight"
    scales = made.stored[f"{name}_scale"].clone()
    scales[-1, -1] = value
    weight = compressed_tensors(made.source).coded[name]
    with pytest.raises(IntegrityError, match=f"{name}: a scale is NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), made.stored | {f"{name}_scale": scales})
    decoded(weight, Box((0, 0), (8, 8)), made.stored | {f"{name}_scale": scales})


def test_global_scale_of_zero(written: Written) -> None:
    made = written("nvfp4")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = compressed_tensors(made.source).coded[name]
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), made.stored | {f"{name}_global_scale": torch.zeros(1)})


def test_exponents_of_all_sizes(written: Written) -> None:
    """Numbers as large and as small as E8M0 scales make them; 255 is no number."""
    made = written("mxfp4")
    name = "model.layers.0.mlp.up_proj.weight"
    scales = (torch.arange(160 * 3) % 255).to(torch.uint8).view(160, 3)
    weight = compressed_tensors(made.source).coded[name]
    stored = made.stored | {f"{name}_scale": scales}
    codes = torch.arange(160 * 48).to(torch.uint8).view(160, 48)
    stored[f"{name}_packed"] = codes
    check_boxes(weight, _mxfp4_by_the_library(codes, scales), stored)
    scales[3, 2] = 255
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), stored)


def _mxfp4_by_the_library(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**group(MXFP4))
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    return compressor.decompress({"weight_packed": codes, "weight_scale": scales}, scheme)["weight"]


def test_activations_and_caches_are_unused(tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    settings = write(tmp_path, {"g": group(floats(8, "tensor"), FP8_INPUT)}, BF16, cache)
    source = source_of(tmp_path, settings)
    found = compressed_tensors(source)
    assert not found.problems
    # transformers 5.24 writes no scales of caches.
    scales = {name for name in source.tensors if name.endswith((".k_scale", ".v_scale", ".input_scale"))}
    assert "model.layers.0.self_attn.q_proj.input_scale" in scales
    assert scales <= found.unused


def test_scales_beside_plain_weights_are_unused(written: Written) -> None:
    """Format dense: weights as they are, and scales that a model in codes would have."""
    made = written("fp8-channel")
    only = made.settings["config_groups"]["group_0"]
    settings = made.settings | {"config_groups": {"group_0": only | {"format": "dense"}}}
    source = made.source
    for name in [n for n in source.tensors if n.endswith("proj.weight")]:
        source = with_part(source, name, "BF16")
    found = compressed_tensors(replace(source, settings=settings))
    assert not found.problems
    assert not found.coded
    assert "model.layers.0.mlp.up_proj.weight_scale" in found.unused


def test_classes_of_modules_are_told_by_their_parts(tmp_path: Path) -> None:
    """Two groups that target classes: stored tensors tell no class, but only one group's scheme fits them."""
    groups = {"a": group(ints(8), None, ("Embedding",)), "b": group(ints(4, "group", 32))}
    found = compressed_tensors(source_of(tmp_path, write(tmp_path, groups, BF16)))
    assert not found.problems
    formats = {name: weight.rule.format for name, weight in found.coded.items()}
    assert formats.pop("model.embed_tokens.weight") == "packed INT8 per channel"
    assert set(formats.values()) == {"packed INT4 in groups of 32"}
    assert len(formats) == 7
