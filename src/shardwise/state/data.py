"""Stores the position of a data loader in the middle of an epoch, and goes on exactly there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from ..errors import StateError
from ..internals.torch import is_stateful_loader
from .replay import ReplayedPosition
from .sampler import ElasticPosition, elastic_sampler_of
from .several import is_several

__all__ = ["ResumableLoader", "data_caveats", "make_iterator"]


class _Position(Protocol):
    """The common interface of both ways to keep a position; :class:`ResumableLoader` documents it."""

    @property
    def epoch(self) -> int: ...

    @property
    def consumed(self) -> int: ...

    @property
    def caveats(self) -> tuple[str, ...]: ...

    def iterate(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ResumableLoader:
    """Wrap a ``DataLoader`` so that its position can be saved and restored. Iterate over this object instead of the loader.

    It yields the loader's own batches in the loader's order, and uses random generators as the loader does. A batch counts once the loop
    receives it; prefetched batches don't count. As with the loader itself, leaving a loop early and iterating again starts a new epoch; until
    then, the position stays in the old epoch. The iterator is created when the first batch is requested.

    To resume, call :meth:`load_state_dict`, restore the global random states, and iterate. The first iteration continues after the last
    batch that the loop received, or with the next epoch if that batch was the last of its epoch. The length of an iterable dataset isn't known in
    advance, so in that case the first loop finishes the old epoch with zero batches. Resuming draws nothing from the global generators. Start
    a loop over epochs at :attr:`epoch`::

        for epoch in range(loader.epoch, epochs):
            for batch in loader: ...

    With an :class:`ElasticSampler` as ``batch_sampler``, no batch is read again, and the state is the same on all ranks and fits any world
    size. With any other sampler, the earlier batches of the epoch are read again, because nothing else restores samplers and datasets. The
    state then belongs to one rank, and fits only the same world size.

    The resume is exact as far as the stored random states and epoch numbers determine the batches. :attr:`caveats` lists this
    loader's exceptions. A state takes a few kilobytes and can be stored as typed JSON.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap ``loader``; draws nothing. Raises :class:`StateError` if it is not a ``DataLoader``."""
        if not isinstance(loader, DataLoader):
            raise StateError(f"expected a torch.utils.data.DataLoader, got {type(loader).__qualname__}")
        self._loader = loader
        elastic = elastic_sampler_of(loader)
        self._is_elastic = elastic is not None
        self._position: _Position = (
            ReplayedPosition(loader) if elastic is None else ElasticPosition(loader, elastic)
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
        """The loader's sampler, for ``set_epoch``. A resume inside a stored epoch overrides ``set_epoch``."""
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
        """Start the next iteration at the position in ``state``. Doesn't touch the global random generators.

        Raises :class:`StateError` that lists every property of the loader that differs from the stored one, such as the dataset's length
        (and, without an :class:`ElasticSampler`, the number of workers and the rank). Nothing is changed then.
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
            "the save came after an epoch's last batch, and torchdata's loader ends that epoch first: the next loop over it gets no "
            "batch. Count steps, or epochs whose loop has ended: a loop that begins with epoch step // len(loader) loses one. "
            "shardwise.ResumableLoader continues with the next epoch"
        )
    if loader.num_workers:
        yield (
            f"num_workers={loader.num_workers}: after a resume inside an epoch torchdata's workers start with new "
            f"generators, so random draws in them (augmentation) differ"
        )
    elif loader.generator is not None:
        yield (
            "generator=…: torchdata draws a seed from it in each epoch except the resumed one, so with shuffle=True later "
            "epochs have another order; give no generator, or use shardwise.ResumableLoader"
        )


def make_iterator(loader: Any) -> None:
    """Make a loader's iterator after its state was loaded, before random generators are restored.

    torchdata's loader would make it at the first request for a batch or a state, and then draw from torch's global
    generator: a draw that the stored run had made already. Other loaders need nothing.
    """
    if is_stateful_loader(loader):
        loader.state_dict()
