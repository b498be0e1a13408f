"""The own state of models and optimizers (state outside parameters and buffers): restored, and checked for arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from ..digests import partial_sums
from ..format.manifest import Manifest, document_named, document_of
from ..internals.torch import local_tensor
from ..limits import brief, cause
from ..ranks.ranks import Ranks
from ..state.beyond import (
    KeptOptimizer,
    OwnOfModel,
    OwnOfOptimizer,
    Path,
    StoredOwn,
    differences,
    extras_in,
    give_back,
    path_text,
    same,
)
from ..state.documents import inner_schedulers, unwrapped
from ..state.optimizer import TrainState
from ..state.parts import is_several
from ..state.typed_json import Places, decode, encode
from ..tensors.live import LiveModel, describe, is_elsewhere

# ----------------------------------------------------------------------------------------------------
# Restores the own state of models and optimizers, and checks whether it arrived.

_LEFT_OUT = "not_stored"


class OwnState:
    """The documents of the own state of objects (``own``), and of its parts that were not stored.

    An older checkpoint has no such documents: the own state of live objects is then reported as a difference. The
    documents' form was checked (:mod:`..state.documents`).
    """

    def __init__(self, documents: Mapping[str, Any], manifest: Manifest, places: Places) -> None:
        def is_own(name: str) -> bool:
            meaning = document_named(name, manifest)
            return meaning is not None and meaning.kind == "own"

        own = {n for n in (*documents, *manifest.local_documents) if is_own(n)}
        self._leaves: dict[str, list[tuple[Path, Any]]] = {n: documents[n] for n in own & documents.keys()}
        self._elsewhere = (
            own - documents.keys()
        )  # of ranks that this run lacks; reported with other documents
        self._places = places
        self._lost: Mapping[str, Mapping[str, str]] = documents.get(_LEFT_OUT, {})
        self.differences = [
            line for n, lines in self._lost.items() if not is_own(n) for line in lines.values()
        ]
        """A line for each part that was not stored or not taken back."""
        self.restored: list[str] = []
        """Names of the restored documents."""
        self._asked: list[Callable[[], list[str]]] = []

    def give_to_models(self, lives: dict[str, LiveModel], ranks: Ranks) -> list[str]:
        """After the models' tensors are filled. Collective.

        A model whose own loading ran is described again in ``lives``: it may have changed anything. Returns the models, the
        same on all ranks, of which tensors were changed: they have to be filled again.
        """

        def given() -> list[str]:
            extras = extras_in(lives)
            before = {n: tensor_sums(live) for n, live in lives.items() if extras and n not in extras}
            changed = [n for n in lives if self._give_to_model(n, lives)]
            return changed + [
                n for n in before if tensor_sums(lives[n]) != before[n]
            ]  # an extra may change a model

        def anywhere(found: list[list[str]]) -> list[str]:
            return [n for n in lives if any(n in names for names in found)]

        return ranks.combine("give models their own state", given, anywhere)

    def _give_to_model(self, name: str, lives: dict[str, LiveModel]) -> bool:
        """Whether its own loading changed a tensor on this rank."""
        document = document_of("model", name, "own")
        stored, lines, before = self._stored(document, name), [], None
        if stored.leaves or OwnOfModel(lives[name]).loads_more:
            before = tensor_sums(lives[name])
            lines = give_back(stored, OwnOfModel(lives[name]), self._places)
            lives[name] = describe(lives[name].root)
        self._note(document, lines, lambda: differences(stored, OwnOfModel(lives[name])))
        return before is not None and tensor_sums(lives[name]) != before

    def give_to_optimizers(self, given: Mapping[str, Optimizer], bare: Mapping[str, Optimizer]) -> None:
        """Call it after the optimizers are filled. Rank-local."""
        for name, outer in given.items():
            document, owner = document_of("optimizer", name, "own"), OwnOfOptimizer(outer, bare[name])
            stored = self._stored(document, name)
            self._note(document, give_back(stored, owner, self._places), partial(differences, stored, owner))

    def ask(self) -> None:
        """Compare each object's own state with the stored one, once every object has its state. Rank-local."""
        for ask in self._asked:
            self.differences += ask()
        self._asked.clear()

    def _stored(self, document: str, name: str) -> StoredOwn:
        return StoredOwn(name, self._leaves.get(document, []), self._lost.get(document, {}))

    def _note(self, document: str, lines: list[str], ask: Callable[[], list[str]]) -> None:
        self.differences += self._lost.get(document, {}).values()
        if document not in self._elsewhere:
            self.differences += lines
            if not any("load_state_dict failed" in line for line in lines):
                self._asked.append(ask)
        if document in self._leaves:
            self.restored.append(document)


def tensor_sums(live: LiveModel) -> dict[str, tuple[Any, ...]]:
    """Sums and shapes of this rank's part of all stored tensors."""
    parts = {t.name: local_tensor(t.tensor).detach() for t in live.stored}
    sums = partial_sums((local, (0,) * local.dim()) for local in parts.values())
    return {n: (tuple(local.shape), s) for (n, local), s in zip(parts.items(), sums, strict=True)}


def not_taken(name: str, stored: Any, ask: Callable[[], Any]) -> Iterator[str]:
    """One line if the state of an object that took a document differs from the stored one. Rank-local.

    ``ask`` returns the object's state. ``stored`` is a copy of the given state, on the CPU. The object's state is
    brought into the same form, without functions.
    """
    try:
        encoded = encode(ask(), where=name)
        now = decode(encoded.document, encoded.tensors)
    except Exception as error:
        yield f"{name}: can't tell whether it was accepted ({cause(error)})"
        return
    if same(now, stored):
        return
    paths = list(islice(_differing(now, stored), 5))
    what = f" ({', '.join(brief(path_text(path)) for path in paths)})" if paths and paths[0] else ""
    yield f"{name}: the object that received it returned a different state than the stored one{what}"


def _differing(now: Any, stored: Any, path: Path = ()) -> Iterator[Path]:
    """Paths at which two values differ, as deep as both are mappings with text keys, or lists of one length."""
    if same(now, stored):
        return
    if isinstance(now, dict) and isinstance(stored, dict):
        for key in {**stored, **now}:
            if key in now and key in stored:
                yield from _differing(now[key], stored[key], (*path, key))
            else:
                yield (*path, key)
    elif isinstance(now, list) and isinstance(stored, list) and len(now) == len(stored):
        for k, (one, other) in enumerate(zip(now, stored, strict=True)):
            yield from _differing(one, other, (*path, k))
    else:
        yield path


# ----------------------------------------------------------------------------------------------------
# Finds and repairs changes of models and optimizers by the program's own objects when these take their state.
#
# An extra may write into the model (an average of the weights), a custom scheduler into an optimizer's settings. torch's
# schedulers, scalers and data loaders do not, and cost nothing.

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
        self.sums = {name: tensor_sums(live) for name, live in lives.items()}
        self._tensors = {name: {t.name: t.tensor for t in live.stored} for name, live in lives.items()}
        bare = state.optimizers
        self._kept = {name: KeptOptimizer(o, bare[name]) for name, o in state.given_optimizers.items()}

    def put_back(self, lives: dict[str, LiveModel]) -> tuple[str, ...]:
        """Give optimizers the settings and states that they had. Returns a line for each change that stays.

        Describes the models again in ``lives``: the program's own code ran.
        """
        lives.update({name: describe(live.root) for name, live in lives.items()})
        swapped = [
            f"{name}: {t.name} was replaced with a different tensor when another object was restored; optimizers train the previous one"
            for name, before in self._tensors.items()
            for t in lives[name].stored
            if before.get(t.name) is not t.tensor and not is_elsewhere(t)
        ]
        changed = [
            f"{name}: {what} was changed when another object was restored, and may differ now"
            for name, kept in self._kept.items()
            for what in kept.put_back()
        ]
        return (*swapped, *changed)


def changed_anywhere(watched: Watched | None, lives: Mapping[str, LiveModel], ranks: Ranks) -> list[str]:
    """Models with a tensor that another object changed on any rank, the same on all ranks: they have to be filled again. Collective."""

    def found() -> list[str]:
        if watched is None:
            return []
        return [name for name, live in lives.items() if tensor_sums(live) != watched.sums[name]]

    return ranks.combine("compare models", found, lambda each: sorted(set[str]().union(*each)))
