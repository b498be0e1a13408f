"""Gradients that wait for an optimizer step: they are part of the state during an accumulation.

A gradient does not show whether it waits: many loops save first, and clear gradients at the start of the next step.
So each optimizer of a :class:`TrainState` gets a hook that notes, after every step, the gradients that it used and
their versions. A new or changed gradient waits. Both mistakes would be silent: losing a waiting gradient, and
restoring a used one, which a loop that clears after saving would use again. Gradients from before the hook are
unknown: the save then says so, and the restore does not call itself exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import StateError
from ..format.manifest import GRADIENT
from ..internals.fsdp import fsdp_unreduced_ids
from ..internals.torch import version_of
from ..layout.live import LiveModel
from ..layout.model import local_tensor
from ..objects import frozen

__all__ = [
    "GRADIENT",
    "UNSEEN_GRADIENTS",
    "bare_optimizer",
    "clear_gradients",
    "has_unseen_gradients",
    "place_gradients",
    "refuse_unreduced",
    "waiting_gradients",
    "watch_steps",
]

UNSEEN_GRADIENTS = "gradients from before the first TrainState (it is not known whether a step has used them)"


@frozen
class _Mark:
    """A gradient after the step that used it, or one from before the hook was set."""

    gradient: weakref.ref[torch.Tensor]
    """An id alone is not enough: a parameter's next gradient often has the address of the last one."""
    versions: tuple[int, int]
    is_used: bool


#: By optimizer, and by id of the gradient.
_MARKS: weakref.WeakKeyDictionary[Optimizer, dict[int, _Mark]] = weakref.WeakKeyDictionary()


def watch_steps(optimizer: Optimizer) -> None:
    """Note the gradients that each later step uses. Further calls for the same optimizer do nothing."""
    inner = bare_optimizer(optimizer)
    if inner in _MARKS:
        return
    try:
        inner.register_step_post_hook(_note_used)
    except AttributeError:  # its class leaves out torch's constructor, and takes no hooks
        return
    _mark(inner, is_used=False)


def _note_used(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _mark(optimizer, is_used=True)


def _mark(optimizer: Optimizer, *, is_used: bool) -> None:
    _MARKS[optimizer] = {
        id(g): _Mark(weakref.ref(g), _versions(g), is_used) for _, g in _gradients(optimizer)
    }


def waiting_gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The gradients, with their parameters, that no step of ``optimizer`` has used in their present version.

    Skips gradients whose use is unknown (:func:`has_unseen_gradients`). Does not see changes that bypass torch's
    version counters: ``.data``, the replay of a CUDA graph, ``torch._foreach`` functions on DTensors.
    """
    for parameter, gradient in _gradients(optimizer):
        if _is_waiting(optimizer, gradient):
            yield parameter, gradient


def has_unseen_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients existed before :func:`watch_steps` and no step has run since."""
    return any(_is_waiting(optimizer, gradient) is None for _, gradient in _gradients(optimizer))


def _is_waiting(optimizer: Optimizer, gradient: torch.Tensor) -> bool | None:
    marks = _MARKS.get(bare_optimizer(optimizer))
    if marks is None:  # an optimizer that takes no hooks
        return None
    mark = marks.get(id(gradient))
    if mark is None or mark.gradient() is not gradient:
        return True
    return mark.versions != _versions(gradient) if mark.is_used else None


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop the gradients of an optimizer's parameters, and no other gradients (such as those of frozen parameters)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def place_gradients(
    optimizer: Optimizer, names: Mapping[int, str], stored: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Give parameters their stored gradients, cast if a parameter now takes another dtype.

    0-d gradients may be plain tensors although the parameter is a DTensor. Returns one line for each cast.
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
                differences.append(f"gradient of {name}: {gradient.dtype} when saved, {wanted} now")
                gradient = gradient.to(wanted)
            if not parameter.dim():
                whole = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).detach()
                local_tensor(whole).copy_(gradient)
                gradient = whole
            parameter.grad = gradient
    return tuple(differences)


def refuse_unreduced(optimizer: Optimizer, live: LiveModel) -> None:
    """Raise :class:`StateError` if FSDP2 holds gradients of the optimizer's parameters that it has yet to reduce.

    These gradients are whole, differ between ranks, and lie in FSDP2's own memory.
    """
    held = fsdp_unreduced_ids(live.fsdp_modules)
    if not held:
        return
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [t.name for t in live.tensors if id(t.tensor) in held & optimized]
    if found:
        raise StateError(
            f"FSDP2 has not reduced the gradients of {len(found)} parameters yet ({', '.join(found[:3])}), because of a "
            f"backward without gradient sync: they can be neither stored nor overwritten. Save and "
            f"resume after the optimizer's step, or leave set_requires_gradient_sync on in every "
            f"backward of the accumulation: then its gradients are part of the state"
        )


def _gradients(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                yield parameter, gradient


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """A DTensor has two counts: its own, and that of its local tensor, which FSDP2 writes to."""
    return version_of(gradient), version_of(local_tensor(gradient))


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's wrapper (its ``optimizer``), or the optimizer itself."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
