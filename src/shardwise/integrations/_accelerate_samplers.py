"""Samplers that can draw the order of an epoch again: what a position inside of an epoch needs.

An order is a function of the random states that it was drawn from. Accelerate's loaders keep none of them, so the
sampler of each prepared loader is put behind a :class:`RecordedSampler`, which notes them when an epoch begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

#: Samplers of torch that draw from global generators before their first sample only, if at all.
_AT_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one epoch, to be drawn again."""

    start: dict[str, Any]
    """The random states that it was drawn from: ``rng`` of the process, ``generator`` of the sampler; each may be None."""
    is_due: Callable[[], bool]
    """Whether the epoch that begins is the one that this order belongs to."""
    finish: Callable[[], None]
    """Called once the order is drawn: puts generators where they were when the position was stored."""


class RecordedSampler(Sampler[Any]):
    """Another sampler, its samples in its order, with the random states that the order was drawn from.

    To ``isinstance`` it is what it stands for, because Accelerate looks at the kind of a loader's sampler.
    """

    def __init__(self, sampler: Any, per_batch: int) -> None:
        """``per_batch``: samples that this rank's loader asks for before it fetches a batch."""
        self.sampler = sampler
        self.start: dict[str, Any] | None = None
        """The random states from which the order of the present epoch was drawn; None before the first one."""
        self.dataset_draws: bool | None = None
        """Whether fetching a batch was seen to draw from the global generators of this process; None: not looked at."""
        self.again: Order | None = None
        """What the next epoch repeats."""
        self._per_batch = per_batch

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.sampler)

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
        """The loader fetches its first two batches at once: generators that move between them were moved by the dataset."""
        before = capture_host_rng()
        yield from itertools.islice(samples, self._per_batch)
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
    """Put the sampler of a loader that Accelerate prepared behind a recorder, once; None if it has none of torch's form.

    An epoch that is running already goes on with the bare sampler. Draws nothing.
    """
    batches, outer = innermost(loader), loader.batch_sampler
    keeps_state = type(batches).__module__.startswith("torchdata.") and batches is outer
    if isinstance(loader.dataset, IterableDataset) or not _is_plain(batches) or keeps_state:
        return None
    if type(batches.sampler) is not RecordedSampler:
        shards = 1 if getattr(outer, "split_batches", False) else getattr(outer, "num_processes", 1)
        batches.sampler = RecordedSampler(batches.sampler, int(batches.batch_size or 1) * shards)
    found: RecordedSampler = batches.sampler
    return found


def innermost(loader: Any) -> Any:
    """What chooses batches, under Accelerate's own wrappers."""
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(found, "batch_sampler", None)) is not None:
        found = inner
    return found


def can_draw_again(sampler: Any) -> bool:
    """Whether a sampler is known to repeat its order: it draws at once, before its first sample, or from its own generator."""
    return type(sampler) in _AT_ONCE or isinstance(getattr(sampler, "generator", None), torch.Generator)


def seen_to_draw(loader: Any) -> bool:
    """Whether making a batch of the first sample draws from the global generators, or fails. Generators are left alone."""
    with preserve_rng():
        before = capture_host_rng()
        try:
            loader.collate_fn([loader.dataset[0]])
        except Exception:  # a dataset of another kind of key: nothing is known
            return True
        return not same(before, capture_host_rng())


def _is_plain(batches: Any) -> bool:
    return isinstance(batches, BatchSampler) and type(batches).__module__.startswith(("torch.", "torchdata."))


def start_that_leads_to(sampler: Any, end: Any) -> dict[str, Any] | None:
    """The present state of a sampler's generator, if drawing an order from it ends in ``end``; else None.

    A script that seeds before it makes its loader has the generator of the stored run, at the beginning. For random
    samplers of torch without replacement, which draw the order at once. Costs one permutation.
    """
    own = getattr(sampler, "generator", None)
    if type(sampler) is not RandomSampler or sampler.replacement or not isinstance(own, torch.Generator):
        return None
    start = own.get_state()
    next(iter(sampler), None)
    is_same = isinstance(end, torch.Tensor) and torch.equal(own.get_state(), end)
    own.set_state(start)
    return {"rng": None, "generator": start} if is_same else None
