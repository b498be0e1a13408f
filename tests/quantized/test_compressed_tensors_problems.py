"""compressed-tensors: one sentence for everything that is wrong with a source."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.catalog.quantized import Source
from shardwise.errors import FormatError
from shardwise.internals.regex import check_patterns
from shardwise.quantized.compressed_tensors import find_compressed_tensors as compressed_tensors
from shardwise.quantized.compressed_tensors import read_settings
from tests.harness.bombs import refused_within
from tests.quantized.boxes import with_part, without
from tests.quantized.compressed_cases import Checkpoint

Written = Callable[[str], Checkpoint]


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
            "has no {UP}.weight_scale next to it, which config_groups.group_0 (pack-quantized, ",
        ),
        ("w4-group-zeros", "weight_zero_point", "has no {UP}.weight_zero_point next to it"),
        ("w4-group-zeros", "weight_shape", "has no {UP}.weight_shape next to it"),
        ("w4-group-zeros", "weight_packed", "{UP}.weight_scale has no {UP}.weight_packed next to it"),
        ("fp8-channel", "weight_scale", "{UP}.weight has no {UP}.weight_scale next to it"),
        ("fp8-channel", "weight", "{UP}.weight_scale has no {UP}.weight next to it"),
        ("int8-channel", "weight_scale", "{UP}.weight has no {UP}.weight_scale next to it"),
        ("nvfp4", "weight_global_scale", "has no {UP}.weight_global_scale next to it"),
    ],
)
def test_missing_part(written: Written, case: str, part: str, sentence: str) -> None:
    made = written(case)
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
    written: Written, case: str, part: str, dtype: str | None, shape: tuple[int, ...] | None, sentence: str
) -> None:
    made = written(case)
    said = problems_of(made, with_part(made.source, f"{UP}.{part}", dtype, shape))
    assert sentence.replace("{UP}", UP) in said


def test_groups_of_wrong_sizes(written: Written) -> None:
    made = written("w4-group")
    for order in (torch.zeros(96), torch.arange(96) // 32 + 1):
        source = with_part(made.source, f"{UP}.weight_g_idx", "I32", (96,))
        source = replace(source, content=lambda _, order=order: order.to(torch.int32).numpy().tobytes())
        assert f"{UP}.weight_g_idx does not name each of 3 groups 32 times" in problems_of(made, source)


@pytest.mark.parametrize(
    ("case", "changed", "sentence"),
    [
        ("w4-group", {"num_bits": 8}, "{UP}.weight_packed has shape (160, 12); expected (160, 24)"),
        ("w4-group", {"group_size": 16}, "{UP}.weight_packed has shape (160, 12); expected (160, 6)"),
        ("w4-group", {"symmetric": False}, "{UP}.weight_packed has no {UP}.weight_zero_point next to it"),
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
def test_settings_that_contradict(
    written: Written, case: str, changed: dict[str, Any], sentence: str
) -> None:
    made = written(case)
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
        ({"format": "int-quantized"}, f"{UP}.weight_packed has no {UP}.weight next to it"),
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
def test_settings_that_are_not_known(written: Written, changed: dict[str, Any], sentence: str) -> None:
    made = written("w4-group")
    only = made.settings["config_groups"]["group_0"]
    settings = made.settings | {"config_groups": {"group_0": only | {"format": None}}} | changed
    assert sentence in problems_of(made, settings=settings)


def test_transforms_that_are_part_of_the_weights(written: Written) -> None:
    made = written("w4-group")
    fused = {
        "config_groups": {"R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]}}
    }
    found = compressed_tensors(replace(made.source, settings=made.settings | {"transform_config": fused}))
    assert not found.problems


def test_packed_codes_without_settings(written: Written) -> None:
    made = written("w4-group")
    found = compressed_tensors(replace(made.source, settings={}))
    assert not found.coded
    assert len(found.problems) == 7
    assert (
        f"{UP}.weight_packed is packed as by compressed-tensors, and the config has no quantization_config"
        in "\n".join(found.problems)
    )


#: Expressions that Python matches for minutes or far longer: with module names of the model, or with one of 900 letters.
ENDLESS = {
    "a repeat within a repeat": "(.+)+X",
    "alternatives that mean the same": "(.|.)" * 40 + "X",
    "stars": ".*" * 9 + "X",
    "optional letters": ".?" * 31 + "." * 21 + "X",
    "nested bounds": "((.{0,16}){0,16}){0,16}X",
    "no expression": "(mlp",
}


@pytest.mark.parametrize("place", ["ignore", "targets"])
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.processes
def test_expressions_that_never_end_are_a_problem(written: Written, name: str, place: str) -> None:
    made = written("int8-channel")
    settings, expression = deepcopy(made.settings), f"re:{ENDLESS[name]}"
    if place == "ignore":
        settings["ignore"] = ["lm_head", expression]
    else:
        next(iter(settings["config_groups"].values()))["targets"] = [expression]
    source = replace(made.source, settings=settings)

    def say() -> None:
        raise FormatError("\n".join(compressed_tensors(source).problems))

    text = refused_within(say, seconds=3)
    assert "an expression in quantization_config" in text
    assert text.count("\n") < 5


def test_simple_expressions_count_too(written: Written) -> None:
    """Each with each name: one match is short, and a config can have 20,000 expressions."""
    many = [f"layers.{k}.*x" for k in range(20_000)]
    check_patterns(many, ["model.layers.0"], "ignore", None)
    with pytest.raises(FormatError, match="ignore: 20000 expressions for 2000 names may take forever"):
        check_patterns(many, (f"model.layers.{k}" for k in range(2_000)), "ignore", None)
    experts = [f"model.layers.{k}.mlp.experts.{n}.up_proj" for k in range(94) for n in range(128)]
    check_patterns([f"model.layers.{k}.mlp.gate" for k in range(400)], experts, "ignore", None)
    made = written("int8-channel")
    tensors = dict(made.source.tensors)
    for k in range(200):
        for end in ("weight", "weight_scale"):
            name = f"other.{k}.{end}"
            tensors[name] = replace(tensors[f"{UP}.{end}"], name=name)
    settings = {**made.settings, "ignore": [f"re:{one}" for one in many]}
    problems = compressed_tensors(replace(made.source, tensors=tensors, settings=settings)).problems
    assert "20000 expressions" in "\n".join(problems)


def test_each_expression_is_compiled_once() -> None:
    from shardwise.quantized import compressed_tensors as compressed_settings

    settings = read_settings({"config_groups": {}, "ignore": [f"re:once.{k}.*x" for k in range(1_000)]})
    before = compressed_settings._compiled.cache_info().misses
    for k in range(5):
        assert not settings.ignored(f"model.layers.{k}")
    assert compressed_settings._compiled.cache_info().misses == before + 1_000


def test_a_long_name_of_a_file_counts(written: Written) -> None:
    """Names of stored tensors come from a file, too."""
    made = written("int8-channel")
    tensors = dict(made.source.tensors)
    for end in ("weight", "weight_scale"):
        name = f"{'a' * 900}.{end}"
        tensors[name] = replace(tensors[f"{UP}.{end}"], name=name)
    source = replace(made.source, tensors=tensors, settings={**made.settings, "ignore": ["re:.*.*.*.*X"]})
    assert "may take forever" in "\n".join(compressed_tensors(source).problems)


@pytest.mark.parametrize(
    "expression",
    [
        ".*mlp.*", r".*layers\.(0|1)\.mlp.*", r"model\.layers\.\d{1,2}\.(self_attn|mlp)\.(q|up)_proj$", "(.*)(up|down)_proj",
        ".*lm_head", "mlp", r"(?:model|language_model)(\.\w+)*\.up_proj", r"^(?!.*mlp).*$", ".*.*.*.*_proj", "(.|.)up", "$", "",
    ],
)  # fmt: skip
def test_expressions_match_as_in_the_library(expression: str) -> None:
    from compressed_tensors.utils.match import match_name

    names = [
        UP,
        "model.layers.0.self_attn.q_proj",
        "model.layers.11.mlp.down_proj",
        "lm_head",
        "mlp",
        "a" * 90,
        "",
    ]
    settings = read_settings({"config_groups": {}, "ignore": [f"re:{expression}"]})
    check_patterns(settings.expressions, names[:5], "ignore", None)
    for name in names:
        assert settings.ignored(name) == match_name(name, f"re:{expression}")
