"""Stored dtypes: the safetensors codes, their sizes, and the torch dtypes they stand for.

Format: https://huggingface.co/docs/safetensors (``dtype`` field of a header entry).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .errors import FormatError

if TYPE_CHECKING:
    import torch


#: Bytes per element of every stored dtype that shardwise reads and writes.
ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

_TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_CODES = {name: code for code, name in _TORCH_NAMES.items()}


def itemsize(code: str) -> int:
    """Bytes per element of the stored dtype ``code``. Raises :class:`FormatError` if it is unknown."""
    try:
        return ITEMSIZE[code]
    except KeyError:
        known = ", ".join(ITEMSIZE)
        raise FormatError(f"unknown stored dtype {code!r}; known: {known}") from None


@cache
def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype that the stored dtype ``code`` stands for."""
    import torch

    itemsize(code)
    dtype = getattr(torch, _TORCH_NAMES[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


@cache
def code_of(dtype: torch.dtype) -> str:
    """The stored dtype code of a torch dtype. Raises :class:`FormatError` if it can't be stored."""
    name = str(dtype).removeprefix("torch.")
    try:
        return _CODES[name]
    except KeyError:
        raise FormatError(f"dtype {dtype} can't be stored in safetensors") from None


def named_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """The torch dtype of that name, or ``dtype`` itself if it is one; None for anything else."""
    import torch

    found = vars(torch).get(dtype) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else None


@cache
def is_lossless(before: str, after: str) -> bool:
    """Whether every value of one stored floating-point dtype is a value of another."""
    import torch

    source, target = torch_dtype(before), torch_dtype(after)
    if not (source.is_floating_point and target.is_floating_point):  # no load casts between them
        return source == target
    a, b = torch.finfo(source), torch.finfo(target)
    return b.eps <= a.eps and b.max >= a.max and b.smallest_normal * b.eps <= a.smallest_normal * a.eps
