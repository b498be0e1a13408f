"""Finds and repairs changes of models and optimizers by the program's own objects when these take their state.

An extra may write into the model (an average of the weights), a custom scheduler into an optimizer's settings. torch's
schedulers, scalers and data loaders do not, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..layout.live import LiveModel, describe
from ..ranks.ranks import Ranks
from ..state.beyond_optimizer import KeptOptimizer
from ..state.schedulers import inner_schedulers, unwrapped
from ..state.several import is_several
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
    if is_several(target):
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

    def __init__(self, state: TrainState, lives: Mapping[str, LiveModel]) -> None:
        self._sums = {name: tensor_sums(live) for name, live in lives.items()}
        self._tensors = {name: {t.name: t.tensor for t in live.stored} for name, live in lives.items()}
        bare = state.optimizers
        self._kept = {name: KeptOptimizer(o, bare[name]) for name, o in state.given_optimizers.items()}

    def changed_models(self, lives: Mapping[str, LiveModel]) -> list[str]:
        """Models with a tensor on this rank that is not as it was: they have to be filled again."""
        return [name for name, live in lives.items() if tensor_sums(live) != self._sums[name]]

    def put_back(self, lives: dict[str, LiveModel]) -> tuple[str, ...]:
        """Give optimizers the settings and states that they had. Returns a line for each change that stays.

        Describes the models again in ``lives``: the program's own code ran.
        """
        lives.update({name: describe(live.root) for name, live in lives.items()})
        return tuple(self._put_back(lives))

    def _put_back(self, lives: Mapping[str, LiveModel]) -> Iterator[str]:
        for name, before in self._tensors.items():
            for t in lives[name].stored:
                if before.get(t.name) is not t.tensor:
                    yield f"{name}: {t.name} is another tensor since another object took its state; optimizers train the former"
        for name, kept in self._kept.items():
            for what in kept.put_back():
                yield f"{name}: {what} was changed when another object took its state, and may differ now"


def changed_anywhere(watched: Watched | None, lives: Mapping[str, LiveModel], ranks: Ranks) -> list[str]:
    """Models that other objects changed on any rank, the same on all. Collective."""

    def found() -> list[str]:
        return watched.changed_models(lives) if watched is not None else []

    def anywhere(each: list[list[str]]) -> list[str]:
        return sorted({name for names in each for name in names})

    return ranks.combine("compare models", found, anywhere)
