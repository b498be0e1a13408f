"""GPTQ's codes: unsigned fields of 2, 4 or 8 bits in words along the inputs, in groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import IntegrityError
from ..layout.boxes import Box
from .groups import scaled
from .scales import finite
from .words import covering, fields

if TYPE_CHECKING:
    import torch

__all__ = ["Gptq"]


@dataclass(frozen=True, slots=True)
class Gptq:
    """``(code − zero) × scale`` of the input's group, in F16. Implements :class:`.Rule`.

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
        import torch

        if not box.numel:
            return torch.empty(box.sizes, dtype=torch.float16)
        rows, columns = box.sizes
        per_word = 32 // self.bits
        codes = fields(parts["codes"].t(), self.bits).narrow(1, box.start[1] % per_word, columns)
        zeros = fields(self.zero_words(parts["zeros"]), self.bits).narrow(1, box.start[0] % per_word, rows)
        scales = finite(self.name, parts["scales"])
        groups = self.checked(parts["groups"], box)
        if self.size:
            scaled(codes, zeros.t().contiguous(), scales.t().contiguous(), box.start[1], self.size)
        else:
            one_zero = bool((zeros == zeros[0, 0]).all())  # symmetric codes: nothing to gather
            codes.sub_(zeros[0, 0] if one_zero else zeros.t().contiguous().index_select(1, groups))
            codes.mul_(scales.t().contiguous().index_select(1, groups))
        # The product of a difference of codes and an F16 is exact in F32, so this is F16 arithmetic, and faster.
        return codes.to(torch.float16)

    def zero_words(self, words: torch.Tensor) -> torch.Tensor:
        """Stored words of zero points, as the points themselves."""
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        return words + ones if self.plus_one else words

    def checked(self, groups: torch.Tensor, box: Box) -> torch.Tensor:
        """The groups of the box's inputs. Raises :class:`IntegrityError` for any other than those that were read."""
        import torch

        if self.size:
            expected = torch.arange(box.start[1], box.stop[1], dtype=torch.int32) // self.size
            if not torch.equal(groups, expected):
                raise IntegrityError(
                    f"{self.name}: g_idx is not in order, which config.json says it is: expected desc_act true, or inputs in "
                    f"groups of {self.size}"
                )
        elif int(groups.min()) < 0 or int(groups.max()) >= self.groups:
            raise IntegrityError(
                f"{self.name}: expected groups from 0 to {self.groups - 1} in g_idx, found {int(groups.min())} "
                f"to {int(groups.max())}"
            )
        return groups
