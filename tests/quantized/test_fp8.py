"""FP8 with scales: every box is bitwise that of transformers' own dequantized tensor; wrong scales are named."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.catalog.open import open_catalog
from shardwise.errors import IntegrityError, PlanError
from shardwise.quantized.open import dequantized
from shardwise.quantized.rules import OneEach, Scaled, floats
from tests.harness import models
from tests.quantized._fp8_library import fp8_module
from tests.quantized._made import boxes_of, decoded, fp8_directory, write_quantized

BLOCKS = [
    ((4, 8), None),
    pytest.param((12, 4), None, marks=pytest.mark.needs("transformers>=5.12", "cuts no block short")),
    ((4, 8), "ue8m0"),
    (None, None),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain") / "qwen3"
    models.write_hub_directory("qwen3", root, torch.bfloat16)
    return root


def reference(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> Any:
    """The whole tensor, dequantized by transformers, in fp32."""
    config = SimpleNamespace(weight_block_size=block)
    made = fp8_module().Fp8Dequantize(SimpleNamespace(quantization_config=config))
    if hasattr(made, "_dequantize_one"):
        knows = "output_dtype" in inspect.signature(made._dequantize_one).parameters  # else the scales' dtype
        return made._dequantize_one(codes, scales, **({"output_dtype": torch.float32} if knows else {}))
    stored = {"weight$": [codes], "weight_scale_inv": [scales]}  # older transformers
    return made.convert(stored, full_layer_name="w")["w"]


@pytest.mark.parametrize(("block", "fmt"), BLOCKS)
def test_every_box(plain: Path, tmp_path: Path, block: Any, fmt: str | None) -> None:
    fp8_directory(plain, tmp_path / "q", block, fmt)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    found = dequantized(open_catalog(tmp_path / "q"))
    assert len(found.coded) == sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 8
    for one in found.coded.values():
        codes, scales = (stored[one.parts[role].name] for role in ("codes", "scales"))
        expected = reference(codes, scales, block)
        for box in boxes_of(one.tensor.shape, 12):
            assert torch.equal(decoded(one, stored, box), expected[box.slices]), (one.tensor.name, box)


@pytest.mark.parametrize("shape", [(40, 24), (1, 24), (40, 1), (3, 40, 24)])
def test_blocks_that_the_edge_cuts_short(shape: tuple[int, ...], tmp_path: Path, plain: Path) -> None:
    """DeepSeek-V3 has 576 rows in blocks of 128: its own kernel gives the last block the rows that are left."""
    grid = (*shape[:-2], *(-(-n // 16) for n in shape[-2:]))
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(grid) + 0.5
    tensors = {"w.weight": codes, "w.weight_scale_inv": scales}
    write_quantized(plain, tmp_path / "q", {"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors)
    spread = scales.repeat_interleave(16, -2)[..., : shape[-2], :].repeat_interleave(16, -1)[..., : shape[-1]]
    (one,) = dequantized(open_catalog(tmp_path / "q")).coded.values()
    for box in boxes_of(shape, 30):
        assert torch.equal(decoded(one, tensors, box), (codes.float() * spread)[box.slices])


@pytest.mark.parametrize("held", [(), (1,), (40,), (40, 1), (1, 1)])
def test_one_scale_a_tensor_or_a_channel(held: tuple[int, ...], tmp_path: Path, plain: Path) -> None:
    codes, scales = torch.randn(40, 24).to(torch.float8_e5m2), torch.rand(held) + 0.5
    tensors = {"w.weight": codes, "w.weight_scale": scales, "w.input_scale": torch.ones(1)}
    write_quantized(plain, tmp_path / "q", {"quant_method": "fp8"}, tensors)
    found = dequantized(open_catalog(tmp_path / "q"))
    assert set(found.tensors) == {"w.weight"}
    (one,) = found.coded.values()
    each = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(())
    for box in boxes_of((40, 24), 20):
        assert torch.equal(decoded(one, tensors, box), (codes.float() * each).expand(40, 24)[box.slices])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("count", [1, 4096, 65536])
@pytest.mark.parametrize("flushed", [False, True])
def test_every_code_is_the_number_that_torch_says(dtype: torch.dtype, count: int, flushed: bool) -> None:
    """Also NaN, infinities, zeros of both signs and subnormal numbers, in a process that flushes those, too."""
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(dtype).to(torch.float32)
    torch.set_flush_denormal(flushed)
    try:
        for codes, numbers in ((every, expected), (every[~expected.isnan()], expected[~expected.isnan()])):
            k = torch.randint(0, len(codes), (count,))
            found = floats(codes[k].view(dtype))
            assert torch.equal(found.view(torch.int32), numbers[k].view(torch.int32))
    finally:
        torch.set_flush_denormal(False)


def missing(t: dict[str, torch.Tensor]) -> None:
    del t["w.weight_scale_inv"]


def surplus(t: dict[str, torch.Tensor]) -> None:
    t["v.weight_scale_inv"] = torch.ones(2, 2)


def of_plain_weights(t: dict[str, torch.Tensor]) -> None:
    t["v.weight_scale_inv"], t["v.weight"] = torch.ones(2, 2), torch.ones(32, 32)


def transposed(t: dict[str, torch.Tensor]) -> None:
    t["w.weight_scale_inv"] = t["w.weight_scale_inv"].T.contiguous()


def too_few(t: dict[str, torch.Tensor]) -> None:
    t["w.weight_scale_inv"] = torch.ones(2, 2)


def two(t: dict[str, torch.Tensor]) -> None:
    t["w.weight_scale"] = torch.ones(3, 2)


def of_a_plain_tensor(t: dict[str, torch.Tensor]) -> None:
    t["v.weight_scale"], t["v.weight"] = torch.ones(2, 2), torch.ones(32, 32)


def integers(t: dict[str, torch.Tensor]) -> None:
    t["w.weight_scale_inv"] = torch.ones(3, 2, dtype=torch.int32)


PROBLEMS = {
    missing: r"missing: scales of the FP8 codes 'w\.weight' \('w\.weight_scale_inv' or 'w\.weight_scale'\)",
    surplus: r"surplus: 'v\.weight_scale_inv' scales 'v\.weight', which is not stored",
    of_plain_weights: r"surplus: 'v\.weight_scale_inv' scales 'v\.weight', which is F32, not FP8",
    transposed: r"shape mismatch: the scales 'w\.weight_scale_inv' of the codes 'w\.weight' \[48, 32\] have shape \[2, 3\]",
    too_few: r"have shape \[2, 2\], expected \[\] for one, or \[3, 2\] for blocks of \[16, 16\], or \[48\]",
    two: r"ambiguous: 'w\.weight_scale_inv' and 'w\.weight_scale' both scale the codes 'w\.weight'; remove one",
    of_a_plain_tensor: r"surplus: 'v\.weight_scale' goes with 'v\.weight', which is stored in another way",
    integers: r"dtype mismatch: the scales 'w\.weight_scale_inv' are I32",
}


@pytest.mark.parametrize("spoil", PROBLEMS)
def test_wrong_scales_are_named(spoil: Any, tmp_path: Path, plain: Path) -> None:
    tensors = {
        "w.weight": torch.randn(48, 32).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.ones(3, 2),
        "u.weight": torch.randn(16, 16).to(torch.float8_e4m3fn),
        "u.weight_scale_inv": torch.ones(1, 1),
    }
    spoil(tensors)
    write_quantized(plain, tmp_path / "q", {"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors)
    with pytest.raises(PlanError, match=PROBLEMS[spoil]) as caught:
        dequantized(open_catalog(tmp_path / "q"))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(wrong: float) -> None:
    from shardwise.tensors.boxes import whole

    scales = torch.ones(2, 2)
    scales[1, 1] = wrong
    parts = {"codes": torch.zeros(32, 32).to(torch.float8_e4m3fn), "scales": scales}
    rule = Scaled("fp8", "FP8", "w.weight", "F32", OneEach(), OneEach(), (16, 16))
    with pytest.raises(IntegrityError, match=r"w\.weight: a scale is NaN or infinite"):
        rule.decode(whole((32, 32)), parts)


def test_a_config_that_contradicts_the_tensors(tmp_path: Path, plain: Path) -> None:
    fp8_directory(plain, tmp_path / "q", (4, 8))
    file = tmp_path / "q" / "config.json"
    for said in ("mxfp4", "gptq"):
        file.write_text(file.read_text().replace('"quant_method": "fp8"', f'"quant_method": "{said}"'))
        with pytest.raises(PlanError, match=f"with '{said}', but its tensors are stored as 'fp8'"):
            dequantized(open_catalog(tmp_path / "q"))
        file.write_text(file.read_text().replace(f'"quant_method": "{said}"', '"quant_method": "fp8"'))


@pytest.mark.parametrize("size", [[16], "16", [0, 16], [16.0, 16], [True, 16]])
def test_a_block_size_that_is_none(tmp_path: Path, plain: Path, size: Any) -> None:
    tensors = {
        "w.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.ones(2, 2),
    }
    write_quantized(plain, tmp_path / "q", {"quant_method": "fp8", "weight_block_size": size}, tensors)
    with pytest.raises(PlanError, match="weight_block_size of the config is"):
        dequantized(open_catalog(tmp_path / "q"))


def test_blocks_whose_size_no_config_says(tmp_path: Path) -> None:
    """Scales that were transposed would fit a tensor as well."""
    tensors = {
        "w.weight": torch.randn(32, 32).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.rand(2, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        PlanError, match="or those of blocks, if the config says their size in weight_block_size"
    ):
        dequantized(open_catalog(tmp_path))


def test_channels_without_a_config(tmp_path: Path) -> None:
    tensors = {"w.weight": torch.randn(32, 16).to(torch.float8_e4m3fn), "w.weight_scale": torch.rand(32, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (one,) = dequantized(open_catalog(tmp_path)).coded.values()
    expected = tensors["w.weight"].float() * tensors["w.weight_scale"]
    assert torch.equal(decoded(one, tensors, next(boxes_of((32, 16), 0))), expected)
