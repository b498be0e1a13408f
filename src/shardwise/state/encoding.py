"""The encoding half of :mod:`.typed_json`: values to documents."""

from __future__ import annotations

import base64
import collections
import enum
import functools
import math
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..devices import own_device
from ..dtypes import code_of
from ..errors import FormatError, StateError
from ..limits import is_text

__all__ = ["FACTORIES", "FUNCTIONS", "MAX_DEPTH", "TAG", "Encoder", "imported", "quantized_parts"]

TAG = "$type"
#: Far above any real state, and far below the limits of Python's JSON reader and recursion.
MAX_DEPTH = 100
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
FACTORIES: dict[str, type] = {
    t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
_NEXT_STEP = "give an object with state_dict/load_state_dict, or convert it to plain values"


class Encoder:
    """Builds one document, and collects the tensors that it refers to."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.not_stored: list[str] = []
        self._open: list[int] = []  # ids of the containers on the current path
        self._keys: dict[int, str] = {}  # key of each tensor met, by id
        self._met: list[torch.Tensor] = []  # keeps these tensors alive, so their ids stay unique

    def encode(self, value: Any, where: str) -> Any:
        cls = type(value)
        if cls in _LEAVES:
            return _LEAVES[cls](value)
        if cls in _CONTAINERS:
            with self._inside(value, where):
                return _CONTAINERS[cls](self, value, where)
        for base, encode_instance in _INSTANCES:
            if isinstance(value, base):
                return encode_instance(self, value, where)
        raise _refusal(where, value, "can't be expressed in typed JSON")

    @contextmanager
    def _inside(self, value: Any, where: str) -> Iterator[None]:
        if id(value) in self._open:
            raise StateError(
                f"{where}: this {type(value).__name__} contains itself, but a cycle can't be stored; "
                "drop the reference back"
            )
        if len(self._open) >= MAX_DEPTH:
            raise StateError(f"{where}: nested deeper than {MAX_DEPTH} levels; flatten it")
        self._open.append(id(value))
        yield
        self._open.pop()

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.encode(value, f"{where}[{index}]") for index, value in enumerate(values)]

    def unordered(self, values: Iterable[Any], where: str) -> list[Any]:
        # A set of text has another order in every process, but equal states must give equal files.
        return sorted((self.encode(value, f"{where}{{{_shown(value)}}}") for value in values), key=repr)

    def pairs(self, mapping: Mapping[Any, Any], where: str) -> list[Any]:
        return [
            [self.encode(key, f"{where}{{key {_shown(key)}}}"), self.encode(value, _below(where, key))]
            for key, value in mapping.items()
        ]

    def mapping(self, mapping: dict[Any, Any], where: str) -> Any:
        if all(type(key) is str and key != TAG and _is_text(key) for key in mapping):
            return {key: self.encode(value, _below(where, key)) for key, value in mapping.items()}
        return {TAG: "dict", "items": self.pairs(mapping, where)}

    def default_mapping(self, mapping: collections.defaultdict[Any, Any], where: str) -> Any:
        factory: Any = mapping.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            raise _refusal(
                where, mapping, f"is a defaultdict whose factory {factory!r} is not a builtin type"
            )
        return {TAG: "defaultdict", "factory": name, "items": self.pairs(mapping, where)}

    def enum_member(self, member: enum.Enum, where: str) -> Any:
        cls = type(member)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if imported(name) is not cls:
            raise _refusal(where, member, f"belongs to an enum that can't be found as {name}")
        if cls.__members__.get(member.name) is not member:  # a combination of flags has no name of its own
            raise _refusal(where, member, "is not a single named member of its enum")
        return {TAG: "enum", "class": name, "name": member.name}

    def function(self, value: Any, where: str) -> Any:
        self.not_stored.append(where)
        return {TAG: "not_stored", "kind": type(value).__name__}

    def tensor(self, value: torch.Tensor, where: str) -> Any:
        if type(value) is not torch.Tensor:
            hint = "is not a plain torch.Tensor (try .detach())"
            if type(value).__name__ == "DTensor":
                hint = (
                    "is sharded; give a copy of the model (an EMA) to TrainState(model={…}) under its own name, which "
                    "stores it shard by shard"
                )
            raise _refusal(where, value, hint)
        if value.layout is not torch.strided or value.is_nested or value.is_meta:
            raise _refusal(where, value, "is a sparse, nested or meta tensor")
        if value.is_quantized:
            return self.quantized(value, where)
        if id(value) not in self._keys:
            self._met.append(value)
            self._keys[id(value)] = self.put(_storable(value, where), where)
        dtype = str(value.dtype).removeprefix("torch.")
        fields = {"key": self._keys[id(value)], "dtype": dtype, "shape": list(value.shape)}
        return {TAG: "tensor", **fields, "device": value.device.type}  # an index differs between ranks

    def quantized(self, value: torch.Tensor, where: str) -> Any:
        parts = quantized_parts(value)
        if parts is None:
            raise _refusal(where, value, f"is quantized by the scheme {value.qscheme()}")
        dtype = str(value.dtype).removeprefix("torch.")
        return {TAG: "quantised", "dtype": dtype, "parts": self.items(parts, where)}

    def array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        if type(value) is not np.ndarray:
            raise _refusal(where, value, "is a subclass of numpy.ndarray")
        if value.dtype.hasobject:
            raise _refusal(where, value, "is an array of Python objects")
        dtype = self.encode(value.dtype, where)["dtype"]
        key = self.put(_bytes_tensor(value.tobytes()), where)
        return {TAG: "numpy.array", "key": key, "dtype": dtype, "shape": list(value.shape)}

    def array_dtype(self, value: np.dtype[Any], where: str) -> Any:
        descr = _numpy_descr(value)
        if descr is None:
            raise _refusal(where, value, f"has the numpy dtype {value!r}, which can't be stored")
        return {TAG: "numpy.dtype", "dtype": self.encode(descr, where)}

    def array_scalar(self, value: np.generic, where: str) -> Any:
        if type(value) is np.str_:  # raw memory and str(value) would both drop trailing NULs
            return {TAG: "numpy.str", "value": _text(str.__str__(value))}
        if type(value) is np.bytes_:
            return {TAG: "numpy.bytes", "base64": _base64(bytes(value))}
        if value.dtype.hasobject or not value.dtype.itemsize:
            raise _refusal(where, value, "can't be stored as raw memory")
        for descr in (_numpy_descr(value.dtype), value.dtype.char):  # char: longlong is not int64
            if descr is not None and _numpy_type(descr) is type(value):
                fields = {"dtype": self.encode(descr, where), "base64": _base64(value.tobytes())}
                return {TAG: "numpy.scalar", **fields}
        raise _refusal(where, value, f"has the numpy dtype {value.dtype!r}, which can't be stored")

    def put(self, tensor: torch.Tensor, where: str) -> str:
        key, count = where, 1
        while key in self.tensors:  # two keys of a dict may print the same text
            count += 1
            key = f"{where}#{count}"
        self.tensors[key] = tensor
        return key


def quantized_parts(value: torch.Tensor) -> tuple[torch.Tensor, Any, Any, int | None] | None:
    """Integers, scale, zero point and axis (None: one scale for all) of a quantized tensor; None for other schemes."""
    if value.qscheme() is torch.per_tensor_affine:
        return value.int_repr(), value.q_scale(), value.q_zero_point(), None
    if value.qscheme() is torch.per_channel_affine:
        axis = value.q_per_channel_axis()
        return value.int_repr(), value.q_per_channel_scales(), value.q_per_channel_zero_points(), axis
    return None


def _refusal(where: str, value: Any, why: str) -> StateError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return StateError(f"{where}: this {kind} {why}; {_NEXT_STEP}")


def _below(where: str, key: Any) -> str:
    return f"{where}.{key}" if type(key) is str and key.isidentifier() else f"{where}[{_shown(key)}]"


def _shown(key: Any) -> str:
    try:
        return repr(key)[:80]
    except Exception:  # a key may have any class, and Python refuses to print integers of 4300 digits
        return f"<{type(key).__qualname__}>"


def _is_text(value: str) -> bool:
    return is_text(value)


def _text(value: str) -> Any:
    # Half a surrogate pair is not Unicode, and JSON would join two halves into one character.
    return value if _is_text(value) else {TAG: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _integer(value: int) -> Any:
    # Hexadecimal, because Python refuses decimal texts of more than 4300 digits.
    return value if -(2**63) <= value < 2**63 else {TAG: "int", "hex": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "value": str(value)}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _device(value: torch.device) -> Any:
    # Each process has its own device. Without the index equal states give equal files, and fit any reader's device.
    if value.index is not None and value == own_device(value.type):
        return {TAG: "torch.device", "name": value.type, "own": True}
    return {TAG: "torch.device", "name": str(value)}


def _tagged(tag: str, field: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {TAG: tag, field: convert(value)}


def _storable(value: torch.Tensor, where: str) -> torch.Tensor:
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    try:
        code_of(plain.dtype)
        return plain
    except FormatError:
        pass
    try:
        return plain.reshape(-1).view(torch.uint8)
    except RuntimeError:
        raise _refusal(where, value, f"has the dtype {value.dtype}, which can't be stored") from None


def _bytes_tensor(content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _numpy_descr(dtype: np.dtype[Any]) -> Any | None:
    """Numpy's own description of ``dtype`` (as in .npy headers), or None if numpy can't rebuild it from that."""
    if dtype.metadata:
        return None
    descr: Any = np.lib.format.dtype_to_descr(dtype)
    try:
        return descr if np.lib.format.descr_to_dtype(descr) == dtype else None
    except (TypeError, ValueError):
        return None


def _numpy_type(descr: Any) -> type | None:
    try:
        return np.lib.format.descr_to_dtype(descr).type
    except (TypeError, ValueError):
        return None


def imported(name: str) -> Any | None:
    """The object ``module:qualname`` if its module is imported. Only reads dicts; runs no code."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


_LEAVES: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _integer,
    float: _float,
    str: _text,
    complex: lambda value: {TAG: "complex", "real": _float(value.real), "imag": _float(value.imag)},
    bytes: _tagged("bytes", "base64", _base64),
    bytearray: _tagged("bytearray", "base64", _base64),
    range: lambda v: {TAG: "range", "items": [_integer(n) for n in (v.start, v.stop, v.step)]},
    torch.Size: _tagged("torch.Size", "items", list),
    torch.dtype: _tagged("torch.dtype", "name", lambda value: str(value).removeprefix("torch.")),
    torch.device: _device,
    type(pathlib.Path()): _tagged("Path", "path", lambda value: _text(str(value))),
    pathlib.PurePosixPath: _tagged("PurePosixPath", "path", lambda value: _text(str(value))),
    pathlib.PureWindowsPath: _tagged("PureWindowsPath", "path", lambda value: _text(str(value))),
}
_CONTAINERS: dict[type, Callable[[Encoder, Any, str], Any]] = {
    list: Encoder.items,
    dict: Encoder.mapping,
    tuple: lambda e, v, where: {TAG: "tuple", "items": e.items(v, where)},
    set: lambda e, v, where: {TAG: "set", "items": e.unordered(v, where)},
    frozenset: lambda e, v, where: {TAG: "frozenset", "items": e.unordered(v, where)},
    slice: lambda e, v, where: {TAG: "slice", "items": e.items((v.start, v.stop, v.step), where)},
    collections.deque: lambda e, v, where: {TAG: "deque", "maxlen": v.maxlen, "items": e.items(v, where)},
    collections.Counter: lambda e, v, where: {TAG: "Counter", "items": e.pairs(v, where)},
    collections.OrderedDict: lambda e, v, where: {TAG: "OrderedDict", "items": e.pairs(v, where)},
    collections.defaultdict: Encoder.default_mapping,
}
_INSTANCES: tuple[tuple[Any, Callable[[Encoder, Any, str], Any]], ...] = (
    (enum.Enum, Encoder.enum_member),  # before numpy and functions: an enum may have any mixin
    (torch.Tensor, Encoder.tensor),
    (np.ndarray, Encoder.array),
    (np.generic, Encoder.array_scalar),
    (np.dtype, Encoder.array_dtype),
    (FUNCTIONS, Encoder.function),
)
