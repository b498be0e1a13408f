"""The dtype and shape of a tensor, without its name, content or place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ..dtypes import code_of, itemsize

if TYPE_CHECKING:
    import torch

__all__ = ["TensorSpec"]


class TensorSpec(NamedTuple):
    """A tensor's stored dtype (a safetensors code) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a live tensor, whole. Raises :class:`FormatError` if its dtype can't be stored."""
        return cls(code_of(tensor.dtype), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)
