"""Positions of the data loaders that an accelerator prepared, and why they may not repeat exactly."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from ..errors import StateError
from ..internals.trainers import count_own_batches
from ..objects import frozen
from ..rng import capture_host_rng, preserve_rng, restore_rng
from ..state.beyond import same
from ..state.data import make_iterator
from ..state.parts import (
    equal,
    generator_states,
    inner_parts,
    own_orders,
    put_generator_states,
    put_own_orders,
    unfit_states,
    unknown_orders,
    watch_orders,
)

# ----------------------------------------------------------------------------------------------------
# Samplers that can draw the order of an epoch again, which a position inside an epoch needs.
#
# An order is a function of the random states that it was drawn from. Accelerate's loaders keep none of them, so a
# :class:`RecordedSampler` wraps the sampler of each prepared loader and notes them when an epoch begins.

#: Samplers of torch that draw from global generators only before their first sample, if at all.
_AT_ONCE = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_END: Any = object()


@frozen
class _Order:
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
        self.again: _Order | None = None
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
            own = getattr(self.sampler, "generator", None)
            held = own.get_state() if isinstance(own, torch.Generator) else None
            orders = own_orders({"sampler": self.sampler})
            self.start = {
                "rng": capture_host_rng(),
                "generator": held,
                **({"orders": orders} if orders else {}),
            }
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

    def _set(self, start: dict[str, Any]) -> None:
        put_own_orders({"sampler": self.sampler}, start.get("orders", {}), start.get("later", ()))
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
    batches, outer = _innermost(loader), loader.batch_sampler
    watch_orders(_parts(loader), have_run=_iteration(loader) > 0 or _active_of(loader) is not None)
    module = type(batches).__module__
    keeps_state = module.startswith("torchdata.") and batches is outer
    is_plain = isinstance(batches, BatchSampler) and module.startswith(("torch.", "torchdata."))
    if isinstance(loader.dataset, IterableDataset) or not is_plain or keeps_state:
        return None
    if type(batches.sampler) is not RecordedSampler:
        batches.sampler = RecordedSampler(batches.sampler)
    found: RecordedSampler = batches.sampler
    shards = 1 if getattr(outer, "split_batches", False) else getattr(outer, "num_processes", 1)
    found.per_batch = int(batches.batch_size or 1) * shards
    return found


def _innermost(loader: Any) -> Any:
    """The object that chooses batches, under Accelerate's own wrappers."""
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(found, "batch_sampler", None)) is not None:
        found = inner
    return found


def _parts(loader: Any) -> dict[str, Any]:
    """What chooses batches and samples, without recorders."""
    batches = _innermost(loader)
    inner = getattr(batches, "sampler", None)
    sampler = inner.sampler if type(inner) is RecordedSampler else inner
    return {"batch_sampler": batches, "sampler": sampler}


def _holders(loader: Any) -> dict[str, Any]:
    """:func:`_parts`, the samplers in them, the dataset and the collator: what may hold generators."""
    found = _parts(loader)
    for name, part in tuple(found.items()):
        inner_parts(part, found, ("sampler", "batch_sampler"), f"{name}.")
    found |= {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    return {path: part for path, part in found.items() if type(part) is not RecordedSampler}


def _can_draw_again(sampler: Any) -> bool:
    """Whether a sampler is known to repeat its order: it draws only before its first sample, or has its own generator."""
    return type(sampler) in _AT_ONCE or isinstance(getattr(sampler, "generator", None), torch.Generator)


def _seen_to_draw(loader: Any) -> bool:
    """Whether making a batch of the first sample draws from the global generators, or fails. Restores generators."""
    with preserve_rng():
        before = capture_host_rng()
        try:
            loader.collate_fn([loader.dataset[0]])
        except Exception:  # a dataset with other keys: nothing is known
            return True
        return not same(before, capture_host_rng())


def _start_that_leads_to(loader: Any, sampler: Any, end: Any) -> dict[str, Any] | None:
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


# ----------------------------------------------------------------------------------------------------
# Positions of the data loaders that an accelerator prepared, and why they may not repeat exactly.
#
# In Accelerate 1.15's loaders (``accelerate/data_loader.py``) each iteration begins with ``set_epoch(loader.iteration)``,
# which overrules any sampler's own epoch. So the position is the loader's ``iteration`` and, for a stateful loader, its
# state.

_HOW = "DataLoaderConfiguration(use_stateful_dataloader=True) resumes exactly"
_RECORD = "prepare the loader with shardwise.integrations.accelerate.prepare or its ShardwiseAccelerator, which note them"

#: By loader, the position that was loaded last.
_LOADED: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class LoaderPositions:
    """Positions of the prepared data loaders, as one object of a :class:`shardwise.TrainState`. Rank-local.

    A stateful loader goes on after the last batch that the loop got. Any other loader begins that batch's epoch again,
    in the same order, as with Accelerate (``accelerator.skip_first_batches``). In both cases later epochs are those of
    a run that never stopped, unless :attr:`caveats` says otherwise.
    """

    def __init__(self, loaders: Sequence[Any]) -> None:
        """Make the loaders' samplers note the random states from which they draw an epoch's order, from now on."""
        for loader in loaders:
            count_own_batches(loader)
            record(loader)
        self._loaders = loaders
        self._caveats: tuple[str, ...] = ()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why the position that was loaded last may not go on exactly, one sentence per reason."""
        return self._caveats

    def state_dict(self) -> dict[str, Any]:
        """The present positions, in values that typed JSON can hold. Changes nothing."""
        return {"loaders": [_position(loader) for loader in self._loaders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration of each loader at its position in ``state``.

        Stateful loaders make their iterator now, which draws from torch's generator: restore random states afterwards.
        Raises :class:`StateError` for loaders that differ from those of the stored run; it then changes nothing.
        """
        stored = state["loaders"]
        if len(stored) != len(self._loaders):
            raise StateError(
                f"the checkpoint holds {len(stored)} data loaders, {len(self._loaders)} are prepared; prepare the same ones"
            )
        for k, (loader, position) in enumerate(zip(self._loaders, stored, strict=True)):
            if ("state" in position) != _is_stateful(loader):
                was, now = ("with", "without") if "state" in position else ("without", "with")
                raise StateError(
                    f"data loader {k} was stored {was} use_stateful_dataloader, and is {now} it; configure it as it was"
                )
        caveats = []
        for k, (loader, position) in enumerate(zip(self._loaders, stored, strict=True)):
            repeats = _set_position(loader, position)
            caveats += [f"data loader {k}: {line}" for line in _caveats(loader, position, repeats)]
        self._caveats = tuple(caveats)


def _position(loader: Any) -> dict[str, Any]:
    if (waiting := _not_taken_up(loader)) is not None:
        return waiting
    active = _active_of(loader)
    inside = active is not None and not active.end_of_dataloader
    # The loader counts an epoch when a loop asks for more than its last batch.
    position: dict[str, Any] = {
        "epoch": _iteration(loader) + (active is loader and not inside),
        "inside": inside,
        "batch": _global_batch(loader),
        "generators": {name: g.get_state() for name, g in _generators(loader).items()},
    }
    record(loader)
    if orders := own_orders(_parts(loader)):
        position["orders"] = orders
    if states := generator_states(_holders(loader), _generators(loader).values()):
        position["own_generators"] = states
    if unknown := unknown_orders(_parts(loader)):
        position["unknown_orders"] = unknown
    if (sampler := _seedable(loader)) is not None:
        position["initial_seed"] = sampler.initial_seed
    if _is_stateful(loader):
        # On a rank that gets dispatched batches, Accelerate keeps the state of the last epoch's end.
        begun = inside and _is_dispatched_to(loader)
        state = position["state"] = (loader.base_dataloader if begun else loader).state_dict()
        # The state is more precise: it counts the batches that the loop got.
        position["inside"] = bool(state.get("_num_yielded", inside)) and not state.get("_iterator_finished")
    if position["inside"] and (recorder := record(loader)) is not None:
        # The states to draw the running epoch's order again, and to go on as if it had not been drawn again.
        draws = recorder.dataset_draws
        if draws is None:
            draws = bool(not loader.num_workers and _seen_to_draw(loader))
        position["order"] = {"start": recorder.start, "now": capture_host_rng(), "dataset_draws": draws}
    return position


def _not_taken_up(loader: Any) -> dict[str, Any] | None:
    """The last loaded position inside an epoch, until the loader has gone on from it."""
    loaded = _LOADED.get(loader)
    if (
        loaded is None
        or not loaded["inside"]
        or _active_of(loader) is not None
        or not equal(loaded["epoch"], _iteration(loader))
    ):
        return None
    recorder = record(loader)
    if _is_stateful(loader):
        is_waiting = loader.dl_state_dict is loaded["state"]
    else:
        is_waiting = recorder is None or _is_dispatched_to(loader) or recorder.again is not None
    return loaded if is_waiting else None


def _set_position(loader: Any, position: Mapping[str, Any]) -> bool:
    """Set the loader's position. Returns whether an epoch that begins again is known to keep its order."""
    if (sampler := _seedable(loader)) is not None and "initial_seed" in position:
        sampler.initial_seed = position["initial_seed"]
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(position["epoch"])
    record(loader)
    if not position["inside"]:
        put_own_orders(_parts(loader), position.get("orders", {}))
        put_generator_states(_holders(loader), position.get("own_generators", {}))
    repeats = not position["inside"] or _draw_again(loader, position)
    if "state" in position:
        loader.load_state_dict(position["state"])
        loader.dl_state_dict = position["state"]  # stored by a save before the first batch
        make_iterator(loader.base_dataloader)  # draws from the loader's generator, if it has one
    has_drawn = (position.get("state") or {}).get("_sampler_iter_state") is not None
    if (
        not position["inside"] or has_drawn
    ):  # otherwise they would draw another order for the epoch that begins again
        live = _generators(loader)
        for name in live.keys() & position["generators"].keys():
            live[name].set_state(position["generators"][name])
    if not position["inside"]:  # the iterator may have drawn
        put_generator_states(_holders(loader), position.get("own_generators", {}))
    _LOADED[loader] = dict(position)
    return repeats


def _draw_again(loader: Any, position: Mapping[str, Any]) -> bool:
    """Make the epoch that begins again keep its order. Returns False if the sampler may draw as it goes along, or if the random states that
    the order was drawn from are unknown."""
    recorder = record(loader)
    order = position.get("order")
    needs_no_start = _needs_no_start(loader, position)
    if not needs_no_start and (recorder is None or not _can_draw_again(_sampler(loader))):
        return False  # it may draw as it goes along
    if recorder is None or order is None or _is_dispatched_to(loader):
        return needs_no_start
    recorder.dataset_draws = order["dataset_draws"]
    start = order["start"] or _start_that_leads_to(
        loader, _sampler(loader), position["generators"].get("sampler")
    )
    if start is None and not needs_no_start:
        return False
    start = {
        **(start or {"rng": None, "generator": None}),
        "later": [key for key in position.get("orders", ()) if key.startswith("sampler.")],
    }
    epoch = position["epoch"]

    def finish() -> None:
        restore_rng(order["now"])
        own, live = getattr(_sampler(loader), "generator", None), _generators(loader)
        for name in live.keys() & position["generators"].keys():
            if live[name] is not own:
                live[name].set_state(position["generators"][name])

    recorder.again = _Order(start, is_due=lambda: _iteration(loader) == epoch, finish=finish)
    return True


def _caveats(loader: Any, position: Mapping[str, Any], repeats: bool) -> Iterator[str]:
    inside = position["inside"]
    order = position.get("order")
    if inside and "state" not in position:
        yield (
            "keeps no state, and the save was mid-epoch. The epoch starts over, so the resume is only exact if the loop skips "
            "the consumed batches (skip_first_batches; with Accelerate before 1.15, ShardwiseAccelerator's version), and calls "
            "set_epoch for the next epoch"
            + (
                ". "
                if order and not _is_dispatched_to(loader)
                else ". The new iterator draws once more from torch's generator. "
            )
            + _HOW
        )
    known = record(loader) is not None and _can_draw_again(_sampler(loader))
    if inside and not repeats:
        unknown = _sampler(loader) if record(loader) is not None else _innermost(loader)
        yield "the rest of the epoch may be in a different order: " + (
            f"the RNG states that it was drawn from are not in the checkpoint; {_RECORD}"
            if known
            else f"it isn't known when a {type(unknown).__name__} draws random numbers. "
            "DataLoaderConfiguration(use_seedable_sampler=True) resumes exactly, with shuffle=True"
        )
    stored, known_ones = position.get("own_generators", {}), _generators(loader).values()
    if unfit := unfit_states(_holders(loader), stored, known_ones):
        yield f"{', '.join(unfit)}: the checkpoint and the loader don't hold the same random generators, so the order of batches may differ"
    items = [path for path in stored if path.startswith(("dataset", "collate_fn"))]
    if inside and items and not loader.num_workers:
        yield f"{', '.join(items)}: the prefetched batch is drawn again, so it may differ, and so may random draws after it"
    for kind in position.get("unknown_orders", ()):
        yield f"a {kind} may keep an order of its own, which isn't in the checkpoint: {_RECORD}"
    if inside and known and order and order["dataset_draws"] and not loader.num_workers:
        yield (
            "the dataset draws from the training process's global generators: the prefetched batch is drawn "
            "again, so it may differ, and so may random draws after it; draw from a generator seeded by the index instead"
        )
    if inside and "state" in position and not equal(position["batch"], _global_batch(loader)):
        yield (
            f"the global batch had {position['batch']} samples when saved, and has {_global_batch(loader)} now; the position "
            "counts batches: samples in this epoch are repeated or skipped"
        )
    kinds = {str(getattr(kind, "value", kind)) for kind in getattr(loader, "rng_types", None) or ()}
    if inside and kinds - ({"generator", "torch"} if order else {"generator"}):
        yield "rng_types: random number generators are synchronized across ranks when an epoch is resumed midway, so draws may differ"
    if inside and "state" in position and loader.num_workers:
        yield (
            f"num_workers={loader.num_workers}: workers start with new generators when an epoch is resumed "
            "midway, so random draws in them (augmentation) may differ"
        )
    if loader.num_workers and loader.persistent_workers:
        yield "persistent_workers=True: random draws in workers after the first epoch may differ"
    if loader.num_workers and not loader.in_order:
        yield "in_order=False: the order of batches depends on the workers' speed"
    if not loader.num_workers and isinstance(loader.dataset, IterableDataset):
        yield (
            "the iterable dataset is read in the training process: if it chooses samples with its own generators, or "
            "keeps a position between epochs, it may continue at a different sample"
        )


def _needs_no_start(loader: Any, position: Mapping[str, Any]) -> bool:
    """Whether the order follows from the epoch's number alone, or from the sampler's own state."""
    return (
        position.get("state", {}).get("_sampler_iter_state") is not None
        or isinstance(loader.dataset, IterableDataset)  # has another caveat
        or _is_dispatched_to(loader)  # rank 0 reads for this rank
        or _seedable(loader) is not None
        or (record(loader) is not None and type(_sampler(loader)) in (SequentialSampler, DistributedSampler))
    )


def _is_dispatched_to(loader: Any) -> bool:
    """Whether this rank gets its batches from rank 0 (``dispatch_batches``)."""
    from accelerate.data_loader import DataLoaderDispatcher

    return type(loader) is DataLoaderDispatcher and loader.state.process_index != 0


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _iteration(loader: Any) -> int:
    return int(getattr(loader, "iteration", 0))


def _active_of(loader: Any) -> Any:
    """The loader of the running loop, if it is this one or one that ``skip_first_batches`` made from it."""
    from accelerate.state import GradientState

    for other in reversed(GradientState().dataloader_references):
        if other is loader or (other is not None and other.dataset is loader.dataset):
            return other
    return None


def _sampler(loader: Any) -> Any:
    """The sampler itself, without the recorder around it."""
    recorder = record(loader)
    batches = _innermost(loader)
    return recorder.sampler if recorder is not None else getattr(batches, "sampler", batches)


def _seedable(loader: Any) -> Any:
    """The sampler that Accelerate keeps alike on all ranks (``use_seedable_sampler``), if there is one."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = _sampler(loader)
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """The loader's own generators. That of a seedable sampler follows from its seed and epoch, and is skipped."""
    found = {
        "loader": loader.generator,
        "synchronized": getattr(loader, "synchronized_generator", None),
        "sampler": None if _seedable(loader) is not None else getattr(_sampler(loader), "generator", None),
    }
    return {name: g for name, g in found.items() if isinstance(g, torch.Generator)}


def _global_batch(loader: Any) -> int | None:
    """Number of samples in one batch of all ranks, if the loader can tell."""
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):
        return None
