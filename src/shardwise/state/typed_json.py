"""Typed JSON: training state as plain JSON, exactly, with tensors in a separate mapping."""

from __future__ import annotations

import base64
import collections
import enum
import functools
import math
import pathlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..dtypes import code_of, named_dtype
from ..errors import FormatError, StateError
from ..host import own_device
from ..internals.torch import quantized
from ..limits import MAX_COLLISIONS, MAX_DIMS, brief, cause, is_text
from ..objects import frozen

# ----------------------------------------------------------------------------------------------------
# The encoding half of :mod:`.typed_json`: values to documents.

TAG = "$type"
#: Far above any real state, and far below the limits of Python's JSON reader and recursion.
MAX_DEPTH = 100
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
_FACTORIES: dict[str, type] = {
    t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
_NEXT_STEP = "give an object with state_dict/load_state_dict, or convert it to plain values"


class _Encoder:
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
        if all(type(key) is str and key != TAG and is_text(key) for key in mapping):
            return {key: self.encode(value, _below(where, key)) for key, value in mapping.items()}
        return {TAG: "dict", "items": self.pairs(mapping, where)}

    def default_mapping(self, mapping: collections.defaultdict[Any, Any], where: str) -> Any:
        factory: Any = mapping.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
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
                hint = "is sharded; sharded tensors are stored in models, and in dicts and lists of an extra's state_dict"
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
        return {TAG: "quantized", "dtype": dtype, "parts": self.items(parts, where)}

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


def _text(value: str) -> Any:
    # Half a surrogate pair is not Unicode, and JSON would join two halves into one character.
    return value if is_text(value) else {TAG: "str", "hex": value.encode("utf-8", "surrogatepass").hex()}


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
_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.mapping,
    tuple: lambda e, v, where: {TAG: "tuple", "items": e.items(v, where)},
    set: lambda e, v, where: {TAG: "set", "items": e.unordered(v, where)},
    frozenset: lambda e, v, where: {TAG: "frozenset", "items": e.unordered(v, where)},
    slice: lambda e, v, where: {TAG: "slice", "items": e.items((v.start, v.stop, v.step), where)},
    collections.deque: lambda e, v, where: {TAG: "deque", "maxlen": v.maxlen, "items": e.items(v, where)},
    collections.Counter: lambda e, v, where: {TAG: "Counter", "items": e.pairs(v, where)},
    collections.OrderedDict: lambda e, v, where: {TAG: "OrderedDict", "items": e.pairs(v, where)},
    collections.defaultdict: _Encoder.default_mapping,
}
_INSTANCES: tuple[tuple[Any, Callable[[_Encoder, Any, str], Any]], ...] = (
    (enum.Enum, _Encoder.enum_member),  # before numpy and functions: an enum may have any mixin
    (torch.Tensor, _Encoder.tensor),
    (np.ndarray, _Encoder.array),
    (np.generic, _Encoder.array_scalar),
    (np.dtype, _Encoder.array_dtype),
    (FUNCTIONS, _Encoder.function),
)


# ----------------------------------------------------------------------------------------------------
# Moves tensors of documents to the right devices of this process.
#
# A checkpoint records only the device type: ``cuda``, not ``cuda:3``, because ranks hold equal state on different
# devices.


class Places:
    """The tensors of documents already read. They lie on the CPU until :meth:`put`."""

    def __init__(self) -> None:
        self._met: dict[
            int, tuple[torch.Tensor, str, str]
        ] = {}  # by id; holds the tensor, which keeps its id unique
        self._moved: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._differences: dict[str, str] = {}

    def met(self, tensor: torch.Tensor, key: str, kind: str) -> None:
        """Note a tensor that was saved from a device of type ``kind``; ``key`` is its path for the report."""
        self._met[id(tensor)] = (tensor, key, kind)

    def put(self, value: Any, live: Callable[[], Any] = lambda: None) -> Any:
        """Move the tensors of ``value`` to the devices of the live ones, else to this process's device of their type,
        else to the CPU.

        ``live`` returns this run's counterpart of the value; it is called only if the value holds a tensor. Containers
        change in place, tuples are new; a tensor that occurs twice stays one tensor.
        """
        if not self._holds_tensors(value):
            return value
        return self._put(value, live())

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each tensor that is now on another device type."""
        return tuple(self._differences.values())

    def _holds_tensors(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in self._met
        return any(self._holds_tensors(part) for _, part in _parts(value))

    def _put(self, value: Any, live: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._put_tensor(value, live)
        changed = {key: self._put(part, _counterpart(live, key)) for key, part in _parts(value)}
        if type(value) is tuple:
            return tuple(changed.values())
        for key, part in changed.items():
            value[key] = part
        return value

    def _put_tensor(self, tensor: torch.Tensor, live: Any) -> torch.Tensor:
        if id(tensor) not in self._met:
            return tensor
        _, key, kind = self._met[id(tensor)]
        follows = isinstance(live, torch.Tensor) and not live.is_meta
        device = live.device if follows else own_device(kind)
        place = (id(tensor), device)
        if place not in self._moved:
            self._moved[place] = _moved(tensor, device)
        found = self._moved[place]
        if found.device.type != kind:
            self._differences[key] = f"{key}: a tensor on {kind} when saved, on {found.device.type} now"
        return found


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return tensor.to(device)
    except (NotImplementedError, RuntimeError):
        if not tensor.is_quantized:  # few devices support quantized tensors
            raise
        return tensor


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """The items of a container of typed JSON, by key. Skips sets, whose members have no keys."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, collections.deque)) or type(value) is tuple:
        return list(enumerate(value))
    return []


def _counterpart(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, (list, tuple, collections.deque)) and isinstance(key, int) and key < len(live):
        return live[key]
    return None


# ----------------------------------------------------------------------------------------------------
# The decoding half of :mod:`.typed_json`: documents to values of a closed list of types.


class _LeftOut:
    """Stands for a function that was not stored, until its container is built."""


_LEFT_OUT = _LeftOut()


class _Decoder:
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
            return {key: value for key, value in decoded if value is not _LEFT_OUT}
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
        return [None if value is _LEFT_OUT else value for value in decoded]

    def members(self, node: Any) -> list[Any]:
        decoded = [self.decode(item) for item in _listed(node)]
        return _hashable([value for value in decoded if value is not _LEFT_OUT])

    def pairs(self, node: Any) -> dict[Any, Any]:
        decoded = [(self.decode(key), self.decode(value)) for key, value in _listed(node)]
        _hashable(key for key, _ in decoded)
        return {key: value for key, value in decoded if key is not _LEFT_OUT and value is not _LEFT_OUT}

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


def _stored_device(node: dict[str, Any]) -> torch.device:
    stored = torch.device(node["name"])
    own = own_device(stored.type)
    return own if node.get("own") is True and own.type == stored.type else stored


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError("only inf, -inf and nan are written as text")
    return float(text)


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
    "defaultdict": lambda d, node: collections.defaultdict(
        None if node["factory"] is None else _FACTORIES[node["factory"]], d.pairs(node["items"])
    ),
    "enum": lambda d, node: _enum_member(node),
    "Path": lambda d, node: pathlib.Path(d.decode(node["path"])),
    "PurePosixPath": lambda d, node: pathlib.PurePosixPath(d.decode(node["path"])),
    "PureWindowsPath": lambda d, node: pathlib.PureWindowsPath(d.decode(node["path"])),
    "tensor": _Decoder.tensor,
    "quantized": _Decoder.quantized,
    "torch.Size": lambda d, node: torch.Size(node["items"]),
    "torch.dtype": lambda d, node: _torch_dtype(node["name"]),
    "torch.device": lambda d, node: _stored_device(node),
    "numpy.array": _Decoder.array,
    "numpy.dtype": lambda d, node: d.array_dtype(node["dtype"]),
    "numpy.scalar": _Decoder.array_scalar,
    "numpy.str": lambda d, node: np.str_(d.decode(node["value"])),
    "numpy.bytes": lambda d, node: np.bytes_(_unbase64(node["base64"])),
}


# ----------------------------------------------------------------------------------------------------
# Typed JSON: training state as plain JSON, exactly, with tensors in a separate mapping.
#
# JSON's own values (null, booleans, 64-bit integers, finite floats, text, lists, objects with text keys) are written
# directly. Every other value is an object whose key ``"$type"`` names its kind:
# ``{"$type": "tuple", "items": [1, 2]}``. A dict that holds ``"$type"`` itself is written as key-value pairs.
# Tensors and numpy arrays go into a separate mapping; the document holds their keys.
#
# Decoding builds values of a closed list of types. It imports nothing, calls nothing that the document names, and reads
# no pickle. It uses an enum class only if the class is imported already.


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
    encoder = _Encoder()
    document = encoder.encode(value, where)
    return Encoded(document, encoder.tensors, tuple(encoder.not_stored))


def decode(document: Any, tensors: Mapping[str, torch.Tensor], places: Places | None = None) -> Any:
    """The value that :func:`encode` was given. Tensors are new, on the CPU, and need no gradient; ``places`` notes the
    device types that they were saved from, to move them there.

    Raises :class:`FormatError` if the document is not one of :func:`encode`'s or a tensor is missing or has
    another dtype or shape, and :class:`StateError` for an enum whose module is not imported.
    """
    value = _Decoder(tensors, places).decode(document)
    return None if value is _LEFT_OUT else value
