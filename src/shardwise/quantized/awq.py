"""The family of AWQ, as AutoAWQ's ``WQLinear_GEMM`` stores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..catalog.records import Coded
from ..errors import FormatError
from ..limits import brief
from ..objects import frozen
from ..tensors.boxes import Box
from .open import Found, Source
from .rules import (
    check,
    coded,
    covering,
    each_module,
    finite,
    group_size_of,
    scaled,
    transposed_halves,
    words_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Awq",
    "find",
    "outputs_of",
]


# ----------------------------------------------------------------------------------------------------
# AWQ's codes: unsigned fields of 4 bits in words along the outputs, in an order of their own, in groups of inputs.

#: The field of a word that holds each of its 8 outputs. Source: AWQ_REVERSE_ORDER of AutoAWQ (MIT).
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
#: F16 with this many units: its mantissa's last bits are those of a small integer that was added to it.
_LIFT, _LIFT_BITS = 1024, 0x6400


@frozen
class Awq:
    """``(code − zero) × scale`` of the input's group, in F16. Implements :class:`.ColumnsRule`.

    Parts: ``codes`` [inputs, outputs in words], ``zeros`` [groups, outputs in words] and ``scales`` [groups, outputs]. The tensor
    is [outputs, inputs], as a Linear's. Source: ``dequantize_gemm`` of AutoAWQ.
    """

    name: str
    size: int
    """Inputs of a group."""

    @property
    def format(self) -> str:
        return f"AWQ with 4 bits in groups of {self.size}"

    @property
    def columns_together(self) -> int:
        """Implements :class:`.ColumnsRule`."""
        return self.size

    def boxes(self, box: Box) -> Mapping[str, Box]:
        (row, column), (row_end, column_end) = box.start, box.stop
        word, word_end = covering(row, row_end, 8)
        group, group_end = covering(column, column_end, self.size)
        return {
            "codes": Box((column, word), (column_end, word_end)),
            "zeros": Box((group, word), (group_end, word_end)),
            "scales": Box((group, row), (group_end, row_end)),
        }

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.opened(box, parts)(box)

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """Implements :class:`.OpeningRule`: codes, zero points and scales are transposed once."""
        import torch

        if not box.numel:
            return lambda inner: torch.empty(inner.sizes, dtype=torch.float16)
        scales = parts["scales"].t().contiguous()
        finite(self.name, scales)
        # F16 holds codes and zero points exactly, both with _LIFT added.
        zeros = outputs_of(parts["zeros"]).add_(_LIFT).narrow(0, box.start[0] % 8, box.sizes[0]).half()
        codes, first = transposed_halves(parts["codes"]), box.start[0] // 8

        def decode(inner: Box) -> torch.Tensor:
            (row, column), (row_end, column_end) = inner.start, inner.stop
            word, word_end = covering(row, row_end, 8)
            halves = slice(2 * (word - first), 2 * (word_end - first))
            start, stop = column - box.start[1], column_end - box.start[1]
            values = _lifted(codes[halves, start:stop])[row % 8 :][: inner.sizes[0]]
            rows = slice(row - box.start[0], row_end - box.start[0])
            groups = slice(column // self.size - box.start[1] // self.size, None)
            scaled(values, zeros[rows, groups], scales[rows, groups], column, self.size)
            return values.to(torch.float32)

        return decode


def _lifted(halves: torch.Tensor) -> torch.Tensor:
    """The outputs of halves of words, one a row, in F16, with :data:`_LIFT` added."""
    import torch

    words = halves.unflatten(0, (-1, 2))
    found = torch.empty((words.shape[0], 4, 2, words.shape[2]), dtype=torch.int16)
    for k in range(4):  # field k of a half: output 2 * k of the first half of a word, 2 * k + 1 of the second
        torch.bitwise_right_shift(words, 4 * k, out=found[:, k])
    return found.bitwise_and_(15).bitwise_or_(_LIFT_BITS).view(torch.float16).flatten(0, 2)


def outputs_of(words: torch.Tensor) -> torch.Tensor:
    """The outputs that words hold, one a row, in F32."""
    import torch

    shifts = torch.tensor(_FIELDS, dtype=torch.int32).mul_(4).view(1, 8, 1)
    shifted = torch.bitwise_right_shift(words.t().contiguous().unsqueeze(1), shifts)
    return shifted.to(torch.int8).bitwise_and_(15).reshape(-1, words.shape[0]).float()


# ----------------------------------------------------------------------------------------------------
# The family of AWQ, as AutoAWQ's ``WQLinear_GEMM`` stores it.
#
# ``X.qweight``, ``X.qzeros`` and ``X.scales`` stand for ``X.weight``.


def find(source: Source) -> Found:
    """Every tensor in codes of AWQ. Implements :class:`.Family`."""
    return each_module(source, "awq", ("qweight", "qzeros"), _group_size, _coded)


def _group_size(given: Mapping[str, Any]) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError` for what this version can't decode."""
    bits, size = (
        given.get("bits", given.get("w_bit", 4)),
        given.get("group_size", given.get("q_group_size", 128)),
    )
    version = given.get("version") or given.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise FormatError(f"expected gemm as version in config.json, found {brief(version)}")
    if type(bits) is not int or bits != 4:
        raise FormatError(f"expected 4 as bits in config.json, found {brief(bits)}")
    return group_size_of(size)


def _coded(source: Source, stem: str, group_size: int) -> Coded:
    codes, zeros, scales = words_of(source.tensors, stem)
    inputs, outputs = codes.shape[0], codes.shape[1] * 8
    size = group_size if group_size > 0 else inputs
    groups = -(-inputs // size)
    why = f"{inputs} inputs in groups of {size} and {outputs} outputs (as {codes.name})"
    check(scales, "F16", (groups, outputs), why)
    check(zeros, "I32", (groups, outputs // 8), why)
    rule = Awq(f"{stem}weight", size)
    return coded(
        rule.name, "F16", (outputs, inputs), {"codes": codes, "zeros": zeros, "scales": scales}, rule
    )
