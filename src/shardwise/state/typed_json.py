"""Typed JSON: training state as plain JSON, exactly, with tensors in a separate mapping.

JSON's own values (null, booleans, 64-bit integers, finite floats, text, lists, objects with text keys) are written
directly. Every other value is an object whose key ``"$type"`` names its kind:
``{"$type": "tuple", "items": [1, 2]}``. A dict that holds ``"$type"`` itself is written as key-value pairs.
Tensors and numpy arrays go into a separate mapping; the document holds their keys.

Decoding builds values of a closed list of types. It imports nothing, calls nothing that the document names, and reads
no pickle. It uses an enum class only if the class is imported already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..objects import frozen
from .decoding import LEFT_OUT, Decoder
from .encoding import Encoder
from .places import Places

__all__ = ["Encoded", "decode", "encode"]


@frozen
class Encoded:
    """The result of :func:`encode`."""

    document: Any
    """Nested dicts, lists, text and finite numbers: ``json.dumps(document, allow_nan=False)`` works."""

    tensors: dict[str, torch.Tensor]
    """By key in the document. Contiguous, on their own device, and references instead of copies where possible.

    All have a dtype that safetensors can store; other dtypes and numpy arrays are held as ``uint8``.
    """

    not_stored: tuple[str, ...]
    """Paths of functions in the value. Decoding drops them from dicts and sets; elsewhere it gives None."""


def encode(value: Any, *, where: str = "state") -> Encoded:
    """``value`` as a JSON document and tensors, from which :func:`decode` makes an equal value.

    Types are exact: an unknown subclass is refused, never flattened. A tensor that occurs twice is stored once and
    decoded as one tensor; other objects that occur twice become copies. ``where`` begins the paths in errors, in
    ``not_stored`` and in the keys of tensors.

    Raises :class:`StateError` naming the path of a value that can't be expressed, of a cycle, or of
    nesting deeper than 100.
    """
    encoder = Encoder()
    document = encoder.encode(value, where)
    return Encoded(document, encoder.tensors, tuple(encoder.not_stored))


def decode(document: Any, tensors: Mapping[str, torch.Tensor], places: Places | None = None) -> Any:
    """The value that :func:`encode` was given. Tensors are new, on the CPU, and need no gradient; ``places`` notes the
    device types that they were saved from, to move them there.

    Raises :class:`FormatError` if the document is not one of :func:`encode`'s or a tensor is missing or has
    another dtype or shape, and :class:`StateError` for an enum whose module is not imported.
    """
    value = Decoder(tensors, places).decode(document)
    return None if value is LEFT_OUT else value
