"""Restores documents: each goes to its receiver, from a closed list. A name in a file never selects an attribute.

A receiver checks its document before anything changes (:meth:`Receiver.check`, :meth:`Receiver.missing`), and takes it
after tensors are restored (:meth:`Receiver.restore`). Other modules apply the documents of optimizers (with their
tensors) and of random generators (last of all).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import FormatError, StateError
from ..format.documents import document_named, document_of
from ..format.manifest import Manifest
from ..layout.live import LiveModel
from ..limits import brief, cause
from ..state.data import make_iterator
from ..state.forms import (
    check_classes,
    check_settings,
    check_state,
    check_values,
    is_several,
    refuse_other_kind,
    unsaid_classes,
)
from ..state.gradients import UNSEEN_GRADIENTS
from ..state.places import Places
from ..state.train_state import TrainState
from .own import not_taken
from .snapshot import classes_of, modules_with_state
from .watch import reaches_others

__all__ = [
    "Receiver",
    "ask_receivers",
    "check_documents",
    "receivers_of",
    "restore_buffers",
    "restore_documents",
]


class Receiver(ABC):
    """The object of this run that takes the document of one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the document."""
        self.asked: list[Callable[[], Iterable[str]]] = []
        """Checks to run when every object has its state; each gives lines for differences from the stored state."""

    @abstractmethod
    def check(self, stored: Any) -> None:
        """Raise :class:`StateError` if a document does not fit, :class:`FormatError` if it is damaged. Changes nothing."""

    @abstractmethod
    def restore(self, stored: Any) -> Iterable[str]:
        """Take a checked document. Returns a line for each part that this run does not take."""

    def reaches_others(self) -> bool:
        """Whether taking the document may change models and optimizers."""
        return False

    def missing(self, manifest: Manifest, path: str) -> None:
        """Raise :class:`StateError` if this run can't go on without the document."""
        if self.name in manifest.local_documents:
            raise StateError(
                f"{path}: {self.name} was stored per rank by {manifest.world_size} ranks, and this run has another number: "
                f"its state can't be carried over. Use one whose state is equal on all ranks, or leave it out of the state"
            )
        raise StateError(
            f"{path}: holds no {self.name}; leave it out of the state, or give the step that has it"
        )


class _Stateful(Receiver):
    """Scheduler, scaler or data loader: an object with ``load_state_dict``, or several by name."""

    def __init__(self, name: str, target: Any, places: Places) -> None:
        super().__init__(name)
        self._target, self._places = target, places

    def check(self, stored: Any) -> None:
        check_state(self._target, stored, self.name)

    def restore(self, stored: Any) -> Iterable[str]:
        return _give(self._target, stored, self.name, self._places, self.asked)

    def reaches_others(self) -> bool:
        return reaches_others(self._target)


class _Extra(Receiver):
    """An extra: an object with ``load_state_dict``, or a plain value that is put back into the dict."""

    def __init__(self, name: str, extra: dict[str, Any], key: str, places: Places) -> None:
        super().__init__(name)
        self._extra, self._key, self._places = extra, key, places

    def check(self, stored: Any) -> None:
        target = self._extra[self._key]  # any value of typed JSON may be the state of other objects
        if isinstance(target, LRScheduler | torch.amp.GradScaler):
            check_state(target, stored, self.name)

    def restore(self, stored: Any) -> Iterable[str]:
        target = self._extra[self._key]
        if hasattr(target, "load_state_dict"):
            _load_state(target, stored, self.name, self._places, self.asked)
        else:
            self._extra[self._key] = self._places.put(stored, lambda: target)
        return ()

    def reaches_others(self) -> bool:
        target = self._extra[self._key]
        return hasattr(target, "load_state_dict") and reaches_others(target)

    def missing(self, manifest: Manifest, path: str) -> None:
        if self.name in manifest.local_documents:
            super().missing(manifest, path)


class _Modules(Receiver):
    """State that modules keep beside tensors."""

    def __init__(self, name: str, model: nn.Module, places: Places) -> None:
        super().__init__(name)
        self._model, self._places = model, places

    def check(self, stored: Any) -> None:
        lost = [path for path, _ in modules_with_state(self._model) if path not in stored]
        if lost:
            raise StateError(
                f"{self.name}: the checkpoint holds no extra state of the module {lost[0]!r}; resume with the model that was "
                f"saved"
            )

    def restore(self, stored: Any) -> Iterable[str]:
        modules = dict(modules_with_state(self._model))
        for path, module in modules.items():
            name, kept = f"{self.name}[{path!r}]", copy.deepcopy(stored[path])
            value = self._places.put(stored[path], module.get_extra_state)
            _call(module.set_extra_state, value, name, module, "set_extra_state")
            self.asked.append(partial(not_taken, name, kept, module.get_extra_state))
        return [
            f"{self.name}[{brief(path)}]: the module keeps no such state"
            for path in stored
            if path not in modules
        ]

    def reaches_others(self) -> bool:
        return any(True for _ in modules_with_state(self._model))

    def missing(self, manifest: Manifest, path: str) -> None:
        if any(True for _ in modules_with_state(self._model)):
            super().missing(manifest, path)


class _Buffers(Receiver):
    """Plain buffers that differed between ranks."""

    def __init__(self, name: str, model: str, lives: Mapping[str, LiveModel]) -> None:
        super().__init__(name)
        self._model, self._lives = model, lives

    def check(self, stored: Any) -> None:
        pass  # the load proves that these tensors of the manifest are the model's

    def restore(self, stored: Any) -> Iterable[str]:
        live = {alias: t.tensor for t in self._lives[self._model].tensors for alias in t.names}
        for name, content in stored.items():
            live[name].detach().copy_(content)
        return ()

    def missing(self, manifest: Manifest, path: str) -> None:
        pass


class _Optimizer(Receiver):
    """Settings and values of an optimizer, which :mod:`.optimizer` applies with its tensors."""

    def __init__(self, name: str, optimizer: Optimizer, path: str) -> None:
        super().__init__(name)
        self._optimizer, self._path = optimizer, path

    def check(self, stored: Any) -> None:
        saved, now = stored["class"], type(self._optimizer).__qualname__
        if saved is None:  # a converted checkpoint, whose source did not record it
            refuse_other_kind(self._optimizer, stored["groups"])
        elif saved != now:
            raise StateError(
                f"{self._path}: holds state of {saved}, the optimizer is {now}; use the same one"
            )
        check_settings(self._optimizer, stored["groups"], self.name)
        check_values(self._optimizer, stored["values"], self.name)

    def restore(self, stored: Any) -> Iterable[str]:
        return [f"{self.name}: not stored: {UNSEEN_GRADIENTS}"] * bool(stored.get("unseen_gradients"))


class _Opaque(Receiver):
    """Tensors of an optimizer that only their own rank can interpret; applied with the rest of the optimizer."""

    def check(self, stored: Any) -> None:
        pass

    def restore(self, stored: Any) -> Iterable[str]:
        return ()

    def missing(self, manifest: Manifest, path: str) -> None:
        if self.name in manifest.local_documents:
            super().missing(manifest, path)


class _Classes(Receiver):
    """The class of each scheduler, because a scheduler silently takes the state of any other."""

    def __init__(self, state: TrainState) -> None:
        super().__init__("classes")
        self._now = classes_of(state)

    def check(self, stored: Any) -> None:
        for of, now in self._now.items():
            check_classes(stored.get(of, {}), now, of)

    def restore(self, stored: Any) -> Iterable[str]:
        for of, now in self._now.items():
            yield from unsaid_classes(stored.get(of, {}), now, of)

    def missing(self, manifest: Manifest, path: str) -> None:
        pass


def receivers_of(
    state: TrainState, lives: Mapping[str, LiveModel], path: str, places: Places
) -> list[Receiver]:
    """Everything in a training state that takes a document. ``path`` is the checkpoint's, for errors; ``places`` knows
    where the documents' tensors lay. ``lives`` is looked at when a document is taken: the caller keeps it true."""
    found: list[Receiver] = [_Classes(state)]
    for name, target in (
        ("scheduler", state.scheduler),
        ("scaler", state.scaler),
        ("dataloader", state.dataloader),
    ):
        if target is not None:
            found.append(_Stateful(name, target, places))
    found += [_Extra(f"extra.{key}", state.extra, key, places) for key in state.extra]
    for name, optimizer in state.optimizers.items():
        found.append(_Optimizer(document_of("optimizer", name), optimizer, path))
        found.append(_Opaque(document_of("optimizer", name, "opaque")))
    for name, model in state.models.items():
        found.append(_Modules(document_of("model", name, "modules"), model, places))
        found.append(_Buffers(document_of("model", name, "buffers"), name, lives))
    return found


def check_documents(
    receivers: Iterable[Receiver], documents: Mapping[str, Any], manifest: Manifest, path: str
) -> None:
    """Refuse documents that do not fit, and missing ones that the run asks for, before anything is changed."""
    for receiver in receivers:
        if receiver.name in documents:
            receiver.check(documents[receiver.name])
        elif receiver.name in (document_of("optimizer", name) for name in manifest.packed):
            raise FormatError(f"holds tensors of {receiver.name}, and not its document", path=path)
        else:
            receiver.missing(manifest, path)


#: Reports don't list documents of these kinds: other modules apply them.
_APPLIED_ELSEWHERE = frozenset({"step", "rng", "classes", "optimizer", "opaque", "own", "not_stored"})


def restore_documents(
    receivers: Iterable[Receiver], state: TrainState, documents: Mapping[str, Any], manifest: Manifest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give every document to its receiver. Returns the names restored, and those not restored with the rule."""
    by_name = {receiver.name: receiver for receiver in receivers}
    restored: list[str] = []
    left = list(_without_document(state, documents, manifest))
    for name, value in documents.items():
        meaning = document_named(name, manifest)
        assert meaning is not None, "unknown names are refused where they are read"
        if name in by_name:
            left += by_name[name].restore(value)
            if meaning.kind not in _APPLIED_ELSEWHERE:
                restored.append(name)
        elif meaning.kind == "extra":
            left.append(f"{name}: not among this run's extras")
        elif meaning.kind in ("scheduler", "scaler", "dataloader", "optimizer"):
            left.append(f"{name}: not given to this run")
    return tuple(restored), tuple(left)


def restore_buffers(receivers: Iterable[Receiver], documents: Mapping[str, Any]) -> None:
    """Restore this rank's own buffers after a model was filled. Rank-local."""
    for receiver in receivers:
        if isinstance(receiver, _Buffers) and receiver.name in documents:
            receiver.restore(documents[receiver.name])


def ask_receivers(receivers: Iterable[Receiver]) -> tuple[str, ...]:
    """One line for each object whose state differs from the given one, once every object has its state. Rank-local."""
    return tuple(line for receiver in receivers for ask in receiver.asked for line in ask())


def _without_document(state: TrainState, documents: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    """Lines for state that this run asks for or the checkpoint holds, but that has no document."""
    for key in state.extra:
        if f"extra.{key}" not in documents:
            yield f"extra.{key}: not in the checkpoint"
    for name in manifest.local_documents:
        meaning = document_named(name, manifest)
        if name in documents or meaning is None:
            continue
        if meaning.kind == "buffers":
            yield f"{name} that differed between ranks: every rank has those of one rank now"
        elif meaning.kind not in _APPLIED_ELSEWHERE or meaning.kind == "own":
            yield f"{name}: stored per rank, and this run has another number of ranks"
    for name in manifest.models:
        if name not in state.models:
            yield f"model {name}: not given to this run"


_Asked = list[Callable[[], Iterable[str]]]


def _give(target: Any, value: Any, name: str, places: Places, asked: _Asked) -> Iterator[str]:
    """Give state to an object, or to several by name. Yields lines for stored state that was not asked for."""
    if not is_several(target):
        _load_state(target, value, name, places, asked)
        if name == "scaler" and value and not target.state_dict():
            asked.clear()
            yield "scaler: it is disabled in this run"
        if name.partition(".")[0] == "dataloader":
            make_iterator(target)
        return
    for key, one in value.items():
        if key in target:
            yield from _give(target[key], one, f"{name}.{key}", places, asked)
        else:
            yield f"{name}.{key}: not given to this run"


def _load_state(target: Any, value: Any, name: str, places: Places, asked: _Asked) -> None:
    """``target.load_state_dict(value)``. Adds a later comparison of the object's state to ``asked``.

    Raises :class:`StateError` naming the object for any error of its own.
    """
    is_asked = not _says_later(target, name)
    kept = copy.deepcopy(value) if is_asked else None  # the object may keep or change the given value

    def take(stored: Any) -> None:
        target.load_state_dict(places.put(stored, target.state_dict if is_asked else lambda: None))

    _call(take, value, name, target, "load_state_dict")
    if is_asked:
        asked.append(partial(not_taken, name, kept, target.state_dict))


def _says_later(target: Any, name: str) -> bool:
    """Whether an object's state can't be compared now: a loader may start its workers to give it, and loaders of this
    package keep the given state until training goes on."""
    own = type(target).__module__.partition(".")[0] == __name__.partition(".")[0]
    return own or name.partition(".")[0] == "dataloader" or isinstance(target, torch.utils.data.DataLoader)


def _call(take: Any, value: Any, name: str, target: Any, method: str) -> None:
    try:
        take(value)
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name}: {type(target).__qualname__}.{method} does not take what was saved ({cause(error)}); use the same "
            f"object as the saved run, or leave it out of the state"
        ) from error
