"""Typed JSON: training state as plain JSON, exactly, with tensors kept aside.

What JSON can say itself (null, booleans, 64-bit integers, finite floats, text, lists, objects with text
keys) is written as such. Everything else is an object with the key ``"$type"``, which names the kind:
``{"$type": "tuple", "items": [1, 2]}``. A dict that holds ``"$type"`` itself is written as key-value pairs.
Tensors and numpy arrays go into a separate mapping; the document holds their key in it.

Decoding builds values of a closed list of types. It imports nothing, calls nothing that the document
names, and reads no pickle. Of enum classes it takes only what is imported already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .decoding import LEFT_OUT, Decoder
from .encoding import Encoder
from .places import Places

__all__ = ["Encoded", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """What :func:`encode` made of a value."""

    document: Any
    """Nested dicts, lists, text and finite numbers: ``json.dumps(document, allow_nan=False)`` works."""

    tensors: dict[str, torch.Tensor]
    """By key in the document. Contiguous, on their device, references and not copies where possible.

    All have a dtype that safetensors can store; other dtypes and numpy arrays are held as ``uint8``.
    """

    not_stored: tuple[str, ...]
    """Paths of functions that were met. Decoding leaves them out of dicts and sets, else gives None."""


def encode(value: Any, *, where: str = "state") -> Encoded:
    """``value`` as a JSON document and tensors, so that :func:`decode` gives an equal value.

    Types are exact: a subclass that is not named here is refused, never flattened. One tensor that is met
    twice is stored once and is one tensor again; other objects that are met twice become copies.
    ``where`` begins the paths in errors, in ``not_stored`` and in the keys of tensors.

    Raises :class:`StateError` naming the path of a value that can't be expressed, of a cycle, or of
    nesting deeper than 100.
    """
    encoder = Encoder()
    document = encoder.encode(value, where)
    return Encoded(document, encoder.tensors, tuple(encoder.not_stored))


def decode(document: Any, tensors: Mapping[str, torch.Tensor], places: Places | None = None) -> Any:
    """The value that :func:`encode` was given. Tensors are new, on the CPU, and need no gradient;
    ``places`` learns on which type of device they lay, and puts them there.

    Raises :class:`FormatError` if the document is not one of :func:`encode`'s or a tensor is missing or has
    another dtype or shape, and :class:`StateError` for an enum whose module is not imported.
    """
    value = Decoder(tensors, places).decode(document)
    return None if value is LEFT_OUT else value
