"""What a rank holds through all phases: its parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import torch

from ..layout.live import LiveModel
from ..layout.model import local_tensor
from ..objects import frozen
from .training import OPTIMIZERS, TrainingSpec

__all__ = ["Held", "held_by_first"]

#: torchao quantizes states of tensors with at least this many elements, in blocks of this many (0.15-0.18).
_LEAST_8BIT, _BLOCK = 4096, 256


@frozen(kw_only=True)
class Held:
    """Bytes of rank 0, which holds most; and over all ranks with replicas once."""

    parameters: int
    pinned_parameters: int
    """The parameters in pinned memory: torch rounds each tensor up to a power of two."""
    buffers: int
    gradients: int
    optimizer: int
    unreached_gradients: int
    """Of gradients, and below of optimizer state: what belongs to parameters that text alone does not reach."""
    unreached_optimizer: int
    largest_trained: int
    """The largest trained parameter."""
    trained: int
    """Elements that are trained."""
    count: int
    """Parameters."""
    stored_model: int
    """Over all ranks: parameters and persistent buffers."""
    stored_optimizer: int
    optimizer_dtype: str


def held_by_first(
    live: LiveModel,
    training: TrainingSpec,
    reached: AbstractSet[str] | None = None,
    whole_gradients: Mapping[str, int] = MappingProxyType({}),
) -> Held:
    """What rank 0 of a sharded model on meta holds. FSDP2 pads shards to the size of those of rank 0.

    ``reached``: names of the parameters that get a gradient; None: all that are trained. ``whole_gradients``: how many times as
    large as a parameter its gradient stays, by name.
    """
    parameters = [t.tensor for t in live.parameters]
    missed = [
        local_tensor(t.tensor)
        for t in live.parameters
        if t.tensor.requires_grad and reached is not None and reached.isdisjoint(t.names)
    ]
    trained = [p for p in parameters if p.requires_grad]
    local = [local_tensor(p) for p in parameters]
    own = [local_tensor(p) for p in trained]
    return Held(
        parameters=sum(t.nbytes for t in local),
        pinned_parameters=sum(_power_of_two(t.nbytes) for t in local),
        buffers=sum(t.tensor.nbytes for t in live.tensors if t.kind != "parameter"),
        gradients=sum(
            local_tensor(t.tensor).nbytes * whole_gradients.get(t.name, 1)
            for t in live.parameters
            if t.tensor.requires_grad
        ),
        optimizer=sum(_states(t, training) for t in own),
        unreached_gradients=sum(t.nbytes for t in missed),
        unreached_optimizer=sum(_states(t, training) for t in missed),
        largest_trained=max((t.nbytes for t in own), default=0),
        trained=sum(t.numel() for t in own),
        count=len(parameters),
        stored_model=sum(t.tensor.numel() * t.tensor.dtype.itemsize for t in live.stored),
        stored_optimizer=sum(_states(p, training) for p in trained),
        optimizer_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained})),
    )


def _states(tensor: torch.Tensor, training: TrainingSpec) -> int:
    """Bytes of the optimizer's states of a tensor. AdamW's step is a number of 4 bytes."""
    count, bytes_each = OPTIMIZERS[training.optimizer]
    numel = tensor.numel()
    if bytes_each is None or numel < _LEAST_8BIT or numel % _BLOCK:
        bytes_each = tensor.dtype.itemsize
    steps = 4 if training.optimizer.startswith("adamw") else 0
    return int(count * numel * bytes_each) + steps


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
