"""The objects of a run that take state documents. Each checks its document before anything changes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import FormatError, StateError
from ..format.manifest import CONVERTED, Manifest, document_named, document_of
from ..limits import brief, cause
from ..rng import RngPlan, devices_of, plan_rng
from ..state.beyond import extras_in
from ..state.data import make_iterator
from ..state.documents import (
    check_classes,
    check_settings,
    check_state,
    check_values,
    refuse_other_kind,
    unsaid_classes,
)
from ..state.optimizer import UNSEEN_GRADIENTS, TrainState
from ..state.parts import is_several
from ..state.typed_json import Places
from ..tensors.live import LiveModel
from .optimizer import OptimizerInCheckpoint, trained_by
from .own import not_taken, reaches_others
from .snapshot import classes_of, modules_with_state
from .stored import StoredCheckpoint, why_of_others

# ----------------------------------------------------------------------------------------------------
# The objects of a run that take documents. Each checks its document before anything changes, and takes it later.
#
# A name in a file never selects an attribute: a receiver knows the name of its own document, from a closed list.


class Receiver(ABC):
    """An object of this run that takes one document: of our checkpoints, or of another program's."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the document."""
        self.asked: list[Callable[[], Iterable[str]]] = []
        """Checks to run when every object has its state; each gives lines for differences from the stored state."""

    def check(self, stored: Any) -> None:  # noqa: B027 (others check it)
        """Raise :class:`StateError` if a document does not fit, :class:`FormatError` if it is damaged. Changes nothing."""

    def restore(self, stored: Any) -> Iterable[str]:
        """Take a checked document. Returns a line for each part that this run does not take."""
        return ()

    @abstractmethod
    def missing(self) -> None:
        """Raise :class:`StateError` if this run can't go on without the document. Changes nothing."""

    def reaches_others(self) -> bool:
        """Whether taking the document may change models and optimizers."""
        return False


class _OfCheckpoint(Receiver):
    """Takes a document of our checkpoints."""

    def __init__(self, name: str, stored: StoredCheckpoint) -> None:
        super().__init__(name)
        self._stored = stored

    @property
    def _is_of_other_ranks(self) -> bool:
        """Whether each rank stored its own, where the document is missing: the saved run had another world size, or other parts of a declared model."""
        return self.name in self._stored.manifest.local_documents

    def missing(self) -> None:
        path, manifest = self._stored.path, self._stored.manifest
        if self._is_of_other_ranks:
            equal = (
                "give the loader an sw.ElasticSampler as batch_sampler (docs/howto/own-loop.md)"
                if self.name == "dataloader"
                else "use one whose state is equal on all ranks"
            )
            raise StateError(
                f"{path}: {self.name} was stored per rank by {manifest.world_size} ranks, but {why_of_others(manifest)}: "
                f"its state can't be carried over. Launch on {manifest.world_size} ranks in the saved layout, or leave it out of the state. "
                f"To change the number of ranks in later resumes, {equal}"
            )
        if kind := manifest.software.get(CONVERTED):
            raise StateError(
                f"{path}: contains no {self.name}: it was converted from {kind}, and the conversion's report listed what it left out under 'skipped'. "
                f"Restore the source itself (sw.restore(state, SOURCE)); without its {self.name}, the run would continue differently"
            )
        raise StateError(
            f"{path}: contains no {self.name}; leave it out of the state, or give the step that has it"
        )


class _Stateful(_OfCheckpoint):
    """Scheduler, scaler or data loader: an object with ``load_state_dict``, or several by name."""

    def __init__(self, name: str, target: Any, stored: StoredCheckpoint) -> None:
        super().__init__(name, stored)
        self._target, self._places = target, stored.places

    def check(self, stored: Any) -> None:
        check_state(self._target, stored, self.name)

    def restore(self, stored: Any) -> Iterable[str]:
        return _give(self._target, stored, self.name, self._places, self.asked)

    def reaches_others(self) -> bool:
        return reaches_others(self._target)


class _Extra(_Stateful):
    """An extra: an object with ``load_state_dict``, or a plain value that is put back into the dict."""

    def __init__(self, extra: dict[str, Any], key: str, stored: StoredCheckpoint) -> None:
        super().__init__(f"extra.{key}", extra[key], stored)
        self._extra, self._key = extra, key
        self._is_object = hasattr(extra[key], "load_state_dict")

    def check(self, stored: Any) -> None:
        if isinstance(self._target, LRScheduler | torch.amp.GradScaler):
            super().check(stored)  # any value of typed JSON may be the state of other objects

    def restore(self, stored: Any) -> Iterable[str]:
        if self._is_object:
            return super().restore(stored)
        self._extra[self._key] = self._places.put(stored, lambda: self._target)
        return ()

    def reaches_others(self) -> bool:
        return self._is_object and super().reaches_others()

    def missing(self) -> None:
        if self._is_of_other_ranks:
            super().missing()


class _Modules(_OfCheckpoint):
    """State that modules keep beside tensors."""

    def __init__(self, name: str, lives: Mapping[str, LiveModel], stored: StoredCheckpoint) -> None:
        super().__init__(document_of("model", name, "modules"), stored)
        self._model, self._lives, self._places = name, lives, stored.places

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(modules_with_state(self._lives[self._model].modules))

    def check(self, stored: Any) -> None:
        lost = [path for path in self._modules if path not in stored]
        if lost:
            raise StateError(
                f"{self.name}: the checkpoint contains no extra state of the module {lost[0]!r}; resume with the model that was "
                f"saved"
            )

    def restore(self, stored: Any) -> Iterable[str]:
        modules = self._modules
        for path, module in modules.items():
            name, kept = f"{self.name}[{path!r}]", copy.deepcopy(stored[path])
            value = self._places.put(stored[path], module.get_extra_state)
            with _taking(name, module, "set_extra_state"):
                module.set_extra_state(value)
            self.asked.append(partial(not_taken, name, kept, module.get_extra_state))
        return [
            f"{self.name}[{brief(path)}]: the module doesn't keep this state"
            for path in stored
            if path not in modules
        ]

    def reaches_others(self) -> bool:
        return bool(self._modules)

    def missing(self) -> None:
        if self._modules:
            super().missing()


class Buffers(_OfCheckpoint):
    """Plain buffers that differed between ranks. Taken again whenever the model was filled.

    The load proves that these tensors of the manifest are the model's.
    """

    def __init__(self, name: str, lives: Mapping[str, LiveModel], stored: StoredCheckpoint) -> None:
        super().__init__(document_of("model", name, "buffers"), stored)
        self._model, self._lives = name, lives

    def restore(self, stored: Any) -> Iterable[str]:
        live = {alias: t.tensor for t in self._lives[self._model].tensors for alias in t.names}
        for name, content in stored.items():
            live[name].detach().copy_(content)
        return ()

    def missing(self) -> None:
        pass


class _Optimizer(_OfCheckpoint):
    """Settings and values of an optimizer, which :mod:`.optimizer` applies with its tensors."""

    def __init__(
        self, name: str, optimizer: Optimizer, lives: Mapping[str, LiveModel], stored: StoredCheckpoint
    ) -> None:
        super().__init__(document_of("optimizer", name), stored)
        self._of, self._optimizer, self._lives = name, optimizer, lives

    def check(self, stored: Any) -> None:
        saved, now = stored["class"], type(self._optimizer).__qualname__
        if saved is None:  # a converted checkpoint, whose source did not record it
            refuse_other_kind(self._optimizer, stored["groups"])
        elif saved != now:
            raise StateError(
                f"{self._stored.path}: contains state for {saved}, but the optimizer is {now}; use the same one"
            )
        check_settings(self._optimizer, stored["groups"], self.name)
        check_values(self._optimizer, stored["values"], self.name)
        part = trained_by(self._of, self._optimizer, self._lives)
        trained = stored.get("model", part.model_name)
        if trained != part.model_name:
            raise StateError(
                f"optimizer {self._of!r} trained the model {trained!r} when it was saved, and {part.model_name!r} now; "
                f"give each optimizer the name that it had"
            )
        named = self._stored.under_names_of(self._lives)
        if {t.name for t in part.live.stored} == named.manifest.models[trained].keys():
            OptimizerInCheckpoint(part, named).check()  # of another model, the load says what does not fit

    def restore(self, stored: Any) -> Iterable[str]:
        return [f"{self.name}: not stored: {UNSEEN_GRADIENTS}"] * bool(stored.get("unseen_gradients"))

    def missing(self) -> None:
        if self._of in self._stored.manifest.packed:
            raise FormatError(f"holds tensors of {self.name}, and not its document", path=self._stored.path)
        super().missing()


class _OfOptimizer(_OfCheckpoint):
    """What is applied with the rest of an optimizer: ``opaque`` tensors that only their own rank can interpret, and the forms
    of ``low_bit`` states."""

    def __init__(self, name: str, what: str, stored: StoredCheckpoint) -> None:
        super().__init__(document_of("optimizer", name, what), stored)

    def missing(self) -> None:
        if self._is_of_other_ranks:
            super().missing()


class _Classes(_OfCheckpoint):
    """The class of each scheduler, because a scheduler silently takes the state of any other."""

    def __init__(self, state: TrainState, stored: StoredCheckpoint) -> None:
        super().__init__("classes", stored)
        self._now = classes_of(state)

    def check(self, stored: Any) -> None:
        for of, now in self._now.items():
            check_classes(stored.get(of, {}), now, of)

    def restore(self, stored: Any) -> Iterable[str]:
        for of, now in self._now.items():
            yield from unsaid_classes(stored.get(of, {}), now, of)

    def missing(self) -> None:
        pass


class Generators(_OfCheckpoint):
    """This process's random generators. They take their document last, because any other object may draw."""

    plan: RngPlan
    """How they will be set; known once the document was checked or found missing."""

    def __init__(self, state: TrainState, stored: StoredCheckpoint, rank: int) -> None:
        super().__init__("rng", stored)
        self._rank, self._devices = rank, devices_of(state.models.values())

    def check(self, stored: Any) -> None:
        seed, step = self._stored.manifest.seed, self._stored.manifest.step
        self.plan = plan_rng(stored, seed=seed, step=step, rank=self._rank, devices=self._devices)

    def missing(self) -> None:
        self.check(None)  # of another world size: they are derived

    def restore(self, stored: Any) -> Iterable[str]:
        self.plan.apply()
        return ()


def receivers_of(
    state: TrainState, lives: Mapping[str, LiveModel], stored: StoredCheckpoint
) -> list[Receiver]:
    """Everything in a training state that takes a document before the random generators do.

    ``lives`` is looked at when a document is checked or taken: the caller keeps it true.
    """
    found: list[Receiver] = [_Classes(state, stored)]
    for name, target in (
        ("scheduler", state.scheduler),
        ("scaler", state.scaler),
        ("dataloader", state.dataloader),
    ):
        if target is not None:
            found.append(_Stateful(name, target, stored))
    found += [_Extra(state.extra, key, stored) for key in state.extra if key not in extras_in(lives)]
    for name in lives:
        found += [_Modules(name, lives, stored), Buffers(name, lives, stored)]
    for name, optimizer in state.optimizers.items():
        found += [
            _Optimizer(name, optimizer, lives, stored),
            *(_OfOptimizer(name, what, stored) for what in ("opaque", "low_bit")),
        ]
    return found


_Asked = list[Callable[[], Iterable[str]]]


def _give(target: Any, value: Any, name: str, places: Places, asked: _Asked) -> Iterator[str]:
    """Give state to an object, or to several by name. Adds a later comparison of each one's state to ``asked``.

    Yields lines for stored state that was not asked for. Raises :class:`StateError` naming the object for any error of its own.
    """
    if is_several(target):
        for key, one in value.items():
            if key in target:
                yield from _give(target[key], one, f"{name}.{key}", places, asked)
            else:
                yield f"{name}.{key}: not given to this run"
        return
    # A loader may start its workers to give its state, and loaders of this package keep the given one until training continues.
    is_of_ours = type(target).__module__.partition(".")[0] == __name__.partition(".")[0]
    is_loader = name.partition(".")[0] == "dataloader"
    is_asked = not (is_of_ours or is_loader or isinstance(target, torch.utils.data.DataLoader))
    kept = copy.deepcopy(value) if is_asked else None  # the object may keep or change the given value
    with _taking(name, target):
        target.load_state_dict(places.put(value, target.state_dict if is_asked else lambda: None))
    if name == "scaler" and value and not target.state_dict():
        yield "scaler: it is disabled in this run"
    elif is_asked:
        asked.append(partial(not_taken, name, kept, target.state_dict))
    if is_loader:
        with _taking(name, target):
            make_iterator(target)


@contextmanager
def _taking(name: str, target: Any, method: str = "load_state_dict") -> Iterator[None]:
    """Raise any error of an object that takes its state as a :class:`StateError` that names the object."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name}: {type(target).__qualname__}.{method} doesn't accept the saved state ({cause(error)}); use the same "
            f"object as the saved run, or leave it out of the state"
        ) from error


# ----------------------------------------------------------------------------------------------------
# Restores documents: each goes to its receiver, from a closed list. A name in a file never selects an attribute.
#
# A receiver checks its document before anything changes, and takes it after tensors are restored. Other modules apply
# the documents of optimizers (with their tensors), of own state, and of random generators (last of all).


def check_documents(receivers: Iterable[Receiver], documents: Mapping[str, Any]) -> None:
    """Refuse documents that do not fit, and missing ones that the run asks for, before anything is changed."""
    for receiver in receivers:
        if receiver.name in documents:
            receiver.check(documents[receiver.name])
        else:
            receiver.missing()


#: Documents of these kinds are listed in reports. Those of other kinds are applied with tensors, or by other modules.
_LISTED = ("scheduler", "scaler", "dataloader", "extra", "modules", "buffers")


def restore_documents(
    receivers: Iterable[Receiver],
    state: TrainState,
    lives: Mapping[str, LiveModel],
    documents: Mapping[str, Any],
    manifest: Manifest,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give every document to its receiver. Returns the names restored, and lines for state that is skipped."""
    by_name = {receiver.name: receiver for receiver in receivers}
    restored: list[str] = []
    skipped = list(_without_document(state, lives, documents, manifest))
    for name, value in documents.items():
        meaning = document_named(name, manifest)
        assert meaning is not None, "unknown names are refused where they are read"
        if name in by_name:
            skipped += by_name[name].restore(value)
            if meaning.kind in _LISTED:
                restored.append(name)
        elif meaning.kind == "extra":
            skipped.append(f"{name}: not among this run's extras")
        elif meaning.kind in ("scheduler", "scaler", "dataloader", "optimizer"):
            skipped.append(f"{name}: not given to this run")
    return tuple(restored), tuple(skipped)


def _without_document(
    state: TrainState, lives: Mapping[str, LiveModel], documents: Mapping[str, Any], manifest: Manifest
) -> Iterator[str]:
    """Lines for state that this run asks for or the checkpoint holds, but that has no document."""
    for key in state.extra:
        if f"extra.{key}" not in documents and key not in extras_in(lives):
            yield f"extra.{key}: not in the checkpoint"
    for name in manifest.local_documents:
        meaning = document_named(name, manifest)
        if name in documents or meaning is None:
            continue
        if meaning.kind == "buffers":
            yield f"{name} that differed between ranks: every rank now has those of one rank"
        elif meaning.kind in (*_LISTED, "own"):
            yield f"{name}: stored per rank, but {why_of_others(manifest)}"
    for name in manifest.models:
        if name not in lives:
            yield f"model {name}: not given to this run"
