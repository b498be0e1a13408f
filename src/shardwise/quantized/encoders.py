"""Quantizes weights again into the format that a source stores them in: the encoder of each rule.

An encoder is the other direction of a :class:`.Rule`: elements in, parts out, with the same layout of codes and the same blocks. It
follows the format's own reference, which its docstring names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..catalog.records import Coded
from ..errors import UnsupportedConversionError
from ..layout.boxes import Box
from .awq_rule import Awq
from .encode_fourbit import NestedFourBitEncoder, fourbit_encoder
from .encode_grouped import GroupedEncoder
from .encode_integers import AwqEncoder, GptqEncoder, RowInt8Encoder
from .encode_mxfp4 import Mxfp4Encoder
from .encode_scaled import ScaledEncoder
from .fourbit import FourBit
from .gptq_rule import Gptq
from .grouped import Grouped
from .mxfp4 import Mxfp4Experts
from .rowint8 import RowInt8
from .scaled import Scaled

if TYPE_CHECKING:
    import torch

__all__ = ["Encoder", "NestedFourBitEncoder", "encoder_of"]


class Encoder(Protocol):
    """How the parts of one tensor are made from its elements. Pure, and the same however windows are cut at :attr:`unit`."""

    @property
    def reference(self) -> str:
        """The rule that it follows, in words, for reports."""

    @property
    def makes(self) -> tuple[str, ...]:
        """The roles of the parts that it makes. The others are those of the source."""

    @property
    def once(self) -> tuple[str, ...]:
        """Those of :attr:`makes` that are of the whole tensor, made from its least and largest element."""

    @property
    def unit(self) -> tuple[int, ...]:
        """Elements in each dim that stay together: windows begin at a multiple of it, and end at one or at the tensor's end."""

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        """The parts of :attr:`makes` for a window, each with the sizes of its box of :meth:`.Rule.boxes`, in its stored dtype.

        ``values``: the finite elements of ``box``, in the dtype of the model. ``kept``: the source's other parts, for the window.
        ``measured``: what was found in the whole tensor before: its least and largest element, in the same dtype, where :attr:`once`
        is not empty; for :class:`.NestedFourBitEncoder` the mean of its scales; else nothing.
        """


def encoder_of(one: Coded, settings: Mapping[str, Any]) -> Encoder:
    """The encoder of a tensor that a source stores in parts. ``settings``: its ``quantization_config``.

    Raises :class:`UnsupportedConversionError` for a format that can't be quantized again, with the reason.
    """
    rule, parts = one.rule, one.parts
    made: Encoder | str = "no rule is known that makes its codes"
    if isinstance(rule, Scaled):
        power = settings.get("scale_fmt") == "ue8m0"
        made = ScaledEncoder.of(rule, one.tensor.shape, parts["codes"].dtype, parts["scales"].dtype, power)
    elif isinstance(rule, Grouped):
        made = GroupedEncoder.of(rule, one.tensor.shape, parts["codes"].dtype, parts["scales"].dtype)
    elif isinstance(rule, FourBit):
        made = fourbit_encoder(rule)
    elif isinstance(rule, RowInt8):
        made = RowInt8Encoder(one.tensor.shape[1])
    elif isinstance(rule, Gptq):
        made = GptqEncoder(rule)
    elif isinstance(rule, Awq):
        made = AwqEncoder(rule)
    elif isinstance(rule, Mxfp4Experts):
        made = Mxfp4Encoder()
    if isinstance(made, str):
        raise UnsupportedConversionError(
            f"{one.tensor.name}: was changed, and can't be re-quantized as {rule.format}: {made}. Export without quantize=, "
            f"for plain weights"
        )
    return made
