"""Typed JSON: training state as plain JSON, exactly, with tensors kept aside.

What JSON can say itself (null, booleans, 64-bit integers, finite floats, text, lists, objects with text
keys) is written as such. Everything else is an object with the key ``"$type"``, which names the kind:
``{"$type": "tuple", "items": [1, 2]}``. A dict that holds ``"$type"`` itself is written as key-value pairs.
Tensors and numpy arrays go into a separate mapping; the document holds their key in it.

Decoding builds values of a closed list of types. It imports nothing, calls nothing that the document
names, and reads no pickle. Of enum classes it takes only what is imported already.
"""

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..dtypes import code_of
from ..errors import FormatError, StateError

__all__ = ["Encoded", "decode", "encode"]

_TAG = "$type"
#: Far above any real state, and far below where Python's JSON reader and recursion limit give up.
_MAX_DEPTH = 100
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
_FACTORIES: dict[str, type] = {
    t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
_NEXT_STEP = "give an object with state_dict/load_state_dict, or convert it to plain values"


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
    encoder = _Encoder()
    document = encoder.encode(value, where)
    return Encoded(document, encoder.tensors, tuple(encoder.not_stored))


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that :func:`encode` was given. Tensors are new, on the CPU, and need no gradient.

    Raises :class:`FormatError` if the document is not one of :func:`encode`'s or a tensor is missing or has
    another dtype or shape, and :class:`StateError` for an enum whose module is not imported.
    """
    value = _Decoder(tensors).decode(document)
    return None if value is _LEFT_OUT else value


# ---------------------------------------------------------------------------------------------- encoding


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.not_stored: list[str] = []
        self._open: list[int] = []  # ids of the containers that we are inside of
        self._keys: dict[int, str] = {}  # key of each tensor met, by id
        self._met: list[torch.Tensor] = []  # keeps those alive, so that no id is used again

    def encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        if kind in _CONTAINERS:
            with self._inside(value, where):
                return _CONTAINERS[kind](self, value, where)
        for base, encode_instance in _INSTANCES:
            if isinstance(value, base):
                return encode_instance(self, value, where)
        raise _refusal(where, value, "can't be expressed in typed JSON")

    @contextmanager
    def _inside(self, value: Any, where: str) -> Iterator[None]:
        if id(value) in self._open:
            raise StateError(
                f"{where}: this {type(value).__name__} contains itself, and a cycle can't be stored; "
                "drop the reference back"
            )
        if len(self._open) >= _MAX_DEPTH:
            raise StateError(f"{where}: nested deeper than {_MAX_DEPTH} levels; flatten it")
        self._open.append(id(value))
        yield
        self._open.pop()

    def items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.encode(value, f"{where}[{index}]") for index, value in enumerate(values)]

    def unordered(self, values: Iterable[Any], where: str) -> list[Any]:
        # The order of a set of texts changes from process to process; equal states give equal files.
        return sorted((self.encode(value, f"{where}{{{_shown(value)}}}") for value in values), key=repr)

    def pairs(self, mapping: Mapping[Any, Any], where: str) -> list[Any]:
        return [
            [self.encode(key, f"{where}{{key {_shown(key)}}}"), self.encode(value, _below(where, key))]
            for key, value in mapping.items()
        ]

    def mapping(self, mapping: dict[Any, Any], where: str) -> Any:
        if all(type(key) is str and key != _TAG and _is_text(key) for key in mapping):
            return {key: self.encode(value, _below(where, key)) for key, value in mapping.items()}
        return {_TAG: "dict", "items": self.pairs(mapping, where)}

    def default_mapping(self, mapping: collections.defaultdict[Any, Any], where: str) -> Any:
        factory: Any = mapping.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise _refusal(where, mapping, f"is a defaultdict whose factory {factory!r} is no builtin type")
        return {_TAG: "defaultdict", "factory": name, "items": self.pairs(mapping, where)}

    def enum_member(self, member: enum.Enum, where: str) -> Any:
        cls = type(member)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if _imported(name) is not cls:
            raise _refusal(where, member, f"is of an enum that is not found as {name}")
        if cls.__members__.get(member.name) is not member:  # a combination of flags has no name of its own
            raise _refusal(where, member, "is no single named member of its enum")
        return {_TAG: "enum", "class": name, "name": member.name}

    def function(self, value: Any, where: str) -> Any:
        self.not_stored.append(where)
        return {_TAG: "not_stored", "kind": type(value).__name__}

    def tensor(self, value: torch.Tensor, where: str) -> Any:
        if type(value) is not torch.Tensor:
            hint = "is no plain torch.Tensor (try .detach())"
            if type(value).__name__ == "DTensor":
                hint = (
                    "is sharded; a copy of the model (an EMA) goes into TrainState(model={…}) under a name of its own, "
                    "and is stored shard by shard"
                )
            raise _refusal(where, value, hint)
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise _refusal(where, value, "is a sparse, quantized, nested or meta tensor")
        if id(value) not in self._keys:
            self._met.append(value)
            self._keys[id(value)] = self.put(_storable(value, where), where)
        dtype = str(value.dtype).removeprefix("torch.")
        fields = {"key": self._keys[id(value)], "dtype": dtype, "shape": list(value.shape)}
        return {_TAG: "tensor", **fields, "device": str(value.device)}

    def array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        if type(value) is not np.ndarray:
            raise _refusal(where, value, "is a subclass of numpy.ndarray")
        if value.dtype.hasobject:
            raise _refusal(where, value, "is an array of Python objects")
        dtype = self.encode(value.dtype, where)["dtype"]
        key = self.put(_bytes_tensor(value.tobytes()), where)
        return {_TAG: "numpy.array", "key": key, "dtype": dtype, "shape": list(value.shape)}

    def array_dtype(self, value: np.dtype[Any], where: str) -> Any:
        descr = _numpy_descr(value)
        if descr is None:
            raise _refusal(where, value, f"has the numpy dtype {value!r}, which can't be stored")
        return {_TAG: "numpy.dtype", "dtype": self.encode(descr, where)}

    def array_scalar(self, value: np.generic, where: str) -> Any:
        if type(value) is np.str_:  # not as raw memory, nor by str(value): both drop trailing NULs
            return {_TAG: "numpy.str", "value": _text(str.__str__(value))}
        if type(value) is np.bytes_:
            return {_TAG: "numpy.bytes", "base64": _base64(bytes(value))}
        if value.dtype.hasobject or not value.dtype.itemsize:
            raise _refusal(where, value, "can't be stored as raw memory")
        for descr in (_numpy_descr(value.dtype), value.dtype.char):  # char: longlong is not int64
            if descr is not None and _numpy_type(descr) is type(value):
                fields = {"dtype": self.encode(descr, where), "base64": _base64(value.tobytes())}
                return {_TAG: "numpy.scalar", **fields}
        raise _refusal(where, value, f"has the numpy dtype {value.dtype!r}, which can't be stored")

    def put(self, tensor: torch.Tensor, where: str) -> str:
        key, count = where, 1
        while key in self.tensors:  # two keys of a dict may print alike
            count += 1
            key = f"{where}#{count}"
        self.tensors[key] = tensor
        return key


def _refusal(where: str, value: Any, why: str) -> StateError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return StateError(f"{where}: this {kind} {why}; {_NEXT_STEP}")


def _below(where: str, key: Any) -> str:
    return f"{where}.{key}" if type(key) is str and key.isidentifier() else f"{where}[{_shown(key)}]"


def _shown(key: Any) -> str:
    try:
        return repr(key)[:80]
    except Exception:  # any class may be a key, and Python refuses to print integers of 4300 digits
        return f"<{type(key).__qualname__}>"


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _text(value: str) -> Any:
    # Half a surrogate pair is no Unicode, and JSON would join two halves into one character.
    return value if _is_text(value) else {_TAG: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


def _integer(value: int) -> Any:
    # Hexadecimal, because Python refuses decimal texts of more than 4300 digits.
    return value if -(2**63) <= value < 2**63 else {_TAG: "int", "hex": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _tagged(tag: str, field: str, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {_TAG: tag, field: convert(value)}


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
    """Numpy's own description of ``dtype`` (as in .npy headers), or None if it does not lead back to it."""
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


_LEAVES: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _integer,
    float: _float,
    str: _text,
    complex: lambda value: {_TAG: "complex", "real": _float(value.real), "imag": _float(value.imag)},
    bytes: _tagged("bytes", "base64", _base64),
    bytearray: _tagged("bytearray", "base64", _base64),
    range: lambda v: {_TAG: "range", "items": [_integer(n) for n in (v.start, v.stop, v.step)]},
    torch.Size: _tagged("torch.Size", "items", list),
    torch.dtype: _tagged("torch.dtype", "name", lambda value: str(value).removeprefix("torch.")),
    torch.device: _tagged("torch.device", "name", str),
    type(pathlib.Path()): _tagged("Path", "path", lambda value: _text(str(value))),
    pathlib.PurePosixPath: _tagged("PurePosixPath", "path", lambda value: _text(str(value))),
    pathlib.PureWindowsPath: _tagged("PureWindowsPath", "path", lambda value: _text(str(value))),
}
_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.mapping,
    tuple: lambda e, v, where: {_TAG: "tuple", "items": e.items(v, where)},
    set: lambda e, v, where: {_TAG: "set", "items": e.unordered(v, where)},
    frozenset: lambda e, v, where: {_TAG: "frozenset", "items": e.unordered(v, where)},
    slice: lambda e, v, where: {_TAG: "slice", "items": e.items((v.start, v.stop, v.step), where)},
    collections.deque: lambda e, v, where: {_TAG: "deque", "maxlen": v.maxlen, "items": e.items(v, where)},
    collections.Counter: lambda e, v, where: {_TAG: "Counter", "items": e.pairs(v, where)},
    collections.OrderedDict: lambda e, v, where: {_TAG: "OrderedDict", "items": e.pairs(v, where)},
    collections.defaultdict: _Encoder.default_mapping,
}
_INSTANCES: tuple[tuple[Any, Callable[[_Encoder, Any, str], Any]], ...] = (
    (enum.Enum, _Encoder.enum_member),  # before numpy and functions: an enum may have any mixin
    (torch.Tensor, _Encoder.tensor),
    (np.ndarray, _Encoder.array),
    (np.generic, _Encoder.array_scalar),
    (np.dtype, _Encoder.array_dtype),
    (_FUNCTIONS, _Encoder.function),
)


# ---------------------------------------------------------------------------------------------- decoding


class _LeftOut:
    """Stands for a function that was not stored, until its container is built."""


_LEFT_OUT = _LeftOut()


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}
        self._depth = 0

    def decode(self, node: Any) -> Any:
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if self._depth > _MAX_DEPTH + 10:  # the parts of a complex number and the like are levels here
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
        if _TAG not in node:
            decoded = ((key, self.decode(value)) for key, value in node.items())
            return {key: value for key, value in decoded if value is not _LEFT_OUT}
        tag = node[_TAG]
        build = _BUILDERS.get(tag) if isinstance(tag, str) else None
        if build is None:
            raise FormatError(f"typed JSON has the unknown kind {tag!r}; was a newer shardwise used?")
        try:
            return build(self, node)
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise FormatError(f"typed JSON has a malformed {tag!r}: {error!r} in {str(node)[:99]}") from error

    def items(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return [None if value is _LEFT_OUT else value for value in decoded]

    def members(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return [value for value in decoded if value is not _LEFT_OUT]

    def pairs(self, node: Any) -> dict[Any, Any]:
        decoded = [(self.decode(key), self.decode(value)) for key, value in _listed(node)]
        return {key: value for key, value in decoded if key is not _LEFT_OUT and value is not _LEFT_OUT}

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
    return None if name is None else _FACTORIES[name]


def _imported(name: str) -> Any | None:
    """The object ``module:qualname`` if its module is imported. Only reads dicts; runs nothing."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _enum_member(node: dict[str, Any]) -> enum.Enum:
    cls = _imported(node["class"])
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise StateError(f"no enum {node['class']} is imported; import its module before resuming")
    if node["name"] not in cls.__members__:
        raise StateError(f"the enum {node['class']} has no member {node['name']!r} any more")
    member: enum.Enum = cls.__members__[node["name"]]
    return member


_BUILDERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "not_stored": lambda d, node: _LEFT_OUT,
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
    "tensor": _Decoder.tensor,
    "torch.Size": lambda d, node: torch.Size(node["items"]),
    "torch.dtype": lambda d, node: _torch_dtype(node["name"]),
    "torch.device": lambda d, node: torch.device(node["name"]),
    "numpy.array": _Decoder.array,
    "numpy.dtype": lambda d, node: d.array_dtype(node["dtype"]),
    "numpy.scalar": _Decoder.array_scalar,
    "numpy.str": lambda d, node: np.str_(d.decode(node["value"])),
    "numpy.bytes": lambda d, node: np.bytes_(_unbase64(node["base64"])),
}
