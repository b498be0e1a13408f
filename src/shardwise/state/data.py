"""Position of a data loader: store it in the middle of an epoch, and go on exactly there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ..errors import StateError
from ..internals.torch import is_stateful_loader
from .replay import ReplayedPosition
from .sampler import ElasticPosition, elastic_sampler_of

__all__ = ["ResumableLoader", "data_caveats", "make_iterator"]


class _Position(Protocol):
    """What the two ways of keeping a position have in common; the docstrings are :class:`ResumableLoader`'s."""

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
    """A ``DataLoader`` whose position is state: iterate over this in place of the loader.

    It yields the loader's own batches, in the loader's order, with the loader's use of random generators. A
    batch counts from the moment that the loop gets it; what workers have prefetched does not count. Leaving a
    loop early and iterating anew begins a new epoch, as with the loader itself; until then the position is
    that of the epoch that was left. The iterator is made when its first batch is asked for.

    Resume with :meth:`load_state_dict`, restore the global random states, iterate: the first iteration goes
    on after the last batch that was handed out. If those were all, it goes on with the next epoch; only with
    an iterable dataset, whose end is not known beforehand, it ends the epoch first: a loop of zero batches.
    Going on draws nothing from global generators. A loop over epochs begins with :attr:`epoch`::

        for epoch in range(loader.epoch, epochs):
            for batch in loader: ...

    With an :class:`ElasticSampler` as its ``batch_sampler``, the sampler is told where to begin: no batch is read
    again, the state is equal on all ranks and goes on at any world size. Every other loader reads the batches of
    the epoch so far again, because only that leaves samplers and datasets as they were; its state is of one rank,
    and goes on at the same world size.

    Exact for what the stored random states and epoch numbers determine; :attr:`caveats` says what, in this
    loader, they do not. A state is a few kilobytes and can be held by typed JSON.
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
        """The loader that was wrapped."""
        return self._loader

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self._loader.dataset

    @property
    def batch_size(self) -> int | None:
        """The loader's batch size; None with a batch sampler of its own or without batching."""
        return self._loader.batch_size

    @property
    def sampler(self) -> Any:
        """The loader's sampler, for ``set_epoch``. A stored epoch that goes on overrules what was set."""
        return self._loader.sampler

    @property
    def epoch(self) -> int:
        """Number, from 0, of the epoch of the next batch; in a loop, of the batch that it holds."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """Batches of :attr:`epoch` that the loop was handed."""
        return self._position.consumed

    @property
    def caveats(self) -> tuple[str, ...]:
        """What of this loader can't be promised to go on exactly, one sentence each; empty if all can."""
        return self._position.caveats

    def __len__(self) -> int:
        """Batches per epoch. Raises ``TypeError`` if the loader has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or of the rest of the loaded one.

        Raises :class:`StateError` if the loaded epoch does not have the batches that were consumed of it.
        """
        return self._position.iterate()

    def state_dict(self) -> dict[str, Any]:
        """The position, in values that typed JSON can hold. Changes nothing, and can be taken in a loop."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the position of ``state`` at the next iteration. Global random generators are not touched.

        Raises :class:`StateError` naming each property of the loader that is not the one under which ``state`` was
        stored, such as the dataset's length (without an :class:`ElasticSampler`, also the number of workers and the
        rank). Nothing is changed in that case.
        """
        if ("sampler" in state) != self._is_elastic:
            was, now = ("with", "without") if "sampler" in state else ("without", "with")
            raise StateError(
                f"the data position was stored {was} an ElasticSampler, and the loader is {now} one; make the loader as "
                f"in the stored run, or resume without its position"
            )
        self._position.load_state_dict(state)


def data_caveats(loader: Any) -> tuple[str, ...]:
    """What a loader (or several by name, or None) can't promise to repeat exactly, one sentence each."""
    if isinstance(loader, Mapping) and not hasattr(loader, "state_dict"):
        return tuple(line for one in loader.values() for line in data_caveats(one))
    if is_stateful_loader(loader):
        return tuple(_caveats_of_torchdata(loader))
    return tuple(getattr(loader, "caveats", ()))


def _caveats_of_torchdata(loader: Any) -> Iterator[str]:
    if loader.num_workers:
        yield (
            f"num_workers={loader.num_workers}: torchdata's workers start with new generators when an epoch is taken up in "
            f"the middle, so random draws in them (augmentation) are others"
        )
    elif loader.generator is not None:
        yield (
            "generator=…: torchdata draws a seed from it in each epoch but the one that is taken up, so with shuffle=True "
            "the epochs after that one have another order; leave it out, or use shardwise.ResumableLoader"
        )


def make_iterator(loader: Any) -> None:
    """Let a loader that was just given its state make its iterator now, before random generators are restored.

    torchdata's makes it when first asked for a batch or a state, and that draws from torch's global generator: a
    draw that the stored run had behind it. Nothing to do for other loaders.
    """
    if is_stateful_loader(loader):
        loader.state_dict()
