"""Whether a run fits into the memory there is, and which changes make it fit, the cheapest first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

from ..errors import ShardwiseError
from ..objects import frozen
from .records import RunPlan
from .variant import Variant

__all__ = [
    "Change",
    "Limits",
    "Need",
    "Search",
    "Tried",
    "Variant",
    "Verdict",
    "smallest_ranks",
    "verdict_of",
]

#: Devices of a host, where nothing says otherwise: more ranks than that are whole hosts.
RANKS_PER_HOST = 8
#: Numbers of ranks that are tried, as clusters are rented: parts of a host, and 2^n or 3 * 2^n hosts.
_SIZES = (1, 2, 4, *sorted(RANKS_PER_HOST * n for k in range(10) for n in {2**k, 3 * 2**k}))
#: So many changes that make it fit are shown.
_MOST_CHANGES = 3
_RANK_OF_LORA = 16
#: A number of ranks takes less than promised if it takes at most this part of it.
_LESS = 0.98
#: Amounts of a device that do not depend on the number of ranks.
_SAME = ("activations", "context", "buffers")


@frozen
class Limits:
    """The memory there is; None: not asked for."""

    device_bytes: int | None
    """Of one device."""
    host_bytes: int | None
    """Of one host."""


@frozen
class Need:
    """A phase that needs more than there is."""

    phase: str
    where: Literal["device", "host"]
    needed_bytes: int
    """At the upper end of the error bar."""
    limit_bytes: int
    largest: str
    """The amount that takes most."""


@frozen
class Change:
    """A change with which the run fits: it was planned with it."""

    what: str
    device_bytes: int
    host_bytes: int


@frozen
class Verdict:
    """Whether a run fits. At the upper ends of error bars, so that "fits" is not too optimistic."""

    outcome: Literal["fits", "fits if", "does not fit"]
    binds: tuple[Need, ...]
    """The phases that do not fit, the one that lacks most first."""
    changes: tuple[Change, ...]
    """The cheapest first."""


@frozen
class Tried:
    """A number of ranks that was planned."""

    ranks: int
    device_bytes: int
    """Of one device, in the phase that takes most, at the upper end of the error bar."""
    binds: tuple[Need, ...]
    """The phases that do not fit; empty if the run does."""


@frozen
class Search:
    """How many ranks a run needs."""

    ranks: int | None
    """The smallest number that fits; None if none does."""
    tried: tuple[Tried, ...]
    """By the number of ranks."""
    change: str | None = None
    """What had to change, because no number of ranks fits without it."""
    unchanged: Need | None = None
    """What does not fit without that change, whatever the number of ranks."""

    @property
    def below(self) -> Tried | None:
        """The largest number that was tried and does not fit."""
        return max((one for one in self.tried if one.binds), key=lambda one: one.ranks, default=None)


def smallest_ranks(plan: Callable[[int], RunPlan], limits: Limits, *, unit: int) -> Search:
    """The smallest number of ranks with which a run fits: 1, 2, 4, or 1, 2, 3, 4, 6, 8, 12, ... hosts of 8; a multiple of ``unit``.

    ``plan`` plans the run with a number of ranks. Most of a device's memory is a part that every rank has, and shards: a + b / ranks.
    So two numbers say where to look, and the neighbors are planned to be sure. Experts are padded to a multiple of the ranks, so that
    two numbers can promise too little: the next larger one is tried, too, and those after it as long as they take less than promised.
    """
    assert limits.device_bytes is not None
    sizes = [n for n in _SIZES if n % unit == 0] or [unit]
    tried: dict[int, Tried] = {}
    promised = math.inf
    low, high = -1, len(sizes)  # that of low does not fit, that of high does
    index = min(bisect_left(sizes, RANKS_PER_HOST), len(sizes) - 1)
    while high - low > 1:
        run = plan(sizes[index])
        one = tried[sizes[index]] = Tried(sizes[index], run.device_bytes, _binding(run, limits))
        low, high = (index, high) if one.binds else (low, index)
        known = sorted(tried.values(), key=lambda tried: tried.ranks)[-2:]
        if len(known) < 2:
            index = bisect_left(sizes, 8 * one.ranks) if one.binds else 0
        else:
            (n, most), (m, least) = ((one.ranks, one.device_bytes) for one in known)
            shards = (most - least) / (1 / n - 1 / m)
            rest = least - shards / m
            if rest < limits.device_bytes:
                index = bisect_left(sizes, shards / (limits.device_bytes - rest))
            elif high < len(sizes):
                index = bisect_left(sizes, m)
            elif least > promised or _same_on_every_rank(run) > limits.device_bytes:
                break  # no number of ranks makes that less
            else:
                index = low + 1
                promised = _LESS * (rest + shards / sizes[min(index, len(sizes) - 1)])
        index = min(max(index, low + 1), high - 1)
    found = sizes[high] if high < len(sizes) else None
    return Search(found, tuple(tried[n] for n in sorted(tried)))


def _same_on_every_rank(run: RunPlan) -> int:
    """Bytes of a device that no number of ranks makes less, in the phase that has most of them."""
    return max(
        sum(a.upper_bytes for a in p.amounts if a.where == "device" and a.what in _SAME) for p in run.phases
    )


def verdict_of(run: RunPlan, limits: Limits, asked: Variant, plan: Callable[[Variant], RunPlan]) -> Verdict:
    """Compare ``run`` with ``limits``. If it does not fit, ``plan`` the changes of ``asked``, from the cheapest on."""
    binds = _binding(run, limits)
    if not binds:
        return Verdict("fits", (), ())
    changes: list[Change] = []
    for what, variant in _changes(asked):
        if changes and "batch size" in what and "batch size" in changes[-1].what:
            continue  # a larger batch fits
        try:
            changed = plan(variant)
        except (ShardwiseError, ValueError):  # this model can't be changed so
            continue
        if not _binding(changed, limits):
            changes.append(Change(what, changed.device_bytes, changed.host_bytes))
        if len(changes) == _MOST_CHANGES:
            break
    return Verdict("fits if" if changes else "does not fit", binds, tuple(changes))


def _binding(run: RunPlan, limits: Limits) -> tuple[Need, ...]:
    found: list[Need] = []
    for phase in run.phases:
        device, host = run.needed(phase)
        for where, needed, limit in (
            ("device", device, limits.device_bytes),
            ("host", host, limits.host_bytes),
        ):
            if limit is not None and needed > limit:
                places = ("device", "host") if run.is_unified else (where,)
                largest = max((a for a in phase.amounts if a.where in places), key=lambda a: a.upper_bytes)
                found.append(Need(phase.name, where, needed, limit, largest.what))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda need: need.limit_bytes / need.needed_bytes))


def _changes(asked: Variant) -> Iterator[tuple[str, Variant]]:
    """Changes by their price: time of a step, other results, more machines, another method."""
    training = asked.training
    leaner, named = asked, ""
    if not training.checkpointing:
        leaner = replace(asked, training=replace(training, checkpointing=True))
        named = "activation checkpointing"
        yield named, leaner
    batch = training.batch_size
    while batch > 1:
        batch //= 2
        what = f"batch size {batch} with gradient accumulation"
        smaller = replace(leaner, training=replace(leaner.training, batch_size=batch))
        yield _and(named, what), smaller
    if training.batch_size > 1:
        leaner, named = smaller, _and(named, "batch size 1 with gradient accumulation")
    if training.optimizer == "adamw":
        what = "an 8-bit AdamW (torchao)"
        yield what, replace(asked, training=replace(training, optimizer="adamw8bit"))
        if named:
            eight = replace(leaner, training=replace(leaner.training, optimizer="adamw8bit"))
            yield _and(named, what), eight
    if not asked.policy.cpu_offload and training.device == "cuda":
        offloaded = replace(leaner, policy=replace(leaner.policy, cpu_offload=True))
        yield _and(named, "offload to the host (ShardPolicy(cpu_offload=True))"), offloaded
    for times in (2, 4, 8):
        yield (
            _and(named, f"{times * asked.ranks} ranks, {asked.ranks_per_host} on each host"),
            replace(leaner, ranks=times * asked.ranks),
        )
    if asked.adapter is None and find_spec("peft") is not None:
        yield (
            _and(named, f"LoRA of rank {_RANK_OF_LORA} on all linear layers"),
            replace(leaner, adapter=_lora()),
        )


def _and(first: str, second: str) -> str:
    return f"{first}, {second}" if first else second


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=_RANK_OF_LORA, target_modules="all-linear", task_type="CAUSAL_LM")
