"""Position of a loader by replay: begin the epoch again as it began, and take its first batches again.

A loader's iterator can't be stored, but it can be made again: it is a function of the random states at the start of
the epoch. So a position consists of these random states and the number of batches that the loop got. A resume starts
the epoch again under those states, takes that many batches, and then restores every random generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..errors import StateError
from ..rng import capture_host_rng, preserve_rng, restore_rng
from .parts import equal, keeps_workers, parts_of

__all__ = ["SAFE_SAMPLERS", "ReplayedPosition"]

_VERSION = 1
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


class ReplayedPosition:
    """Position of any ``DataLoader``: the implementation of :class:`.data.ResumableLoader` for any sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch = _Epoch(number=0)
        self._workers_kept = False  # whether this object has started persistent workers

    @property
    def epoch(self) -> int:
        """Number, from 0, of the epoch of the next batch; inside a loop, of the current batch."""
        return self._epoch.number + (self._epoch.loaded and self._is_complete(self._epoch))

    @property
    def consumed(self) -> int:
        """Batches of :attr:`epoch` that the loop has got."""
        if self._epoch.loaded and self._is_complete(self._epoch):
            return 0
        return self._epoch.consumed

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why this loader may not go on exactly, one sentence per reason; empty if it goes on exactly."""
        loader = self._loader
        found = []
        if loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset):
            found.append(
                "the iterable dataset is read in the training process: if it chooses samples with the global generators "
                "after the first batch, or keeps a position between epochs, its samples differ after a resume"
            )
        if loader.num_workers and not loader.in_order:
            found.append("in_order=False: the order of batches depends on the workers' speed")
        if self._keeps_workers:
            found.append("persistent_workers=True: random draws in workers after the first epoch differ")
        for path, part in self._parts().items():
            if "sampler" in path and type(part) not in SAFE_SAMPLERS and _generator(part) is None:
                found.append(
                    f"{path} is a {type(part).__qualname__} without its own generator: if it draws from global "
                    "generators after the first batch, its samples differ after a resume"
                )
        return tuple(found)

    def iterate(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of the loaded one.

        Raises :class:`StateError` if the loaded epoch has fewer batches than were consumed.
        """
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
        """The position, in values that typed JSON can hold. Changes nothing; may be called inside a loop."""
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
        """Start the next iteration at the position of ``state``. Does not touch global random generators.

        Raises :class:`StateError` naming each property of the loader, such as its number of workers, that differs
        from the stored one. It then changes nothing.
        """
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
            self._start_workers()
        self._epoch = _Epoch(state["epoch"], state["consumed"], state["start"], loaded=True)

    # ------------------------------------------------------------------------------------------ iterating

    def _begin(self) -> Iterator[Any]:
        begun = self._epoch.start is not None
        start = {**self._own_states(), "rng": capture_host_rng(), "workers_kept": self._workers_kept}
        self._epoch = _Epoch(self._epoch.number + begun, start=start)
        return self._open()

    def _open(self) -> Iterator[Any]:
        batches = iter(self._loader)
        self._workers_kept = self._keeps_workers
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
        return _length(self._loader)

    @property
    def _keeps_workers(self) -> bool:
        return keeps_workers(self._loader)

    def _start_workers(self) -> None:
        # Persistent workers draw their seed when they first start, not at later epochs. The stored run has made that
        # draw already, so a resumed run must not make it again.
        with self._preserved():
            self._open()

    # -------------------------------------------------------------------------- states of the loader's parts

    def _parts(self) -> dict[str, Any]:
        return parts_of(self._loader)

    def _own_states(self) -> dict[str, Any]:
        parts = self._parts()
        generators = {path: _generator(part) for path, part in parts.items()}
        epochs = {path: _epoch_of(part) for path, part in parts.items()}
        return {
            "generators": {path: gen.get_state() for path, gen in generators.items() if gen is not None},
            "epochs": {path: epoch for path, epoch in epochs.items() if epoch is not None},
        }

    def _set_own_states(self, states: dict[str, Any]) -> None:
        parts = self._parts()
        for path, generator_state in states["generators"].items():
            generator = _generator(parts[path])
            assert generator is not None, "checked when the state was loaded"
            generator.set_state(generator_state)
        for path, epoch in states["epochs"].items():
            if _epoch_of(parts[path]) != epoch:
                parts[path].set_epoch(epoch)

    @contextmanager
    def _preserved(self) -> Iterator[None]:
        own = self._own_states()
        with preserve_rng():
            try:
                yield
            finally:
                self._set_own_states(own)

    def _description(self) -> dict[str, Any]:
        """The properties that must be equal for a position to fit."""
        loader = self._loader
        return {
            "dataset length": _length(loader.dataset),
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
        wrong = [
            f"{name} was {stored.get(name)!r} and is {value!r}"
            for name, value in live.items()
            if not equal(stored.get(name), value)
        ]
        if wrong:
            raise StateError(
                f"the data position belongs to another loader: {'; '.join(wrong)}. "
                "Make the loader as in the stored run, or resume without its position"
            )


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _generator(part: Any) -> torch.Generator | None:
    generator = getattr(part, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _epoch_of(part: Any) -> int | None:
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) and callable(getattr(part, "set_epoch", None)) else None
