"""Bytes that a training step sends over the network: what each rank receives, and what each host receives from other hosts.

Collectives over ranks are taken to be rings: of a tensor that ``n`` ranks gather or reduce, each rank receives ``(n - 1) / n``, and so
does each host that has a part of the ring, for each ring that leaves it. An all-reduce is both, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..objects import frozen
from .activations import Step
from .exchange import Sent
from .groups import StepGroup
from .measure import alike
from .records import Flow
from .variant import Variant

__all__ = ["flows_of"]


@frozen
class _Axis:
    """Groups of ``size`` ranks, ``stride`` ranks apart, on hosts of ``per_host`` ranks."""

    size: int
    stride: int
    per_host: int

    @property
    def rings_leaving(self) -> int:
        """Rings that a host is a part of, and that leave it."""
        if self.size * self.stride <= self.per_host and self.per_host % (self.size * self.stride) == 0:
            return 0  # each group lies on one host
        on_host = max(1, -(-self.per_host // self.stride))
        return -(-self.per_host // min(on_host, self.size)) if self.size > 1 else 0

    def around(self, nbytes: float) -> tuple[float, float]:
        """What a rank and a host receive when tensors of so many bytes go around the ring once."""
        each = nbytes * (self.size - 1) / self.size
        return each, each * self.rings_leaving

    def exchanged(self, nbytes: float) -> tuple[float, float]:
        """The same for an all-to-all, in which a rank receives so many bytes, evenly from all, itself included."""
        near = self.size if not self.rings_leaving else min(self.size, max(1, self.per_host // self.stride))
        return nbytes * (self.size - 1) / self.size, nbytes * (self.size - near) / self.size * self.per_host


def flows_of(step: Step, variant: Variant, sent: Sequence[Sent], itemsize: int) -> tuple[Flow, ...]:
    """The bytes of a step, by purpose. ``sent``: of the run; ``itemsize``: bytes of an element of its activations."""
    per_host, replicas = min(variant.ranks_per_host, variant.ranks), variant.replicas
    dense = _Axis(variant.shards, variant.tp, per_host)
    experts = _Axis(variant.expert_shards, variant.ep, per_host) if variant.ep > 1 else dense
    copies = _Axis(replicas, variant.ranks // replicas, per_host)
    found: dict[str, tuple[float, float]] = {}

    def add(what: str, flow: tuple[float, float]) -> None:
        before = found.get(what, (0.0, 0.0))
        found[what] = before[0] + flow[0], before[1] + flow[1]

    for group in (g for g in step.groups if g.index in step.called):
        axis = experts if group.own_shards is not None else dense
        add(_GATHER, axis.around(group.gathered_bytes * (2 if group.path else 1)))
        add(_REDUCE, axis.around(group.reduced_bytes))
        add(_COPIES, copies.around(2 * group.reduced_bytes / axis.size))
    times = _times(step.groups)
    for one in sent:
        nbytes = one.elements * max(itemsize, one.dtype.itemsize) * times(one.path)
        if one.kind == "all-to-all":
            add(_TOKENS, _Axis(variant.ep, 1, per_host).exchanged(nbytes))
        else:
            add(_TP, _Axis(variant.tp, 1, per_host).around(nbytes * (2 if one.kind == "all-reduce" else 1)))
    return tuple(
        Flow(what, round(rank), round(host), _FORMULAS[what]) for what, (rank, host) in found.items() if rank
    )


_GATHER, _REDUCE, _COPIES, _TP, _TOKENS = (
    "FSDP all-gathers",
    "FSDP reduce-scatters",
    "all-reduces across replicas",
    "tensor parallelism",
    "tokens to experts",
)
_FORMULAS: Mapping[str, str] = {
    _GATHER: "gathered bytes of each group, in forward and backward (the root once), x (shards - 1) / shards",
    _REDUCE: "gradients of each group in the dtype of the reduction, x (shards - 1) / shards",
    _COPIES: "a rank's part of the gradients x 2 x (replicas - 1) / replicas",
    _TP: "all-reduces (twice) and all-gathers of activations and their gradients, as the model's plan has them, x (tp - 1) / tp",
    _TOKENS: "tokens x experts of each, there and back, in forward and backward, x (ep - 1) / ep; experts get equally many",
}


def _times(groups: Sequence[StepGroup]) -> Callable[[str], int]:
    """How many blocks a module's block stands for: of blocks that are alike, one ran."""
    first = alike(groups)
    paths = {f"{groups[rep].path}.": sum(r == rep for r in first.values()) for rep in set(first.values())}
    return lambda path: next((n for start, n in paths.items() if path.startswith(start)), 1)
