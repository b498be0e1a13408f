"""What shardwise uses of torch's modules, tensors, dispatch, optimizers and schedulers that torch keeps private. torch 2.12-2.14."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "NO_TORCH_FUNCTION",
    "StridedShard",
    "TorchDispatchMode",
    "bare_tree",
    "compiled_by",
    "default_store",
    "dtensor_like",
    "empty_host_cache",
    "empty_like",
    "fake_device_or_view",
    "fake_store",
    "fake_tensors",
    "fsdp_placements",
    "fused_attention",
    "gives_one_tensor",
    "has_own_state_dict",
    "inner_by_torch",
    "is_checkpointed",
    "is_stateful_loader",
    "keep_metadata",
    "keeps_flat_history",
    "local_tensor",
    "meta_tree",
    "original_class",
    "parameter_like",
    "quantized",
    "reset_methods",
    "scale_function",
    "scaler_stages",
    "reads_values",
    "sibling_meshes",
    "spec_key",
    "stand_in",
    "storage_key",
    "swappable_weights",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "version_of",
    "with_original_classes",
    "wrapper_subclass",
    "written_tensors",
]


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of torch's modules, tensors and dispatch that torch keeps private. torch 2.12-2.14.
#
# Optimizers, schedulers and scalers: :mod:`.torch`. FSDP2's groups: :mod:`.fsdp`.

# ``StridedShard``: how FSDP2 over TP cuts a dim that TP has cut; no public placement says it. Without it, models that
# are sharded so would be refused.
# ``TorchDispatchMode``: sees every operation below autograd. Without it, there is the public ``TorchFunctionMode``,
# which misses those that torch's own code calls, and with them initial values.
# ``tree_leaves``, ``tree_map_only``: nested arguments, as dispatch gets them. Without them, ``models/meta.py``
# would have to walk lists, tuples and dicts itself.


# ----------------------------------------------------------------------------------------------------
# Ranks


def default_store() -> Any:
    """The store of the default process group, through which ranks agree. Private, but the only way to it.

    Without it, the caller would have to give a store of its own before ranks could tell each other of errors.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def empty_host_cache() -> None:
    """Give the system the pinned memory that torch's host allocator keeps although it is free, where this torch can.

    torch 2.11 of CUDA and ROCm: ``torch._C._host_emptyCache``; from 2.12 on a public function does it on every device. Without
    it, a process under torch 2.11 keeps what a load or a smaller save had pinned.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty is not None:
        empty()


def fake_store() -> Any:
    """The store of a process group ``fake``, whose ranks are not there: what torch's own planners use.

    Importing it registers the backend. Without it, planning for 64 ranks would take 64 processes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention runs as on a device whose values have fewer features than its keys (DeepSeek-V3: 128 of 192).

    Kernels of devices keep no matrix of tokens x tokens: some take such values, others get them padded to the features of keys.
    Padded ones are an upper bound of both. torch 2.12-2.14: ``functional.scaled_dot_product_attention`` is replaced, because a
    function mode is not asked where a backward recomputes. Without it, a plan for a GPU counts the matrix that the CPU keeps.
    """
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def padded(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        features, more = value.shape[-1], query.shape[-1] - value.shape[-1]
        if more <= 0:
            return original(query, key, value, *args, **kwargs)
        return original(query, key, functional.pad(value, (0, more)), *args, **kwargs)[..., :features]

    setattr(functional, "scaled_dot_product_attention", padded)  # noqa: B010
    try:
        yield
    finally:
        setattr(functional, "scaled_dot_product_attention", original)  # noqa: B010


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Operations run on tensors without memory that say they are on the CPU; real ones may take part.

    torch 2.12-2.14: ``torch._subclasses.FakeTensorMode``. Tensors on meta would choose other kernels (attention as one large
    matrix), and models look at their values where they leave those of fake tensors alone. Its logger prints a traceback for
    each operation that has no rule; the caller has the exception. Without it, activations could only be guessed.
    """
    from torch._subclasses import fake_tensor

    log, quiet = logging.getLogger(fake_tensor.__name__), lambda record: False
    log.addFilter(quiet)
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.removeFilter(quiet)


def reads_values(error: Exception) -> bool:
    """Whether code has failed because it asked a fake tensor for its values, or for a shape that depends on them.

    torch 2.9-2.14: two exceptions of ``fake_tensor``. Without it, the error of a plan couldn't say what to change.
    """
    from torch._subclasses import fake_tensor

    kinds = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    return isinstance(error, kinds)


def fake_device_or_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` where it asks a fake tensor for its device or makes a view of it; None for other operations.

    They are most of what a model dispatches, and neither needs torch's rules: the operation itself makes a view without memory.
    The mode of :func:`fake_tensors` looks for each in a cache whose key holds the offset, and so misses in loops over the parts of
    a tensor. Tensors whose values torch keeps are left to that mode.

    torch 2.12-2.14: ``FakeTensor`` and ``in_kernel_invocation_manager``. Without it, a plan of Qwen3.5-35B-A3B, whose
    linear attention walks over the sequence in Python, takes 3.2 CPU s, not 2.0.
    """
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    tensor = args[0] if args else None
    if type(tensor) is not FakeTensor:
        return None
    if func is torch.ops.prim.device.default:
        return tensor.fake_device
    if not (func.is_view or func is torch.ops.aten._unsafe_view.default) or tensor.constant is not None:
        return None
    with in_kernel_invocation_manager(tensor.fake_mode):
        view = func(*args, **kwargs)
    return FakeTensor(tensor.fake_mode, view, tensor.fake_device) if isinstance(view, torch.Tensor) else None


def sibling_meshes(mesh: Any) -> torch.Tensor:
    """Ranks of a device mesh and of its siblings: all meshes that the same slicing of the root mesh gives.

    Shape: number of siblings, then the mesh's own. ``DeviceMesh.mesh`` picks this rank's from the same tensor. Without
    it, each rank would describe another layout of one model, and a manifest can hold one only.

    torch 2.10-2.14: a mesh keeps the layout of its slice. torch 2.9: the table of all meshes knows the root, whose dims that
    are not sliced come first, as in ``create_sub_mesh``.
    """
    if hasattr(mesh, "_layout"):
        ranks: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
        return ranks
    table = cast("Any", device_mesh)._mesh_resources
    root = table.get_root_mesh(mesh)
    if root is mesh or mesh.mesh_dim_names is None:
        return cast("torch.Tensor", mesh.mesh.unsqueeze(0))
    flattened, names = table.flatten_name_to_root_dims.get(root, {}), list(root.mesh_dim_names)
    own = [dim for name in mesh.mesh_dim_names for dim in flattened.get(name) or (names.index(name),)]
    others = [dim for dim in range(root.mesh.ndim) if dim not in own]
    return cast("torch.Tensor", root.mesh.permute(*others, *own).reshape(-1, *mesh.mesh.shape))


def fsdp_placements(parameter: DTensor) -> tuple[Any, ...]:
    """Placements of a parameter that ``fully_shard`` manages, as torch 2.9 and 2.12-2.14 describe them.

    torch 2.10 and 2.11 don't count packed weights (``_StridedShard``) among the cuts that tensor parallelism makes first, and call
    FSDP's own cut of those ``Shard``, as if it came first. Without it, a checkpoint of such a weight would hold other rows
    than the parameter.
    """
    placements = parameter.placements
    if issubclass(StridedShard, Shard) or not any(isinstance(p, StridedShard) for p in placements):
        return placements
    found, sizes = list(placements), parameter.device_mesh.shape
    for axis, placement in enumerate(placements):
        if type(placement) is not Shard:
            continue
        later = [
            k
            for k in range(axis + 1, len(placements))
            if getattr(placements[k], "dim", None) == placement.dim
        ]
        parts = math.prod(sizes[k] for k in later)
        if parts > 1 and any(isinstance(placements[k], StridedShard) for k in later):
            found[axis] = StridedShard(placement.dim, split_factor=parts)
    return tuple(found)


# ----------------------------------------------------------------------------------------------------
# Tensors


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter or buffer that lies on this rank (the tensor itself if it is not a DTensor).

    The very tensor that FSDP2 trains: ``to_local()`` makes a view of it through autograd each time.
    Without it, callers would read and write such views.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_key(tensor: torch.Tensor) -> int:
    """A number that DTensors of one spec (mesh, placements and shape) share while they live; one for all other tensors.

    Tensors of one shape often have one spec, so that mesh and placements are read once for them. Without it,
    finding the geometries of 20,000 parameters takes twice the time (0.20 for 0.10 CPU seconds).
    """
    return id(tensor._spec) if isinstance(tensor, DTensor) else 0


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to. Raises ``RuntimeError`` for one that was made in inference mode.

    Without it, a gradient that a step has used can't be told from one that waits for a step.
    """
    return int(tensor._version)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share while it lives, also on meta, where every address is 0.

    Without it, a write to a view of a parameter on meta could not be told as a write to that parameter.
    """
    return int(tensor.untyped_storage()._cdata)


def parameter_like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter that holds ``data``, with the class, ``requires_grad`` and Python attributes of another one.

    A subclass of ``Parameter`` may want other arguments in ``__new__``: ``Tensor._make_subclass`` goes around it.
    Without it, such a parameter could not be moved to meta, nor get memory there, and keep its class.
    """
    if type(data) is torch.Tensor:
        made: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    else:  # a tensor subclass (DTensor, quantized) that is itself marked as a parameter
        made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def quantized(integers: torch.Tensor, scale: Any, zero_point: Any, axis: int | None) -> torch.Tensor:
    """A quantized tensor of these integers; ``axis=None``: one scale for all.

    Without it, there is ``torch.quantize_*``, which takes floats and would round them anew.
    """
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(integers, float(scale), int(zero_point))
    return torch._make_per_channel_quantized_tensor(integers, scale, zero_point, axis)


# ----------------------------------------------------------------------------------------------------
# Operations

#: As a class's ``__torch_function__``: none of it, ``__torch_dispatch__`` alone. Without it, torch's own method would
#: run around each operation, and make plain results of it instances of the class.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def wrapper_subclass(kind: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """An instance of a tensor class, on meta, with a shape and a dtype and nothing else.

    Without it, conversions can't be run on symbols, and every rank would convert whole tensors.
    """
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=torch.device("meta"))


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation of ``__torch_dispatch__`` writes to, by its schema.

    Without it, which parameters a rule of initial values fills would have to be guessed from their names.
    """
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def gives_one_tensor(func: Any) -> bool:
    """Whether an operation of ``__torch_dispatch__`` returns a tensor, and nothing else, by its schema.

    Without it, a write that is held back while an engine's loader is recorded might return what its caller can't take.
    """
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


# ----------------------------------------------------------------------------------------------------
# Modules


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard`` swapped it (FSDP<Name>, FSDPModule, Name, …).

    Without it, a checkpoint's config would name FSDP2's class under ``architectures``, and copies would be built of it.
    """
    kind = type(module)
    if isinstance(module, FSDPModule):
        return next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))
    return kind


def reset_methods(module: nn.Module) -> list[Callable[..., Any]]:
    """``reset_parameters`` of a module, and ``_reset_parameters``, as torch's own attention and transformer call it.

    Without it, parameters of ``nn.MultiheadAttention`` would have no rule of initial values.
    """
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return [method for method in found if callable(method)]


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is torch's wrapper for activation checkpointing, which must not be put around another.

    Without it, Accelerate would put a second wrapper around each block that has one.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return isinstance(module, CheckpointWrapper)


def compiled_by(module: nn.Module) -> str | None:
    """The backend of ``torch.compile`` around a module or for its calls; None for ``eager``, which computes as torch does without it.

    torch 2.12-2.14. Without it, a resume of a compiled model that is no longer compiled would be called exact.
    """
    if module._compiled_call_impl is not None:
        cells = [
            cell.cell_contents for cell in getattr(module._compiled_call_impl, "__closure__", None) or ()
        ]
        context: Any = next((one for one in cells if hasattr(one, "callback")), None)
    elif "dynamo_ctx" in vars(module):
        context = module.dynamo_ctx
    else:
        return None
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", type(backend).__name__))
    return None if name == "eager" else str(name)


def is_stateful_loader(loader: object) -> bool:
    """Whether a loader is torchdata's (0.11). Does not import torchdata.

    Without it, a resume with such a loader would repeat a draw from torch's generator, which the stored run has made.
    """
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


def keep_metadata(of: Any, to: Any) -> None:
    """Note on a copy of a module's state dict the versions of modules that the state dict says, if it says any.

    Without it, modules with ``_load_from_state_dict`` of their own take the copy for one of an old release.
    """
    if hasattr(of, "_metadata"):
        to._metadata = of._metadata


#: Where a module keeps its hooks.
_HOOKS = tuple([name for name in nn.Module().__dict__ if "_hooks" in name])


def bare_tree(module: nn.Module) -> nn.Module:
    """A copy of a tree of modules around the same tensors, with the original classes and without hooks.

    Shared modules stay shared. No constructor is run: one may want arguments. Without it, transformers would not know the
    classes of a model that FSDP2 has sharded.
    """
    return _bare_tree(module, {})


def _bare_tree(module: nn.Module, modules: dict[int, nn.Module]) -> nn.Module:
    if (known := modules.get(id(module))) is not None:
        return known
    tree = modules[id(module)] = object.__new__(original_class(module))
    own = tree.__dict__
    own.update(module.__dict__)
    for name in _HOOKS:
        if name in own:
            own[name] = type(own[name])()
    own["_parameters"], own["_buffers"] = dict(module._parameters), dict(module._buffers)
    own["_modules"] = {
        name: None if child is None else _bare_tree(child, modules) for name, child in module._modules.items()
    }
    return tree


def with_original_classes(root: nn.Module, picks: Callable[[nn.Module], bool]) -> nn.Module:
    """A view of a tree in which the FSDP2 modules that ``picks`` chooses have their original classes. For reading only.

    These modules and the ones above them are copied; all others, and all tensors and hooks, are the model's own. Without it,
    transformers would not know the classes of a model that FSDP2 has sharded.
    """
    views: dict[int, nn.Module] = {}

    def view(module: nn.Module) -> nn.Module:
        known = views.get(id(module))
        if known is not None:
            return known
        inner = {}
        for name, child in module._modules.items():
            if child is not None and (
                child._modules or isinstance(child, FSDPModule)
            ):  # most children have none
                seen = view(child)
                if seen is not child:
                    inner[name] = seen
        kind = original_class(module) if isinstance(module, FSDPModule) and picks(module) else type(module)
        made = module
        if inner or kind is not type(module):
            made = object.__new__(kind)
            made.__dict__.update(module.__dict__)
            made._modules = {**module._modules, **inner}
        views[id(module)] = made
        return made

    return view(root)


def has_own_state_dict(module: nn.Module) -> bool:
    """Whether the class of a module decides itself what its state dict holds, beyond its parameters and persistent buffers.

    torch 2.9-2.14: the methods that ``nn.Module.state_dict`` calls. Without it, a state dict made from names would lack quantized
    weights' scales, and extra state.
    """
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return any(getattr(type(module), name) is not getattr(nn.Module, name) for name in methods)


def meta_tree(module: nn.Module) -> nn.Module:
    """:func:`bare_tree` with tensors of its own, on meta. Shared tensors stay shared.

    Without it, the initial values of a class that only the caller can build would have no rule.
    """
    tree = bare_tree(module)
    tensors: dict[int, torch.Tensor] = {}

    def on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and id(tensor) not in tensors:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return None if tensor is None else tensors[id(tensor)]

    for part in tree.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: on_meta(t) for name, t in held.items()})  # type: ignore[misc]
    return tree


# ----------------------------------------------------------------------------------------------------
# Memory for models on meta


def empty_like(
    tensor: torch.Tensor, dtype: torch.dtype, allocate: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """``torch.empty_like``, with local memory from ``allocate(size, stride, dtype)``. DTensors keep their placements.

    Without it, there is ``DTensor.from_local``, which moves the memory to the device of the mesh, where FSDP2 keeps the
    shards in host memory.
    """
    local = torch.empty_like(local_tensor(tensor), dtype=dtype, device="meta")
    empty = allocate(local.size(), local.stride(), dtype)  # dense, whatever the strides of ``tensor``
    if not isinstance(tensor, DTensor):
        return empty
    like = DTensor.from_local(
        *(local, tensor.device_mesh, tensor.placements),
        shape=tensor.size(),
        stride=tensor.stride(),
        run_check=False,
    )
    return DTensor(empty, like._spec, requires_grad=False)


def dtensor_like(tensor: torch.Tensor, local: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A DTensor of global ``shape``, spread like ``tensor``, whose part on this rank is ``local``; ``local`` itself if
    ``tensor`` is no DTensor.

    Without it, there is ``DTensor.from_local``, which makes a view of ``local`` (torchao's states lose their dtype there), and
    moves it to the device of the mesh.
    """
    if not isinstance(tensor, DTensor):
        return local
    like = DTensor.from_local(
        *(torch.empty(local.shape, dtype=local.dtype, device="meta"), tensor.device_mesh, tensor.placements),
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
        run_check=False,
    )
    return DTensor(local, like._spec, requires_grad=False)


def stand_in(
    shape: Sequence[int], dtype: torch.dtype, ranks: Sequence[int], device_type: str, *, requires_grad: bool
) -> DTensor:
    """A DTensor on a mesh of other ranks, which has no elements here. The mesh has no process groups, so nothing can run on it.

    torch 2.9-2.14: ``DeviceMesh`` takes ``_init_backend``. Without it, every rank would have to make a process group for each set of ranks.
    """
    spec = _spec_without_groups(torch.Size(shape), dtype, tuple(ranks), device_type)
    here = torch.empty((0,) * max(1, len(shape)), dtype=dtype, device=device_type)
    return DTensor(here, spec, requires_grad=requires_grad)


@lru_cache(maxsize=1024)  # thousands of tensors share one; to make it takes most of the time
def _spec_without_groups(
    shape: torch.Size, dtype: torch.dtype, ranks: tuple[int, ...], device_type: str
) -> Any:
    with torch.device("cpu"):  # the caller may be in another device's context
        mesh = DeviceMesh(device_type, torch.tensor(ranks), _init_backend=False)
    # DTensor.from_local would take the shape () as not given.
    strides = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, (Replicate(),), TensorMeta(shape, strides, dtype))


@contextmanager
def swappable_weights(modules: Collection[nn.Module]) -> Iterator[None]:
    """Inside, ``torch.utils.swap_tensors`` takes the weights of ``nn.LSTM`` and the like among ``modules``, and those under ``weight_norm``.

    The former keep weak references to their weights, which ``swap_tensors`` refuses; they make new ones at the end. The old
    ``weight_norm`` and ``spectral_norm`` keep a weight that is computed from parameters, whose graph refers to them; it has no values
    on meta, and each forward computes it again. Without it, models with such modules could not leave meta.
    """
    _cut_from_graph(modules)
    rnns = [m for m in modules if isinstance(m, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []
    yield
    for rnn in rnns:
        rnn._init_flat_weights()


def _cut_from_graph(modules: Iterable[nn.Module]) -> None:
    """Detach the tensors on meta that modules have as attributes and that were computed from parameters."""
    for module in modules:
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, torch.Tensor) and value.is_meta and value.grad_fn is not None:
                attributes[name] = value.detach()


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of torch's optimizers, schedulers and scalers that torch keeps private. torch 2.12-2.14.


def keeps_flat_history(optimizer: Optimizer) -> bool:
    """Whether an optimizer is LBFGS, or made like it: its state is one flat tensor over all parameters.

    torch 2.12-2.14: copies of it that don't derive from it are told by ``_numel_cache``, which it has after its first
    step. Without it, history would be stored under the name of the first parameter.
    """
    is_named_so = isinstance(optimizer, torch.optim.LBFGS) or type(optimizer).__name__ == "LBFGS"
    return is_named_so or getattr(optimizer, "_numel_cache", None) is not None


def scaler_stages(scaler: Any) -> set[str]:
    """How far the optimizers of a ``torch.amp.GradScaler`` are in a step: ``READY``, ``UNSCALED``, ``STEPPED``.

    torch 2.12-2.14: empty after ``update``. Without it, a save between ``unscale_`` and ``step`` would resume with
    gradients that are scaled down twice.
    """
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    return {state["stage"].name for state in states if "stage" in state}


def inner_by_torch(scheduler: Any) -> Sequence[Any]:
    """The schedulers in a ``SequentialLR`` or ``ChainedScheduler``; none of any other one.

    torch 2.12-2.14. Without it, a state for another number of them would be taken, and fail in a later step.
    """
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


def scale_function(scheduler: Any) -> Any | None:
    """The function that was given to a ``CyclicLR`` as ``scale_fn``, which its state is without; else None.

    torch 2.12-2.14. Without it, both reports would be silent about a function that the program has to give again.
    """
    return getattr(scheduler, "_scale_fn_custom", None)
