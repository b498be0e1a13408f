"""Constructs any module with its parameters on meta and its buffers real, and gives parameters memory in place."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ..internals.fsdp import allocate_dtensors
from ..internals.torch import (
    TorchDispatchMode,
    local_tensor,
    parameter_like,
    swappable_weights,
    tree_leaves,
    tree_map_only,
)
from ..names import NamedTensor, canonical_name, modules_by_path
from ..rng import preserve_rng
from ..tensors.live import HostMemory, LiveModel

# ----------------------------------------------------------------------------------------------------
# Constructs any module with its parameters on meta and its buffers real and correct.
#
# ``torch.device("meta")`` would put buffers on meta too, with no way to compute them afterwards; transformers'
# ``no_init_weights`` skips the buffers that ``_init_weights`` computes. Here construction runs as usual; only each
# *parameter* is replaced by one on meta when a module registers it. Later operations on it (initialization, ties, dtype
# conversion) run on meta and cost next to nothing.


@contextmanager
def meta_init() -> Iterator[None]:
    """Construct modules with their parameters on meta, and with the same buffers as in ordinary construction.

    A context manager that works for any ``nn.Module``. Each parameter keeps its shape, strides, dtype, ``requires_grad``, class, Python
    attributes and ties. Affects only the calling thread and can be nested. On exit, even after an error, the random number generators (Python, numpy,
    torch on the CPU and on an initialized accelerator) return to their state on entry. Host memory: one parameter's unwritten allocation.

    A buffer that is computed *from a parameter* can't be real; :func:`meta_buffers` lists such buffers. Lazy parameters
    (``nn.LazyLinear``) stay unchanged.

    The first use in a process registers three hooks with torch (``register_module_parameter_registration_hook`` and related ones). They stay
    registered, because torch may be iterating over its hooks in another thread. Outside the block they return immediately.

    Needs no process group; each rank that calls it constructs the modules for itself.
    """
    with preserve_rng():
        _enter()
        try:
            with _StaysOnMeta():  # type: ignore[no-untyped-call]
                yield
        finally:
            _exit()


@contextmanager
def at_most(registrations: int, refusal: Exception) -> Iterator[None]:
    """Raise ``refusal`` when a :func:`meta_init` in the block registers too many modules, parameters and buffers.

    For configs from files, which can ask for any number of layers. Scoped to the calling thread.
    """
    before, _scope.left, _scope.refusal = (_scope.left, _scope.refusal), registrations, refusal
    try:
        yield
    finally:
        _scope.left, _scope.refusal = before


def meta_buffers(model: nn.Module) -> list[str]:
    """Canonical names of buffers with unknown values: :func:`meta_init` left them on meta, or they are on meta now.

    A buffer stays listed after it got memory, because its values are still undefined, until
    :func:`forget_meta_buffers`.
    """
    names: dict[str, None] = {}
    for path, module in modules_by_path(model):
        left = _left_on_meta(module)
        for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta or attribute in left:
                names[canonical_name(f"{path}.{attribute}" if path else attribute)] = None
    return list(names)


def is_unknown(buffer: NamedTensor) -> bool:
    """Whether :func:`meta_buffers` lists a buffer of a model."""
    return buffer.tensor.is_meta or any(
        attribute in _left_on_meta(module) for module, attribute in buffer.owners
    )


def forget_meta_buffers(model: nn.Module, names: Iterable[str] | None = None) -> None:
    """Remove buffers (canonical ``names``; all if None) from the list: they were loaded or recomputed."""
    if not _remembered:
        return
    settled = None if names is None else frozenset(names)
    for path, module in modules_by_path(model):
        left = _left_on_meta(module)
        for attribute in tuple(left):
            if settled is None or canonical_name(f"{path}.{attribute}" if path else attribute) in settled:
                left.discard(attribute)


# ----------------------------------------------------------------------------------------------------
# One set of global hooks serves every thread that is inside; what a thread has seen is its own.


class _StaysOnMeta(TorchDispatchMode):
    """Skips operations that would only fill meta tensors with random numbers, and keeps tensors on meta that are moved to a device.

    For meta torch has these two operations only in Python (torch 2.12-2.14); they take two thirds of a 32B model's
    construction. Factories such as open_clip's ``create_model`` end with ``model.to(device)``, which torch refuses for meta.
    """

    _FILLS = frozenset((torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._FILLS and args[0].is_meta:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


class NotLarger(TorchDispatchMode):
    """Raises ``refusal`` before torch makes a tensor of more than ``most_bytes`` in the block.

    For configs from files, which can ask for buffers of any size. Tries each operation on meta first.
    """

    def __init__(self, most_bytes: int, refusal: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most_bytes, self._refusal = most_bytes, refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _bytes_made(func, args, kwargs) > self._most_bytes:
            raise self._refusal
        return func(*args, **kwargs)


#: Operations that only write into a tensor. With views and copies to meta, they are most of a construction.
_IN_PLACE = frozenset((torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default, *_StaysOnMeta._FILLS))


#: Operations that make a tensor of the size that is their first argument. They make all parameters of most models.
_SIZED = frozenset(
    (torch.ops.aten.empty.memory_format, torch.ops.aten.ones.default, torch.ops.aten.zeros.default)
)


def _is_meta(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _bytes_made(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of the largest result of an operation; 0 if meta can't tell."""
    if func in _IN_PLACE or func.is_view or _is_meta(kwargs.get("device")):
        return 0
    if func in _SIZED:
        dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return int(math.prod(args[0])) * dtype.itemsize
    on_meta = {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
    try:
        args, on_meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, on_meta))
        made = func(*args, **on_meta)
    except Exception:  # no kernel for meta, or an operation that looks at values
        return 0
    return max(
        (t.numel() * t.element_size() for t in tree_leaves(made) if isinstance(t, torch.Tensor)), default=0
    )


class _Scope(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        #: Number of registrations left, and the error after that; None if there is no limit.
        self.left: int | None = None
        self.refusal: Exception | None = None
        # By id of the original parameter. The weak reference detects an id that Python has reused, without holding
        # the original's memory.
        self.replacements: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}
        self.with_buffers: dict[int, weakref.ref[nn.Module]] = {}


_scope = _Scope()
_lock = threading.Lock()
_are_registered = False

# Keyed by id, since a module may define __eq__ and so lose its hash.
_remembered: dict[int, tuple[weakref.ref[nn.Module], set[str]]] = {}


def _enter() -> None:
    _register_hooks()
    _scope.depth += 1


def _register_hooks() -> None:
    """Once per process: taking a hook out while another thread registers a parameter would raise in that thread."""
    global _are_registered
    with _lock:
        if not _are_registered:
            register_module_parameter_registration_hook(cast(Any, _to_meta))
            register_module_buffer_registration_hook(_note_buffer)
            register_module_module_registration_hook(_note_module)
            _are_registered = True


def _exit() -> None:
    _remember_meta_buffers()
    _scope.depth -= 1
    if not _scope.depth:
        _scope.replacements.clear()
        _scope.with_buffers.clear()


def _note_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    _count()


def _count() -> None:
    if _scope.depth and _scope.left is not None and _scope.refusal is not None:
        _scope.left -= 1
        if _scope.left < 0:
            raise _scope.refusal


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    _count()
    if not _scope.depth or parameter.is_meta or is_lazy(parameter):
        return None
    known = _scope.replacements.get(id(parameter))
    if known is not None and known[0]() is parameter:
        return known[1]
    replacement = parameter_like(parameter, parameter.data.to("meta"))
    _scope.replacements[id(parameter)] = (weakref.ref(parameter), replacement)
    return replacement


def _note_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    _count()
    if _scope.depth:
        _scope.with_buffers[id(module)] = weakref.ref(module)


def _remember_meta_buffers() -> None:
    for key, reference in _scope.with_buffers.items():
        module = reference()
        if module is None or id(module) != key:
            continue
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        left = {name for name, buffer in buffers if buffer.is_meta}
        if left:
            _left_on_meta(module, create=True).update(left)


def _left_on_meta(module: nn.Module, *, create: bool = False) -> set[str]:
    known = _remembered.get(id(module))
    if known is not None and known[0]() is module:
        return known[1]
    left: set[str] = set()
    if create:
        key = id(module)
        reference = weakref.ref(module, lambda dead: _forget_module(key, dead))
        _remembered[key] = (reference, left)
    return left


def _forget_module(key: int, dead: weakref.ref[nn.Module]) -> None:
    known = _remembered.get(key)
    if known is not None and known[0] is dead:
        del _remembered[key]


# ----------------------------------------------------------------------------------------------------
# Gives a meta model memory, in place, before a load reads into it.
#
# Kept small and guarded, because it depends on how torch swaps parameters:
#
# * DTensors (FSDP2): one ``model._apply`` that allocates only meta tensors. FSDP's own ``_apply`` then
#   re-pads its shards and keeps its references; identity, ties and real buffers survive.
# * Plain parameters: ``torch.utils.swap_tensors``, once per object, keeps identity and ties.
# * Buffers are replaced in every module that registers them.
#
# ``to_empty`` would ruin real buffers and untie; ``load_state_dict(assign=True)`` would lose identity;
# setting ``_local_tensor`` leaves a meta wrapper.


def materialize(live: LiveModel, device: torch.device | str, memory: HostMemory | None = None) -> None:
    """Allocate memory on ``device`` for all meta tensors of a model; other tensors stay unchanged.

    ``memory``: where those on the CPU come from; it must be told of the reads that fill them.

    Memory: this rank's shards; one uneven FSDP parameter's shard may briefly exist twice. New values are undefined.
    Rank-local, idempotent. Buffers are replaced: :meth:`.LiveModel.refreshed` describes the model afterwards.
    """
    device, memory = torch.device(device), memory or HostMemory()

    def empty_like(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":
            return memory.empty(tensor.size(), tensor.stride(), tensor.dtype)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    parameters = [cast(nn.Parameter, t.tensor) for t in live.parameters]  # they keep their identity
    waiting = [p for p in parameters if p.is_meta]
    if sharded := [p for p in waiting if isinstance(p, DTensor)]:
        allocate_dtensors([module for _, module in live.modules], sharded, empty_like)
    plain = [p for p in waiting if p.is_meta]
    with swappable_weights([module for _, module in live.modules] if plain else ()):
        for parameter in plain:
            torch.utils.swap_tensors(parameter, parameter_like(parameter, empty_like(parameter.data)))
    _materialize_buffers(live.tensors, device)
    give_addresses(parameters)


def give_addresses(parameters: Iterable[nn.Parameter]) -> None:
    """Make ``data_ptr()`` of each empty shard among ``parameters`` return a unique number.

    torch returns 0 for all of them, but ``accelerator.prepare`` identifies an optimizer's parameters by this number: if
    a rank has no rows of two parameters, it would add one of them twice and never the other. Nothing reads memory at
    the number, and no other memory has the address of a living Python object. Rank-local, idempotent; FSDP2 keeps the
    tensors, so it lasts during training.
    """
    for parameter in parameters:
        if (
            isinstance(parameter, DTensor)
            and not (local := local_tensor(parameter)).numel()
            and not local.is_meta
        ):
            local.data_ptr = functools.partial(int, id(parameter))  # type: ignore[method-assign]


def default_device(parameters: Iterable[NamedTensor]) -> torch.device:
    """The default device for meta tensors: that of the mesh of a model's parameters, otherwise the CPU."""
    sharded = [p.tensor for p in parameters if isinstance(p.tensor, DTensor)]
    for kind in dict.fromkeys([t.device_mesh.device_type for t in sharded]):
        if kind != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def _materialize_buffers(tensors: Iterable[NamedTensor], device: torch.device) -> None:
    """Allocate persistent meta buffers; a buffer that several modules register stays one tensor."""
    for found in tensors:
        if found.kind == "buffer" and found.persistent and found.tensor.is_meta:
            real = torch.empty_like(found.tensor, device=device)
            for module, attribute in found.owners:
                setattr(module, attribute, real)
