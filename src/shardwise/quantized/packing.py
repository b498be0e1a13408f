"""Packs codes as the formats store them: the other direction of :mod:`.packed`, :mod:`.words`, :mod:`.fp4` and AWQ's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .packed import packed_size

if TYPE_CHECKING:
    import torch

__all__ = ["awq_words", "field_words", "fp4_bytes", "fp4_codes", "integer_words", "nibble_bytes"]

#: The output whose code lies in each field of a word. Source: ``order_map`` of AutoAWQ's ``WQLinear_GEMM`` (MIT).
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def integer_words(integers: torch.Tensor, bits: int, dim: int = 1) -> torch.Tensor:
    """Signed integers of some bits, packed without gaps along one of two dims into int32 words, as :class:`.PackedIntegers` reads them.

    Eight integers are put together as one large integer, which has as many bytes as each of them has bits. Source:
    ``pack_to_int32`` of compressed-tensors.
    """
    import torch

    rows = integers if dim == 1 else integers.t()
    columns = rows.shape[1]
    unsigned = (rows.to(torch.int64) + (1 << (bits - 1))) & ((1 << bits) - 1)
    eights = torch.nn.functional.pad(unsigned, (0, -columns % 32)).unflatten(1, (-1, 8))
    large = torch.zeros(eights.shape[:-1], dtype=torch.int64)
    for k in range(8):
        large |= eights[..., k] << k * bits
    octets = torch.stack([(large >> 8 * k) & 0xFF for k in range(bits)], -1).to(torch.uint8)
    words = octets.flatten(1).contiguous().view(torch.int32)[:, : packed_size(columns, bits)]
    return (words if dim == 1 else words.t()).contiguous()


def field_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes of 2, 4 or 8 bits in int32 words along the last dim, lowest bits first, as :func:`.fields` reads them."""
    import torch

    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % (32 // bits)))
    parted = padded.unflatten(-1, (-1, per_byte))
    octets = torch.zeros(parted.shape[:-1], dtype=torch.uint8)
    for k in range(per_byte):
        octets |= parted[..., k] << k * bits
    words: torch.Tensor = octets.contiguous().view(torch.int32)
    return words


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned codes of 4 bits in int32 words along the last dim, in AWQ's order."""
    return field_words(codes.unflatten(-1, (-1, 8))[..., list(_AWQ_OUTPUTS)].flatten(-2), 4)


def nibble_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Pairs of 4-bit codes along the last dim in bytes, low bits first."""
    import torch

    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return torch.bitwise_or(pairs[..., 0], pairs[..., 1] << 4)


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 numbers (E2M1) of finite values, ties to even, as codes of 4 bits.

    A negative value that becomes zero keeps its sign, a zero has none. Source: ``cast_to_fp4`` and ``pack_fp4_to_uint8`` of
    compressed-tensors.
    """
    import torch

    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for above, takes_it in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False)):
        codes += (size >= above) if takes_it else (size > above)
    codes += size >= 3.5
    codes += size > 5.0
    codes |= (values < 0).to(torch.uint8) << 3
    return codes


def fp4_bytes(values: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 numbers of values, two in each byte along the last dim."""
    return nibble_bytes(fp4_codes(values))
