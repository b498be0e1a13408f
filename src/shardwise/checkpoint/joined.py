"""The state of an optimizer whose parameters are on several ranks, each with its own part of the model: the same on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..dtypes import code_of, torch_dtype
from ..errors import StateError
from ..names import merged_order
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..state.optimizer import Drained, TrainState, drain, parameter_names
from ..tensors.live import LiveModel, absent, describe, is_declared

_PLAIN = (bool, int, float, str, type(None))


@frozen
class Joined:
    """What the parts of an optimizer on all ranks keep, by parameter name."""

    groups: Sequence[Sequence[str]]
    """The names of each group's parameters."""
    tensors: Mapping[str, Mapping[str, str]]
    """Parameter → state → dtype of each tensor that is spread over ranks like its parameter."""
    scalars: Mapping[str, Mapping[str, tuple[str, Any]]]
    """Parameter → state → dtype and number of each 0-d tensor; of a float its text."""
    values: Mapping[str, Mapping[str, Any]]
    """Parameter → state → value that is not a tensor."""

    def of_whole_model(self, drained: Drained, live: LiveModel) -> Drained:
        """This rank's state with that of all other ranks: numbers as they are, tensors as stand-ins without elements here."""
        names = [t.name for t in live.parameters]
        shapes = {t.name: live.spec(t).shape for t in live.parameters}
        kind = next((t.tensor.device.type for t in live.parameters if t.owners), "cpu")
        found = Drained(
            groups=[
                {**group, "names": list(members)}
                for group, members in zip(drained.groups, self.groups, strict=True)
            ],
            values={n: dict(self.values[n]) for n in names if n in self.values},
            opaque=drained.opaque,
            has_unseen_gradients=drained.has_unseen_gradients,
        )
        for name in (n for n in names if n in self.tensors):
            own = drained.tensors.get(name, {})
            found.tensors[name] = {
                key: own[key]
                if key in own
                else absent(shapes[name], live.geometries[name], torch_dtype(dtype), kind)
                for key, dtype in self.tensors[name].items()
            }
        packs: dict[str, list[torch.Tensor]] = defaultdict(list)
        for name in (n for n in names if n in self.scalars):
            for key, (dtype, number) in self.scalars[name].items():
                pack = packs[f"{key}.{dtype}"]
                found.packed_index.setdefault(name, {})[key] = (f"{key}.{dtype}", len(pack))
                value = float.fromhex(number) if isinstance(number, str) else number
                pack.append(torch.tensor(value, dtype=torch_dtype(dtype)))
        found.packed = {key: torch.stack(pack) for key, pack in packs.items()}
        return found


def agree_on_parts(state: TrainState, ranks: Ranks) -> dict[str, Joined]:
    """By name, the optimizers of models that are declared parts, joined over ranks. Collective; nothing is exchanged without such models.

    Raises :class:`StateError` or :class:`RankError` on every rank.
    """
    if not any(map(is_declared, state.models.values())):
        return {}

    def told() -> dict[str, Any]:
        lives = {name: describe(model) for name, model in state.models.items()}
        return {name: _told(name, o, lives) for name, o in state.optimizers.items()}

    found = ranks.combine("join optimizers", told, _joined)
    if found["problems"]:
        raise StateError("; ".join(found["problems"][:5]))
    return {name: Joined(**one) for name, one in found["optimizers"].items() if one is not None}


def trained_model(name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> str:
    """The name of the first model that holds all parameters of the optimizer; of the first one, if none does.

    Raises :class:`StateError` if a rank can't tell: it has no parameters of several models that are declared in parts.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not optimized and len(lives) > 1 and any(is_declared(live.root) for live in lives.values()):
        raise StateError(
            f"optimizer {name}: has no parameters on this rank, so it isn't known which of the models {', '.join(lives)} it trains. Give it a "
            f"parameter on each rank, or save the models as two states"
        )
    found = (n for n, live in lives.items() if optimized <= {id(t.tensor) for t in live.tensors})
    return next(found, next(iter(lives)))


def _told(name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel]) -> dict[str, Any] | None:
    """What this rank's part of an optimizer keeps; None if its model isn't declared in parts."""
    if not is_declared(lives[trained_model(name, optimizer, lives)].root):
        return None
    tensors = [t for live in lives.values() for t in live.tensors if t.owners]
    drained = drain(optimizer, parameter_names(optimizer, tensors))
    if drained.low_bit:
        raise StateError(
            f"optimizer {name}: keeps states of few bits of a model that is declared in parts; not supported. Use an optimizer whose states have "
            f"32 or 16 bits"
        )
    for of, values in drained.values.items():
        for key, value in values.items():
            if type(value) not in _PLAIN:
                raise StateError(
                    f"optimizer state {of}.{key} is a {type(value).__name__}, of a model that is declared in parts; not supported"
                )
    scalars: dict[str, dict[str, Any]] = {}
    for of, states in drained.packed_index.items():
        for key, (pack, index) in states.items():
            value = drained.packed[pack][index]
            number = value.item()  # NaN is not equal to itself: as text
            scalars.setdefault(of, {})[key] = [
                code_of(value.dtype),
                number.hex() if isinstance(number, float) else number,
            ]
    return {
        "groups": [list(group["names"]) for group in drained.groups],
        "options": [_texts(group["options"]) for group in drained.groups],
        "tensors": {n: {k: code_of(t.dtype) for k, t in of.items()} for n, of in drained.tensors.items()},
        "scalars": scalars,
        "values": drained.values,
    }


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """The options of a parameter group that every rank writes alike. The save compares the others as documents."""

    def is_plain(value: Any) -> bool:
        return all(map(is_plain, value)) if type(value) in (tuple, list) else type(value) in _PLAIN

    numbers = {
        k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in options.items()
    }
    return {key: repr(value) for key, value in numbers.items() if is_plain(value)}


def _unlike_options(name: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for k, first in enumerate(parts[0]["options"]):
        for rank, part in enumerate(parts):
            now = part["options"][k]
            found += [
                f"optimizer {name}: the {key} of group {k} is {first.get(key, 'not there')} on rank 0, and "
                f"{now.get(key, 'not there')} on rank {rank}; expected the same on each rank"
                for key in {**first, **now}
                if first.get(key) != now.get(key)
            ]
    return found


def _joined(told: Sequence[Mapping[str, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """Rank 0 joins the parts of all ranks. Pure."""
    problems: list[str] = []
    found: dict[str, Any] = {}
    given: dict[tuple[str, ...], int] = {}
    for rank, one in enumerate(told):
        given.setdefault(tuple(sorted(one)), rank)
    if len(given) > 1:
        texts = ", ".join(f"{', '.join(names) or 'none'} on rank {rank}" for names, rank in given.items())
        return {
            "optimizers": {},
            "problems": [f"ranks have different optimizers: {texts}. Give the same names on each rank"],
        }
    for name in told[0]:
        parts = [part for part in (one[name] for one in told) if part is not None]
        if not parts:
            found[name] = None
            continue
        if len(parts) < len(told):
            problems.append(f"optimizer {name}: trains different models on different ranks")
            continue
        counts: dict[int, int] = {}
        for rank, part in enumerate(parts):
            counts.setdefault(len(part["groups"]), rank)
        if len(counts) > 1:
            texts = ", ".join(f"{count} on rank {rank}" for count, rank in counts.items())
            problems.append(
                f"optimizer {name}: its number of parameter groups differs between ranks: {texts}. Make the same groups on each rank; one may have no "
                f"parameters there"
            )
            continue
        problems += _unlike_options(name, parts)
        places: dict[str, set[int]] = defaultdict(set)
        for part in parts:
            for k, members in enumerate(part["groups"]):
                for member in members:
                    places[member].add(k)
        problems += [
            f"optimizer {name}: {member} is in groups {sorted(of)} on different ranks"
            for member, of in places.items()
            if len(of) > 1
        ]
        joined: dict[str, Any] = {
            "groups": [
                merged_order([part["groups"][k] for part in parts]) for k in range(len(parts[0]["groups"]))
            ]
        }
        for what in ("tensors", "scalars", "values"):
            merged: dict[str, Any] = {}
            for rank, part in enumerate(parts):
                held = {n for members in part["groups"] for n in members}
                for member in held:
                    states = part[what].get(member, {})
                    if merged.setdefault(member, states) != states:
                        problems.append(
                            f"optimizer {name}: the {what} of {member} differ between ranks that hold it: {states} on rank {rank}, "
                            f"{merged[member]} on one before. All of them must have made the same steps with it; packed experts without tokens "
                            f"need a gradient of zeros"
                        )
            joined[what] = {member: states for member, states in merged.items() if states}
        found[name] = joined
    return {"optimizers": found, "problems": problems}
