"""Describes how an object was made: the arguments of its constructor, and the settings of a program."""

from __future__ import annotations

import argparse
import dis
import inspect
import math
import os
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ..host import to_host
from ..internals.fsdp import precision_of
from ..internals.torch import compiled_by, original_class
from ..internals.transformers import config_settings
from ..limits import MAX_NAME_CHARS, MAX_TEXT_CHARS, brief
from ..names import NamedTensor, canonical_name
from ..tensors.live import LiveModel, is_declared
from .documents import callables_in, inner_schedulers, unwrapped
from .optimizer import TrainState
from .parts import is_several

# ----------------------------------------------------------------------------------------------------
# Describes how an object was made: the arguments of its constructor, as far as it keeps them, in a few lines of text.
#
# A class keeps an argument under its own name, with or without an underscore in front: that is the convention of torch and of most
# other code. Such attributes are read. Nothing is called, so that a description draws no random number and reads no sample. Of a
# function, the globals and attributes that its code names are read as well. Of a path, some files are read,
# and of a ``datasets.Dataset`` some rows.
# Two descriptions are compared line by line.

#: A description has at most so many lines; one with more is cut at the same place in each run.
MAX_LINES = 2_000
_MAX_DEPTH = 10
#: A container with more items, and a tensor, is described by a digest of so many of them, at equal distances.
_MAX_ITEMS, _SAMPLES = 16, 256
#: Files under a path that tell whether another path has the same, and bytes that are read of each.
_MAX_FILES, _BEGINNING = 256, 4096
#: Rows of a ``datasets.Dataset`` that tell whether another one has the same.
_MAX_ROWS = 64
#: Functions that are searched for the attributes that they read of one object.
_MAX_FUNCTIONS = 256
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
#: Counters that a training loop keeps: they are positions, too.
_COUNTERS = (*_OF_STATE, "step", "global_step")
#: Arguments of data loaders that change when a batch is made and where it is kept, not what is in it.
_OF_SPEED = ("pin_memory", "pin_memory_device", "prefetch_factor", "timeout")
_CODE = (types.FunctionType, types.MethodType, partial)
#: Objects that are described whole, whatever code reads of them.
_WHOLE = (*_CODE, torch.Generator, torch.Tensor, np.ndarray, nn.Module)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_INSTALLED_PARTS = frozenset({"site-packages", "dist-packages"})


class Described:
    """Lines that describe objects: text by path, such as ``dataloader.sampler.seed`` → ``0``."""

    def __init__(self, known: Mapping[int, str]) -> None:
        """``known``: names of objects, by id, that are described elsewhere. A line then gives the name."""
        self.lines: dict[str, str] = {}
        self._met = dict(known)
        self._used: set[tuple[int, frozenset[str]]] = set()
        self._kept: list[Any] = []  # an id is one object's as long as it lives

    def add(self, path: str, value: Any, depth: int = 0) -> None:
        """Add the lines of a value under a path. An object that was met before has no second lines."""
        if len(self.lines) >= MAX_LINES or depth > _MAX_DEPTH:
            return
        if is_plain(value):
            self.lines[path] = _path_text(value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self.lines[path] = _content_text(value)
        elif isinstance(value, _CONTAINERS):
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
            names = _names_of(value.func if isinstance(value.func, types.FunctionType | type) else None)
            for index, argument in enumerate(value.args):
                self._add_used(f"{path}[{index}]", argument, names, depth + 1)
            for name, argument in value.keywords.items():
                self._add_used(f"{path}.{name}", argument, names, depth + 1)
        elif isinstance(value, types.MethodType):
            self.add(path, value.__func__, depth)
            self.add(f"{path}.__self__", value.__self__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._add_function(path, value, depth)
        elif isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
            self.lines[path] = getattr(value, "__qualname__", value.__name__)
        elif _is_generator(value):  # their states are stored and compared as states
            self.lines[path] = type(value).__qualname__
        else:
            kind: Any = original_class(value) if isinstance(value, nn.Module) else type(value)
            self.lines[path] = kind.__qualname__
            for name, argument in _arguments(value, kind):
                if text := _as_process(name, argument):
                    self.lines[f"{path}.{name}"] = text
                elif name == "fingerprint" and _is_table(value):
                    self.lines[f"{path}.{name}"] = f"{_plain_text(argument)} (rows #{_digest_of_rows(value)})"
                elif _is_settings(argument):
                    self._add_used(f"{path}.{name}", argument, _names_of(kind), depth + 1)
                else:
                    self.add(f"{path}.{name}", argument, depth + 1)
            if _is_table(value):
                self.add(f"{path}.format", value.format, depth + 1)
            for name, child in value.named_children() if isinstance(value, nn.Module) else ():
                self.add(f"{path}.{name}", child, depth + 1)

    def _add_function(self, path: str, function: types.FunctionType, depth: int) -> None:
        """A function by its code, its defaults, and what it takes from outside: closed-over values and globals.

        A function of a package whose version is compared anyway has its name, and what it was closed over. Of another installed
        package's function only the globals that are plain or functions count: others are its caches and registries.
        """
        is_versioned = (function.__module__ or "").partition(".")[0] in _VERSIONED
        is_installed = is_versioned or _is_installed(function.__code__.co_filename)
        name = f"function {function.__qualname__}"
        self.lines[path] = name if is_versioned else f"{name} (#{_digest_of_code(function.__code__)})"
        reads, names = _reads(function.__code__), _names_of(function)
        for index, value in enumerate(function.__defaults__ or ()):
            self._add_used(f"{path}.default[{index}]", value, names, depth + 1)
        for key, value in (function.__kwdefaults__ or {}).items():
            self._add_used(f"{path}.default.{key}", value, names, depth + 1)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add_used(f"{path}.{key}", cell.cell_contents, names, depth + 1)
            except ValueError:  # not assigned yet
                continue
        for key in () if is_versioned else sorted(reads.globals & function.__globals__.keys()):
            value = function.__globals__[key]
            if is_plain(value) or isinstance(value, types.FunctionType):
                self.add(f"{path}.{key}", value, depth + 1)
            elif not is_installed and not _is_of_libraries(value):
                self._add_used(f"{path}.{key}", value, names, depth + 1)

    def _add_used(self, path: str, value: Any, names: frozenset[str], depth: int) -> None:
        """A value that code reads attributes of: the program's modules, classes and objects with settings by these attributes alone."""
        if depth > _MAX_DEPTH or is_plain(value) or isinstance(value, _CONTAINERS):
            self.add(path, value, depth)
            return
        is_whole = (
            self._met.get(id(value))
            or isinstance(value, _WHOLE)
            or _is_generator(value)
            or _is_of_libraries(value)
        )
        found = {} if is_whole else _attributes(value, names)
        if (id(value), names) not in self._used:
            self._used.add((id(value), names))
            self._kept.append(value)
            for name, attribute in found.items():
                if not _is_of_libraries(attribute):
                    self._add_used(f"{path}.{name}", attribute, names, depth + 1)
        if not isinstance(value, types.ModuleType) and not (found and _is_settings(value)):
            self.add(path, value, depth)


def _arguments(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """The arguments of an object's constructor that it keeps."""
    settings = config_settings(value)
    if settings is not None:
        yield from settings.items()
        return
    held = getattr(value, "__dict__", {})
    if _is_settings(value):
        yield from held.items()
        return
    skipped = {*_OF_STATE, *(_OF_SPEED if isinstance(value, torch.utils.data.DataLoader) else ())}
    if isinstance(value, torch.optim.Optimizer):  # options of its groups are stored
        skipped |= {"params", "defaults", *(key for group in value.param_groups for key in group)}
    for name in _argument_names(kind):
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
def _argument_names(kind: Any) -> tuple[str, ...]:
    """The arguments of a class's constructor, and of those of its bases.

    And of those that a decorator of the class replaced, as transformers' ``use_kernelized_func`` does: they're in its closure.
    """
    found: dict[str, None] = {}
    waiting = [vars(base).get("__init__") for base in kind.__mro__]
    for initializer in waiting:
        if not isinstance(initializer, types.FunctionType):
            continue
        try:
            parameters = list(inspect.signature(initializer).parameters.values())[1:]
            found |= {p.name: None for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
            closed_over = [cell.cell_contents for cell in initializer.__closure__ or ()]
        except (TypeError, ValueError):
            continue
        functions = [one for one in closed_over if isinstance(one, types.FunctionType)]
        waiting += [one for one in functions if one.__name__ == "__init__" and one not in waiting]
    return tuple(found)


def is_plain(value: Any) -> bool:
    """Whether a value's ``repr`` says all of it."""
    return isinstance(value, _PLAIN)


def _plain_text(value: Any) -> str:
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


def _path_text(value: Any) -> str:
    """A plain value as text; an absolute path to files here with a digest of their names, sizes and beginnings."""
    text = _plain_text(value)
    if not isinstance(value, str | PurePath):
        return text
    name = str(value)
    is_path = os.path.isabs(name) and os.path.dirname(name) != name
    if not is_path or len(name) > MAX_NAME_CHARS or "\0" in name:
        return text
    digest = _digest_of_files(name)
    return f"{text} (files #{digest})" if digest else text


def _digest_of_files(path: str) -> str:
    """Digest of a file, or of the first files under a folder. Empty if there are none or if they can't be read."""
    total, count = xxhash.xxh3_64(), 0
    try:
        files = iter([(path, "")]) if os.path.isfile(path) else _files_under(path)
        for file, name in islice(files, _MAX_FILES):
            with open(file, "rb") as opened:
                beginning = opened.read(_BEGINNING)
            total.update(f"{name} {os.path.getsize(file)}\n".encode(errors="surrogatepass"))
            total.update(beginning)
            count += 1
    except (OSError, ValueError):  # a text that is no name of a file
        return ""
    return total.hexdigest() if count else ""


def _is_table(value: Any) -> bool:
    """Whether a value is a ``datasets.Dataset``. Its fingerprint depends on where its files are, not only on its rows."""
    module = sys.modules.get("datasets.arrow_dataset")  # a program may have its own module "datasets"
    kind = getattr(module, "Dataset", None)
    return isinstance(kind, type) and hasattr(kind, "with_format") and isinstance(value, kind)


def _digest_of_rows(table: Any) -> str:
    """Digest of the number of rows, the columns, and some rows as they are stored: no transform is called."""
    total = xxhash.xxh3_64(f"{len(table)} {table.features}".encode(errors="surrogatepass"))
    stored, count = table.with_format("arrow"), len(table)
    for row in sorted({*range(0, count, max(1, count // _MAX_ROWS)), count - 1}) if count else ():
        total.update(repr(stored[row].to_pylist()).encode(errors="surrogatepass"))
    return total.hexdigest()


def _files_under(folder: str) -> Iterator[tuple[str, str]]:
    for here, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(here, name)
            if os.path.isfile(file):  # no pipe, no device
                yield file, os.path.relpath(file, folder)


def _content_text(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
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
        return _plain_text(item)
    if isinstance(item, torch.Tensor | np.ndarray):
        return _content_text(item)
    if isinstance(item, list | tuple | dict) and depth < 2:
        items = list(item.items() if isinstance(item, dict) else item)[:_SAMPLES]
        return f"{len(item)}({','.join(_item_text(one, depth + 1) for one in items)})"
    return type(item).__qualname__


_READS_GLOBAL, _READS_ATTRIBUTE = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")


class _Reads(NamedTuple):
    """Names of globals and of attributes."""

    globals: frozenset[str]
    attributes: frozenset[str]


@cache
def _reads(code: types.CodeType) -> _Reads:
    """The names that code reads, with those of the functions, lambdas and comprehensions in it."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    inside = [_reads(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return _Reads(
        frozenset(n for name, n in steps if name in _READS_GLOBAL).union(*(one.globals for one in inside)),
        frozenset(n for name, n in steps if name in _READS_ATTRIBUTE).union(
            *(one.attributes for one in inside)
        ),
    )


def _names_of(called: Any) -> frozenset[str]:
    """The attributes that the code of a function, or of the methods of a class, reads, and that of functions it calls by name."""
    held = (
        [value for base in called.__mro__ for value in vars(base).values()]
        if isinstance(called, type)
        else [called]
    )
    functions = (one.fget if isinstance(one, property) else getattr(one, "__func__", one) for one in held)
    waiting = [one for one in functions if isinstance(one, types.FunctionType)]
    met: dict[types.CodeType, frozenset[str]] = {}
    while waiting and len(met) < _MAX_FUNCTIONS:
        function = waiting.pop(0)
        if function.__code__ in met or _is_installed(function.__code__.co_filename):
            continue
        reads = _reads(function.__code__)
        met[function.__code__] = reads.attributes
        found = (function.__globals__.get(name) for name in sorted(reads.globals))
        waiting += [one for one in found if isinstance(one, types.FunctionType)]
    return frozenset().union(*met.values())


def _attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of these names that an object has in itself or as values in its class."""
    found = {}
    for name in sorted(names):
        if name.startswith("__") or name in _COUNTERS:
            continue
        held = inspect.getattr_static(value, name, None)
        if isinstance(held, types.MemberDescriptorType):  # a slot
            held = getattr(value, name, None)
        is_of_class = isinstance(held, staticmethod | classmethod | property) or inspect.isdatadescriptor(
            held
        )
        is_method = isinstance(held, types.FunctionType) and not isinstance(value, types.ModuleType)
        if held is not None and not is_of_class and not is_method:
            found[name] = held
    return found


def _is_settings(value: Any) -> bool:
    """Whether an object holds settings of a whole program, and each part of the program reads only some of them."""
    return isinstance(value, argparse.Namespace | types.SimpleNamespace)


def _is_of_libraries(value: Any) -> bool:
    """Whether a value is a module, a class or a builtin of Python or of a package, or an object of Python such as a logger."""
    if isinstance(value, types.ModuleType):
        return _is_module_installed(value)
    if isinstance(value, type):
        module = sys.modules.get(str(value.__module__))
        return module is not None and _is_module_installed(module)
    if isinstance(value, (*_PLAIN, *_CONTAINERS, *_CODE)) or _is_settings(value):
        return False
    return str(type(value).__module__).partition(".")[0] in sys.stdlib_module_names - {"__main__"}


def _is_module_installed(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # built in, unless the program made it, or is it
        return getattr(module, "__spec__", None) is not None
    return _is_installed(file)


@cache
def _standard_folders() -> tuple[str, ...]:
    """Folders of Python's standard library."""
    import sysconfig  # which reads a file of its own

    return tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})


def _is_generator(value: object) -> bool:
    """Whether a value is a generator of torch or numpy. Doesn't import ``numpy.random``, which numpy itself imports on its first use."""
    if isinstance(value, torch.Generator):
        return True
    random = sys.modules.get("numpy.random")
    return random is not None and isinstance(value, (random.Generator, random.RandomState))


@cache
def _is_installed(file: str) -> bool:
    """Whether code is part of Python or of an installed package."""
    return file.startswith(("<frozen", *_standard_folders())) or not _INSTALLED_PARTS.isdisjoint(
        PurePath(file).parts
    )


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


# ----------------------------------------------------------------------------------------------------
# The settings that the next steps depend on and that no state has: how models, optimizers and loaders were made, torch's flags.
#
# A save records them, and a resume compares them with this run's once every object has its state. Values that a state brings back
# are equal by then. The others are differences: this run goes on with its own.

_PACKAGE = __name__.partition(".")[0]
#: How a buffer and a path are described: :func:`_of_buffers`, :func:`_path_text`.
_BUFFER = re.compile(r"\[([\d, ]*)\](?:: tensor (\w+) .*)?")
_FILES = re.compile(r"(.*) \(((?:files|rows) #\w+)\)", re.DOTALL)
#: A number in a path.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: A report has at most so many lines of changed settings.
_MAX_LINES = 40
#: Elements of a non-persistent buffer that are compared.
_SETTINGS_SAMPLES = 256
#: Environment variables by which libraries choose kernels and their precision.
_ENVIRONMENT = (
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO"),
    *("MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)


#: Settings of torch that choose kernels or their precision, by the attribute or function of torch that says each.
_FLAGS = {
    "default dtype": "get_default_dtype",
    "deterministic algorithms": "are_deterministic_algorithms_enabled",
    "float32 matmul precision": "get_float32_matmul_precision",
    "opt_einsum": "backends.opt_einsum.enabled",
    "opt_einsum strategy": "backends.opt_einsum.strategy",
    "mkldnn": "backends.mkldnn.enabled",
    "fp32_precision": "backends.fp32_precision",
    "mkldnn matmul fp32_precision": "backends.mkldnn.matmul.fp32_precision",
    "cudnn": "backends.cudnn.enabled",
    "cudnn benchmark": "backends.cudnn.benchmark",
    "cudnn deterministic": "backends.cudnn.deterministic",
    "cudnn conv fp32_precision": "backends.cudnn.conv.fp32_precision",
    "cuda matmul fp32_precision": "backends.cuda.matmul.fp32_precision",
    "cuda matmul allow_fp16_reduced_precision_reduction": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda matmul allow_bf16_reduced_precision_reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "flash attention": "backends.cuda.flash_sdp_enabled",
    "memory-efficient attention": "backends.cuda.mem_efficient_sdp_enabled",
    "cudnn attention": "backends.cuda.cudnn_sdp_enabled",
    "math attention": "backends.cuda.math_sdp_enabled",
}


def settings_of(state: TrainState, lives: Mapping[str, LiveModel]) -> dict[str, str]:
    """The settings of everything but the data, as lines of text by path. Draws nothing. Rank-local."""
    found = dict(_of_torch(lives))
    for name in state.models:
        live = lives[name]
        found |= _of_model("model" if name == "model" else f"model.{name}", live)
    described = Described(_known(state))
    for name, optimizer in state.given_optimizers.items():
        inside = Described({})
        inside.add(_path("optimizer", name), optimizer)
        described.lines |= inside.lines
    for path, called in callables_in(state.scheduler):  # first: a scheduler keeps them under other names, too
        described.add(path, called)
    _add_each(described, "scheduler", state.scheduler)
    for name, extra in state.extra.items():
        if hasattr(extra, "state_dict") and not type(extra).__module__.startswith(f"{_PACKAGE}."):
            described.add(f"extra.{name}", extra)
    return found | described.lines


def data_settings_of(state: TrainState) -> dict[str, str]:
    """The settings of the data loader, its dataset and its samplers. They differ between ranks where these know their rank."""
    described = Described(_known(state))
    _add_each(described, "dataloader", state.dataloader)
    return described.lines


def given_settings_of(state: TrainState) -> dict[str, str]:
    """Settings that this program gave and that a restore replaces: of parameter groups and schedulers.

    ``lr``, ``momentum`` and ``betas`` are left out where a scheduler sets them; ``initial_lr`` then is the program's.
    """
    described = Described(_known(state))
    _add_each(described, "scheduler", state.scheduler)
    found = described.lines
    several = state.scheduler.values() if is_several(state.scheduler) else [state.scheduler]
    every = [unwrapped(one) for one in several]
    every += [inner for one in every for inner in inner_schedulers(one)]
    cycles = any(
        getattr(one, "cycle_momentum", False) for one in every
    )  # OneCycleLR, CyclicLR: momentum as well
    left_out = {"params", *(("momentum", "betas") if cycles else ())}
    for name, optimizer in state.optimizers.items():
        path = _path("optimizer", name)
        for number, group in enumerate(optimizer.param_groups):
            at = f"{path}.param_groups[{number}]" if len(optimizer.param_groups) > 1 else path
            for key, value in group.items():
                if key not in left_out and not (key == "lr" and "initial_lr" in group):
                    found |= _lines(f"{at}.{key}", value)
    return found


def replaced_settings(given: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """A line for each setting that had one value before a restore and has another one after it."""
    return tuple(
        f"{path}: this program's {was} was replaced by the checkpoint's {now[path]}"
        for path, was in given.items()
        if now.get(path, was) != was
    )


def changed_settings(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each setting that differs from the saved run's. Of objects of another class only the class."""
    found: list[str] = []
    other: list[str] = []
    stored, now = _spread(stored, now), _spread(now, stored)
    parts = tuple(f"{path}." for lines in (stored, now) for path, text in lines.items() if text == _IN_PARTS)
    for path in {**stored, **now}:
        if f"{path}.".startswith(parts) and (f"{path}." in parts or path not in stored or path not in now):
            continue  # the other run has no lines of its modules
        was, is_now = stored.get(path), now.get(path)
        if was == is_now or any(path.startswith(above) for above in other):
            continue
        if is_now == "None" and was is not None and was.startswith("torch."):
            continue  # a dtype that a module takes from its first input (bitsandbytes' layers do)
        if _is_a_cache(was, is_now) or _is_moved(was, is_now):
            continue
        if was is not None and is_now is not None:
            other += [f"{path}.", f"{path}["]
        found.append(f"{path}: {_said(was)} when saved, {_said(is_now)} now")
    more = len(found) - _MAX_LINES
    return found if more <= 0 else [*found[:_MAX_LINES], f"settings: {more} more differ"]


def _is_a_cache(was: str | None, now: str | None) -> bool:
    """Whether a non-persistent buffer is one that ``forward`` fills or lets grow, and has not done so yet in this run."""
    before, after = (_BUFFER.fullmatch(text or "") for text in (was, now))
    if (before is None and was is not None) or (after is None and now is not None):
        return False
    if after is None:
        return before is not None
    size = [int(n) for n in after[1].split(", ") if n]
    if before is None or 0 in size:
        return 0 in size
    filled = [int(n) for n in before[1].split(", ") if n]
    smaller = len(size) == len(filled) and all(n <= f for n, f in zip(size, filled, strict=True))
    return before[2] == after[2] and size != filled and smaller


def _is_moved(was: str | None, now: str | None) -> bool:
    """Whether two paths name the same files in two places, or two fingerprints the same rows."""
    before, after = (_FILES.fullmatch(text or "") for text in (was, now))
    if before is None or after is None:
        return (before is not None and before[1] == now) or (after is not None and after[1] == was)
    return before[1] == after[1] or before[2] == after[2]


def _said(text: str | None) -> str:
    return "not set" if text is None else text


def _of_torch(lives: Mapping[str, LiveModel]) -> Iterator[tuple[str, str]]:
    for name, of_torch in _FLAGS.items():
        try:
            value = attrgetter(of_torch)(torch)
            value = value() if callable(value) else value
        except (AttributeError, RuntimeError):  # not in this release; old and new flags for TF32 were mixed
            continue
        # "none" leaves the choice to a more general setting, and in the end to "ieee".
        is_left = name.endswith("fp32_precision") and value == "none"
        yield f"torch: {name}", _plain_text("ieee" if is_left else value)
    if all(t.tensor.device.type == "cpu" for live in lives.values() for t in live.tensors[:1]):
        yield "torch: instructions of the CPU", torch.backends.cpu.get_cpu_capability()
    for name in _ENVIRONMENT:
        if (value := os.environ.get(name)) is not None:
            yield f"environment: {name}", _plain_text(value)


#: In place of the class of a model that ranks declare in parts. It has no lines for its modules: they differ between ranks.
_IN_PARTS = "declared in parts"


def _of_model(at: str, live: LiveModel) -> dict[str, str]:
    found: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    own_modules = live.modules
    if is_declared(live.root):
        found[at], own_modules = _IN_PARTS, ()
    for path, module in own_modules:
        name = f"{at}.{path}" if path else at
        if (backend := compiled_by(module)) is not None:
            found[f"{canonical_name(name)}.compiled"] = backend
        found |= {f"{canonical_name(name)}.{key}": text for key, text in precision_of(module).items()}
        modules[canonical_name(name)] = module  # of wrappers the innermost
    described = Described({id(module): "" for _, module in live.modules})
    for name, module in modules.items():
        kind: Any = original_class(module)
        found[name] = kind.__qualname__
        held = vars(module)
        for argument in _argument_names(kind):
            value = held.get(argument)
            if argument in held and is_plain(value):
                found[f"{name}.{argument}"] = _path_text(value)
            elif isinstance(value, list | tuple | dict) or (
                callable(value) and not isinstance(value, nn.Module)
            ):
                described.add(f"{name}.{argument}", value)
    config = getattr(live.unwrapped, "config", None)
    if config is not None:
        described.add(f"{at}.config", config)
    found |= {f"{at}.{t.name}.requires_grad": repr(t.tensor.requires_grad) for t in live.parameters}
    if own_modules:
        found |= _of_buffers(at, live)
    return _collapsed(found | described.lines)


def _of_buffers(at: str, live: LiveModel) -> dict[str, str]:
    """Some elements of each buffer that construction makes again."""
    made = [t for t in live.tensors if not t.persistent and t.tensor.device.type != "meta"]
    parts = to_host([_part(t) for t in made if _is_dense(t)])
    texts = iter([_content_text(part) for part in parts])
    return {
        f"{at}.{t.name}": f"{list(t.tensor.shape)}: {next(texts)}"
        if _is_dense(t)
        else f"{list(t.tensor.shape)}"
        for t in made
    }


def _is_dense(t: NamedTensor) -> bool:
    return type(t.tensor) is torch.Tensor and t.tensor.layout is torch.strided and not t.tensor.is_quantized


def _part(t: NamedTensor) -> torch.Tensor:
    tensor = t.tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor[(slice(0, 1),) * tensor.dim()]
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SETTINGS_SAMPLES)].contiguous()


def _pattern(path: str) -> str:
    return _NUMBER.sub("*", path)


def _spread(lines: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Undo :func:`_collapsed` for buffers that the other run has a line of for each block."""
    found = dict(lines)
    for path in other:
        text = lines.get(_pattern(path), "")
        if path not in lines and _BUFFER.fullmatch(text):
            found.pop(_pattern(path), None)
            found[path] = text
    return found


def _collapsed(lines: Mapping[str, str]) -> dict[str, str]:
    """One line for what all blocks of a model have alike: ``layers.*.dropout.p``."""
    groups: dict[str, list[str]] = {}
    for path in lines:
        groups.setdefault(_pattern(path), []).append(path)
    found = {}
    for pattern, paths in groups.items():
        if len(paths) > 1 and len({lines[path] for path in paths}) == 1:
            found[pattern] = lines[paths[0]]
        elif len(paths) > 1 and all(lines[path] == _NUMBER.findall(path)[-1] for path in paths):
            found[pattern] = "the number of the block"
        else:
            found |= {path: lines[path] for path in paths}
    return found


def _add_each(described: Described, path: str, given: Any) -> None:
    if is_several(given):
        for name, one in given.items():
            _add_each(described, f"{path}.{name}", one)
    elif given is not None:
        described.add(path, given)


def _known(state: TrainState) -> dict[int, str]:
    found = {id(model): f"the model {name!r}" for name, model in state.models.items()}
    for optimizers in (state.given_optimizers, state.optimizers):
        found |= {id(optimizer): f"the optimizer {name!r}" for name, optimizer in optimizers.items()}
    return found


def _path(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind}.{name}"


def _lines(path: str, value: Any) -> dict[str, str]:
    if isinstance(value, torch.Tensor):
        return {path: _plain_text(value.item() if value.numel() == 1 else value.tolist())}
    if isinstance(value, list | tuple) and all(map(is_plain, value)):
        return {path: repr(value)}
    return {path: _plain_text(value)} if is_plain(value) else {}
