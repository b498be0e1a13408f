"""What shardwise uses of torchao's optimizers that torchao keeps in modules of its own. torchao 0.15-0.18.

Importing this does not import torchao.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ..objects import frozen

__all__ = ["KINDS", "LowBit", "fresh_book", "low_bit", "low_bit_state", "may_keep_low_bits"]


@frozen
class Kind:
    """A class of states: its module, the dtype of its codes, how many elements one code holds, the length of its code book.

    Without it, a checkpoint could not be checked before a state is made of it.
    """

    module: str
    codes: torch.dtype
    elements: int
    book: int
    """0 if it has none."""


#: The classes by name. They are told by name, because a program may work without torchao.
KINDS = {
    "OptimState8bit": Kind("torchao.optim.subclass_8bit", torch.uint8, 1, 256),
    "OptimState4bit": Kind("torchao.optim.subclass_4bit", torch.uint8, 2, 16),
    "OptimStateFp8": Kind("torchao.optim.subclass_fp8", torch.float8_e4m3fn, 1, 0),
}


@frozen
class LowBit:
    """The plain tensors in a state, and its attributes. References, no copies.

    Without it, the three classes would be told apart everywhere.
    """

    kind: str
    codes: torch.Tensor
    scale: torch.Tensor
    book: torch.Tensor | None
    """The numbers that codes stand for, before they are scaled."""
    signed: bool | None
    block: int
    """Elements with one scale."""
    dtype: torch.dtype
    """What the state says that it is."""


def may_keep_low_bits(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torchao's, by its class alone: the same on every rank, also on those without elements.

    Without it, a rank whose shards are short would not know that others hold theirs in few bits.
    """
    return any(kind.__module__.startswith("torchao.optim") for kind in type(optimizer).__mro__)


def low_bit(tensor: torch.Tensor) -> LowBit | None:
    """The plain tensors of a state of torchao's optimizers, None of any other tensor.

    Without it, there is ``__tensor_flatten__``, whose names and order of attributes are the same private ones.
    """
    if type(tensor) is torch.Tensor:
        return None
    found: Any = tensor
    name = type(tensor).__name__
    if name not in KINDS or type(tensor).__module__ != KINDS[name].module:
        return None
    return LowBit(
        kind=name,
        codes=found.codes,
        scale=found.scale,
        book=found.qmap if KINDS[name].book else None,
        signed=found.signed if KINDS[name].book else None,
        block=found.block_size,
        dtype=found.dtype,
    )


def low_bit_state(parts: LowBit, shape: tuple[int, ...]) -> torch.Tensor:
    """A state of these tensors, of a local ``shape``. Imports torchao; raises ``ImportError``, ``AttributeError``.

    torchao before 0.17: a state has no dtype of its own and says fp32 of any model; codes and scales are the same. Without it, a state could only
    be made by a step of the optimizer, which would change the parameters.
    """
    made = _class_of(parts.kind)
    given: list[Any] = [parts.codes, parts.scale]
    if parts.kind != "OptimStateFp8":
        given += [parts.book, parts.signed]
    if parts.kind == "OptimState4bit":
        given.append(torch.Size(shape))
    knows_dtypes = "dtype" in inspect.signature(made.__new__).parameters
    found: torch.Tensor = made(*given, dtype=parts.dtype) if knows_dtypes else made(*given)
    return found


def fresh_book(kind: str, signed: bool) -> torch.Tensor:
    """The code book of a new state. Without it, a rank without elements would write another document than the rest."""
    zeros = _class_of(kind).zeros((2,), signed=signed, block_size=2, device="cpu")
    book: torch.Tensor = zeros.qmap
    return book


def _class_of(kind: str) -> Any:
    return getattr(importlib.import_module(KINDS[kind].module), kind)
