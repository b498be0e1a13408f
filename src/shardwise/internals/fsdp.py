"""What shardwise uses of FSDP2's own objects: the parameter groups that ``fully_shard`` keeps, and their shards. torch 2.9-2.14."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard, overload
from weakref import getweakrefs

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..objects import frozen
from .torch import original_class


@frozen
class FsdpGroup:
    """One parameter group of FSDP2: its settings, and what it runs last in every backward.

    torch 2.12-2.14: ``FSDPParamGroup``. Without it, parameters that FSDP2 can't shard would train apart on each rank.
    """

    group: Any

    @property
    def all_reduces(self) -> bool:
        """Whether gradients are reduced over the replicas of HSDP, too (``set_requires_all_reduce``)."""
        return bool(self.group.all_reduce_grads)

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced in this backward (``set_requires_gradient_sync``)."""
        return bool(self.group.reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """By what sums of gradients are divided, if the caller said so (``set_gradient_divide_factor``)."""
        factor: float | None = self.group.gradient_divide_factor
        return factor

    @property
    def finalizer(self) -> Callable[[], None]:
        """What the group runs last in every backward, on every rank that ran one: FSDP2's method, or its stand-in."""
        found: Callable[[], None] = self.group.finalize_backward
        return found

    def finalize_with(self, finalizer: Callable[[], None]) -> None:
        """Run ``finalizer`` instead of the group's ``finalize_backward``, which it has to call itself.

        An attribute of this one object is assigned; FSDP2's class and module stay as they are. FSDP2 has no public
        place after the last reduction of a backward: a hook on a parameter is lost when the parameter is swapped, and
        hangs where one rank's loss did not use it; one on a module runs before the gradients of its inputs are there.
        """
        self.group.finalize_backward = finalizer


def fsdp_groups(module: object) -> list[FsdpGroup]:
    """The parameter groups of one module that ``fully_shard`` was called on; none of any other module.

    torch 2.9-2.14: up to 2.12 one in the module's state, from 2.13 a list. Without it, parameters that FSDP2
    can't shard would train apart on each rank, and a save would not see gradients that wait for their reduction.
    """
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [group] if group is not None else []
    return [FsdpGroup(group) for group in groups]


def precision_of(module: object) -> dict[str, str]:
    """The mixed precision of FSDP2 at one module, and the divisor of its gradients, as text, if they were set; else empty.

    torch 2.12-2.14: ``FSDPState._mp_policy``. Without it, a resume under another policy would be called exact.
    """
    if not isinstance(module, FSDPModule):
        return {}
    state: Any = module._get_fsdp_state()
    policy = state._mp_policy
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    found = {"mixed_precision": repr(policy)} if any(dtypes) else {}
    factors = {repr(g.divide_factor) for g in fsdp_groups(module) if g.divide_factor is not None}
    return found | ({"gradient_divide_factor": ", ".join(sorted(factors))} if factors else {})


def settings_of(module: FSDPModule) -> dict[str, Any]:
    """The arguments of ``fully_shard`` for a further module that is to be sharded as this one, whose output isn't cast.

    torch 2.9-2.14: in the module's state and its parameter group. Without it, modules that were added to a sharded model would be trained apart
    on each rank.
    """
    state: Any = module._get_fsdp_state()
    group = fsdp_groups(module)[0].group
    return {
        "mesh": group.mesh_info.mesh,
        "reshard_after_forward": group.post_forward_mesh_info is not None,
        "mp_policy": replace(state._mp_policy, output_dtype=None),
        "offload_policy": group.offload_policy,
    }


def has_run(module: FSDPModule) -> bool:
    """Whether the model around a module was called since it was sharded: FSDP2 takes no further modules then.

    torch 2.9-2.14: FSDP2 looks for its root in the first forward. Without it, modules added later would be roots of their own.
    """
    state: Any = module._get_fsdp_state()
    return state._is_root is not None


def fsdp_parameter_ids(modules: Iterable[FSDPModule]) -> set[int]:
    """ids of the parameters that ``fully_shard`` manages in ``modules`` (their ``_StridedShard`` means: TP cut first).

    torch 2.12-2.14 keep them in the parameter groups. Without it, uneven shards of FSDP2 over TP would be read and
    written at wrong rows.
    """
    return {id(p.sharded_param) for group in _all_groups(modules) for p in group.fsdp_params}


def fsdp_unreduced_ids(modules: Iterable[FSDPModule]) -> set[int]:
    """ids of the parameters in ``modules`` of which ``fully_shard`` keeps a gradient that it has not reduced yet.

    torch 2.12-2.14: the gradient of the whole parameter, or its sum in the reduce dtype, after a backward without
    gradient sync; of HSDP without all-reduce, one partial sum a group. Without it, a save in the middle of such an
    accumulation would lose them, silently.
    """
    found: set[int] = set()
    for group in _all_groups(modules):
        partial = getattr(group, "_partial_reduce_output", None) is not None
        for p in group.fsdp_params:
            whole = getattr(p, "_unsharded_param", None)  # before the first forward there is none
            summed = getattr(p, "unsharded_accumulated_grad", None) is not None
            if partial or summed or (whole is not None and whole.grad is not None):
                found.add(id(p.sharded_param))
    return found


def fsdp_gathered_ids(modules: Iterable[FSDPModule]) -> set[int]:
    """ids of the whole parameters that FSDP2 gathers for a forward pass. No optimizer may hold them.

    torch 2.9-2.14: each group's ``_unsharded_param``, which the root module has in place of its shards after a forward without gradients. Without
    it, an optimizer made then would train parameters that the model no longer reads, silently.
    """
    found = (
        getattr(p, "_unsharded_param", None) for group in _all_groups(modules) for p in group.fsdp_params
    )
    return {id(p) for p in found if p is not None}


def _all_groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """The groups of these modules, as FSDP2 has them."""
    return (one.group for module in modules for one in fsdp_groups(module))


class _Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._rows = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        start = min(index % self._count * self._rows, self._tensor.size(self._dim))
        length = min(self._rows, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length else self._tensor.new_empty(0)


@contextmanager
def lazy_chunks() -> Iterator[None]:
    """Let ``fully_shard`` make only the chunks of a parameter that it looks at.

    torch 2.12-2.14: ``_fsdp_param._chunk_with_empty``, which makes one for each rank and drops all but two. Replaced for the
    whole process, by what gives the same chunks. Without it, a plan of 1,024 ranks takes three times as long.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param
    own = module._chunk_with_empty
    module._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        module._chunk_with_empty = own


# ----------------------------------------------------------------------------------------------------
# Memory for shards on meta


def allocate_dtensors(
    modules: Sequence[nn.Module],
    waiting: Sequence[DTensor],
    empty_like: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Give DTensors of a model that are on meta memory: ``empty_like`` of each local tensor. Identity and ties survive.

    ``modules``: all modules of the model, its root first. ``waiting``: the distinct parameters on meta. FSDP2 re-pads its shards and
    keeps references to them: ``FSDPParam.reset_sharded_param``, which its own ``_apply`` calls. torch 2.9-2.14. Without it, there is
    ``to_empty``, which ruins tensors that are real already.

    Does what ``model._apply`` does, in a third of its time, and calls it for a model with an ``_apply`` of its own, a subclass of
    DTensor or gradients.
    """
    if not _are_ordinary(modules, waiting):
        modules[0]._apply(lambda t: _with_memory(t, empty_like) if _waits(t) else t)
        return
    for parameter in waiting:
        _exchange(parameter, _with_memory(parameter, empty_like, parameter.requires_grad))
    with torch.no_grad():
        for module in modules:
            if isinstance(module, FSDPModule):
                for one in fsdp_groups(module):
                    for shard in one.group.fsdp_params:
                        shard.reset_sharded_param()


def _waits(tensor: Any) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and tensor.is_meta


def _with_memory(
    tensor: DTensor, empty_like: Callable[[torch.Tensor], torch.Tensor], requires_grad: bool = False
) -> DTensor:
    """A DTensor as FSDP2 makes one itself: the dispatch of ``torch.empty_like`` costs more than the rest.

    Leaves out ``DTensor.__init__``: it does nothing, but torch's compiler wraps it, and the wrapper takes longer than the rest.
    """
    local, spec = empty_like(tensor._local_tensor), tensor._spec
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def _exchange(parameter: DTensor, made: DTensor) -> None:
    """Swap two DTensors with the same spec, as ``torch.utils.swap_tensors`` does. ``parameter`` keeps its attributes.

    torch 2.9-2.14: ``torch._C._swap_tensor_impl`` and ``Tensor._use_count``. The public function looks up the slots of both classes and
    makes an autograd node for each tensor, which costs more than the exchange. If anything else refers to the parameter, the public function is called.
    """
    count: Callable[[], int] = parameter._use_count  # type: ignore[attr-defined]
    if getweakrefs(parameter) or count() > 1:
        made.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, made)
        return
    parameter._local_tensor, made._local_tensor = made._local_tensor, parameter._local_tensor
    torch._C._swap_tensor_impl(parameter, made)


def _are_ordinary(modules: Sequence[nn.Module], waiting: Sequence[DTensor]) -> bool:
    """Whether ``_apply`` does nothing with the modules beside what :func:`allocate_dtensors` does."""
    by_class = {type(module): module for module in modules}
    return all(original_class(one)._apply is nn.Module._apply for one in by_class.values()) and not any(
        type(p) is not DTensor or p.grad is not None for p in waiting
    )
