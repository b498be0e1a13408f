"""Loaders and samplers whose position can be stored in the middle of an epoch."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..errors import StateError
from ..internals.torch import is_stateful_loader
from ..rng import capture_host_rng, preserve_rng, restore_rng
from .parts import (
    all_parts,
    epoch_of,
    equal,
    is_several,
    keeps_workers,
    own_orders,
    parts_of,
    put_own_orders,
)

# ----------------------------------------------------------------------------------------------------
# A distributed sampler whose order does not depend on the number of ranks, and its position in a loader.

_VERSION = 1


class ElasticSampler(Sampler[list[int]]):
    """Produce the same global batches on any number of ranks, so that a run can resume with a different world size.

    The order of an epoch depends only on ``seed``, the epoch number and the dataset's length. Global batch *k* is the *k*-th run of
    ``global_batch_size`` samples in that order, split into ``num_replicas`` equal blocks, one per rank. Therefore
    ``global_batch_size`` must be a multiple of ``num_replicas``. Use it as the ``batch_sampler`` of a loader that counts batches when the loop
    consumes them, not when workers prefetch them::

        sampler = ElasticSampler(dataset, global_batch_size=32, seed=0)
        loader = ResumableLoader(DataLoader(dataset, batch_sampler=sampler, num_workers=2))
        state = TrainState(model=model, optimizer=optimizer, dataloader=loader)

    The position is the epoch and the number of samples consumed by all ranks. It is the same on all ranks and stored once, and it fits any
    world size, any number of workers, and a different global batch size (for a different number of accumulation steps). A
    resume neither skips nor repeats a sample.

    The last global batch of an epoch is padded with the first samples of the epoch's order, as torch's ``DistributedSampler`` does, but by at
    most ``global_batch_size - 1`` samples at any world size. ``drop_last=True`` drops that batch instead. Doesn't use the global
    random number generators. Takes 8 bytes of memory per sample during an epoch.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """``num_replicas`` and ``rank`` default to those of the process group, or 1 and 0 without one. If several ranks
        read the same samples, give the size and rank of the data-parallel axes.

        Raises :class:`StateError` if the global batch can't be divided, or an epoch would hold no batch;
        ``TypeError`` for a number that is not a whole one.
        """
        length = length_of(dataset)
        if length is None:
            raise StateError(
                f"an ElasticSampler needs a dataset with a length, got {type(dataset).__qualname__}"
            )
        self._length = length
        self._seed, self._shuffle, self._drop_last = _whole("seed", seed), shuffle, drop_last
        here, of = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._num_replicas = of if num_replicas is None else _whole("num_replicas", num_replicas)
        self._rank = here if rank is None else _whole("rank", rank)
        self._global_batch_size = _whole("global_batch_size", global_batch_size)
        self._check()
        self._epoch = self._consumed = 0
        self._is_counted = True  # not iterated yet, or the caller counts consumed batches

    def _check(self) -> None:
        size, replicas = self._global_batch_size, self._num_replicas
        if not 0 <= self._rank < replicas:
            raise StateError(f"rank {self._rank} is not one of {replicas} replicas")
        if size < 1 or size % replicas:
            raise StateError(
                f"a global batch of {size} isn't divisible by {replicas} replicas; give a multiple of {replicas}"
            )
        if not self._length or (self._drop_last and self._length < size):
            raise StateError(
                f"{self._length} samples make no global batch of {size} with drop_last={self._drop_last}"
            )

    @property
    def epoch(self) -> int:
        """Number of the epoch, starting at 0."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks have consumed together, including padding at its end."""
        return self._consumed

    @property
    def global_batch_size(self) -> int:
        """Samples in one batch across all ranks."""
        return self._global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``, unless it is already the current one. A :class:`ResumableLoader` does this automatically."""
        if epoch != self._epoch:
            self._epoch, self._consumed, self._is_counted = epoch, 0, True

    def advance(self) -> None:
        """Count one batch as consumed, on every rank. A :class:`ResumableLoader` does this automatically."""
        self._consumed += self._global_batch_size
        self._is_counted = True

    @property
    def is_complete(self) -> bool:
        """Whether the epoch has no more batches."""
        return not self._holds_batch(self._consumed)

    def _holds_batch(self, begin: int) -> bool:
        return begin + (self._global_batch_size if self._drop_last else 1) <= self._length

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        whole, rest = divmod(self._length, self._global_batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices, one batch at a time, from the position to the end of the epoch (of the next epoch if this
        one is complete)."""
        if self.is_complete:
            self.set_epoch(self._epoch + 1)
        self._is_counted = False
        # Bind the position now, not at the first batch: a loader asks for batches ahead.
        return self._batches(self._epoch, self._consumed)

    def _batches(self, epoch: int, begin: int) -> Iterator[list[int]]:
        order = _order(self._seed, epoch, self._length) if self._shuffle else None
        size = self._global_batch_size // self._num_replicas
        while self._holds_batch(begin):
            first = begin + self._rank * size
            places = np.arange(first, first + size) % self._length
            yield (places if order is None else order[places]).tolist()
            begin += self._global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks. Raises :class:`StateError` if consumed batches were not counted."""
        if not self._is_counted:
            raise StateError(
                "batches were taken from the ElasticSampler, but none was reported as consumed: wrap the "
                "loader, shardwise.ResumableLoader(loader), and give that to the state, or call advance() after each batch"
            )
        return self.position()

    def position(self) -> dict[str, Any]:
        """Like :meth:`state_dict`, for callers that call :meth:`advance` themselves."""
        return {"version": _VERSION, **self._description(), "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position in ``state``.

        Raises :class:`StateError` if it belongs to a different order or isn't a position. In that case, nothing is changed.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the sampler's position is {type(state).__qualname__}, expected a dict")
        if not equal(state.get("version"), _VERSION):
            raise StateError(
                f"the sampler's position has version {state.get('version')!r}, expected {_VERSION}"
            )
        if wrong := _differing(state, self._description()):
            raise StateError(
                f"the position belongs to another order of samples: {wrong}. Make the ElasticSampler as in "
                f"the stored run, or resume without its position"
            )
        for name in ("epoch", "consumed"):
            value = state.get(name)
            if type(value) is not int or value < 0:  # True is not a number here
                found = repr(value) if name in state else "missing"
                raise StateError(
                    f"the sampler's position is damaged: {name!r} is {found}, expected a number from 0. Resume without "
                    f"its position, or from another step"
                )
        self._epoch, self._consumed, self._is_counted = state["epoch"], state["consumed"], True

    def _description(self) -> dict[str, Any]:
        """The values that determine the order of samples."""
        return {"dataset length": self._length, "seed": self._seed, "shuffle": self._shuffle}


class _ElasticPosition:
    """Position of a loader over an :class:`ElasticSampler`; :class:`ResumableLoader` documents the methods."""

    def __init__(self, loader: DataLoader[Any], sampler: ElasticSampler) -> None:
        self._loader = loader
        self._sampler = sampler
        self._is_loaded = False
        self._iteration: object = None  # the latest iteration, the only one that counts

    @property
    def epoch(self) -> int:
        return self._sampler.epoch + self._ends_with_load

    @property
    def consumed(self) -> int:
        return 0 if self._ends_with_load else -(-self._sampler.consumed // self._sampler.global_batch_size)

    @property
    def _ends_with_load(self) -> bool:
        """Whether a loaded position lies at the end of its epoch."""
        return self._is_loaded and self._sampler.is_complete

    @property
    def caveats(self) -> tuple[str, ...]:
        found = []
        if self._loader.num_workers:
            found.append(
                f"num_workers={self._loader.num_workers}: workers start over after a mid-epoch resume, so random "
                f"draws in them (augmentation) differ"
            )
            if not self._loader.in_order:
                found.append("in_order=False: the order of batches depends on the workers' speed")
        return tuple(found)

    def iterate(self) -> Iterator[Any]:
        sampler = self._sampler
        if self._is_loaded and sampler.consumed and not sampler.is_complete:
            # Making an iterator draws from the global generator; the stored run did that when the epoch began.
            with preserve_rng():
                batches = iter(self._loader)
        else:
            if sampler.consumed:  # the epoch is complete, or the last loop ended early
                sampler.set_epoch(sampler.epoch + 1)
            batches = iter(self._loader)
        self._is_loaded = False
        self._iteration = iteration = object()
        for batch in batches:
            if self._iteration is iteration:  # else another iteration or a loaded state has taken over
                sampler.advance()
            yield batch
        if self._iteration is iteration:
            sampler.set_epoch(sampler.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"version": _VERSION, "sampler": self._sampler.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._is_loaded = True
        self._iteration = None


def _elastic_sampler_of(loader: DataLoader[Any]) -> ElasticSampler | None:
    """The :class:`ElasticSampler` of a loader, if any. Raises :class:`StateError` if it is given as ``sampler``."""
    if isinstance(loader.batch_sampler, ElasticSampler):
        return loader.batch_sampler
    if not isinstance(loader.sampler, ElasticSampler):
        return None
    if loader.batch_sampler is not None:
        raise StateError("an ElasticSampler makes batches: give it as batch_sampler, not as sampler")
    return loader.sampler  # batch_size=None: the dataset itself takes a list of indices


def _differing(stored: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """The live properties that differ from the stored ones, in words; empty if none does."""
    return "; ".join(
        f"{name} was {stored.get(name)!r} and is {value!r}"
        for name, value in live.items()
        if not equal(stored.get(name), value)
    )


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from error


def _order(seed: int, epoch: int, length: int) -> Any:
    """The samples of an epoch in their order, [length] int64.

    Uses numpy's RandomState, whose draws are frozen for good (NEP 19). torch's and numpy's newer generators may draw
    differently in another version, which would change the order in the middle of a run.
    """
    digest = hashlib.sha256(f"shardwise order {seed} {epoch} {length}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4").astype(np.uint32)).permutation(length)


# ----------------------------------------------------------------------------------------------------
# Position of a loader by replay: begin the epoch again as it began, and take its first batches again.
#
# A loader's iterator can't be stored, but it can be made again: it is a function of the random states at the start of
# the epoch. So a position consists of these random states and the number of batches that the loop got. A resume starts
# the epoch again under those states, takes that many batches, and then restores every random generator.

_KEYS = {"version", "loader", "epoch", "consumed", "start", "now", "workers_kept"}
#: Samplers of torch that draw from global generators only before their first batch, if at all.
SAFE_SAMPLERS = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)


@dataclass(slots=True)
class _Epoch:
    """One epoch: not begun (no ``start``), going on, or loaded from a state and not yet taken up again."""

    number: int
    consumed: int = 0
    start: dict[str, Any] | None = None
    loaded: bool = False


class _ReplayedPosition:
    """Position of a loader over any sampler; :class:`ResumableLoader` documents the methods."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch = _Epoch(number=0)
        self._workers_kept = False  # whether this object has started persistent workers

    @property
    def epoch(self) -> int:
        return self._epoch.number + (self._epoch.loaded and self._is_complete(self._epoch))

    @property
    def consumed(self) -> int:
        if self._epoch.loaded and self._is_complete(self._epoch):
            return 0
        return self._epoch.consumed

    @property
    def caveats(self) -> tuple[str, ...]:
        loader = self._loader
        found = []
        if loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
            found.append(
                "the iterable dataset is read in the training process: if it chooses samples with the global generators "
                "after the first batch, or keeps a position between epochs, its samples differ after a resume"
            )
        if loader.num_workers and not loader.in_order:
            found.append("in_order=False: the order of batches depends on the workers' speed")
        if keeps_workers(self._loader):
            found.append("persistent_workers=True: random draws in workers after the first epoch differ")
        for path, part in parts_of(self._loader).items():
            if "sampler" in path and type(part) not in SAFE_SAMPLERS and _generator(part) is None:
                found.append(
                    f"{path} is a {type(part).__qualname__} without its own generator: if it draws from global "
                    "generators after the first batch, its samples differ after a resume"
                )
        return tuple(found)

    def iterate(self) -> Iterator[Any]:
        batches = self._go_on() if self._epoch.loaded else None
        if batches is None:
            batches = self._begin()
        epoch = self._epoch
        for batch in batches:
            epoch.consumed += 1
            yield batch
        if self._epoch is epoch:  # else another iteration or a loaded state has taken over
            self._epoch = _Epoch(number=epoch.number + 1)

    def state_dict(self) -> dict[str, Any]:
        epoch = self._epoch
        return {
            "version": _VERSION,
            "loader": self._description(),
            "epoch": epoch.number,
            "consumed": epoch.consumed,
            "start": epoch.start,
            "now": self._own_states(),
            "workers_kept": self._workers_kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not equal(state.get("version"), _VERSION):
            raise StateError(f"data position has version {state.get('version')!r}, expected {_VERSION}")
        if missing := _KEYS - state.keys():
            raise StateError(f"data position lacks {', '.join(sorted(missing))}")
        self._check_description(state["loader"], state["now"])
        workers_kept = (state["start"] or state)["workers_kept"]
        if self._workers_kept and not workers_kept:
            raise StateError("persistent workers run already; load a data position into a new DataLoader")
        self._set_own_states(state["now"])
        if workers_kept and not self._workers_kept:
            # Persistent workers draw their seed when they first start, not at later epochs. The stored run has made that
            # draw already, so a resumed run must not make it again.
            with self._preserved():
                self._open()
        start = state["start"]
        if start is not None and "orders" in state["now"]:
            start = {**start, "later": [*state["now"]["orders"]]}
        self._epoch = _Epoch(state["epoch"], state["consumed"], start, loaded=True)

    # ------------------------------------------------------------------------------------------ iterating

    def _begin(self) -> Iterator[Any]:
        begun = self._epoch.start is not None
        start = {**self._own_states(), "rng": capture_host_rng(), "workers_kept": self._workers_kept}
        self._epoch = _Epoch(self._epoch.number + begun, start=start)
        return self._open()

    def _open(self) -> Iterator[Any]:
        batches = iter(self._loader)
        self._workers_kept = keeps_workers(self._loader)
        return batches

    def _go_on(self) -> Iterator[Any] | None:
        """The rest of the loaded epoch, or None if the next epoch must begin."""
        epoch = self._epoch
        if epoch.start is None:
            epoch.loaded = False
            return None
        with self._preserved():
            self._set_own_states(epoch.start)
            restore_rng(epoch.start["rng"])
            batches = self._open()
            for done in range(epoch.consumed):
                if next(batches, self) is self:
                    raise StateError(
                        f"epoch {epoch.number} ended after {done} batches, but the stored run had consumed "
                        f"{epoch.consumed}: the dataset or sampler differs from that of the stored run"
                    )
        epoch.loaded = False
        if not self._is_complete(epoch):
            return batches
        # Reaching the end is part of the epoch: some samplers draw once more at the end.
        if next(batches, self) is not self:
            raise StateError(
                f"epoch {epoch.number} has more batches than its length {epoch.consumed}; correct __len__"
            )
        self._epoch = _Epoch(epoch.number + 1)
        return None

    def _is_complete(self, epoch: _Epoch) -> bool:
        return epoch.start is not None and epoch.consumed == self._length()

    def _length(self) -> int | None:
        """Batches per epoch, if certain. An iterable dataset's length is an estimate, and calling it has effects."""
        if isinstance(self._loader.dataset, IterableDataset):
            return None
        return length_of(self._loader)

    # -------------------------------------------------------------------------- states of the loader's parts

    def _own_states(self) -> dict[str, Any]:
        parts = parts_of(self._loader)
        generators = {path: _generator(part) for path, part in parts.items()}
        epochs = {path: epoch_of(part) for path, part in parts.items()}
        return {
            "generators": {path: gen.get_state() for path, gen in generators.items() if gen is not None},
            "epochs": {path: epoch for path, epoch in epochs.items() if epoch is not None},
            **({"orders": changed} if (changed := own_orders(all_parts(self._loader))) else {}),
        }

    def _set_own_states(self, states: dict[str, Any], later: Iterable[str] = ()) -> None:
        parts = parts_of(self._loader)
        for path, generator_state in states["generators"].items():
            generator = _generator(parts[path])
            assert generator is not None, "checked when the state was loaded"
            generator.set_state(generator_state)
        for path, epoch in states["epochs"].items():
            if epoch_of(parts[path]) != epoch:
                parts[path].set_epoch(epoch)
        put_own_orders(all_parts(self._loader), states.get("orders", {}), (*later, *states.get("later", ())))

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        own = self._own_states()
        with preserve_rng():
            try:
                yield
            finally:
                self._set_own_states(own, own_orders(all_parts(self._loader)))

    def _description(self) -> dict[str, Any]:
        """The properties that must be equal for a position to fit."""
        loader = self._loader
        return {
            "dataset length": length_of(loader.dataset),
            "batch size": loader.batch_size,
            "batches per epoch": self._length(),
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "sampler": type(loader.sampler).__qualname__,
            "sampler's replicas": getattr(loader.sampler, "num_replicas", None),
            "sampler's rank": getattr(loader.sampler, "rank", None),
        }

    def _check_description(self, stored: dict[str, Any], states: dict[str, Any]) -> None:
        live = self._description()
        live_states = self._own_states()
        for kind in ("generators", "epochs"):
            stored = {**stored, f"parts with {kind}": sorted(states[kind])}
            live[f"parts with {kind}"] = sorted(live_states[kind])
        if wrong := _differing(stored, live):
            raise StateError(
                f"the data position belongs to another loader: {wrong}. "
                "Make the loader as in the stored run, or resume without its position"
            )


def length_of(sized: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _generator(part: Any) -> torch.Generator | None:
    generator = getattr(part, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


# ----------------------------------------------------------------------------------------------------
# Stores the position of a data loader mid-epoch, and continues exactly there.


class ResumableLoader:
    """Wrap a ``DataLoader`` so that its position can be saved and restored. Iterate over this object instead of the loader.

    It yields the loader's own batches in the loader's order, and uses random number generators the way the loader does. A batch counts once the loop
    receives it; prefetched batches don't count. As with the loader itself, leaving a loop early and iterating again starts a new epoch; until
    then, the position stays in the old epoch. The iterator is created when the first batch is requested.

    To resume, call :meth:`load_state_dict`, restore the global RNG states, and iterate. The first iteration continues after the last
    batch that the loop received, or with the next epoch if that batch was the last of its epoch. The length of an iterable dataset isn't known in
    advance, so in that case the first loop ends the old epoch without yielding a batch. Resuming doesn't use the global random number
    generators. Start your loop over epochs at :attr:`epoch`::

        for epoch in range(loader.epoch, epochs):
            for batch in loader: ...

    With an :class:`ElasticSampler` as ``batch_sampler``, no batch is read again, and the state is the same on all ranks and fits any world
    size. With any other sampler, the epoch's earlier batches are read again, because there is no other way to restore samplers and datasets.
    The state then belongs to one rank, and only fits the same world size.

    The resume is exact as far as the stored RNG states and epoch numbers determine the batches. :attr:`caveats` lists this
    loader's exceptions. A state takes a few kilobytes and can be stored as typed JSON.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap ``loader``; draws nothing. Raises :class:`StateError` if it is not a ``DataLoader``."""
        if not isinstance(loader, DataLoader):
            raise StateError(f"expected a torch.utils.data.DataLoader, got {type(loader).__qualname__}")
        self._loader = loader
        elastic = _elastic_sampler_of(loader)
        self._is_elastic = elastic is not None
        self._position: _ReplayedPosition | _ElasticPosition = (
            _ReplayedPosition(loader) if elastic is None else _ElasticPosition(loader, elastic)
        )

    @property
    def loader(self) -> DataLoader[Any]:
        """The wrapped loader."""
        return self._loader

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """The loader's batch size; None with a custom batch sampler or without batching."""
        return self._loader.batch_size

    @property
    def sampler(self) -> Any:
        """The loader's sampler, for ``set_epoch``. If you resume mid-epoch, the stored epoch overrides ``set_epoch``."""
        return self._loader.sampler

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, starting at 0; inside a loop, of the current batch."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """Batches of :attr:`epoch` that the loop has received."""
        return self._position.consumed

    @property
    def caveats(self) -> tuple[str, ...]:
        """Reasons why this loader may not resume exactly, one sentence each; empty if it does."""
        return self._position.caveats

    def __len__(self) -> int:
        """Batches per epoch. Raises ``TypeError`` if the loader has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of the loaded one.

        Raises :class:`StateError` if the loaded epoch has fewer batches than were consumed.
        """
        return self._position.iterate()

    def state_dict(self) -> dict[str, Any]:
        """The position, in values that typed JSON can store. Changes nothing and can be called inside a loop."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the position in ``state``. Doesn't touch the global random number generators.

        If any property of the loader differs from the stored one, such as the dataset's length (or, without an :class:`ElasticSampler`, the
        number of workers or the rank), raises a :class:`StateError` that lists them all. In that case, nothing is changed.
        """
        if ("sampler" in state) != self._is_elastic:
            was, now = ("with", "without") if "sampler" in state else ("without", "with")
            raise StateError(
                f"the data position was stored {was} an ElasticSampler, but the loader is {now} one; make the loader "
                f"as in the stored run, or resume without its position"
            )
        self._position.load_state_dict(state)


def data_caveats(loader: Any) -> tuple[str, ...]:
    """Why a loader (or several by name, or None) may not repeat exactly, one sentence per reason."""
    if is_several(loader):
        return tuple(line for one in loader.values() for line in data_caveats(one))
    if is_stateful_loader(loader):
        return tuple(_caveats_of_torchdata(loader))
    return tuple(getattr(loader, "caveats", ()))


def _ends_an_epoch(loader: Any) -> bool:
    """Whether torchdata's loader gave the last batch of an epoch, and its loop has not asked for another one."""
    state = loader.state_dict()
    yielded = state.get("_num_yielded")
    if yielded is None:  # with workers
        snapshot = state.get("_snapshot", {}).get("_snapshot_step", 0)
        yielded = snapshot + state.get("_steps_since_snapshot", 0)
    if isinstance(loader.dataset, IterableDataset):  # its length is an estimate
        return False
    return not state["_iterator_finished"] and 0 < yielded == len(loader)


def _caveats_of_torchdata(loader: Any) -> Iterator[str]:
    if _ends_an_epoch(loader):
        yield (
            "the save came after an epoch's last batch, and torchdata's loader first ends that epoch: the next loop over it gets no "
            "batch. Count steps, or epochs whose loop has ended: a loop that starts at epoch step // len(loader) loses one. "
            "shardwise.ResumableLoader continues with the next epoch"
        )
    if loader.num_workers:
        yield (
            f"num_workers={loader.num_workers}: after a mid-epoch resume, torchdata's workers start with new "
            f"generators, so random draws in them (augmentation) differ"
        )
    elif loader.generator is not None:
        yield (
            "generator=…: torchdata draws a seed from it in each epoch except the resumed one, so with shuffle=True later "
            "epochs are in a different order; leave generator out, or use shardwise.ResumableLoader"
        )


def make_iterator(loader: Any) -> None:
    """Make a loader's iterator after its state was loaded, before random generators are restored.

    torchdata's loader would make it at the first request for a batch or a state, and then draw from torch's global
    generator: a draw that the stored run had made already. Other loaders need nothing.
    """
    if is_stateful_loader(loader):
        loader.state_dict()
