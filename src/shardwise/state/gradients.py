"""Gradients that wait for an optimizer step: they belong to the state while an accumulation is not finished.

Which ones wait can't be seen from a gradient itself: many loops clear gradients at the start of the next step, and
save before. So each optimizer of a :class:`TrainState` gets a hook that notes, after every step, the gradients that
it used and their versions. A gradient that is another one, or was changed since, waits. Both mistakes would be silent: a
gradient that is lost, and a used one that comes back and is used again by a loop that clears after saving. Where nobody
saw it, the save says so, and the resume does not call itself exact.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

UNSEEN_GRADIENTS = (
    "gradients that were there before the first TrainState, of which nobody saw whether a step had used them"
)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A gradient that was there after a step, which used it, or before anybody watched the steps."""

    gradient: weakref.ref[torch.Tensor]
    """An id alone would not do: the next gradient of a parameter often lies at the address of the last one."""
    versions: tuple[int, int]
    is_used: bool


#: By optimizer, and by id of the gradient.
_MARKS: weakref.WeakKeyDictionary[Optimizer, dict[int, _Mark]] = weakref.WeakKeyDictionary()


def watch_steps(optimizer: Optimizer) -> None:
    """Note from now on which gradients each step uses; once per optimizer, however often it is called."""
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
    """The gradients that no step of ``optimizer`` has used as they are, with their parameters.

    Left out are those of which nobody can tell (:func:`has_unseen_gradients`). What changes a used gradient behind the
    back of torch's version counters is not seen: ``.data``, the replay of a CUDA graph, ``torch._foreach`` functions
    given DTensors.
    """
    for parameter, gradient in _gradients(optimizer):
        if _is_waiting(optimizer, gradient):
            yield parameter, gradient


def has_unseen_gradients(optimizer: Optimizer) -> bool:
    """Whether gradients were there before :func:`watch_steps`, and no step has come since."""
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


def refuse_unreduced(optimizer: Optimizer, live: LiveModel) -> None:
    """Raise :class:`StateError` if FSDP2 holds gradients of the optimizer's parameters that it has yet to reduce.

    They are of whole parameters, differ between ranks, and lie in FSDP2's own memory.
    """
    held = fsdp_unreduced_ids(live.fsdp_modules)
    if not held:
        return
    optimised = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [t.name for t in live.tensors if id(t.tensor) in held & optimised]
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


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """Of a DTensor: what is done to it counts on itself, what FSDP2 does to its local tensor counts there."""
    return version_of(gradient), version_of(local_tensor(gradient))


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose step is really called: Accelerate's wrapper has it as ``optimizer``."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
