"""compressed-tensors: checkpoints that it writes, each weight by boxes, and one sentence for everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import IntegrityError
from shardwise.layout.boxes import Box, whole
from shardwise.quantized.compressed_tensors import find as compressed_tensors
from shardwise.quantized.families import Source
from tests.quantized.boxes import check_boxes, decoded, same_bits, source_of, stored_in, with_part, without
from tests.quantized.ct_models import whole_weights, write

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def ints(
    bits: int, strategy: str = "channel", size: int | None = None, symmetric: bool = True
) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


def group(
    weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: tuple[str, ...] = ("Linear",)
) -> Any:
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


INT8_INPUT = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_INPUT = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
NVFP4 = floats(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
NVFP4_INPUT = NVFP4 | {"dynamic": "local"}
MXFP4 = floats(4, "group", group_size=32, scale_dtype="torch.uint8")
MXFP8 = floats(8, "group", group_size=32, scale_dtype="torch.uint8")

#: By name: groups, the model's dtype, the format that the library chooses.
CASES: dict[str, tuple[Any, torch.dtype, str]] = {
    "fp8-tensor": ({"g": group(floats(8, "tensor"), FP8_INPUT)}, BF16, "float-quantized"),
    "fp8-channel": ({"g": group(floats(8, "channel"), FP8_INPUT)}, F16, "float-quantized"),
    "fp8-group": ({"g": group(floats(8, "group", group_size=32), FP8_INPUT)}, F32, "float-quantized"),
    "fp8-blocks": (
        {"g": group(floats(8, "block", block_structure=[64, 32]), FP8_INPUT)},
        BF16,
        "float-quantized",
    ),
    "fp8-weights-only": ({"g": group(floats(8, "channel"))}, BF16, "naive-quantized"),
    "int8-channel": ({"g": group(ints(8), INT8_INPUT)}, BF16, "int-quantized"),
    "int8-tensor-zeros": ({"g": group(ints(8, "tensor", symmetric=False), INT8_INPUT)}, F16, "int-quantized"),
    "int8-group-zeros": ({"g": group(ints(8, "group", 32, False), INT8_INPUT)}, BF16, "int-quantized"),
    "w4-group": ({"g": group(ints(4, "group", 32))}, BF16, "pack-quantized"),
    "w4-group-f32": ({"g": group(ints(4, "group", 16))}, F32, "pack-quantized"),
    "w4-group-zeros": ({"g": group(ints(4, "group", 32, False))}, BF16, "pack-quantized"),
    "w4-channel": ({"g": group(ints(4))}, F16, "pack-quantized"),
    "w4-channel-zeros": ({"g": group(ints(4, symmetric=False))}, BF16, "pack-quantized"),
    "w4-tensor-zeros": ({"g": group(ints(4, "tensor", symmetric=False))}, BF16, "pack-quantized"),
    "w8-channel-zeros": ({"g": group(ints(8, symmetric=False))}, BF16, "pack-quantized"),
    **{
        f"w{n}-group-zeros": ({"g": group(ints(n, "group", 32, False))}, BF16, "pack-quantized")
        for n in (1, 2, 3, 5)
    },
    **{f"w{n}-channel": ({"g": group(ints(n))}, F16, "pack-quantized") for n in (2, 6, 7)},
    "nvfp4": ({"g": group(NVFP4, NVFP4_INPUT)}, BF16, "nvfp4-pack-quantized"),
    "mxfp4": ({"g": group(MXFP4)}, BF16, "mxfp4-pack-quantized"),
    "mxfp8": ({"g": group(MXFP8)}, BF16, "mxfp8-quantized"),
    "mixed": (
        {
            "a": group(NVFP4, None, ("re:.*self_attn.*",)),
            "b": group(ints(4, "group", 32), None, ("re:.*mlp.*",)),
        },
        BF16,
        "mixed-precision",
    ),
    "embedding": ({"g": group(ints(8, "channel"), None, ("Embedding",))}, BF16, "pack-quantized"),
}


@dataclass(frozen=True)
class Checkpoint:
    root: Path
    settings: dict[str, Any]
    source: Source
    stored: dict[str, torch.Tensor]


_written: dict[str, Checkpoint] = {}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("compressed-tensors")
    _written.clear()


def checkpoint(directory: Path, case: str) -> Checkpoint:
    """A case's checkpoint, written once."""
    if case not in _written:
        groups, dtype, _ = CASES[case]
        root = directory / case
        # per channel, a number of columns that fills no word
        settings = write(root, groups, dtype, inner=150 if "channel" in case or "tensor" in case else 160)
        _written[case] = Checkpoint(root, settings, source_of(root, settings), stored_in(root))
    return _written[case]


@pytest.mark.parametrize("case", CASES)
def test_boxes(directory: Path, case: str) -> None:
    made = checkpoint(directory, case)
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


def test_boxes_of_parts_are_tight(directory: Path) -> None:
    made = checkpoint(directory, "w4-group-zeros")
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


def test_formats_in_words(directory: Path) -> None:
    words = {}
    for case in ("fp8-tensor", "fp8-blocks", "int8-channel", "w4-group-zeros", "nvfp4", "mxfp4", "mxfp8"):
        found = compressed_tensors(checkpoint(directory, case).source)
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


def test_columns_of_any_group(directory: Path) -> None:
    """``weight_g_idx``: the library's rule until 0.16 sorts columns by their groups, decodes, and puts them back."""
    made = checkpoint(directory, "w4-group-zeros")
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


def test_marked_groups_leave_columns_in_place(directory: Path) -> None:
    made = checkpoint(directory, "w4-group")
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
def test_scale_that_is_no_number(directory: Path, case: str, value: float) -> None:
    made = checkpoint(directory, case)
    name = "model.layers.0.mlp.up_proj.weight"
    scales = made.stored[f"{name}_scale"].clone()
    scales[-1, -1] = value
    weight = compressed_tensors(made.source).coded[name]
    with pytest.raises(IntegrityError, match=f"{name}: a scale is NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), made.stored | {f"{name}_scale": scales})
    decoded(weight, Box((0, 0), (8, 8)), made.stored | {f"{name}_scale": scales})


def test_global_scale_of_zero(directory: Path) -> None:
    made = checkpoint(directory, "nvfp4")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = compressed_tensors(made.source).coded[name]
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        decoded(weight, whole(weight.tensor.shape), made.stored | {f"{name}_global_scale": torch.zeros(1)})


def test_exponents_of_all_sizes(directory: Path) -> None:
    """Numbers as large and as small as E8M0 scales make them; 255 is no number."""
    made = checkpoint(directory, "mxfp4")
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


# ----------------------------------------------------------------------------------------------------
# What is wrong

UP = "model.layers.0.mlp.up_proj"


def problems_of(
    made: Checkpoint, source: Source | None = None, settings: dict[str, Any] | None = None
) -> str:
    source = source or made.source
    found = compressed_tensors(replace(source, settings=settings or made.settings))
    assert found.problems
    if settings is None:
        assert f"{UP}.weight" not in found.coded
        assert len(found.coded) == 6  # the others are what they were
    return "\n".join(found.problems)


@pytest.mark.parametrize(
    ("case", "part", "sentence"),
    [
        (
            "w4-group-zeros",
            "weight_scale",
            "has no {UP}.weight_scale beside it, which config_groups.group_0 (pack-quantized, ",
        ),
        ("w4-group-zeros", "weight_zero_point", "has no {UP}.weight_zero_point beside it"),
        ("w4-group-zeros", "weight_shape", "has no {UP}.weight_shape beside it"),
        ("w4-group-zeros", "weight_packed", "{UP}.weight_scale has no {UP}.weight_packed beside it"),
        ("fp8-channel", "weight_scale", "{UP}.weight has no {UP}.weight_scale beside it"),
        ("fp8-channel", "weight", "{UP}.weight_scale has no {UP}.weight beside it"),
        ("int8-channel", "weight_scale", "{UP}.weight has no {UP}.weight_scale beside it"),
        ("nvfp4", "weight_global_scale", "has no {UP}.weight_global_scale beside it"),
    ],
)
def test_missing_part(directory: Path, case: str, part: str, sentence: str) -> None:
    made = checkpoint(directory, case)
    assert sentence.replace("{UP}", UP) in problems_of(made, without(made.source, f"{UP}.{part}"))


@pytest.mark.parametrize(
    ("case", "part", "dtype", "shape", "sentence"),
    [
        (
            "w4-group",
            "weight_zero_point",
            "I32",
            (20, 3),
            "{UP}.weight_zero_point is not among the parts that ",
        ),
        ("w4-group", "weight", "BF16", (160, 96), "{UP}.weight is not among the parts"),
        (
            "w4-group",
            "weight_scale",
            None,
            (3, 160),
            "{UP}.weight_packed has shape (160, 12); expected (160, 640)",
        ),
        (
            "w4-group",
            "weight_scale",
            None,
            (160, 6),
            "{UP}.weight_packed has shape (160, 12); expected (160, 24)",
        ),
        ("w4-group", "weight_scale", None, (160,), "{UP}.weight_scale has shape (160,); expected two dims"),
        (
            "w4-group",
            "weight_scale",
            "F8_E4M3",
            None,
            "{UP}.weight_scale has dtype F8_E4M3; expected BF16 or F16 or F32",
        ),
        ("w4-group", "weight_shape", None, (3,), "{UP}.weight_shape has shape (3,); expected (2,)"),
        ("w4-group", "weight_g_idx", "I32", (95,), "{UP}.weight_g_idx has shape (95,); expected (96,)"),
        ("w4-group", "weight_packed", "U8", None, "{UP}.weight_packed has dtype U8; expected I32"),
        (
            "w4-group",
            "weight_packed",
            None,
            (2, 80, 12),
            "{UP}.weight_packed has shape (2, 80, 12); expected two dims",
        ),
        (
            "w4-group-zeros",
            "weight_zero_point",
            None,
            (160, 3),
            "{UP}.weight_zero_point has shape (160, 3); expected (20, 3)",
        ),
        (
            "w4-channel",
            "weight_packed",
            None,
            (150, 13),
            "{UP}.weight_shape says (150, 96), and {UP}.weight_packed of shape",
        ),
        (
            "w4-channel",
            "weight_shape",
            "F32",
            None,
            "{UP}.weight_shape has shape and dtype (2,), F32; expected (2,), I64",
        ),
        (
            "w4-channel",
            "weight_scale",
            None,
            (1, 150),
            "{UP}.weight_scale has shape (1, 150); expected (150, 1)",
        ),
        ("fp8-blocks", "weight_scale", None, (3, 4), "{UP}.weight_scale has shape (3, 4); expected (3, 3)"),
        ("fp8-blocks", "weight", "F8_E5M2", None, "{UP}.weight has dtype F8_E5M2; expected F8_E4M3"),
        (
            "fp8-tensor",
            "weight_scale",
            None,
            (2,),
            "{UP}.weight_scale has shape (2,); expected (1,) or () or (1, 1)",
        ),
        ("int8-channel", "weight", "F8_E4M3", None, "{UP}.weight has dtype F8_E4M3; expected I8"),
        ("nvfp4", "weight_scale", None, (160, 3), "{UP}.weight_scale has shape (160, 3); expected (160, 6)"),
        ("nvfp4", "weight_global_scale", None, (), "{UP}.weight_global_scale has shape (); expected (1,)"),
        ("mxfp4", "weight_scale", "BF16", None, "{UP}.weight_scale has dtype BF16; expected U8"),
        (
            "fp8-group",
            "weight",
            None,
            (160, 95),
            "{UP}.weight has columns 95; expected a multiple of group_size 32",
        ),
    ],
)
def test_wrong_part(
    directory: Path, case: str, part: str, dtype: str | None, shape: tuple[int, ...] | None, sentence: str
) -> None:
    made = checkpoint(directory, case)
    said = problems_of(made, with_part(made.source, f"{UP}.{part}", dtype, shape))
    assert sentence.replace("{UP}", UP) in said


def test_groups_of_wrong_sizes(directory: Path) -> None:
    made = checkpoint(directory, "w4-group")
    for order in (torch.zeros(96), torch.arange(96) // 32 + 1):
        source = with_part(made.source, f"{UP}.weight_g_idx", "I32", (96,))
        source = replace(source, content=lambda _, order=order: order.to(torch.int32).numpy().tobytes())
        assert f"{UP}.weight_g_idx does not name each of 3 groups 32 times" in problems_of(made, source)


@pytest.mark.parametrize(
    ("case", "changed", "sentence"),
    [
        ("w4-group", {"num_bits": 8}, "{UP}.weight_packed has shape (160, 12); expected (160, 24)"),
        ("w4-group", {"group_size": 16}, "{UP}.weight_packed has shape (160, 12); expected (160, 6)"),
        ("w4-group", {"symmetric": False}, "{UP}.weight_packed has no {UP}.weight_zero_point beside it"),
        (
            "w4-group",
            {"strategy": "channel", "group_size": None},
            "{UP}.weight_scale has shape (160, 3); expected (160, 1)",
        ),
        ("w4-group-zeros", {"symmetric": True}, "{UP}.weight_zero_point is not among the parts"),
        ("w4-group", {"type": "float"}, "format 'pack-quantized' and weights of type float of 4 bits"),
        ("w4-group", {"num_bits": 9}, "weights has num_bits 9; expected 1 to 8"),
        ("w4-group", {"type": "complex"}, "weights has type 'complex'; expected 'int' or 'float'"),
        ("w4-group", {"strategy": "row"}, "weights has strategy 'row'; known are tensor, "),
        (
            "w4-group",
            {"group_size": "x"},
            "weights has strategy 'group' and group_size 'x'; expected a positive number",
        ),
        (
            "fp8-blocks",
            {"block_structure": [64]},
            "weights has strategy 'block' and block_structure [64]; expected two",
        ),
        ("fp8-blocks", {"block_structure": "64x64"}, "{UP}.weight_scale has shape (3, 3); expected (3, 2)"),
        ("fp8-channel", {"type": "int"}, "format 'float-quantized' and weights of type int of 8 bits"),
        ("int8-channel", {"type": "float"}, "format 'int-quantized' and weights of type float"),
        (
            "nvfp4",
            {"symmetric": False},
            "format 'nvfp4-pack-quantized' and weights of type float of 4 bits, not symmetric",
        ),
        ("mxfp8", {"num_bits": 4}, "expected symmetric floats of 8 bits in groups"),
    ],
)
def test_settings_that_contradict(directory: Path, case: str, changed: dict[str, Any], sentence: str) -> None:
    made = checkpoint(directory, case)
    only = made.settings["config_groups"]["group_0"]
    settings = made.settings | {"config_groups": {"group_0": only | {"weights": only["weights"] | changed}}}
    assert sentence.replace("{UP}", UP) in problems_of(made, settings=settings)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"config_groups": None}, "config_groups is None; expected groups by name"),
        (
            {"config_groups": {"W4A16": ["Linear"]}},
            "config_groups.W4A16 is ['Linear']; expected its targets and weights",
        ),
        ({"config_groups": {}}, "no target of quantization_config.config_groups names model.layers.0"),
        ({"ignore": ["re:.*mlp.*"]}, f"and quantization_config.ignore names {UP}"),
        ({"format": "marlin-24"}, "has format 'marlin-24'; known are float-quantized, "),
        (
            {"format": "dense"},
            f"{UP}.weight_packed is stored as codes (I32); config_groups.group_0 has format 'dense'",
        ),
        ({"format": "int-quantized"}, f"{UP}.weight_packed has no {UP}.weight beside it"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config has format 'sparse-24-bitmask'",
        ),
        (
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            "transforms input while",
        ),
    ],
)
def test_settings_that_are_not_known(directory: Path, changed: dict[str, Any], sentence: str) -> None:
    made = checkpoint(directory, "w4-group")
    only = made.settings["config_groups"]["group_0"]
    settings = made.settings | {"config_groups": {"group_0": only | {"format": None}}} | changed
    assert sentence in problems_of(made, settings=settings)


def test_transforms_that_are_part_of_the_weights(directory: Path) -> None:
    made = checkpoint(directory, "w4-group")
    fused = {
        "config_groups": {"R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]}}
    }
    found = compressed_tensors(replace(made.source, settings=made.settings | {"transform_config": fused}))
    assert not found.problems


def test_packed_codes_without_settings(directory: Path) -> None:
    made = checkpoint(directory, "w4-group")
    found = compressed_tensors(replace(made.source, settings={}))
    assert not found.coded
    assert len(found.problems) == 7
    assert (
        f"{UP}.weight_packed is packed as by compressed-tensors, and the config has no quantization_config"
        in "\n".join(found.problems)
    )


def test_activations_and_caches_are_unused(tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    settings = write(tmp_path, {"g": group(floats(8, "tensor"), FP8_INPUT)}, BF16, cache)
    found = compressed_tensors(source_of(tmp_path, settings))
    assert not found.problems
    attention = "model.layers.0.self_attn"
    assert {f"{attention}.k_scale", f"{attention}.v_scale", f"{attention}.q_proj.input_scale"} <= found.unused


def test_scales_beside_plain_weights_are_unused(directory: Path) -> None:
    """Format dense: weights as they are, and scales that a model in codes would have."""
    made = checkpoint(directory, "fp8-channel")
    only = made.settings["config_groups"]["group_0"]
    settings = made.settings | {"config_groups": {"group_0": only | {"format": "dense"}}}
    source = made.source
    for name in [n for n in source.tensors if n.endswith("proj.weight")]:
        source = with_part(source, name, "BF16")
    found = compressed_tensors(replace(source, settings=settings))
    assert not found.problems
    assert not found.coded
    assert f"{UP}.weight_scale" in found.unused
