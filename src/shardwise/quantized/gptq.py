"""The family of GPTQ, as AutoGPTQ, GPTQModel and Optimum store it.  ``X.qweight``, ``X.qzeros``, ``X.scales`` and ``X.g_idx`` stand
for ``X.weight``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..catalog.records import Coded
from ..errors import FormatError, IntegrityError
from ..limits import brief
from ..objects import frozen
from ..tensors.boxes import Box
from .open import Found, Source
from .rules import (
    check,
    coded,
    covering,
    each_module,
    fields,
    finite,
    group_size_of,
    groups_within,
    require,
    scaled,
    words_of,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Gptq",
    "find",
]


# ----------------------------------------------------------------------------------------------------
# GPTQ's codes: unsigned fields of 2, 4 or 8 bits in words along the inputs, in groups of inputs.


@frozen
class Gptq:
    """``(code − zero) × scale`` of the input's group, in F16. Implements :class:`.ColumnsRule`.

    Parts: ``codes`` [inputs in words, outputs], ``zeros`` [groups, outputs in words], ``scales`` [groups, outputs] and ``groups``
    [inputs], the group of each input. The tensor is [outputs, inputs], as a Linear's. Source: ``dequantize_weight`` of GPTQModel's
    ``TorchLinear``. The first format stores each zero point less one, which its packer subtracts from whole words; so they are
    added to whole words.
    """

    name: str
    bits: int
    groups: int
    size: int | None
    """Inputs of a group, where the groups are in order. None: any input may be of any group, so a box needs all of them."""
    plus_one: bool
    """Whether zero points are stored less one."""

    @property
    def format(self) -> str:
        groups = f"in groups of {self.size}" if self.size else "in groups by activation order"
        return f"GPTQ with {self.bits} bits {groups}"

    @property
    def columns_together(self) -> int:
        """Implements :class:`.ColumnsRule`."""
        return math.lcm(32 // self.bits, self.size or 1)

    def boxes(self, box: Box) -> Mapping[str, Box]:
        (row, column), (row_end, column_end) = box.start, box.stop
        word, word_end = covering(column, column_end, 32 // self.bits)
        zero, zero_end = covering(row, row_end, 32 // self.bits)
        group, group_end = covering(column, column_end, self.size) if self.size else (0, self.groups)
        return {
            "codes": Box((word, row), (word_end, row_end)),
            "zeros": Box((group, zero), (group_end, zero_end)),
            "scales": Box((group, row), (group_end, row_end)),
            "groups": Box((column,), (column_end,)),
        }

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.opened(box, parts)(box)

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """Implements :class:`.OpeningRule`: codes, zero points and scales are transposed once."""
        import torch

        if not box.numel:
            return lambda inner: torch.empty(inner.sizes, dtype=torch.float16)
        per_word = 32 // self.bits
        (first, first_column), (rows, _) = box.start, box.sizes
        zeros = fields(self.zero_words(parts["zeros"]), self.bits).narrow(1, first % per_word, rows)
        zeros, scales = zeros.t().contiguous(), finite(self.name, parts["scales"].t().contiguous())
        groups, words = self.check_groups(parts["groups"], box), parts["codes"].t().contiguous()
        one_zero = bool((zeros == zeros[0, 0]).all())  # symmetric codes: nothing to gather

        def decode(inner: Box) -> torch.Tensor:
            (row, column), (row_end, column_end) = inner.start, inner.stop
            own = slice(row - first, row_end - first)
            word, word_end = covering(column, column_end, per_word)
            inside = slice(word - first_column // per_word, word_end - first_column // per_word)
            codes = fields(words[own, inside], self.bits).narrow(1, column % per_word, inner.sizes[1])
            if self.size:
                near = slice(column // self.size - first_column // self.size, None)
                scaled(codes, zeros[own, near], scales[own, near], column, self.size)
            else:
                of = groups[column - first_column : column_end - first_column]
                codes.sub_(zeros[0, 0] if one_zero else zeros[own].index_select(1, of))
                codes.mul_(scales[own].index_select(1, of))
            # The product of a difference of codes and an F16 is exact in F32, so this is F16 arithmetic, and faster.
            return codes.copy_(codes.to(torch.float16))

        return decode

    def zero_words(self, words: torch.Tensor) -> torch.Tensor:
        """Stored words of zero points, as the points themselves."""
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        return words + ones if self.plus_one else words

    def check_groups(self, groups: torch.Tensor, box: Box) -> torch.Tensor:
        """The groups of the box's inputs. Raises :class:`IntegrityError` for any other than those that were read."""
        import torch

        if self.size:
            expected = torch.arange(box.start[1], box.stop[1], dtype=torch.int32) // self.size
            if not torch.equal(groups, expected):
                raise IntegrityError(
                    f"{self.name}: g_idx is not in order, which config.json says it is: expected desc_act true, or inputs in "
                    f"groups of {self.size}"
                )
            return groups
        return groups_within(self.name, groups, self.groups)


# ----------------------------------------------------------------------------------------------------

_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


@frozen
class _Settings:
    bits: int
    group_size: int
    """-1: all inputs are one group."""
    in_order: bool
    plus_one: bool
    dynamic: bool
    """Modules may have bits and groups of their own, which their tensors tell."""


def find(source: Source) -> Found:
    """Every tensor in codes of GPTQ. Implements :class:`.Family`."""
    return each_module(source, "gptq", ("qweight", "qzeros", "g_idx"), _settings, _coded)


def _settings(given: Mapping[str, Any]) -> _Settings:
    """What config.json says of all modules. Raises :class:`FormatError` for what this version can't decode."""
    bits, size, by_activation = (
        given.get(k, d) for k, d in (("bits", None), ("group_size", 128), ("desc_act", False))
    )
    layout = given.get("checkpoint_format") or given.get("format") or "gptq"
    if type(bits) is not int or bits not in _BITS:
        raise FormatError(f"expected 2, 4 or 8 as bits in config.json, found {brief(bits)}")
    if not isinstance(by_activation, bool):
        raise FormatError(f"expected true or false as desc_act in config.json, found {brief(by_activation)}")
    if layout not in _FORMATS or given.get("is_marlin_format"):
        found = brief(layout) if layout not in _FORMATS else "is_marlin_format"
        raise FormatError(f"expected gptq or gptq_v2 as checkpoint_format in config.json, found {found}")
    if given.get("rotation"):
        raise FormatError(
            f"config.json says rotation = {brief(given['rotation'])}: the codes are of rotated weights"
        )
    return _Settings(
        bits, group_size_of(size), not by_activation, layout == "gptq", bool(given.get("dynamic"))
    )


def _coded(source: Source, stem: str, settings: _Settings) -> Coded:
    codes, zeros, scales = words_of(source.tensors, stem)
    index = require(source.tensors, f"{stem}g_idx", f"{stem}weight")
    if index.dtype != "I32" or len(index.shape) != 1 or not index.shape[0]:
        raise FormatError(
            f"expected I32 in one dim, found {index.dtype} {list(index.shape)}", path=index.name
        )
    (inputs,), outputs = index.shape, codes.shape[1]
    bits, size = settings.bits, min(settings.group_size, inputs) if settings.group_size > 0 else inputs
    in_order, groups = settings.in_order, -(-inputs // size)
    if settings.dynamic:
        bits = next((n for n in _BITS if codes.shape[0] == -(-inputs * n // 32)), bits)
        in_order, groups = in_order and groups == scales.shape[0], scales.shape[0]
    check(
        codes, "I32", (-(-inputs * bits // 32), outputs), f"{inputs} inputs (as {index.name}) of {bits} bits"
    )
    check(scales, "F16", (groups, outputs), f"{inputs} inputs in groups of {size} and {outputs} outputs")
    check(
        zeros,
        "I32",
        (groups, -(-outputs * bits // 32)),
        f"{groups} groups and {outputs} outputs of {bits} bits",
    )
    rule = Gptq(f"{stem}weight", bits, groups, size if in_order else None, settings.plus_one)
    parts = {"codes": codes, "zeros": zeros, "scales": scales, "groups": index}
    return coded(rule.name, "F16", (outputs, inputs), parts, rule)
