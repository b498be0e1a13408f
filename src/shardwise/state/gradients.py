"""Gradients that wait for an optimizer step: they belong to the state while an accumulation is not finished.

Which ones wait can't be seen from a gradient itself: many loops clear gradients at the start of the next step, and
save before. So each optimizer of a :class:`TrainState` gets a hook that notes, after every step, the gradients that
it used and their versions. A gradient that is another one, or was changed since, waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._compat import fsdp_unreduced_ids
from ..errors import StateError
from ..layout.model import local_tensor
from ..names import named_tensors

__all__ = [
    "GRADIENT",
    "bare_optimizer",
    "clear_gradients",
    "place_gradients",
    "refuse_unreduced",
    "waiting_gradients",
    "watch_steps",
]

#: Under this key a gradient is stored beside the optimizer states of its parameter.
GRADIENT = "__grad__"

#: By optimizer, and by id of each gradient that its last step used: the gradient, and its version then. An id alone
#: would not do: the next gradient of a parameter often lies at the address of the last one.
_USED: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[weakref.ref[torch.Tensor], int]]] = (
    weakref.WeakKeyDictionary()
)


def watch_steps(optimizer: Optimizer) -> None:
    """Note from now on which gradients each step uses; once per optimizer, however often it is called.

    Of an optimizer that takes no hooks, every gradient counts as waiting: stored without need, but never lost.
    """
    inner = bare_optimizer(optimizer)
    if inner not in _USED and hasattr(inner, "_optimizer_step_post_hooks"):
        inner.register_step_post_hook(_note_used)
        _USED[inner] = {}


def _note_used(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _USED[optimizer] = {id(g): (weakref.ref(g), _version(g)) for _, g in _gradients(optimizer)}


def waiting_gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The gradients that no step of ``optimizer`` has used as they are, with their parameters.

    What changes a gradient behind the back of torch's version counter (``.data``, the replay of a CUDA graph) is not
    seen.
    """
    used = _USED.get(bare_optimizer(optimizer), {})
    for parameter, gradient in _gradients(optimizer):
        reference, version = used.get(id(gradient), (None, -1))
        if reference is None or reference() is not gradient or version != _version(gradient):
            yield parameter, gradient


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters. Others (of frozen parameters, say) are left alone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def place_gradients(
    optimizer: Optimizer, names: Mapping[int, str], stored: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Give parameters their stored gradients, as they are, or in the dtype that a parameter now takes.

    0-d ones may be plain tensors of a parameter that is none. Returns what was changed in dtype, one line each.
    """
    differences = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            gradient = stored.get(name)
            if gradient is None:
                continue
            wanted = getattr(parameter, "grad_dtype", parameter.dtype)  # None: any
            if wanted is not None and gradient.dtype != wanted:
                differences.append(f"gradient of {name}: saved {gradient.dtype}, now {wanted}")
                gradient = gradient.to(wanted)
            if not parameter.dim():
                whole = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).detach()
                local_tensor(whole).copy_(gradient)
                gradient = whole
            parameter.grad = gradient
    return tuple(differences)


def refuse_unreduced(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise :class:`StateError` if FSDP2 holds gradients of the optimizer's parameters that it has yet to reduce.

    They are of whole parameters, differ between ranks, and lie in FSDP2's own memory.
    """
    held = fsdp_unreduced_ids(model)
    if not held:
        return
    optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [t.name for t in named_tensors(model) if id(t.tensor) in held & optimised]
    if found:
        raise StateError(
            f"FSDP2 holds gradients of {len(found)} parameters ({', '.join(found[:3])}) that are not reduced yet, from a "
            f"backward without gradient sync: they can be neither stored nor overwritten. Save and "
            f"resume after the optimizer's step, or leave set_requires_gradient_sync on in every "
            f"backward of the accumulation: then its gradients belong to the state"
        )


def _gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                yield parameter, gradient


def _version(gradient: torch.Tensor) -> int:
    """A DTensor's own version never changes."""
    return local_tensor(gradient)._version


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose step is really called: Accelerate's wrapper has it as ``optimizer``."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
