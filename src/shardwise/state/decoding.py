"""The decoding half of :mod:`.typed_json`: documents to values, of a closed list of types."""

from __future__ import annotations

import base64
import collections
import enum
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import FormatError, StateError
from .encoding import FACTORIES, MAX_DEPTH, TAG, imported

__all__ = ["LEFT_OUT", "Decoder"]


class _LeftOut:
    """Stands for a function that was not stored, until its container is built."""


LEFT_OUT = _LeftOut()


class Decoder:
    """One document that is being read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}
        self._depth = 0

    def decode(self, node: Any) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if self._depth > MAX_DEPTH + 10:  # the parts of a complex number and the like are levels here
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
            raise FormatError(f"typed JSON holds a {type(node).__name__}, which JSON has not")
        if TAG not in node:
            decoded = ((key, self.decode(value)) for key, value in node.items())
            return {key: value for key, value in decoded if value is not LEFT_OUT}
        tag = node[TAG]
        build = _BUILDERS.get(tag) if isinstance(tag, str) else None
        if build is None:
            raise FormatError(f"typed JSON has the unknown kind {tag!r}; was a newer shardwise used?")
        try:
            return build(self, node)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise FormatError(f"typed JSON has a malformed {tag!r}: {error!r} in {str(node)[:99]}") from error

    def items(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return [None if value is LEFT_OUT else value for value in decoded]

    def members(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return [value for value in decoded if value is not LEFT_OUT]

    def pairs(self, node: Any) -> dict[Any, Any]:
        decoded = [(self.decode(key), self.decode(value)) for key, value in _listed(node)]
        return {key: value for key, value in decoded if key is not LEFT_OUT and value is not LEFT_OUT}

    def stored(self, key: Any) -> torch.Tensor:
        if not isinstance(key, str) or key not in self._tensors:
            raise FormatError(f"typed JSON refers to the tensor {key!r}, which is not there")
        return self._tensors[key].detach()

    def tensor(self, node: dict[str, Any]) -> torch.Tensor:
        key, shape = node["key"], list(node["shape"])
        if key in self._made:
            return self._made[key]
        stored, dtype = self.stored(key), _torch_dtype(node["dtype"])
        value = stored.to("cpu", copy=True).contiguous()
        if value.dtype is not dtype and value.dtype is torch.uint8:
            value = value.view(dtype).reshape(shape)
        if value.dtype is not dtype or list(value.shape) != shape:
            found = f"{value.dtype} {list(value.shape)}"
            raise FormatError(f"tensor {key!r} should be {dtype} {shape}, but it is {found}")
        self._made[key] = value
        return value

    def quantised(self, node: dict[str, Any]) -> torch.Tensor:
        integers, scale, zero_point, axis = self.items(node["parts"])
        if axis is None:
            made = torch._make_per_tensor_quantized_tensor(integers, float(scale), int(zero_point))
        else:
            if (
                not 0 <= axis < integers.dim()
                or not scale.shape == zero_point.shape == integers.shape[axis : axis + 1]
            ):
                raise ValueError("scales do not fit the axis")
            if (scale.dtype, zero_point.dtype) != (torch.float64, torch.int64):
                raise ValueError("scales or zero points are of another dtype")
            made = torch._make_per_channel_quantized_tensor(integers, scale, zero_point, axis)
        if made.dtype is not _torch_dtype(node["dtype"]):
            raise ValueError("its integers are of another dtype")
        return made

    def array(self, node: dict[str, Any]) -> np.ndarray[Any, Any]:
        content = self.stored(node["key"]).to("cpu").contiguous()
        if content.dtype is not torch.uint8 or content.dim() != 1:
            raise ValueError("an array's tensor holds bytes")
        dtype, shape = self.array_dtype(node["dtype"]), tuple(node["shape"])
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != content.numel():
            raise ValueError("the array's bytes do not fit its dtype and shape")
        return np.ndarray(shape, dtype, bytearray(content.numpy().tobytes()))

    def array_dtype(self, descr: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(self.decode(descr))
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


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype of torch: {name!r}")
    return dtype


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("only inf, -inf and nan are written as text")
    return float(text)


def _factory(name: str | None) -> type | None:
    return None if name is None else FACTORIES[name]


def _enum_member(node: dict[str, Any]) -> enum.Enum:
    cls = imported(node["class"])
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise StateError(f"no enum {node['class']} is imported; import its module before resuming")
    if node["name"] not in cls.__members__:
        raise StateError(f"the enum {node['class']} has no member {node['name']!r} any more")
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
    "quantised": Decoder.quantised,
    "torch.Size": lambda d, node: torch.Size(node["items"]),
    "torch.dtype": lambda d, node: _torch_dtype(node["name"]),
    "torch.device": lambda d, node: torch.device(node["name"]),
    "numpy.array": Decoder.array,
    "numpy.dtype": lambda d, node: d.array_dtype(node["dtype"]),
    "numpy.scalar": Decoder.array_scalar,
    "numpy.str": lambda d, node: np.str_(d.decode(node["value"])),
    "numpy.bytes": lambda d, node: np.bytes_(_unbase64(node["base64"])),
}
