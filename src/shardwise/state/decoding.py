"""The decoding half of :mod:`.typed_json`: documents to values of a closed list of types."""

from __future__ import annotations

import base64
import collections
import enum
import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..devices import own_device
from ..dtypes import named_dtype
from ..errors import FormatError, StateError
from ..internals.torch import quantized
from ..limits import MAX_COLLISIONS, MAX_DIMS, brief, cause
from .encoding import FACTORIES, MAX_DEPTH, TAG, imported
from .places import Places

__all__ = ["LEFT_OUT", "Decoder"]


class _LeftOut:
    """Stands for a function that was not stored, until its container is built."""


LEFT_OUT = _LeftOut()


class Decoder:
    """One document that is being read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], places: Places | None = None) -> None:
        self._tensors = tensors
        self._places = places
        self._made: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()  # by arrays
        self._depth = 0

    def decode(self, node: Any) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if self._depth > MAX_DEPTH + 10:  # parts of a complex number and similar count as levels here
            raise FormatError("typed JSON is nested too deeply")
        self._depth += 1
        try:
            return self._decode_nested(node)
        finally:
            self._depth -= 1

    def _decode_nested(self, node: Any) -> Any:
        if isinstance(node, list):
            return self.items(node)
        if not isinstance(node, dict):
            raise FormatError(f"typed JSON holds a {type(node).__name__}, which JSON does not have")
        if TAG not in node:
            decoded = ((key, self.decode(value)) for key, value in node.items())
            return {key: value for key, value in decoded if value is not LEFT_OUT}
        tag = node[TAG]
        build = _BUILDERS.get(tag) if isinstance(tag, str) else None
        if build is None:
            raise FormatError(
                f"typed JSON has the unknown kind {brief(tag)}; did a newer shardwise write it?"
            )
        try:
            return build(self, node)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
            raise FormatError(
                f"typed JSON has a malformed {tag!r}: {cause(error)} in {brief(node)}"
            ) from error

    def items(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return [None if value is LEFT_OUT else value for value in decoded]

    def members(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return _hashable([value for value in decoded if value is not LEFT_OUT])

    def pairs(self, node: Any) -> dict[Any, Any]:
        decoded = [(self.decode(key), self.decode(value)) for key, value in _listed(node)]
        _hashable(key for key, _ in decoded)
        return {key: value for key, value in decoded if key is not LEFT_OUT and value is not LEFT_OUT}

    def stored(self, key: Any) -> torch.Tensor:
        if not isinstance(key, str) or key not in self._tensors:
            raise FormatError(f"typed JSON refers to the tensor {brief(key)}, which is missing")
        return self._tensors[key].detach()

    def tensor(self, node: dict[str, Any]) -> torch.Tensor:
        key, shape = node["key"], _shape(node["shape"])
        if key in self._made:
            return self._made[key]
        stored, dtype = self.stored(key), _torch_dtype(node["dtype"])
        if node["dtype"].startswith(("qint", "quint")):
            raise ValueError("a quantized tensor is more than its bytes")
        value = stored.to("cpu", copy=True).contiguous()
        if value.dtype is not dtype and value.dtype is torch.uint8:
            value = value.view(dtype).reshape(shape)
        if value.dtype is not dtype or list(value.shape) != shape:
            found = f"{value.dtype} {list(value.shape)}"
            raise FormatError(f"tensor {brief(key)} should be {dtype} {shape}, but it is {found}")
        self._made[key] = value
        if self._places is not None:  # older documents say cuda:0
            self._places.met(value, key, torch.device(node["device"]).type)
        return value

    def quantized(self, node: dict[str, Any]) -> torch.Tensor:
        integers, scale, zero_point, axis = self.items(node["parts"])
        if axis is None:
            made = quantized(integers, float(scale), int(zero_point), None)
        else:
            if (
                not 0 <= axis < integers.dim()
                or not scale.shape == zero_point.shape == integers.shape[axis : axis + 1]
            ):
                raise ValueError("scales do not fit the axis")
            if (scale.dtype, zero_point.dtype) != (torch.float64, torch.int64):
                raise ValueError("scales or zero points are of another dtype")
            made = quantized(integers, scale, zero_point, axis)
        if made.dtype is not _torch_dtype(node["dtype"]):
            raise ValueError("its integers have another dtype")
        if self._places is not None:  # it goes where its integers were
            part = node["parts"][0]
            self._places.met(made, part["key"].removesuffix("[0]"), torch.device(part["device"]).type)
        return made

    def array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        content = self.stored(node["key"]).to("cpu").contiguous()
        if node["key"] in self._used:  # each reference copies it: many would take more memory than the file
            raise ValueError("two arrays refer to one tensor")
        self._used.add(node["key"])
        if content.dtype is not torch.uint8 or content.dim() != 1:
            raise ValueError("an array's tensor holds bytes")
        dtype, shape = self.array_dtype(node["dtype"]), tuple(_shape(node["shape"]))
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != content.numel():
            raise ValueError("the array's bytes do not fit its dtype and shape")
        return np.ndarray(shape, dtype, bytearray(content.numpy().tobytes()))

    def array_dtype(self, descr: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_checked_descr(self.decode(descr)))
        return dtype

    def array_scalar(self, node: dict[str, Any]) -> Any:
        dtype, content = self.array_dtype(node["dtype"]), _unbase64(node["base64"])
        if dtype.hasobject or dtype.itemsize != len(content):
            raise ValueError("the scalar's bytes do not fit its dtype")
        return np.ndarray((1,), dtype, bytearray(content))[0]


def _listed(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError("expected a list")
    return node


def _shape(node: Any) -> list[int]:
    if len(_listed(node)) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in node):
        raise ValueError(f"expected a shape of at most {MAX_DIMS} dims")
    return list(node)


def _hashable(keys: Iterable[Any]) -> list[Any]:
    """The keys of a set or dict. Refuses many keys with one hash: inserting them takes quadratic time.

    Python hashes a number to its value modulo 2^61 - 1, and a tuple by its items, so a file can hold such keys.
    """
    found = list(keys)
    most = max(Counter(map(hash, found)).values(), default=0)
    if most > MAX_COLLISIONS:
        raise ValueError(f"{most} keys have one hash, the limit is {MAX_COLLISIONS}")
    return found


def _checked_descr(descr: Any, depth: int = 0) -> Any:
    """A dtype as numpy describes it (as in .npy headers): text, a list of fields, or a pair of a dtype and a shape."""
    if isinstance(descr, str) and descr.isascii() and 0 < len(descr) < 100 and "," not in descr:
        return descr
    if depth < MAX_DIMS and isinstance(descr, tuple) and len(descr) == 2:
        shape = descr[1] if isinstance(descr[1], tuple) else (descr[1],)
        return (_checked_descr(descr[0], depth + 1), tuple(_shape(list(shape))))
    if depth < MAX_DIMS and isinstance(descr, list):
        return [_checked_field(field, depth) for field in descr]
    raise ValueError(f"{brief(descr)} does not describe a numpy dtype")


def _checked_field(field: Any, depth: int) -> tuple[Any, ...]:
    if not isinstance(field, tuple) or len(field) not in (2, 3):
        raise ValueError(f"{brief(field)} does not describe a field of a numpy dtype")
    title_and_name = field[0] if isinstance(field[0], tuple) and len(field[0]) == 2 else ("", field[0])
    if not all(isinstance(text, str) for text in title_and_name):
        raise ValueError(f"{brief(field[0])} is not the name of a field")
    shape = (
        [tuple(_shape(list(field[2] if isinstance(field[2], tuple) else (field[2],))))] if field[2:] else []
    )
    return (field[0], _checked_descr(field[1], depth + 1), *shape)


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = named_dtype(name)
    if dtype is None:
        raise ValueError(f"not a dtype of torch: {brief(name)}")
    return dtype


def _device(node: dict[str, Any]) -> torch.device:
    stored = torch.device(node["name"])
    own = own_device(stored.type)
    return own if node.get("own") is True and own.type == stored.type else stored


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("only inf, -inf and nan are written as text")
    return float(text)


def _factory(name: str | None) -> type | None:
    return None if name is None else FACTORIES[name]


def _enum_member(node: dict[str, Any]) -> enum.Enum:
    cls = imported(node["class"])
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise StateError(
            f"the enum {brief(node['class'])} is not imported; import its module before resuming"
        )
    if node["name"] not in cls.__members__:
        raise StateError(f"the enum {brief(node['class'])} has no member {brief(node['name'])} any more")
    member: enum.Enum = cls.__members__[node["name"]]
    return member


_BUILDERS: dict[str, Callable[[Decoder, dict[str, Any]], Any]] = {
    "not_stored": lambda d, node: LEFT_OUT,
    "int": lambda d, node: int(node["hex"], 16),
    "float": lambda d, node: _special_float(node["value"]),
    "complex": lambda d, node: complex(d.decode(node["real"]), d.decode(node["imag"])),
    "str": lambda d, node: bytes.fromhex(node["hex"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda d, node: _unbase64(node["base64"]),
    "bytearray": lambda d, node: bytearray(_unbase64(node["base64"])),
    "tuple": lambda d, node: tuple(d.items(node["items"])),
    "set": lambda d, node: set(d.members(node["items"])),
    "frozenset": lambda d, node: frozenset(d.members(node["items"])),
    "range": lambda d, node: range(*d.items(node["items"])),
    "slice": lambda d, node: slice(*d.items(node["items"])),
    "deque": lambda d, node: collections.deque(d.items(node["items"]), node["maxlen"]),
    "dict": lambda d, node: d.pairs(node["items"]),
    "Counter": lambda d, node: collections.Counter(d.pairs(node["items"])),
    "OrderedDict": lambda d, node: collections.OrderedDict(d.pairs(node["items"])),
    "defaultdict": lambda d, node: collections.defaultdict(_factory(node["factory"]), d.pairs(node["items"])),
    "enum": lambda d, node: _enum_member(node),
    "Path": lambda d, node: pathlib.Path(d.decode(node["path"])),
    "PurePosixPath": lambda d, node: pathlib.PurePosixPath(d.decode(node["path"])),
    "PureWindowsPath": lambda d, node: pathlib.PureWindowsPath(d.decode(node["path"])),
    "tensor": Decoder.tensor,
    "quantised": Decoder.quantized,  # the tag as it is stored
    "torch.Size": lambda d, node: torch.Size(node["items"]),
    "torch.dtype": lambda d, node: _torch_dtype(node["name"]),
    "torch.device": lambda d, node: _device(node),
    "numpy.array": Decoder.array,
    "numpy.dtype": lambda d, node: d.array_dtype(node["dtype"]),
    "numpy.scalar": Decoder.array_scalar,
    "numpy.str": lambda d, node: np.str_(d.decode(node["value"])),
    "numpy.bytes": lambda d, node: np.bytes_(_unbase64(node["base64"])),
}
