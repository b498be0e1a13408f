"""Describes how an object was made: the arguments of its constructor, as far as it keeps them, in a few lines of text.

A class keeps an argument under its own name, with or without an underscore in front: that is the convention of torch and of most
other code. Such attributes are read. Nothing is called, so that a description draws no random number and reads no sample.
Two descriptions are compared line by line.
"""

from __future__ import annotations

import inspect
import math
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ..internals.torch import original_class
from ..internals.transformers import config_settings
from ..limits import MAX_TEXT_CHARS, brief

__all__ = ["Described", "argument_names", "content_text", "is_plain", "plain_text"]

#: A description has at most so many lines; one with more is cut at the same place in each run.
MAX_LINES = 2_000
_MAX_DEPTH = 10
#: A container with more items, and a tensor, is described by a digest of so many of them, at equal distances.
_MAX_ITEMS, _SAMPLES = 16, 256
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState)
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(Enum, PurePath, np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
#: Packages whose versions a checkpoint records.
_VERSIONED = ("torch", "transformers", "numpy", "shardwise")
#: Arguments that count epochs: positions, which are state.
_OF_STATE = ("epoch", "iteration", "last_epoch")
#: Arguments by which samplers of torch, Accelerate and shardwise know their rank.
_OF_RANKS = ("rank", "process_index", "num_replicas", "num_processes")
#: Arguments of data loaders that change when a batch is made and where it is kept, not what is in it.
_OF_SPEED = ("pin_memory", "pin_memory_device", "prefetch_factor", "timeout")


class Described:
    """Lines that describe objects: text by path, such as ``dataloader.sampler.seed`` → ``0``."""

    def __init__(self, known: Mapping[int, str]) -> None:
        """``known``: names of objects, by id, that are described elsewhere. A line then gives the name."""
        self.lines: dict[str, str] = {}
        self._met = dict(known)
        self._kept: list[Any] = []  # an id is one object's as long as it lives

    def add(self, path: str, value: Any, depth: int = 0) -> None:
        """Add the lines of a value under a path. An object that was met before has no second lines."""
        if len(self.lines) >= MAX_LINES or depth > _MAX_DEPTH:
            return
        if is_plain(value):
            self.lines[path] = plain_text(value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self.lines[path] = content_text(value)
        elif isinstance(value, list | tuple | dict | set | frozenset | deque):
            self._add_container(path, value, depth)
        elif id(value) in self._met:
            if known := self._met[id(value)]:
                self.lines[path] = known
        else:
            self._met[id(value)] = ""
            self._kept.append(value)
            self._add_object(path, value, depth)

    def _add_container(self, path: str, value: Any, depth: int) -> None:
        kind = type(value).__name__
        if isinstance(value, set | frozenset) or len(value) > _MAX_ITEMS:
            self.lines[path] = f"{kind} of {len(value)} (#{_digest(value)})"
            return
        self.lines[path] = f"{kind} of {len(value)}"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            part = f".{key}" if isinstance(key, str) else f"[{brief(key)}]"
            self.add(f"{path}{part}", item, depth + 1)

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, partial):
            self.add(path, value.func, depth)
            for index, argument in enumerate(value.args):
                self.add(f"{path}[{index}]", argument, depth + 1)
            for name, argument in value.keywords.items():
                self.add(f"{path}.{name}", argument, depth + 1)
        elif isinstance(value, types.MethodType):
            self.add(path, value.__func__, depth)
            self.add(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._add_function(path, value, depth)
        elif isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
            self.lines[path] = getattr(value, "__qualname__", value.__name__)
        elif isinstance(value, _GENERATORS):  # their states are stored and compared as states
            self.lines[path] = type(value).__qualname__
        else:
            kind = original_class(value) if isinstance(value, nn.Module) else type(value)
            self.lines[path] = kind.__qualname__
            for name, argument in _arguments(value, kind):
                if text := _as_process(name, argument):
                    self.lines[f"{path}.{name}"] = text
                else:
                    self.add(f"{path}.{name}", argument, depth + 1)
            for name, child in value.named_children() if isinstance(value, nn.Module) else ():
                self.add(f"{path}.{name}", child, depth + 1)

    def _add_function(self, path: str, function: types.FunctionType, depth: int) -> None:
        """A function by its code, its defaults, and what it takes from outside: closed-over values and plain globals.

        A function of a package whose version is compared anyway has its name, and what it was closed over.
        """
        is_versioned = (function.__module__ or "").partition(".")[0] in _VERSIONED
        name = f"function {function.__qualname__}"
        self.lines[path] = name if is_versioned else f"{name} (#{_code_digest(function)})"
        for index, value in enumerate(function.__defaults__ or ()):
            self.add(f"{path}.default[{index}]", value, depth + 1)
        for key, value in (function.__kwdefaults__ or {}).items():
            self.add(f"{path}.default.{key}", value, depth + 1)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.add(f"{path}.{key}", cell.cell_contents, depth + 1)
            except ValueError:  # not assigned yet
                continue
        for key in () if is_versioned else function.__code__.co_names:
            value = function.__globals__.get(key)
            if key in function.__globals__ and (is_plain(value) or isinstance(value, types.FunctionType)):
                self.add(f"{path}.{key}", value, depth + 1)


def _arguments(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """The arguments of an object's constructor that it keeps."""
    settings = config_settings(value)
    if settings is not None:
        yield from settings.items()
        return
    held = getattr(value, "__dict__", {})
    skipped = {*_OF_STATE, *(_OF_SPEED if isinstance(value, torch.utils.data.DataLoader) else ())}
    if isinstance(value, torch.optim.Optimizer):  # options of its groups are stored
        skipped |= {"params", "defaults", *(key for group in value.param_groups for key in group)}
    for name in argument_names(kind):
        if name in skipped:
            continue
        for attribute in (name, f"_{name}"):
            if attribute in held:
                yield name, held[attribute]
                break
        else:
            if isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType):
                try:
                    yield name, getattr(value, name)
                except AttributeError:  # a slot without a value
                    continue


def _as_process(name: str, value: Any) -> str:
    """What a sampler's number says of this process group, the same on all ranks; empty if it is another number."""
    if name not in _OF_RANKS or type(value) is not int:
        return ""
    here, of = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if name in ("rank", "process_index"):
        return "the process's own" if value == here else ""
    return "the number of processes" if value == of else ""


@cache
def argument_names(kind: Any) -> tuple[str, ...]:
    """The arguments of a class's constructor, and of those of its bases."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        initializer = vars(base).get("__init__")
        if not isinstance(initializer, types.FunctionType):
            continue
        try:
            parameters = list(inspect.signature(initializer).parameters.values())[1:]
        except (TypeError, ValueError):
            continue
        found |= {p.name: None for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    return tuple(found)


def is_plain(value: Any) -> bool:
    """Whether a value's ``repr`` says all of it."""
    return isinstance(value, _PLAIN)


def plain_text(value: Any) -> str:
    """A plain value as text: short, and different for different values."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**128:
        return f"whole number of {value.bit_length()} bits (#{xxhash.xxh3_64_hexdigest(hex(value).encode())})"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    text = repr(value)
    if len(text) <= MAX_TEXT_CHARS // 3:
        return text
    return f"{brief(value)} (#{xxhash.xxh3_64_hexdigest(text.encode(errors='surrogatepass'))})"


def content_text(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """A tensor or an array as text: dtype, shape, and a digest of some elements, if they are in memory here."""
    if isinstance(value, np.ndarray):
        text = f"array {value.dtype} {list(value.shape)}"
        is_here = not isinstance(value, np.memmap) and value.dtype.kind in "biufc" and value.size
        if not is_here or not value.flags.c_contiguous:
            return text
        some = value.reshape(-1)[:: _stride(value.size)]
        return f"{text} (#{xxhash.xxh3_64_hexdigest(some.tobytes())})"
    text = f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    is_here = type(value) in (torch.Tensor, nn.Parameter) and value.device.type == "cpu"
    if not is_here or value.layout is not torch.strided or value.is_quantized or not value.numel():
        return text
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return text
    part = value.detach().reshape(-1)[:: _stride(value.numel())].contiguous()
    return f"{text} (#{xxhash.xxh3_64_hexdigest(part.view(torch.uint8).numpy().tobytes())})"


def _stride(count: int) -> int:
    return max(1, count // _SAMPLES)


def _digest(value: Any) -> str:
    """Digest of a container: of all items of a set or a dict of plain values, of some items of a list."""
    total = xxhash.xxh3_64()
    if isinstance(value, set | frozenset):
        texts = sorted(_item_text(item, 0) for item in value) if len(value) <= 10_000 else []
    elif isinstance(value, dict):
        texts = [f"{_item_text(k, 0)}:{_item_text(v, 0)}" for k, v in list(value.items())[:_SAMPLES]]
    else:
        places = range(0, len(value), _stride(len(value)))
        texts = [_item_text(value[place], 0) for place in (*places, -1)]
    for text in texts:
        total.update(f"{text}\n".encode(errors="surrogatepass"))
    return total.hexdigest()


def _item_text(item: Any, depth: int) -> str:
    if is_plain(item):
        return plain_text(item)
    if isinstance(item, torch.Tensor | np.ndarray):
        return content_text(item)
    if isinstance(item, list | tuple | dict) and depth < 2:
        items = list(item.items() if isinstance(item, dict) else item)[:_SAMPLES]
        return f"{len(item)}({','.join(_item_text(one, depth + 1) for one in items)})"
    return type(item).__qualname__


def _code_digest(function: types.FunctionType) -> str:
    return _digest_of_code(function.__code__)


@cache
def _digest_of_code(code: types.CodeType) -> str:
    """Digest of what a function does. Its name, its file and its lines don't count."""
    total = xxhash.xxh3_64(code.co_code)
    total.update(repr((code.co_names, code.co_argcount, code.co_kwonlyargcount, code.co_flags)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            total.update(_digest_of_code(constant).encode())
        elif isinstance(constant, frozenset):
            total.update(repr(sorted(map(repr, constant))).encode())
        else:
            total.update(repr(constant).encode(errors="surrogatepass"))
    return total.hexdigest()
