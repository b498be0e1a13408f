"""Restores documents: each goes to its receiver, from a closed list. A name in a file never selects an attribute.

A receiver checks its document before anything changes, and takes it after tensors are restored. Other modules apply
the documents of optimizers (with their tensors), of own state, and of random generators (last of all).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..format.documents import document_named
from ..format.manifest import Manifest
from ..state.train_state import TrainState
from .receivers import Buffers, Receiver

__all__ = [
    "ask_receivers",
    "check_documents",
    "reaches_others",
    "restore_buffers",
    "restore_documents",
]


def check_documents(receivers: Iterable[Receiver], documents: Mapping[str, Any]) -> None:
    """Refuse documents that do not fit, and missing ones that the run asks for, before anything is changed."""
    for receiver in receivers:
        if receiver.name in documents:
            receiver.check(documents[receiver.name])
        else:
            receiver.missing()


def reaches_others(receivers: Iterable[Receiver], documents: Mapping[str, Any]) -> bool:
    """Whether a model or an optimizer may change when the receivers take these documents."""
    return any(receiver.reaches_others() for receiver in receivers if receiver.name in documents)


#: Reports don't list documents of these kinds: other modules apply them.
_APPLIED_ELSEWHERE = frozenset(
    {
        "step",
        "rng",
        "classes",
        "optimizer",
        "opaque",
        "low_bit",
        "own",
        "not_stored",
        "settings",
        "data_settings",
    }
)


def restore_documents(
    receivers: Iterable[Receiver], state: TrainState, documents: Mapping[str, Any], manifest: Manifest
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Give every document to its receiver. Returns the names restored, and lines for state that is skipped."""
    by_name = {receiver.name: receiver for receiver in receivers}
    restored: list[str] = []
    skipped = list(_without_document(state, documents, manifest))
    for name, value in documents.items():
        meaning = document_named(name, manifest)
        assert meaning is not None, "unknown names are refused where they are read"
        if name in by_name:
            skipped += by_name[name].restore(value)
            if meaning.kind not in _APPLIED_ELSEWHERE:
                restored.append(name)
        elif meaning.kind == "extra":
            skipped.append(f"{name}: not among this run's extras")
        elif meaning.kind in ("scheduler", "scaler", "dataloader", "optimizer"):
            skipped.append(f"{name}: not given to this run")
    return tuple(restored), tuple(skipped)


def restore_buffers(receivers: Iterable[Receiver], documents: Mapping[str, Any]) -> None:
    """Restore this rank's own buffers after a model was filled. Rank-local."""
    for receiver in receivers:
        if isinstance(receiver, Buffers) and receiver.name in documents:
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
            yield f"{name}: stored per rank, but this run has a different number of ranks"
    for name in manifest.models:
        if name not in state.models:
            yield f"model {name}: not given to this run"
