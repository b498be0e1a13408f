"""Samplers that can draw the order of an epoch again, which a position inside an epoch needs.

An order is a function of the random states that it was drawn from. Accelerate's loaders keep none of them, so a
:class:`RecordedSampler` wraps the sampler of each prepared loader and notes them when an epoch begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from ..objects import frozen
from ..rng import capture_host_rng, preserve_rng, restore_rng
from ..state.beyond import same

__all__ = [
    "Order",
    "RecordedSampler",
    "can_draw_again",
    "innermost",
    "record",
    "seen_to_draw",
    "start_that_leads_to",
]

#: Samplers of torch that draw from global generators only before their first sample, if at all.
_AT_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_END: Any = object()


@frozen
class Order:
    """The order of one epoch, to be drawn again."""

    start: dict[str, Any]
    """The random states that it was drawn from: the process's ``rng``, the sampler's ``generator``. Each may be None."""
    is_due: Callable[[], bool]
    """Whether the beginning epoch is the one of this order."""
    finish: Callable[[], None]
    """Called once the order is drawn: restores generators to their states in the stored position."""


class RecordedSampler(Sampler[Any]):
    """Wraps a sampler: gives its samples in its order, and notes the random states that the order was drawn from.

    To ``isinstance`` it is the wrapped sampler, because Accelerate checks the type of a loader's sampler.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.start: dict[str, Any] | None = None
        """The random states from which the order of the present epoch was drawn; None before the first one."""
        self.dataset_draws: bool | None = None
        """Whether fetching a batch drew from the global generators of this process; None: not known yet."""
        self.again: Order | None = None
        """The order that the next epoch repeats."""
        self.per_batch = 1
        """Number of samples that this rank's loader requests before it fetches a batch."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.sampler)

    @property
    def generator(self) -> Any:
        """The wrapped sampler's. Accelerate gives one to a sampler without."""
        return self.sampler.generator

    @generator.setter
    def generator(self, generator: torch.Generator) -> None:
        self.sampler.generator = generator

    def __iter__(self) -> Iterator[Any]:
        again, self.again = self.again, None
        if again is not None and again.is_due():
            self.start = again.start
            with preserve_rng():
                self._set(again.start)
                samples = iter(self.sampler)
                first = next(samples, _END)
            again.finish()
        else:
            self.start = {"rng": capture_host_rng(), "generator": self._own_state()}
            samples = iter(self.sampler)
            first = next(samples, _END)
        if first is not _END:
            yield from self._watched(itertools.chain((first,), samples))

    def _watched(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Watch the first two batches, fetched at once: only the dataset can move generators between them."""
        before = capture_host_rng()
        yield from itertools.islice(samples, self.per_batch)
        self.dataset_draws = bool(self.dataset_draws) or not same(before, capture_host_rng())
        yield from samples

    def _own_state(self) -> torch.Tensor | None:
        own = getattr(self.sampler, "generator", None)
        return own.get_state() if isinstance(own, torch.Generator) else None

    def _set(self, start: dict[str, Any]) -> None:
        if start["rng"] is not None:
            restore_rng(start["rng"])
        own = getattr(self.sampler, "generator", None)
        if start["generator"] is not None and isinstance(own, torch.Generator):
            own.set_state(start["generator"])


def record(loader: Any) -> RecordedSampler | None:
    """Wrap the sampler of a loader in a recorder, once; None without a sampler of torch's form. Draws nothing.

    A running epoch goes on with the bare sampler. The first epoch runs already when Accelerate has prepared a stateful
    loader with workers: torchdata starts them, and draws the order, at the first question for a state. So a loader is
    recorded before it is prepared, and again afterwards: Accelerate may have put another sampler in.
    """
    batches, outer = innermost(loader), loader.batch_sampler
    keeps_state = type(batches).__module__.startswith("torchdata.") and batches is outer
    if isinstance(loader.dataset, IterableDataset) or not _is_plain(batches) or keeps_state:
        return None
    if type(batches.sampler) is not RecordedSampler:
        batches.sampler = RecordedSampler(batches.sampler)
    found: RecordedSampler = batches.sampler
    shards = 1 if getattr(outer, "split_batches", False) else getattr(outer, "num_processes", 1)
    found.per_batch = int(batches.batch_size or 1) * shards
    return found


def innermost(loader: Any) -> Any:
    """The object that chooses batches, under Accelerate's own wrappers."""
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(found, "batch_sampler", None)) is not None:
        found = inner
    return found


def can_draw_again(sampler: Any) -> bool:
    """Whether a sampler is known to repeat its order: it draws only before its first sample, or has its own generator."""
    return type(sampler) in _AT_ONCE or isinstance(getattr(sampler, "generator", None), torch.Generator)


def seen_to_draw(loader: Any) -> bool:
    """Whether making a batch of the first sample draws from the global generators, or fails. Restores generators."""
    with preserve_rng():
        before = capture_host_rng()
        try:
            loader.collate_fn([loader.dataset[0]])
        except Exception:  # a dataset with other keys: nothing is known
            return True
        return not same(before, capture_host_rng())


def _is_plain(batches: Any) -> bool:
    return isinstance(batches, BatchSampler) and type(batches).__module__.startswith(("torch.", "torchdata."))


def start_that_leads_to(loader: Any, sampler: Any, end: Any) -> dict[str, Any] | None:
    """The present state of a sampler's generator, if drawing an order from it ends in ``end``; otherwise None.

    A script that seeds before it makes its loader begins with the generator of the stored run. For torch's random
    samplers without replacement, which draw the order at once, and once more at its end. Costs one permutation.

    None for loaders with workers: these have been asked for samples before this process trained, and may have been
    asked for the last one when the position was stored. Another order then ends in the same state.
    """
    if loader.num_workers:
        return None
    own = getattr(sampler, "generator", None)
    if type(sampler) is not RandomSampler or sampler.replacement or not isinstance(own, torch.Generator):
        return None
    start = own.get_state()
    next(iter(sampler), None)
    is_same = isinstance(end, torch.Tensor) and torch.equal(own.get_state(), end)
    own.set_state(start)
    return {"rng": None, "generator": start} if is_same else None
