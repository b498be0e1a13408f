"""A live model described once, and handed down to all that an entry point calls; host memory for its shards."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..dtypes import code_of
from ..errors import LayoutError, ShardError
from ..internals.fsdp import FsdpGroup, fsdp_groups, fsdp_parameter_ids
from ..internals.peft import base_of
from ..internals.torch import empty_like, local_tensor, original_class, spec_key, stand_in
from ..names import NamedTensor, modules_by_path, own_parameter, tensors_of, unwrap
from ..objects import frozen
from .boxes import Layout, LocalBox, TensorKind, TensorSpec, Wanted, contiguous_strides
from .placements import Geometry, check_local_shape, cut_boxes, geometry_of, local_shape

__all__ = [
    "Copies",
    "DECLARED",
    "HUGE_PAGE_BYTES",
    "HostMemory",
    "LEAST_BYTES",
    "LiveModel",
    "Pages",
    "absent",
    "describe",
    "elsewhere_in",
    "is_elsewhere",
    "is_declared",
    "fsdp1_problem",
    "geometries_of",
    "layout_of",
    "local_tensor",
    "mesh_device",
    "reduce_after_backward",
    "reduced_parameters",
    "reshard",
    "wanted_of",
    "world_size",
]


# ----------------------------------------------------------------------------------------------------
# The layout of a live module: plain, FSDP2, HSDP, TP, EP or any mix, on meta or not.


def fsdp1_problem(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Why a model that FSDP1 wraps, in whole or in part, can be neither filled nor stored, and the way out; else None.

    Its flat parameters have neither names nor shapes of the model. ``modules``: all of them, with their paths.
    """
    for path, module in modules:
        if isinstance(module, FullyShardedDataParallel):
            return (
                f"{path or 'the model'} is wrapped by FSDP1 (torch's FullyShardedDataParallel), which keeps flat "
                f"parameters; expected FSDP2. Shard with shardwise.shard or fully_shard (Accelerate: fsdp_version: 2). "
                f"A checkpoint of FSDP1 written by torch or Accelerate can be restored into an FSDP2 model"
            )
    return None


def reshard(modules: Iterable[nn.Module]) -> tuple[FSDPModule, ...]:
    """Put every FSDP2 module among ``modules`` back to its sharded parameters; returns these modules, each once.

    After a forward pass without backward the root keeps its gathered parameters registered, but reading or filling a
    model needs the shards. Rank-local, and free if nothing is gathered.
    """
    found = tuple(dict.fromkeys([m for m in modules if isinstance(m, FSDPModule)]))
    for module in found:
        module.reshard()
    return found


def world_size() -> int:
    """Size of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Copies(nn.Module):
    """Copies of parameters, held as buffers. They're sharded as ``fully_shard`` sharded the parameters."""


def geometries_of(
    fsdp_modules: Iterable[FSDPModule], tensors: Iterable[NamedTensor], *, are_copies: bool = False
) -> dict[str, Geometry]:
    """The geometry of each tensor, by name. ``fsdp_modules``: the model's modules that FSDP2 shards. ``are_copies``: as in :class:`Copies`."""
    fsdp = fsdp_parameter_ids(fsdp_modules)
    world = world_size()
    # Reading a mesh dominates the cost. Most tensors share mesh and placements; many share their spec.
    known: dict[object, Geometry] = {}
    by_spec: dict[tuple[int, bool], Geometry] = {}
    found = {}
    for t in tensors:
        managed = are_copies or id(t.tensor) in fsdp
        spec = (spec_key(t.tensor), managed)
        geometry = by_spec.get(spec)
        if geometry is None:
            mesh = getattr(t.tensor, "device_mesh", None)
            key = (id(mesh), getattr(t.tensor, "placements", None), t.tensor.dim(), managed)
            if key not in known:
                known[key] = geometry_of(t.tensor, world_size=world, fsdp_order=managed)
            geometry = by_spec[spec] = known[key]
        found[t.name] = geometry
    return found


def layout_of(
    tensors: Iterable[NamedTensor], geometries: Mapping[str, Geometry], *, rank: int | None = None
) -> Layout:
    """What a load has to fill: the tensors of a model with the boxes of one rank.

    ``rank=None`` is this rank; its boxes are checked against the local tensors that torch allocated. Another rank's
    layout is computed from placements alone: one process can plan for all ranks. Reads structure only. Raises
    :class:`LayoutError`.
    """
    place = _place_on(_this_rank(), is_here=True) if rank is None else _place_on(rank, is_here=False)
    return Layout(
        tuple([_wanted(t.name, t.tensor, geometries[t.name], place, t.aliases, t.kind) for t in tensors])
    )


def wanted_of(name: str, tensor: torch.Tensor, geometry: Geometry) -> Wanted:
    """A tensor on this rank that a load has to fill, outside any model; see :func:`layout_of`."""
    return _wanted(name, tensor, geometry, _place_on(_this_rank(), is_here=True))


def _this_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@frozen
class _LocalPlace:
    """The boxes and the storage of a tensor on one rank."""

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]


#: From a tensor's name, the tensor, its local part and its geometry to its place.
_LocalPlaceOf = Callable[[str, torch.Tensor, torch.Tensor, Geometry], _LocalPlace]


def _place_on(rank: int, *, is_here: bool) -> _LocalPlaceOf:
    """A function that places tensors on a rank. Thousands are spread alike and share one place."""
    known: dict[tuple[object, ...], _LocalPlace] = {}

    def place_of(name: str, tensor: torch.Tensor, local: torch.Tensor, geometry: Geometry) -> _LocalPlace:
        key = (tensor.shape, geometry, local.shape, local.stride())
        place = known.get(key)
        if place is None:
            place = known[key] = _find_place(name, tensor, local if is_here else None, geometry, rank)
        return place

    return place_of


def _find_place(
    name: str, tensor: torch.Tensor, local: torch.Tensor | None, geometry: Geometry, rank: int
) -> _LocalPlace:
    shape = geometry.whole_shape(tensor.shape)
    coordinate = geometry.coordinate(rank)
    boxes = cut_boxes(shape, geometry, coordinate) if coordinate is not None else ()
    if local is None:
        held = local_shape(shape, boxes) or (0,) * len(shape)
        return _LocalPlace(shape, boxes, held, contiguous_strides(held))
    held, strides = tuple(local.shape), tuple(local.stride())
    check_local_shape(shape, boxes, held, name, getattr(tensor, "placements", "none"))
    if local.numel() and not _owns_elements(local):
        raise LayoutError(
            f"{name}: local tensor with strides {strides} stores several elements at the same address "
            f"(an expanded tensor); make it contiguous before loading into it"
        )
    return _LocalPlace(shape, boxes, held, strides)


def _wanted(
    name: str,
    tensor: torch.Tensor,
    geometry: Geometry,
    place_of: _LocalPlaceOf,
    aliases: tuple[str, ...] = (),
    kind: TensorKind = "state",
) -> Wanted:
    place = place_of(name, tensor, local_tensor(tensor), geometry)
    dtype = code_of(tensor.dtype)
    return Wanted(
        name, dtype, place.shape, place.boxes, place.local_shape, place.local_strides, aliases, kind
    )


def _owns_elements(tensor: torch.Tensor) -> bool:
    """Whether no two indices of a strided tensor share a storage element (exact for tensors that torch makes)."""
    pairs = sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


# ----------------------------------------------------------------------------------------------------
# A live model described once: what an entry point finds out about it first, and hands down to all that it calls.

#: For modules that are this rank's part of a model (:mod:`..sharding.declared`): from the description of the module to that of the whole model.
DECLARED: weakref.WeakKeyDictionary[nn.Module, Callable[[LiveModel], LiveModel]] = weakref.WeakKeyDictionary()


@frozen(kw_only=True, eq=False)
class LiveModel:
    """A model as :func:`describe` found it.

    Names, ties, kinds, placements and FSDP2's groups stay true while shardwise works on the model. What gives meta tensors
    memory replaces buffers: :meth:`refreshed` then gives the description with the tensors of now, without a walk. What runs
    the program's own code (a model's ``load_state_dict``) may change anything, and the caller describes the model again.
    """

    root: nn.Module
    """What the caller gave."""
    unwrapped: nn.Module
    """Inside wrappers around the root: what its class and origin are looked up by."""
    base: nn.Module
    """Inside PEFT's wrapper, too: the model that names of stored tensors are about."""
    tensors: tuple[NamedTensor, ...]
    """Every distinct parameter and buffer, in module order; FSDP2's as shards."""
    modules: tuple[tuple[str, nn.Module], ...]
    """Every module with its path, in order; one that stands twice is there twice."""
    fsdp_modules: tuple[FSDPModule, ...]
    """The modules that ``fully_shard`` was applied to."""
    fsdp1_problem: str | None
    """Why the model can be neither filled nor stored, where FSDP1 wraps a part of it."""
    _geometries: dict[str, Geometry] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> type[nn.Module]:
        """The class of the base, before ``fully_shard`` swapped it."""
        return original_class(self.base)

    @property
    def stored(self) -> tuple[NamedTensor, ...]:
        """What a load fills and a save stores: parameters and persistent buffers."""
        return tuple([t for t in self.tensors if t.persistent])

    @property
    def parameters(self) -> tuple[NamedTensor, ...]:
        """The parameters alone."""
        return tuple([t for t in self.tensors if t.kind == "parameter"])

    @property
    def first_names(self) -> Mapping[str, str]:
        """The first name of each tensor, which shardwise uses, by each of its names: a tied tensor has several."""
        return {alias: t.name for t in self.tensors for alias in t.names}

    @property
    def geometries(self) -> Mapping[str, Geometry]:
        """How each of :attr:`stored` is spread over ranks. Worked out once, when it is first asked for.

        Raises :class:`LayoutError` for placements that are not supported.
        """
        if self.tensors and not self._geometries:
            copies = isinstance(self.root, Copies)
            self._geometries.update(geometries_of(self.fsdp_modules, self.stored, are_copies=copies))
        return self._geometries

    def layout(self, *, rank: int | None = None) -> Layout:
        """What a load has to fill on this rank, or on another one: see :func:`.layout_of`."""
        return layout_of(self.stored, self.geometries, rank=rank)

    def spec(self, tensor: NamedTensor) -> TensorSpec:
        """Dtype and shape of one of :attr:`stored`, whole."""
        return TensorSpec(
            code_of(tensor.tensor.dtype), self.geometries[tensor.name].whole_shape(tensor.tensor.shape)
        )

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """The part of each of :attr:`stored` that lies on this rank now: FSDP2 may have padded it since."""
        return {t.name: local_tensor(t.tensor) for t in self.stored}

    def without(self, names: Collection[str]) -> LiveModel:
        """The same description without some of its tensors."""
        return replace(self, tensors=tuple([t for t in self.tensors if t.name not in names]))

    def of_states(self, states: Mapping[str, torch.Tensor], geometries: Mapping[str, Geometry]) -> LiveModel:
        """Describe an optimizer's states of this model's parameters, so that they are filled as a model is. ``geometries``: by state."""
        named = [
            NamedTensor(name=n, aliases=(), kind="state", persistent=True, tensor=t, owners=())
            for n, t in states.items()
        ]
        return replace(self, tensors=tuple(named), _geometries=dict(geometries))

    def refreshed(self) -> LiveModel:
        """The same description with the tensor objects that the modules hold now."""
        return replace(self, tensors=tuple([t.refreshed() for t in self.tensors]))


def absent(
    shape: Sequence[int],
    geometry: Geometry,
    dtype: torch.dtype,
    device_type: str = "cpu",
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor of other ranks, without any element on this one. ``shape``: of the whole tensor."""
    parts = geometry.parts or (1,) * len(shape)
    own = tuple(n // k for n, k in zip(shape, parts, strict=True))
    return stand_in(own, dtype, geometry.ranks, device_type, requires_grad=requires_grad)


def is_elsewhere(tensor: NamedTensor) -> bool:
    """Whether a tensor of a described model is on other ranks only."""
    return not tensor.owners and tensor.kind != "state"


def elsewhere_in(tensors: Iterable[NamedTensor]) -> frozenset[str]:
    """Names of the parameters that are on other ranks only."""
    return frozenset(t.name for t in tensors if t.kind == "parameter" and is_elsewhere(t))


def is_declared(model: nn.Module) -> bool:
    """Whether a model is declared this rank's part of one. Rank-local; the same on every rank, by the rules of ``declare_part``."""
    return unwrap(model) in DECLARED


def describe(model: nn.Module) -> LiveModel:
    """Describe a model, or the whole model if this is a declared part of one; walks its tree once. Puts FSDP2's gathered parameters back to shards first. Rank-local.

    Reads structure only: no payload, no collectives; works on meta and on sharded models.

    Raises :class:`LayoutError` if two different tensors have one name, or a declared part has changed.
    """
    modules = tuple(modules_by_path(model))
    found = LiveModel(
        root=model,
        unwrapped=unwrap(model),
        base=base_of(model),
        modules=modules,
        fsdp_modules=reshard(module for _, module in modules),
        tensors=tensors_of(modules),
        fsdp1_problem=fsdp1_problem(modules),
    )
    whole = DECLARED.get(found.unwrapped)
    return found if whole is None else whole(found)


# ----------------------------------------------------------------------------------------------------
# Host memory for the shards of a model, filled through huge pages where that costs less than through small ones.
#
# A read into fresh memory is bound by page faults: the kernel finds, clears and maps 4 KiB at a time. In pages of 2 MiB the
# same read took a third of the CPU time on the machine measured. ``malloc`` spoils that: it writes a header before each
# tensor, and where one small page is in use the kernel puts no huge one. So the shards lie side by side in mappings
# of their own, not touched before they are filled.
#
# Huge pages can also cost more: the kernel may have to move memory to make one, and a virtual machine may have given its
# large free blocks back to the host. The CPU time of the reads decides, for each part of the load.
#
# Sources: Documentation/admin-guide/mm/transhuge.rst of Linux, ``madvise(2)``.

Pages = Literal["auto", "huge", "small"]

HUGE_PAGE_BYTES = 2 * 1024**2
#: Smaller tensors come from torch's allocator: whole pages for each would waste more than they save.
LEAST_BYTES = 128 * 1024
#: Address space that one mapping takes. Memory is used only where it is written.
_MAPPING_BYTES = 256 * 1024**2
#: The kind of pages is chosen anew after so many bytes. The first choice comes after fewer: the small pages that are tried first
#: mostly cost twice as much.
_WINDOW_BYTES = 16 * 1024**2
_TRIAL_BYTES = 4 * 1024**2
#: Pages are changed if they cost so many times as much as the others did. CPU time also grows where another program shares a core's caches.
_DEARER = 1.25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostMemory:
    """Allocates CPU tensors that are filled soon, and chooses the pages that they are filled through. Rank-local.

    Each tensor owns its pages: when its storage dies, they go back to the system, as with torch's allocator. Its storage
    can't be resized. One thread allocates, several may fill. Beside the tensors' own bytes, rounded up to 4 KiB, at most one
    huge page in 128 is in use.
    """

    def __init__(self, pages: Pages = "auto", *, cpu_time: Callable[[], float] = time.thread_time) -> None:
        """``pages``: as ``IOOptions.pages``. ``cpu_time``: the CPU seconds that this thread has used."""
        self._mappings: list[mmap.mmap] = []
        self._next = self._end = 0  # free bytes of the last mapping
        self._refusal = _refusal()
        self._may_change = pages == "auto"
        self._pages: Literal["huge", "small"] = "huge" if pages == "huge" else "small"
        #: CPU seconds for each byte, as last measured; 0 before.
        self._cost = {"small": 0.0, "huge": 0.0}
        self._bytes = {"small": 0, "huge": 0}
        self._has_chosen = False
        self._cpu_time = cpu_time
        self._measured_bytes, self._measured_s = 0, 0.0
        self._lock = threading.Lock()  # around what is measured

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized CPU tensor, as ``torch.empty_strided``."""
        if self._refusal is not None or math.prod(size) * dtype.itemsize < LEAST_BYTES:  # as most tensors are
            return torch.empty_strided(size, stride, dtype=dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = count * dtype.itemsize
        raw = torch.frombuffer(self._take(nbytes), dtype=dtype, count=count)
        return raw.as_strided(size, stride)

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor as ``torch.empty_like`` on the same device; of a DTensor, one with its placements."""
        if tensor.device.type != "cpu" or type(local_tensor(tensor)) is not torch.Tensor:
            return torch.empty_like(tensor, dtype=dtype)
        return empty_like(tensor, dtype, self.empty)

    def first_bytes(self, nbytes: int) -> int:
        """How much of a read of ``nbytes`` bytes to make first: up to where the first choice of pages is due."""
        if not self._mappings or self._has_chosen or not self._may_change:
            return nbytes
        # A piece smaller than LEAST_BYTES is not measured, so the trial would never end.
        return min(nbytes, max(_TRIAL_BYTES - self._measured_bytes, LEAST_BYTES))

    @contextmanager
    def filling(self, nbytes: int) -> Iterator[None]:
        """Around each read of ``nbytes`` bytes into the tensors."""
        if not self._mappings or nbytes < LEAST_BYTES:
            yield
            return
        pages, begin = self._pages, self._cpu_time()
        yield
        seconds = self._cpu_time() - begin
        with self._lock:
            if pages != self._pages:  # another thread has changed them meanwhile
                return
            self._measured_s += seconds
            self._measured_bytes += nbytes
            if self._measured_bytes >= (_WINDOW_BYTES if self._has_chosen else _TRIAL_BYTES):
                self._choose()

    def settle(self) -> None:
        """No more huge pages from here on; those that are there stay. Call it when the tensors are filled.

        Else khugepaged goes on: around each page in use it fills the 2 MiB that are not there, also where a tensor lay that is gone. A rank
        whose uneven shards FSDP2 had padded grew by 5 to 10 MiB within a minute.
        """
        for mapping in self._mappings:
            with suppress(OSError):
                mapping.madvise(mmap.MADV_NOHUGEPAGE)

    def describe(self) -> str:
        """The pages that were used, or the reason why huge ones were not."""
        if self._refusal is not None:
            return f"small: {self._refusal}"
        total = sum(self._bytes.values()) + self._measured_bytes
        huge = self._bytes["huge"] + (self._measured_bytes if self._pages == "huge" else 0)
        return f"huge for {huge / total:.0%} of {total} bytes" if total else "small: no fresh memory to fill"

    def _choose(self) -> None:
        """Use the others from here on if these cost clearly more; those never tried count as free."""
        self._cost[self._pages] = self._measured_s / self._measured_bytes
        self._bytes[self._pages] += self._measured_bytes
        self._measured_bytes, self._measured_s = 0, 0.0
        other: Literal["huge", "small"] = "small" if self._pages == "huge" else "huge"
        self._has_chosen = True
        if self._may_change and self._cost[other] * _DEARER < self._cost[self._pages]:
            self._pages = other
            for mapping in self._mappings:
                self._advise(mapping)

    def _advise(self, mapping: mmap.mmap) -> None:
        with suppress(OSError):  # advice: the read works without
            mapping.madvise(mmap.MADV_HUGEPAGE if self._pages == "huge" else mmap.MADV_NOHUGEPAGE)

    def _take(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Whole pages, untouched, which go back to the system with the last reference to them."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._end - self._next < whole:
            size = max(_MAPPING_BYTES, -(-whole // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mappings.append(mapping)
            self._advise(mapping)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            self._next, self._end = -address % HUGE_PAGE_BYTES, size
        mapping, start = self._mappings[-1], self._next
        self._next += whole
        taken = (ctypes.c_char * nbytes).from_buffer(mapping, start)
        # Not at exit: tensors may live longer than Python's finalizers wait.
        weakref.finalize(taken, mapping.madvise, mmap.MADV_DONTNEED, start, whole).atexit = False
        return taken


def _refusal() -> str | None:
    """Why this system has no huge pages to give on request, or None."""
    try:
        setting = _SETTING.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "this system has no transparent huge pages"
    return None if setting in ("madvise", "always") else f"the kernel's setting is {setting!r}"


# ----------------------------------------------------------------------------------------------------
# Averages, after backward, the gradients of parameters that FSDP2 can't shard and that stay whole on every rank.
#
# FSDP2 ends every backward in one callback, on every rank that ran one. What is here goes after it: one reduction
# over the mesh for all such parameters, zeros where this rank has no gradient. So it does not matter which of them
# a rank's loss used, in what order, or how often forward ran before; and nothing hangs on the parameter objects,
# which may be swapped, moved and loaded. One attribute of one of FSDP2's groups is assigned for it; its classes stay as they are.


def reduce_after_backward(
    places: Sequence[tuple[nn.Module, str]], beside: Sequence[nn.Module], mesh: DeviceMesh
) -> None:
    """Average the gradients of the parameters at ``places`` over ``mesh`` at the end of each backward.

    The settings (gradient sync, divide factor) of one group apply: that of the first module in ``beside`` for which
    FSDP2 holds parameters. Call it after ``fully_shard``, on every rank, with the same places in the same order.
    """
    groups = [group for module in beside for group in fsdp_groups(module)]
    if groups:  # else nothing here is trainable
        groups[0].finalize_with(Reduction(groups[0], tuple(places), mesh))


def reduced_parameters(modules: Iterable[FSDPModule]) -> set[int]:
    """ids of the plain parameters whose gradients are averaged after each backward. ``modules``: all modules of a model
    that FSDP2 shards."""
    return {
        id(parameter)
        for module in modules
        for group in fsdp_groups(module)
        if isinstance(group.finalizer, Reduction)
        for parameter in group.finalizer.parameters()
    }


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


class Reduction:
    """Replaces a group's ``finalize_backward``: calls the original, then averages the gradients."""

    def __init__(self, group: FsdpGroup, places: tuple[tuple[nn.Module, str], ...], mesh: DeviceMesh) -> None:
        self._group = group
        self._finish = group.finalizer
        self._places = places
        self._mesh = mesh
        self._reduced: list[weakref.ref[torch.Tensor]] = []

    def __call__(self) -> None:
        self._finish()
        all_axes = self._mesh.ndim == 1 or self._group.all_reduces
        if self._group.reduces and all_axes:  # else gradients add up until they are: averaging is linear
            self._reduce([p for p in self.parameters() if p.requires_grad])

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are at the places now."""
        found = (own_parameter(module, attribute) for module, attribute in self._places)
        return [p for p in found if p is not None and not isinstance(p, DTensor)]

    @torch.no_grad()
    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the mesh; None only if no rank has one."""
        if not parameters:
            return
        factor = self._group.divide_factor or self._mesh.size()
        if factor != self._mesh.size():
            self._refuse_reduced(parameters)
        sizes = [p.numel() for p in parameters]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        sums = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=mesh_device(self._mesh))
        *parts, holders = sums.split([*sizes, len(sizes)])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.reshape(-1))
        holders.copy_(torch.tensor([p.grad is not None for p in parameters]))
        _sum_over(self._mesh, sums)
        sums /= factor
        # Reading it waits for the device, so only a rank that lacks a gradient does.
        held = holders.tolist() if any(p.grad is None for p in parameters) else []
        for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))
            elif held[index]:
                parameter.grad = part.view_as(parameter).to(parameter, copy=True)
        self._reduced = [weakref.ref(p.grad) for p in parameters if p.grad is not None]

    def _refuse_reduced(self, parameters: list[nn.Parameter]) -> None:
        """Refuse gradients reduced before: they are averaged again, which is right only for a mean."""
        before = [grad for reference in self._reduced if (grad := reference()) is not None]
        if any(p.grad is grad for p in parameters for grad in before):
            raise ShardError(
                "with set_gradient_divide_factor, gradients of parameters that are whole on every rank can't add up over "
                "several reduced backwards. Call set_requires_gradient_sync(False) for all but the last one, and "
                "zero_grad(set_to_none=True) after the step"
            )


def _sum_over(mesh: DeviceMesh, tensor: torch.Tensor) -> None:
    """Sum in place over all ranks of the mesh, with the same bits on each."""
    for axis in reversed(range(mesh.ndim)):
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    if mesh.ndim > 1:
        # Another slice of the last axis may have added the same values in another order.
        dist.broadcast(tensor, group=mesh.get_group(1), group_src=0)
