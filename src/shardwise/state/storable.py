"""Refuses tensors that can't be stored directly: expected are dense ones, in real memory, of a safetensors dtype."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..dtypes import code_of
from ..errors import FormatError, StateError
from ..internals.torch import local_tensor

__all__ = ["refuse_meta", "why_unstorable"]


def refuse_meta(where: str, tensor: torch.Tensor) -> None:
    """Raise :class:`StateError` naming ``where`` if a tensor has no values."""
    if tensor.is_meta:
        raise StateError(
            f"{where}: is on the meta device and has no values; load or initialize the model before saving"
        )


def why_unstorable(tensor: torch.Tensor) -> str:
    """Why a tensor (the local part of a DTensor) can't be stored, and the way out; empty if it can.

    Accepts tensors on meta, which may be planned but not written: see :func:`refuse_meta`.
    """
    local = local_tensor(tensor)
    if type(local) is not torch.Tensor and (why := _why_not_a(type(local))):
        return why
    if local.is_nested or local.layout is not torch.strided:
        kind = "nested" if local.is_nested else str(local.layout).removeprefix("torch.")
        return (
            f"is a {kind} tensor; expected a dense one. Store it as to_dense(), or as a non-persistent buffer"
        )
    if local.is_quantized:
        return "is a quantized tensor; expected a plain one. Store its int_repr(), scale and zero point"
    if local.is_conj() or local.is_neg():
        return "is a conjugate or negative view; expected its own values. Call resolve_conj().resolve_neg()"
    try:
        code_of(local.dtype)
    except FormatError:
        return f"has the dtype {local.dtype}, which safetensors can't store. Use another dtype"
    return ""


@cache
def _why_not_a(kind: type[torch.Tensor]) -> str:
    """Why no tensor of a class can be stored."""
    if issubclass(kind, UninitializedParameter | UninitializedBuffer):
        return "is lazy and has no shape yet; run the model once before saving"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {kind.__qualname__}, a tensor subclass with its own content, which can't be stored; expected a "
            f"plain tensor. Use one, or keep it outside the TrainState"
        )
    return ""
