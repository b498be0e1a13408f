"""Encoders: what they make of a weight is bitwise what the format's own library makes of the whole tensor, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import Coded
from shardwise.errors import UnsupportedConversionError
from shardwise.export.again import windows_in
from shardwise.quantized.again import (
    Encoder,
    Window,
    encoder_of,
    fp4_bytes,
    integer_words,
    nibble_bytes,
)
from shardwise.quantized.open import dequantized
from shardwise.tensors.boxes import Box, whole
from tests.harness.versions import lacking
from tests.quantized._boxes import State
from tests.quantized._made import decoded, fp8_directory, plain_tensors, quantized_directories
from tests.quantized._references import quantized_by_library
from tests.quantized.compressed_cases import CASES
from tests.quantized.compressed_models import write

#: Those of :func:`quantized_directories` are there already.
_MORE = (
    "fp8-tensor",
    "fp8-channel",
    "fp8-group",
    "int8-tensor-zeros",
    "int8-group-zeros",
    "w4-channel-zeros",
    "w4-tensor-zeros",
)
_LARGER = (
    "w1-group-zeros",
    "w3-group-zeros",
    "w5-group-zeros",
    "w2-channel",
    "w7-channel",
    "mxfp8",
    "mixed",
    "embedding",
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("requantized")
    found = quantized_directories(root)
    for case in (*_MORE, *_LARGER):
        write(root / case, CASES[case][0], CASES[case][1], inner=150 if "-c" in case or "-t" in case else 160)
    fp8_directory(root / "qwen3", root / "ue8m0", (4, 8), "ue8m0")
    return [*found, root / "ue8m0", *(root / case for case in (*_MORE, *_LARGER))]


def _made(one: Coded, encoder: Encoder, weight: torch.Tensor, stored: State, most: int) -> State:
    """The parts of a tensor, put together from windows of at most ``most`` elements."""
    found = {
        role: torch.zeros(one.parts[role].shape, dtype=_dtype(one, role, stored)) for role in encoder.makes
    }
    measured: tuple[torch.Tensor, ...] = tuple(torch.aminmax(weight)) if encoder.once else ()
    if encoder.scales is not None:
        measured = (encoder.scales(weight).mean(),)
    for box in windows_in(tuple(weight.shape), encoder.unit, most):
        boxes = one.rule.boxes(box)
        kept = {
            role: _part(one, role, stored)[b.slices] for role, b in boxes.items() if role not in encoder.makes
        }
        made = encoder.encode(Window(box, weight[box.slices], kept, measured))
        assert made.keys() == set(encoder.makes)
        for role, elements in made.items():
            found[role][boxes[role].slices] = elements
    return {one.parts[role].name: part for role, part in found.items()}


def _part(one: Coded, role: str, stored: State) -> torch.Tensor:
    return stored[one.parts[role].name].view(_dtype(one, role, stored)).reshape(one.parts[role].shape)


def _dtype(one: Coded, role: str, stored: State) -> torch.dtype:
    return torch.uint8 if one.parts[role].dtype == "U8" else stored[one.parts[role].name].dtype


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_format_is_that_of_its_library(directories: list[Path]) -> None:
    """Weights with zeros, with a row of zeros, with values beyond the source's scales, in the dtype of the scales."""
    rules = set()
    for directory in directories:
        stored, catalog = plain_tensors(directory), dequantized(open_catalog(directory))
        one = next(one for one in catalog.coded.values())
        if catalog.quantization.settings["quant_method"] in ("awq", "gptq"):
            with pytest.raises(UnsupportedConversionError, match="its scales come from calibration data"):
                encoder_of(one, catalog.quantization.settings)
            continue
        encoder = encoder_of(one, catalog.quantization.settings)
        rules.add(encoder.reference)
        if directory.name == "ue8m0" and lacking(
            "transformers>=5.23", "has no scale_fmt, or rounds the scales after the codes"
        ):
            continue
        dtype = CASES[directory.name][1] if directory.name in CASES else torch.bfloat16
        weight = decoded(one, stored, whole(one.tensor.shape)).float() * 1.3
        weight = (weight + torch.randn_like(weight) * weight.std() / 8).to(dtype)
        weight[..., 3, :] = 0
        weight[..., 5, 7] = 0
        expected = quantized_by_library(directory, one.tensor.name, weight, stored)
        for most in (1, 3000, 2**30):
            for name, part in _made(one, encoder, weight, stored, most).items():
                unlike = (_bytes(part) != _bytes(expected[name])).sum()
                # The library's CPU kernel for codes of scales is less exact than its plain code.
                allowed = (
                    part.numel() // 200 if directory.name == "nested fp4" and name.endswith("absmax") else 0
                )
                assert unlike <= allowed, (directory.name, name, most, unlike)
    assert len(rules) == 7, rules


def test_quantizing_what_codes_stand_for_gives_the_codes(directories: list[Path]) -> None:
    """Where the rule makes that exact: its scales are the largest elements themselves."""
    exact = {"nf4"}
    for directory in directories:
        if directory.name not in exact:
            continue
        stored, catalog = plain_tensors(directory), dequantized(open_catalog(directory))
        for one in catalog.coded.values():
            encoder = encoder_of(one, catalog.quantization.settings)
            weight = decoded(one, stored, whole(one.tensor.shape))
            for name, part in _made(one, encoder, weight, stored, 2**30).items():
                assert torch.equal(_bytes(part), _bytes(stored[name])), (directory.name, name)
        exact.remove(directory.name)
    assert not exact


# ----------------------------------------------------------------------------------------------------
# Codes as integers, and packed again


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_integers(bits: int, dim: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    for sizes in ((9, 3), (32, 64), (33, 7), (17, 150)):
        integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), sizes).to(torch.int8)
        words = pack_to_int32(integers, bits, packed_dim=dim)  # type: ignore[arg-type]
        assert torch.equal(integer_words(integers, bits, dim), words)
        again = unpack_from_int32(words, bits, torch.Size(sizes), packed_dim=dim)  # type: ignore[arg-type]
        assert torch.equal(integer_words(again, bits, dim), words)


def test_every_pair_of_fp4() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

    octets = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
    assert torch.equal(nibble_bytes(codes), octets)
    values = unpack_fp4_from_uint8(octets, 16, 32)
    without = values + 0.0  # a zero has no sign
    assert torch.equal(fp4_bytes(values), pack_fp4_to_uint8(torch.where(without == 0, 0.0, without)))


def test_fp4_is_rounded_as_its_library_does() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

    values = torch.cat([torch.arange(-7, 7, 0.125), torch.randn(80)]).view(6, -1)
    assert torch.equal(fp4_bytes(values), pack_fp4_to_uint8(FP4_E2M1_DATA.cast_to_fp4(values.clone())))


def test_the_bytes_of_every_directory(directories: list[Path]) -> None:
    """Packed parts, unpacked by the library's rule and packed by ours."""
    seen = 0
    for directory in directories:
        stored = plain_tensors(directory)
        for name, words in stored.items():
            if name.endswith(("_blocks", "weight_packed")) and words.dtype == torch.uint8:
                assert torch.equal(nibble_bytes(torch.stack((words & 15, words >> 4), -1).flatten(-2)), words)
                seen += 1
    assert seen > 20


def test_windows_are_of_whole_units_and_cover() -> None:
    for shape, unit, most in (
        ((10, 7), (4, 3), 24),
        ((3, 10, 7), (1, 10, 2), 1),
        ((5,), (2,), 2),
        ((), (), 1),
        ((0, 4), (2, 4), 8),
    ):
        seen = torch.zeros(shape)
        for box in windows_in(shape, unit, most):
            assert isinstance(box, Box)
            assert all(
                a % u == 0 and (b % u == 0 or b == n)
                for a, b, u, n in zip(box.start, box.stop, unit, shape, strict=True)
            )
            seen[box.slices] += 1
        assert bool((seen == 1).all())
