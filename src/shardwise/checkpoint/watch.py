"""Finds and repairs changes of models and optimizers by the program's own objects when these take their state.

An extra may write into the model (an average of the weights), a custom scheduler into an optimizer's settings. torch's
schedulers, scalers and data loaders do not, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..names import named_tensors
from ..ranks.ranks import Ranks
from ..state.beyond_optimizer import KeptOptimizer
from ..state.schedulers import inner_schedulers, unwrapped
from ..state.train_state import TrainState
from .own import tensor_sums

__all__ = ["Watched", "changed_anywhere", "reaches_others"]

#: Classes whose ``load_state_dict`` changes only the object itself.
_KNOWN = (
    "accelerate.",
    "shardwise.",
    "torch.amp.",
    "torch.optim.lr_scheduler",
    "torch.utils.data.",
    "torchdata.",
)


def reaches_others(target: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether the ``load_state_dict`` of an object may change other objects: true for every unknown class.

    ``above``: ids of the schedulers around it.
    """
    if isinstance(target, Mapping) and not hasattr(target, "load_state_dict"):
        return any(map(reaches_others, target.values()))
    above = (*above, id(target))
    within = [unwrapped(target), *inner_schedulers(target)]
    taking = getattr(type(target), "load_state_dict", None)
    known = (getattr(taking, "__module__", None) or "").startswith(_KNOWN)
    return (
        not known
        or "load_state_dict" in getattr(target, "__dict__", {})
        or any(reaches_others(s, above) for s in within if id(s) not in above)
    )


class Watched:
    """A record of models and optimizers before other objects get their state. Reads all their tensors. Rank-local."""

    def __init__(self, state: TrainState) -> None:
        self._models = state.models
        self._sums = {name: tensor_sums(model) for name, model in self._models.items()}
        self._tensors = {name: dict(self._by_name(name)) for name in self._models}
        bare = state.optimizers
        self._kept = {name: KeptOptimizer(o, bare[name]) for name, o in state.given_optimizers.items()}

    def _by_name(self, model: str) -> Iterator[tuple[str, Any]]:
        return ((t.name, t.tensor) for t in named_tensors(self._models[model]) if t.persistent)

    def changed_models(self) -> list[str]:
        """Models with a changed tensor on this rank: fill them again."""
        return [name for name, model in self._models.items() if tensor_sums(model) != self._sums[name]]

    def put_back(self) -> Iterator[str]:
        """Restore the optimizers' settings and states. Yields a line for each change that can't be undone."""
        for name, before in self._tensors.items():
            for key, tensor in self._by_name(name):
                if before.get(key) is not tensor:
                    yield f"{name}: {key} is another tensor since another object took its state; optimizers train the former"
        for name, kept in self._kept.items():
            for what in kept.put_back():
                yield f"{name}: {what} was changed when another object took its state, and may differ now"


def changed_anywhere(watched: Watched | None, ranks: Ranks) -> list[str]:
    """Models that other objects changed on any rank; the same on all ranks. Collective."""

    def found() -> list[str]:
        return watched.changed_models() if watched is not None else []

    def anywhere(each: list[list[str]]) -> list[str]:
        return sorted({name for names in each for name in names})

    return ranks.combine("compare models", found, anywhere)
